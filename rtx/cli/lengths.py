"""Option `length` of `rtx eval`: other lengths of a sequence than that of training. No torch."""

from rtx.errors import UserError, shorten, written
from rtx.settings.overrides import Override
from rtx.settings.schema import Config, all_fields

LENGTH = "data.length"
WINDOWS = ("routing.window", "model.window")
"""Keys that may be as wide as a sequence."""
FIXED = ("learned", "axial")
"""Values of model.positions with a vector for each position of training, and for no other."""


def read_lengths(text: str) -> list[int]:
    """Return the lengths that a text names, such as 2048,4096; UserError for any other text."""
    field = all_fields()[LENGTH]
    lengths = []
    for part in text.split(","):
        length = field.read(part.strip())
        if length in lengths:
            raise UserError(f"length={shorten(text)}: names {length} twice")
        lengths.append(length)
    return lengths


def overrides_of_length(config: Config, length: int) -> list[Override]:
    """Return what gives a run's configuration sequences of another length.

    Windows that are as wide as the sequences of training mean all keys, so they get the new length.
    Windows of the split adjoin unless option `stride` says otherwise.
    """
    values: dict[str, int | None] = {LENGTH: length, "trainer.val_stride": None}
    trained = config.data.length
    widths = (config.routing.window, config.model.window)
    for key, width in zip(WINDOWS, widths, strict=True):
        if width == trained:
            values[key] = length
    return [Override(key, (written(value),)) for key, value in values.items()]


def refuse_length(config: Config, length: int) -> None:
    """Raise `UserError` where a model has no positions for sequences of another length."""
    model = config.model
    if model.positions in FIXED and length != config.data.length:
        reason = f"has a vector for each of the {config.data.length:,} positions of training"
        others = "rotary, shaw, xl and none extend to others"
        raise UserError(f"length={length}: model.positions={model.positions} {reason}; {others}")
    if model.memory:
        instead = "memory= says how many units before a segment it reads"
        raise UserError(f"length={length}: not for model.memory={model.memory}; {instead}")
