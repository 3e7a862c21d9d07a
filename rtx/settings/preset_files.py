"""The files of presets, which must be plain values: a folder of presets may be a stranger's.

Resolvers of OmegaConf such as `${oc.env:HOME}` are refused, since they read what is outside of the
configuration, and so are aliases that expand to more than `MOST_NODES` nodes.
"""

import functools
import io
import pickle
import re
from pathlib import Path

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf

from rtx.errors import UserError, shorten
from rtx.settings.presets import read_text
from rtx.settings.run_values import events_of

MOST_NODES = 10_000
"""The most values and collections of values in a file, with all that aliases repeat."""
REFERENCE = re.compile(r"\$\{[\w.]+\}")
"""A reference to another key, such as ${data.length}."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
TEXTS_KEPT = 512
"""The most texts that each cache keeps."""


def load_preset(path: Path) -> DictConfig:
    """Return the content of a preset's file; errors of `preset_text` and `content`."""
    return content(path, preset_text(path))


def content(path: Path, text: str) -> DictConfig:
    """Return the content of a file with this text; `UserError` unless it has keys with values."""
    try:
        result = loaded(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {shorten(str(error), 200)}") from error
    except OSError:
        # OmegaConf raises it for a text that is a single value.
        result = None
    if not isinstance(result, DictConfig):
        raise UserError(f"{path}: must have keys with values")
    return result


def loaded(text: str) -> DictConfig | ListConfig:
    """Return the content of a file of YAML, for the caller to change; each text is parsed once.

    Unpickling takes a tenth of the time of `deepcopy`.
    """
    return pickle.loads(pickled(text))


@functools.lru_cache(maxsize=TEXTS_KEPT)
def pickled(text: str) -> bytes:
    """Return the content of a file of YAML, pickled."""
    return pickle.dumps(OmegaConf.load(io.StringIO(text)))


def preset_text(path: Path) -> str:
    """Return the text of a preset's file.

    UserError where it cannot be read, is no YAML, or is more than plain values.
    """
    text = read_text(path)
    try:
        check_nodes(path, text)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {shorten(str(error), 200)}") from error
    return text


@functools.lru_cache(maxsize=TEXTS_KEPT)
def check_nodes(path: Path, text: str) -> None:
    """Raise `UserError` for values other than plain ones, before aliases are expanded."""
    sizes: dict[str | None, int] = {}
    # Anchor of each collection that has not ended, and the number of nodes before it.
    opened: list[tuple[str | None, int]] = []
    nodes = 0
    for event in events_of(text, LOADER):
        match event:
            case yaml.AliasEvent():
                nodes += repeated_nodes(path, event, sizes)
            case yaml.ScalarEvent():
                refuse_resolver(path, event)
                sizes[event.anchor] = 1
                nodes += 1
            case yaml.CollectionStartEvent():
                opened.append((event.anchor, nodes))
                nodes += 1
            case yaml.CollectionEndEvent():
                anchor, before = opened.pop()
                sizes[anchor] = nodes - before
            case _:
                pass
        if nodes > MOST_NODES:
            raise UserError(f"{path}: its aliases expand to more than {MOST_NODES:,} values")


def repeated_nodes(path: Path, alias: yaml.AliasEvent, sizes: dict[str | None, int]) -> int:
    """Return the number of nodes that an alias repeats; `UserError` where it repeats itself."""
    if alias.anchor not in sizes:
        where = f"line {alias.start_mark.line + 1}"
        raise UserError(f"{path}, {where}: *{shorten(alias.anchor)} is nothing before it")
    return sizes[alias.anchor]


def refuse_resolver(path: Path, scalar: yaml.ScalarEvent) -> None:
    """Raise `UserError` for a value with an interpolation other than a reference to a key."""
    if "${" in REFERENCE.sub("", scalar.value):
        where = f"line {scalar.start_mark.line + 1}"
        rule = "a preset may refer to keys alone, as in ${data.length}"
        instead = "write the value, or name it on the command line"
        raise UserError(f"{path}, {where}: {shorten(scalar.value)}: {rule}; {instead}")
