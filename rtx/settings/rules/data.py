"""What fits together in data: files, images, recall tasks. These rules read keys of data alone."""

from collections.abc import Iterator

from rtx.settings.data_sets import MADE, SETS
from rtx.settings.derived import image_side
from rtx.settings.rules.rule import at_most, rule
from rtx.settings.schema import Config, DataConfig

PATHS = {
    "text": "file, folder or glob",
    "images": "folder with images",
    "hub": "owner/name, or a folder",
}
"""Data sets that are read from data.path, and what it names."""


@rule("data.name", "data.path")
def path_of_data(config: Config) -> Iterator[str]:
    """The user's own data need a path."""
    data = config.data
    if data.name in PATHS and data.path is None:
        yield f"data={data.name} needs data.path=<{PATHS[data.name]}>"


@rule("data.name", "data.length", "data.size")
def length_of_image(config: Config) -> Iterator[str]:
    """An image is one sequence of all its sub-pixels."""
    data = config.data
    if not SETS[data.name].image:
        return
    side = image_side(data)
    if side is None:
        is_right = data.length % 3 == 0
        needed = "height x width x 3"
    else:
        is_right = data.length == 3 * side**2
        needed = f"{3 * side**2} = {side} x {side} x 3"
    if not is_right:
        yield f"data.length={data.length} must be {needed}: an image is one sequence"


@rule("data.name", "data.pairs", "data.keys")
def enough_keys(config: Config) -> Iterator[str]:
    """The pairs of a recall sequence have different keys; copy has one key."""
    if config.data.name in MADE and config.data.name != "copy":
        yield from at_most(config, "data.pairs", "data.keys")


@rule("data.name", "data.pairs", "data.distance", "data.length")
def room_for_pairs(config: Config) -> Iterator[str]:
    """A recall sequence holds its pairs, their questions, and the distance between them."""
    data = config.data
    if data.name not in MADE:
        return
    least = tokens_of_pairs(data) + data.distance
    if least > data.length:
        needs = "needs"
        if data.distance:
            needs = f"and data.distance={data.distance} need"
        yield (
            f"data.pairs={data.pairs} {needs} data.length of at least {least}, not {data.length}"
        )


def tokens_of_pairs(data: DataConfig) -> int:
    """Return the least number of tokens that pairs and questions of a recall task need."""
    if data.name == "copy":
        return 2 * data.pairs + 2
    if data.name == "induction":
        return 8 * data.pairs
    return 4 * data.pairs
