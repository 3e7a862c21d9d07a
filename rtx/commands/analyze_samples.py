"""`rtx analyze samples RUN [OTHER]`: what one run writes, or two side by side; images go on from their upper half."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rtx.commands.analyze import keep, save
from rtx.commands.eval import check_fingerprint
from rtx.commands.sample import TEXT_LENGTH, check_length
from rtx.data.catalog import data_root, open_data
from rtx.data.sheet import BACKGROUND, png_grid
from rtx.data.store import TokenStore
from rtx.data.tokenizers import encode_text
from rtx.data.windows import windows
from rtx.errors import UserError
from rtx.evaluation.scores import sample_windows
from rtx.identity import short_hash
from rtx.model.decoding import generate
from rtx.options import SamplesOptions, read_words
from rtx.report.spelling import known_words, samples_page, shares, shares_table, side_by_side, words
from rtx.report.text import printable
from rtx.sets import IMAGE_SETS
from rtx.training.metrics import utc_now
from rtx.training.progress import Progress, clock
from rtx.training.trained import Trained, load_trained, run_config

TEXTS, COMPLETIONS = 8, 4

CHUNK = 1 << 20
"""Units of the training text that are searched at once."""


def main(arguments: list[str]) -> int:
    """Run `rtx analyze samples RUN [OTHER] [overrides]`; page or picture stand in the first run's `analysis/`.

    Raises:
        UserError: no such run, more than two, runs of different data, or a wrong option.
        RunFailed: no checkpoint is whole, or the result cannot be written.
    """
    words = read_words("analyze samples", arguments)
    folders, wish = words.runs, words.options
    configs = [run_config(folder, words.overrides) for folder in folders]
    for folder, config in zip(folders, configs, strict=True):
        if config.data.name == "recall":
            raise UserError(f"{folder}: a run on data=recall has no text to write")
    store = open_data(configs[0].data, data_root())
    assert isinstance(store, TokenStore)
    runs: dict[str, Trained] = {}
    for folder, config in zip(folders, configs, strict=True):
        trained = load_trained(folder, config, wish.checkpoint)
        if not runs:
            check_fingerprint(store, trained)
        elif trained.checkpoint["data"]["fingerprint"] != next(iter(runs.values())).checkpoint["data"]["fingerprint"]:
            raise UserError(f"{folder}: was trained on other data than {folders[0]}; their samples cannot be compared")
        runs[named(folder, runs)] = trained
    draw = complete_images if configs[0].data.name in IMAGE_SETS else write_texts
    return draw(folders[0], runs, store, wish)


def named(folder: Path, taken: dict[str, Trained]) -> str:
    """Return what a run is called: its folder, with the one above it where that is taken."""
    whole = folder.resolve()
    name = f"{whole.parent.name}/{whole.name}"
    return name if name not in taken else f"{name} (again)"


def write_texts(folder: Path, runs: dict[str, Trained], store: TokenStore, wish: SamplesOptions) -> int:
    """Write texts with every run from the same prompts by the same seeds, print the first, and keep all."""
    begin = time.monotonic()
    count, length = wish.samples or TEXTS, wish.length or TEXT_LENGTH
    prompts_SP = text_prompts(wish, store, count)
    for trained in runs.values():
        check_length(trained.config, prompts_SP.shape[1], length)
    held_out_SN = held_out_texts(wish, store, count, length)
    drawn = {name: drawn_units(name, trained, wish, prompts_SP, length) for name, trained in runs.items()}
    texts = {name: [decoded(store, units_N) for units_N in drawn_SN] for name, drawn_SN in drawn.items()}
    held_out = [decoded(store, units_N) for units_N in held_out_SN]
    cut_start = prompts_SP.shape[1] > 0
    found = {name: [words(text, cut_start=cut_start) for text in own] for name, own in texts.items()}
    found[f"{wish.split} text"] = [words(text, cut_start=True) for text in held_out]
    candidates = {word for samples in found.values() for sample in samples for word in sample}
    known = known_words(candidates, training_text(store))
    rows = {name: shares(samples, known) for name, samples in found.items()}
    prompts = [decoded(store, prompt_P) for prompt_P in prompts_SP.numpy()]
    kept = [
        {
            "prompt": prompts[s],
            "texts": {name: own[s] for name, own in texts.items()},
            "unknown": {name: [word for word in found[name][s] if word not in known] for name in texts},
        }
        for s in range(count)
    ]
    table = shares_table(rows)
    if prompts[0]:
        print(f"given: {printable(prompts[0])}\n")
    print("\n".join([*side_by_side([own[0] for own in texts.values()], list(texts)), "", *table]))
    path = result_path(folder, runs, store, wish)
    lines = [said(wish, store, count, length, prompts_SP.shape[1])]
    save(path.with_suffix(".md"), samples_page("Samples", lines, table, kept).encode("utf-8", "replace"))
    print(path.with_suffix(".md"))
    keep(path, {**record("samples", runs, store, wish, begin), "length": length, "shares": rows, "samples": kept})
    return 0


def said(wish: SamplesOptions, store: TokenStore, count: int, length: int, given: int) -> str:
    """Return how the samples came about, in a sentence or two."""
    given_words = f"from {given} given {store.unit}s" if given else "from nothing given"
    cut = "".join(f", {key}={value}" for key, value in (("top_k", wish.top_k), ("top_p", wish.top_p)) if value)
    return (
        f"{count} texts of {length:,} {store.unit}s {given_words}, temperature {wish.temperature:g}{cut}, seed "
        f"{wish.seed}; data {store.name}, fingerprint {store.fingerprint[:12]}. A word is letters in a row, in small "
        "letters; standard errors are over the texts."
    )


def text_prompts(wish: SamplesOptions, store: TokenStore, count: int) -> torch.Tensor:
    """Return what each text goes on from, `[count, P]`: a prompt of the user's, units of the split, or nothing.

    Raises:
        UserError: both are asked for, or the split has fewer units.
    """
    given, prompt = wish.given or 0, wish.prompt
    if given and prompt:
        raise UserError("given takes prompts from the split, prompt is one of your own: say one of them")
    if prompt:
        return torch.from_numpy(encode_text(store.tokenizer, prompt)).expand(count, -1)
    if not given:
        return torch.zeros(count, 0, dtype=torch.int64)
    return torch.from_numpy(held_out_texts(wish, store, count, given))


def held_out_texts(wish: SamplesOptions, store: TokenStore, count: int, length: int) -> np.ndarray:
    """Return `count` texts of the split, drawn by the seed, int64 `[count, length]`.

    Raises:
        UserError: the split has not that many.
    """
    tokens = store.split(wish.split)
    every = windows(len(tokens), length)
    if len(tokens) < length or len(every) < count:
        have = f"{len(tokens):,} {store.unit}s"
        raise UserError(
            f"split {wish.split} has {have}: too few for {count} texts of {length:,}; make samples or length smaller"
        )
    chosen = sample_windows(every, count, wish.seed)
    return np.stack([tokens[window.start : window.stop] for window in chosen]).astype(np.int64)


def drawn_units(name: str, trained: Trained, wish: SamplesOptions, prompts_SP: torch.Tensor, length: int) -> np.ndarray:
    """Return what a run draws behind the prompts, int64 `[S, length]`, behind a progress line."""
    progress, begin = Progress(sys.stderr), time.monotonic()
    options = {"temperature": wish.temperature, "top_k": wish.top_k, "top_p": wish.top_p}
    generator = torch.Generator().manual_seed(wish.seed)
    units: list[torch.Tensor] = []
    with trained.arithmetic():
        for unit_S in generate(trained.model, prompts_SP, length, **options, generator=generator):
            units.append(unit_S)
            left = (time.monotonic() - begin) / len(units) * (length - len(units))
            progress.show(f"{name}: {len(units):,}/{length:,} units | {clock(left)} left")
    progress.clear()
    return torch.stack(units, dim=1).numpy()


def decoded(store: TokenStore, units_N: np.ndarray) -> str:
    """Return units as text; broken bytes become replacement characters."""
    return store.tokenizer.decode(units_N).decode("utf-8", "replace")


def training_text(store: TokenStore) -> Iterator[str]:
    """Yield the training text in pieces that end at a blank, behind a progress line."""
    tokens, held = store.split("train"), b""
    progress = Progress(sys.stderr)
    for first in range(0, len(tokens), CHUNK):
        progress.show(f"training text: {first / len(tokens):.0%} searched for the samples' words")
        data = held + store.tokenizer.decode(tokens[first : first + CHUNK])
        cut = max(data.rfind(b" "), data.rfind(b"\n")) + 1
        held = data[cut:]
        yield data[:cut].decode("utf-8", "replace")
    progress.clear()
    yield held.decode("utf-8", "replace")


def complete_images(folder: Path, runs: dict[str, Trained], store: TokenStore, wish: SamplesOptions) -> int:
    """Draw the rest of images of the split, and keep a picture: original, what was given, completions of every run.

    Raises:
        UserError: a prompt or a length, more images than there are, or nothing left to draw.
    """
    config = next(iter(runs.values())).config
    begin = time.monotonic()
    assert store.image is not None
    (height, width), size = store.image, config.data.length
    if wish.prompt or wish.length:
        raise UserError("prompt and length have no place here: images go on from given to the end")
    given = height // 2 * width * 3 if wish.given is None else wish.given
    if given >= size:
        raise UserError(f"given={given}: an image has {size} units; give fewer")
    images, completions = wish.windows, wish.samples or COMPLETIONS
    originals_IN = held_out_texts(wish, store, images, size)
    prompts_SP = torch.from_numpy(originals_IN[:, :given]).repeat_interleave(completions, dim=0)
    rows = [[image_N, np.append(image_N[:given], np.full(size - given, BACKGROUND))] for image_N in originals_IN]
    for name, trained in runs.items():
        drawn_SN = drawn_units(name, trained, wish, prompts_SP, size - given)
        whole_SN = np.concatenate([prompts_SP.numpy(), drawn_SN], axis=1)
        for i, row in enumerate(rows):
            row.extend(whole_SN[i * completions : (i + 1) * completions])
    path = result_path(folder, runs, store, wish)
    cells = [cell_N.astype(np.uint8) for row in rows for cell_N in row]
    save(path.with_suffix(".png"), png_grid(cells, store.image, columns=len(rows[0])))
    order = ", ".join(f"{completions} by {name}" for name in runs)
    print(f"{path.with_suffix('.png')}: rows are images of split {wish.split}: original, given, {order}")
    keep(path, {**record("completions", runs, store, wish, begin), "given": given, "images": images})
    return 0


def result_path(folder: Path, runs: dict[str, Trained], store: TokenStore, wish: SamplesOptions) -> Path:
    """Return where the result is kept in the first run's folder: of other checkpoints, runs or wishes elsewhere."""
    first, *others = (f"{trained.name}-step{trained.checkpoint['step']}" for trained in runs.values())
    other = "".join(f"-beside-{name.replace('/', '_')}-{one}" for name, one in zip(list(runs)[1:], others, strict=True))
    key = short_hash({**dataclasses.asdict(wish), "data": store.fingerprint})
    return folder / "analysis" / f"samples-{first}{other}-seed{wish.seed}-{key}.json"


def record(
    what: str, runs: dict[str, Trained], store: TokenStore, wish: SamplesOptions, begin: float
) -> dict[str, Any]:
    """Return what a result says of how it came about."""
    return {
        "what": what,
        "runs": {
            name: {"checkpoint": trained.name, "step": trained.checkpoint["step"]} for name, trained in runs.items()
        },
        **dataclasses.asdict(wish),
        "data": store.describe(),
        "seconds": time.monotonic() - begin,
        "time": utc_now(),
    }
