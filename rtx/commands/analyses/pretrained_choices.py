"""The options of `rtx analyze pretrained` as the choices that it compares."""

import itertools
from collections.abc import Sequence
from typing import Any

from rtx.cli.options import PretrainedOptions
from rtx.errors import UserError, listed, nearest
from rtx.hf.choice import NAMES, PER, ROTARY, Choice

SELECTIONS = tuple(name for name in NAMES if name not in ("none", "next"))
"""The selections that the option `selection` may name; every table has "none" and "next"."""


def choices_of(options: PretrainedOptions) -> list[Choice]:
    """Return all choices that are compared.

    These are the window and sinks alone, longer windows, and each selection with each combination
    of the options that are lists.

    Raises:
        UserError: a list has a value that is not allowed.
    """
    selections = parse_words("selection", options.selection, SELECTIONS)
    key_counts = parse_numbers("keys", options.keys, 1)
    pers = parse_words("per", options.per, PER)
    rotaries = parse_words("rotary", options.rotary, ROTARY)
    dense_layers = parse_numbers("dense_layers", options.dense_layers, 0)
    choices = [make_choice(options, selection="none")]
    for keys in key_counts:
        choices.append(make_choice(options, selection="next", keys=keys))
    combinations = itertools.product(selections, pers, rotaries, dense_layers, key_counts)
    for selection, per, rotary, layers, keys in combinations:
        choice = make_choice(
            options,
            selection=selection,
            per=per,
            rotary=rotary,
            dense_layers=layers,
            keys=keys,
        )
        choices.append(choice)
    return choices


def make_choice(options: PretrainedOptions, **listed_options: Any) -> Choice:
    """Return a choice.

    Args:
        listed_options: one value for each option of which the command takes a list. All other
            values are those of `options`.

    Raises:
        UserError: a value is out of range.
    """
    try:
        return Choice(
            window=options.window,
            sinks=options.sinks,
            clusters=options.clusters,
            candidates=options.candidates,
            block=options.block,
            rounds=options.rounds,
            buckets=options.buckets,
            length=options.length,
            seed=options.seed,
            **listed_options,
        )
    except ValueError as error:
        raise UserError(str(error)) from error


def parse_words(option: str, text: str, allowed: Sequence[str]) -> list[str]:
    """Return the words of a list such as `exact,probed`, each once, in their order.

    Raises:
        UserError: a word is not allowed.
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in allowed:
            rule = f"must be one of {listed(allowed)}, or several with commas"
            shown = repr(word or "nothing")
            raise UserError(f"{option}={text}: {shown} {rule}{nearest(word, allowed)}")
    return list(dict.fromkeys(words))


def parse_numbers(option: str, text: str, least: int) -> list[int]:
    """Return the numbers of a list such as `32,64`, each once, ascending.

    Raises:
        UserError: a word is no whole number, or one below `least`.
    """
    numbers = set()
    for word in text.split(","):
        is_number = word.strip().isdecimal()
        if not is_number or int(word) < least:
            rule = f"must be numbers from {least} on, separated by commas"
            raise UserError(f"{option}={text}: {rule}")
        numbers.add(int(word))
    return sorted(numbers)
