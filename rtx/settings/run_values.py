"""Reads the config.yaml of a run into a dictionary by dotted keys, without Hydra.

Reports and lists of runs read nothing else of a configuration, and Hydra takes a tenth of a second
to import. Settings of earlier versions are translated.
"""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from rtx.disk import read_inside
from rtx.errors import UserError
from rtx.settings.schema import all_fields

RUN_CONFIG = "config.yaml"
LARGEST_CONFIG = 1 << 20
"""The most bytes of a config.yaml."""
OLD_LOGGER_SETTINGS = {
    "auto": {"logger.wandb": True},
    "online": {"logger.wandb": True, "logger.mode": "online"},
    "offline": {"logger.wandb": True, "logger.mode": "offline"},
    "csv": {"logger.csv": True},
    "tensorboard": {"logger.tensorboard": True},
    "jsonl": {},
}
"""What replaces each value of logger.name, a key up to version 0.4."""
LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
"""The loader that leaves every value a text: the one in C, which is faster, where PyYAML has it."""


ALLOWED = {
    0: "must be a section, that is names and values",
    1: "must be a value or a section, and not a list or an alias",
    2: "must be a value, and not a section, a list or an alias",
}
"""What a message says of a node, by the number of mappings around it."""


def read_values(run: Path) -> dict[str, Any]:
    """Return the values in a run's config.yaml by dotted keys.

    Raises:
        OSError: the file cannot be read.
        UnicodeDecodeError: it is not UTF-8.
        UserError, yaml.YAMLError: see `values_of`.
    """
    return values_of(read_inside(run, RUN_CONFIG, LARGEST_CONFIG).decode())


def values_of(content: str) -> dict[str, Any]:
    """Return the values in the text of a config.yaml by dotted keys, converted to their types.

    Ranges of numbers are checked. Texts are not checked against the known choices, because an
    extension that is not loaded may have added one.

    Raises:
        UserError: the text has no values; or it has an alias, a list, a key or section that occurs
            twice, a key more than two levels deep, a name that is no text, or a second document;
            or a number is out of its range.
        yaml.YAMLError: the text is no YAML.
    """
    texts = texts_of(content)
    if not texts:
        raise UserError("is not the configuration of a run")
    values: dict[str, Any] = {}
    old_logger = texts.get("logger.name")
    if old_logger in OLD_LOGGER_SETTINGS:
        values |= OLD_LOGGER_SETTINGS[old_logger]
        del texts["logger.name"]
    for key, text in texts.items():
        values[key] = recorded_value(key, text)
    return values


@functools.lru_cache(maxsize=4096)
def recorded_value(key: str, text: str) -> Any:
    """Return the value of a key from its text.

    It is cached, because the runs of a sweep repeat most values.
    """
    field = all_fields().get(key)
    if field is None:
        return text
    if field.optional and text == "null":
        return None
    if field.kind is str:
        return text
    return field.read(text)


def texts_of(content: str) -> dict[str, str]:
    """Return the text of each value in the text of a config.yaml; see `values_of`.

    It reads YAML events, and builds no document, so that an alias is refused before it expands.
    """
    section_and_key: list[str] = []
    depth = 0
    texts: dict[str, str] = {}
    seen: set[str] = set()
    for event in events_of(content, LOADER):
        # In a mapping, the name of a section or of a key comes next if there is none yet.
        expects_name = len(section_and_key) < depth
        if expects_name and isinstance(event, yaml.ScalarEvent):
            section_and_key.append(event.value)
            continue
        key = ".".join(section_and_key)
        if isinstance(event, yaml.NodeEvent) and not expects_name:
            if key in seen:
                raise UserError(f"{key} occurs twice" if key else "has more than one document")
            seen.add(key)
        match event:
            case yaml.ScalarEvent(value=text) if depth > 0:
                texts[key] = text
                section_and_key.pop()
            case yaml.MappingStartEvent() if not expects_name and depth < 2:
                depth += 1
            case yaml.MappingEndEvent():
                depth -= 1
                # The end of a section; the document has no name to remove.
                del section_and_key[-1:]
            case yaml.NodeEvent() if expects_name:
                raise UserError("a name must be a text")
            case yaml.NodeEvent():
                raise UserError(f"{key} {ALLOWED[depth]}".strip())
            case _:
                pass
    return texts


def events_of(text: str, loader: Any) -> Iterator[yaml.Event]:
    """Return the events of a text in YAML."""
    # PyYAML's stubs leave `parse` without types.
    parse: Callable[..., Iterator[yaml.Event]]
    parse = yaml.parse  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return parse(text, Loader=loader)
