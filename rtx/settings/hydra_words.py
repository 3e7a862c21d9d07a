"""Hydra's grammar of overrides: lists, functions such as range(1,5), and what replaces words that
rtx does not take.

Hydra's own parser reads the functions; it is imported only where a word has one. No torch, no YAML.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rtx.errors import UserError, listed, shorten

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override as HydraOverride

COMMA = re.compile(
    r"""(?<!\\),(?=(?:[^"'()\[\]{}]|"[^"]*"|'[^']*'|\([^()]*\)|\[[^\[\]]*\]|\{[^{}]*\})*$)"""
)
"""A comma that separates values: outside quotes and brackets, and without a backslash."""
FUNCTION = re.compile(
    r"\s*(choice|range|interval|glob|shuffle|sort|tag|int|float|str|bool|json_str)\(.*\)\s*",
    re.DOTALL,
)
QUOTED = re.compile(r"""'[^']*'|"[^"]*\"""")
INTEGERS = re.compile(r"\s*(-?\d{1,9})\.\.(-?\d{1,9})\s*")
PLAIN = re.compile(r"[A-Za-z_][\w.-]*|0|-?[1-9]\d{0,17}")
"""Texts that Hydra reads as they are; all others are passed to it in quotes."""
MOST_VALUES = 10_000
"""Values that a function may stand for."""
OF_SWEEPS = ("hydra/sweeper", "hydra.sweeper.", "hydra/launcher", "hydra.launcher.")
"""What the keys begin with that `rtx train -m` passes to Hydra."""
FOLDERS = "RTX_OUTPUTS=<folder> and name= say where runs go"
MESSAGES = "what a run prints is in its output.log, metrics in metrics.jsonl"
REPLACED = {
    "hydra.run": FOLDERS,
    "hydra.sweep": FOLDERS,
    "hydra.output_subdir": "the configuration of a run is its config.yaml",
    "hydra.job.chdir": f"no run changes the folder; {FOLDERS}",
    "hydra.job.name": "name= names the runs",
    "hydra.mode": "rtx train -m starts a sweep",
    "hydra.searchpath": "--config-dir <folder> adds presets of your own",
    "hydra.verbose": MESSAGES,
    "hydra.job_logging": MESSAGES,
    "hydra.hydra_logging": MESSAGES,
    "hydra.help": "rtx train --help lists all keys",
}
"""Keys of Hydra's that rtx does not read, without what follows a further dot, and what serves
instead.
"""
SWEEPERS = {
    "optuna": "hydra_optuna_sweeper",
    "ax": "hydra_ax_sweeper",
    "nevergrad": "hydra_nevergrad_sweeper",
}
"""Sweepers that draw values, by the module of their plug-in."""
FLAGS = {
    ("-cn", "--config-name"): "model= and experiment= choose presets: model=tiny",
    ("-cp", "--config-path"): "--config-dir <folder> adds presets of your own",
    ("-r", "--run"): "leave it out; -m starts a sweep",
    ("-i", "--info", "-p", "--package"): "--cfg job prints the configuration",
    ("--hydra-help",): "--help lists the keys, --help <group> one group",
    ("-sc", "--shell-completion"): "rtx completion bash prints a script for the shell",
    ("--experimental-rerun",): "rtx resume <run> continues a run",
}
"""Flags of Hydra's that rtx does not take, and what serves instead."""


@dataclass(frozen=True)
class FunctionValues:
    """What a function of Hydra's grammar stands for."""

    values: tuple[str, ...]
    """The texts of its values; of an interval, its two ends."""
    is_interval: bool = False
    is_sweep: bool = True
    """False for one value, as of int(3)."""


def hydra_flag(flag: str) -> str:
    """Return "; " and what to use instead of a flag of Hydra's, else ""."""
    name = flag.partition("=")[0]
    for names, instead in FLAGS.items():
        if name in names:
            return f"; {instead}"
    return ""


def is_hydra_key(key: str) -> bool:
    """Whether a key is part of Hydra's own configuration."""
    return key == "hydra" or key.lower().startswith(("hydra.", "hydra/"))


def check_hydra_key(key: str, text: str, *, sweep: bool) -> None:
    """Raise `UserError` for a key of Hydra that rtx does not pass on; say what to write."""
    word = shorten(f"{key}={text}")
    if key.startswith(OF_SWEEPS):
        if not sweep:
            raise UserError(f"{word}: only a sweep reads it: rtx train -m")
        if key == "hydra/launcher" and text not in ("rtx_processes", "rtx_slurm"):
            instead = "sweep.parallel=<number> runs cells side by side, hardware=slurm as jobs"
            raise UserError(f"{word}: rtx starts the processes of a sweep by itself; {instead}")
        plugin = SWEEPERS.get(text) if key == "hydra/sweeper" else None
        if plugin and importlib.util.find_spec(f"hydra_plugins.{plugin}") is None:
            raise UserError(f"{word}: needs a plug-in: pip install {package_of(text)}")
        if key.startswith("hydra.sweeper.params"):
            raise UserError(f"{word}: write the key of the run itself, with its values: seed=1,2")
        return
    section = key.lower().replace("/", ".")
    reasons = [
        instead for name, instead in REPLACED.items() if f"{section}.".startswith(f"{name}.")
    ]
    instead = reasons[0] if reasons else f"{FOLDERS}, sweep.parallel= and hardware=slurm how"
    raise UserError(f"{word}: rtx does not read this key of Hydra; {instead}")


def package_of(sweeper: str) -> str:
    """Return what pip installs for a sweeper."""
    return "'rtx[optuna]'" if sweeper == "optuna" else SWEEPERS[sweeper].replace("_", "-")


def split_values(text: str) -> list[str]:
    r"""Return the texts of the values that commas separate; `\,` is a comma in a value."""
    values = COMMA.split(text)
    return [in_quotes(value.replace("\\,", ",")) if "\\," in value else value for value in values]


def in_quotes(text: str) -> str:
    """Return a text in quotes of the kind that it does not contain."""
    quote = '"' if "'" in text else "'"
    return f"{quote}{text}{quote}"


def integers_hint(text: str) -> str:
    """Return Hydra's word for a text such as 1..5, which it reads as no list; else ""."""
    match = INTEGERS.fullmatch(text)
    return f"range({match[1]},{int(match[2]) + 1})" if match else ""


def is_function(text: str) -> bool:
    """Whether a value is a function of Hydra's grammar."""
    return FUNCTION.fullmatch(text) is not None


def function_values(key: str, text: str, names: Collection[str]) -> FunctionValues:
    """Return what a function stands for; `names` are those from which glob() chooses.

    Raises:
        UserError: Hydra's parser refuses it, or it stands for no value.
    """
    from hydra.core.override_parser.types import Glob, IntervalSweep
    from hydra.errors import HydraException

    word = f"{key}={text.strip()}"
    parsed = parse(word)
    value = parsed.value()
    if isinstance(value, IntervalSweep):
        return FunctionValues((str(value.start), str(value.end)), is_interval=True)
    if not parsed.is_sweep_override():
        return FunctionValues((text_before_conversion(parsed),), is_sweep=False)
    if isinstance(value, Glob):
        values = tuple(value.filter(list(names)))
        if not values:
            choices = f"of {listed(names)}" if names else f"because {key} has no list of names"
            raise UserError(f"{shorten(word)}: matches nothing, {choices}")
        return FunctionValues(values)
    try:
        elements = list(itertools.islice(parsed.sweep_iterator(), MOST_VALUES + 1))
    except (HydraException, ValueError, ArithmeticError) as error:
        raise UserError(f"{shorten(word)}: {shorten(str(error))}") from error
    values = tuple(map(text_of, elements))
    if len(values) > MOST_VALUES:
        raise UserError(f"{shorten(word)}: contains more than {MOST_VALUES:,} values")
    if not values:
        raise UserError(f"{shorten(word)}: contains no value")
    return FunctionValues(values)


def parse(word: str) -> HydraOverride:
    """Return an override as Hydra's parser reads it; `UserError` where it cannot."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except (HydraException, ValueError, ArithmeticError) as error:
        reasons = [line for line in str(error).splitlines() if line.strip()]
        reason = reasons[0].removeprefix(f"Error parsing override '{word}'") if reasons else ""
        detail = reason.strip() or " ".join(reasons[1:2]).strip() or "Hydra cannot read it"
        raise UserError(f"{shorten(word)}: {shorten(detail)}") from error


def text_before_conversion(override: HydraOverride) -> str:
    """Return the text of an override's value, with its quotes, which the public value() drops."""
    return text_of(override._value)  # pyright: ignore[reportPrivateUsage]


def hydra_text(text: str) -> str:
    """Return one value in Hydra's grammar, for its sweepers; `text_of` reads it back."""
    from hydra.core.override_parser.types import Quote, QuotedString

    bare = text.strip()
    if bare.lower() == "null":
        return "null"
    if PLAIN.fullmatch(bare):
        return bare
    content = bare[1:-1] if QUOTED.fullmatch(bare) else text
    return QuotedString(text=content, quote=Quote.single).with_quotes()


def text_of(element: Any) -> str:
    """Return one value that Hydra has parsed as a user of rtx writes it, in quotes where it needs
    them.
    """
    if element is None:
        return "null"
    if isinstance(element, bool):
        return str(element).lower()
    text = str(getattr(element, "text", element))
    stripped = text.strip()
    is_plain = text == stripped and stripped.lower() != "null" and not QUOTED.fullmatch(stripped)
    return text if is_plain and len(split_values(text)) == 1 else in_quotes(text)


def read_jobs(jobs: Iterable[Iterable[str]]) -> list[list[tuple[str, str]]]:
    """Return the overrides of each job of a sweeper, `key=value` in Hydra's grammar, as keys and
    texts.

    A text that Hydra would read as a list is one value: sweepers write texts without their quotes.
    """
    pairs: dict[str, tuple[str, str]] = {}
    lists: list[list[tuple[str, str]]] = []
    for job in jobs:
        words = list(job)
        for word in words:
            if word not in pairs:
                pairs[word] = read_job(word)
        lists.append([pairs[word] for word in words])
    return lists


def read_job(word: str) -> tuple[str, str]:
    """Return the key and the text of one override of a job."""
    key, _, value = word.partition("=")
    key = key.lstrip("+")
    if is_function(value) or len(split_values(value)) > 1:
        return key, in_quotes(value)
    return key, text_before_conversion(parse(word))
