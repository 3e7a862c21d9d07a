"""What fits together in data: files, images, tasks made on the fly. These rules read data alone."""

from collections.abc import Iterator

from rtx.settings.data_sets import RECALL, SETS
from rtx.settings.derived import context_length, counts_of_values, image_side
from rtx.settings.rules.rule import at_most, rule
from rtx.settings.schema import TEXTS, Config, DataConfig

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


@rule("data.name", "data.tokenizer", "data.tokenizer_path")
def path_of_tokenizer(config: Config) -> Iterator[str]:
    """A tokenizer that exists is read from a file."""
    data = config.data
    is_needed = data.name in TEXTS and data.tokenizer == "pretrained"
    if is_needed and data.tokenizer_path is None:
        yield "data.tokenizer=pretrained needs data.tokenizer_path=<tokenizer.json, or its folder>"


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
    if config.data.name in RECALL and config.data.name != "copy":
        yield from at_most(config, "data.pairs", "data.keys")


@rule("data.name", "data.pairs", "data.distance", "data.length")
def room_for_pairs(config: Config) -> Iterator[str]:
    """A recall sequence holds its pairs, their questions, and the distance between them."""
    data = config.data
    if data.name not in RECALL:
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
    if data.name in ("induction", "masked"):
        return 8 * data.pairs
    return 4 * data.pairs


@rule(
    "data.name",
    "data.pairs",
    "data.keys",
    "data.queries",
    "data.needle_values",
    "data.hops",
)
def pairs_of_questions(config: Config) -> Iterator[str]:
    """Needles and chains are whole, have different keys, and are asked for once at the most."""
    data = config.data
    if data.name == "needles":
        size = data.needle_values
        size_key = "data.needle_values"
        keys = data.pairs // size
    elif data.name == "tracking":
        size = data.hops
        size_key = "data.hops"
        keys = data.pairs
    else:
        return
    if data.pairs % size:
        yield f"data.pairs={data.pairs} must be a multiple of {size_key}={size}"
    if keys > data.keys:
        yield f"data.pairs={data.pairs} needs data.keys of at least {keys}, not {data.keys}"
    most = data.pairs // size
    if data.queries > most:
        yield f"data.queries={data.queries} must be at most data.pairs / {size_key} = {most}"


@rule(
    "data.name",
    "data.length",
    "data.distance",
    "data.pairs",
    "data.queries",
    "data.needle_values",
    "data.hops",
)
def room_for_context(config: Config) -> Iterator[str]:
    """The pairs of needles and chains are before the distance and the questions."""
    data = config.data
    if data.name not in ("needles", "tracking"):
        return
    missing = 2 * data.pairs - context_length(data)
    if missing > 0:
        needed = f"data.length of at least {data.length + missing}, not {data.length}"
        yield f"data.pairs={data.pairs}, data.distance={data.distance} and questions need {needed}"


@rule("data.name", "data.length", "data.distance", "data.queries", "data.values")
def ranks_differ(config: Config) -> Iterator[str]:
    """The most frequent values of a text differ in their counts, and from the next one."""
    data = config.data
    if data.name != "counting":
        return
    if data.queries > data.values:
        yield from at_most(config, "data.queries", "data.values")
        return
    counts = [*counts_of_values(data), 0][: data.queries + 1]
    if sorted(set(counts), reverse=True) != counts:
        text = f"data.length={data.length} with data.distance={data.distance}"
        most = "too short for their counts to differ"
        yield f"data.queries={data.queries} most frequent values: {text} is {most}"
