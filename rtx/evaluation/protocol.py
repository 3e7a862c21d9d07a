"""How a score comes about: its protocol, made where the score is made, and recorded with it.

Values of a configuration are by their dotted keys. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rtx.data.sets import stamp_phrases
from rtx.runs.older import FOREIGN
from rtx.runs.records import DataRecord, Measures, OlderFinal, Protocol, ScoreRecord
from rtx.settings.data_sets import MADE
from rtx.settings.derived import spans
from rtx.settings.schema import Config, flat, to_dict

if TYPE_CHECKING:
    from rtx.evaluation.scores import Score

Values = Mapping[str, Any]

ABLATED = {
    "routing": "outputs of the routing heads set to zero",
    "local": "routing heads read the last W positions",
    "random": "routing heads read random members",
}
"""What option `ablate` does to a model, in words."""
DOCUMENTS = "nothing read across documents"
"""How a model with data.documents=true reads a window, in words."""


def routes(values: Values) -> bool:
    """Tell whether a model has heads that route."""
    return bool(values.get("routing.heads")) and bool(values.get("routing.layers"))


def hashes(values: Values) -> bool:
    """Tell whether some heads read by hashing."""
    if "lsh" not in str(values.get("model.base")).split("+"):
        return False
    all_heads = values.get("routing.heads") == values.get("model.heads")
    all_layers = values.get("routing.layers") == values.get("model.layers")
    return not (all_heads and all_layers)  # else all of them route


def looks_ahead(values: Values, ablate: str = "none") -> bool:
    """Tell whether a teacher-forced score may depend on later tokens.

    That is so for encoders, for top-w selection of members, and for LSH as published.
    """
    if values.get("model.causal") is False:
        return True
    if routes(values) and ablate == "none" and values.get("routing.selection") == "topk":
        return True
    return hashes(values) and values.get("model.lsh") == "reformer"


def memory_phrases(values: Values) -> list[str]:
    """Return in words how a model with a memory reads a window; nothing of other models."""
    memory = values.get("model.memory")
    if not memory:
        return []
    phrase = f"segments of {values['data.length']:,} with a memory of {memory:,}"
    if compressed := values.get("model.compressed"):
        phrase += f" and {compressed:,} compressed"
    if clamp := values.get("model.clamp"):
        phrase += f", distances clamped at {clamp:,}"
    if values.get("model.same_length"):
        phrase += ", the same length for all"
    return [phrase]


def selection_words(values: Values, ablate: str = "none") -> str:
    """Return what chose the keys of a score, in words."""
    words = "no routing heads"
    if routes(values):
        words = f"selection={values['routing.selection']}"
    if ablate != "none":  # what the model was trained with chooses nothing here
        words = f"ablated ({ABLATED[ablate]}; trained with {words})"
    if hashes(values):
        words += f", lsh={values['model.lsh']}"
    if values.get("model.causal") is False:
        words += ", an encoder"
    return words


class Reading(NamedTuple):
    """How a model reads a split: options of `rtx eval`.

    `released`: how the paper's released code reads the text otherwise, where it is read so.
    """

    mode: str = "parallel"
    ablate: str = "none"
    released: str = ""


def sees_future(values: Values, mode: str = "parallel", ablate: str = "none") -> bool:
    """Tell whether the score of some token may depend on later tokens."""
    return mode == "parallel" and looks_ahead(values, ablate)


def protocol_of(
    config: Config,
    data: DataRecord,
    split: str,
    reading: Reading | None = None,
    *,
    sample: int | None = None,
    own_data: bool = True,
) -> Protocol:
    """Return the protocol of a score.

    Args:
        config: that of the model; it has the stride of the windows.
        data: those that are scored.
        split: the part of them.
        reading: how the model reads it; None: as in training.
        sample: how many windows are scored where some are left out.
        own_data: whether the model was trained on these data.
    """
    reading = reading or Reading()
    values = flat(to_dict(config))
    length, stride = spans(values)
    stamps = [*stamp_phrases(data.stamps, split), *memory_phrases(values)]
    if config.data.documents:
        stamps.append(DOCUMENTS)
    if reading.released:
        stamps.insert(0, f"protocol=released ({reading.released})")
    return Protocol(
        split=split,
        mode=reading.mode,
        unit=data.unit,
        data=data.name if own_data else f"{data.name}{FOREIGN}",
        fingerprint=data.fingerprint,
        length=length,
        stride=stride,
        windows=sample,
        ablate=reading.ablate,
        stamps=tuple(stamps),
    )


def score_record(
    config: Config,
    protocol: Protocol,
    score: Score,
    measures: Measures,
) -> ScoreRecord:
    """Return the record of what windows scored with a model, also in other `measures`."""
    values = flat(to_dict(config))
    error = score.standard_error
    return ScoreRecord(
        **measures.to_json(),
        protocol=protocol,
        bits=score.bits,
        units=score.units,
        windows=len(score.units_K),
        nats=score.nats,
        standard_error=error if math.isfinite(error) else None,
        sees_future=sees_future(values, protocol.mode, protocol.ablate),
        selection=selection_words(values, protocol.ablate),
    )


def with_protocol(
    final: OlderFinal,
    values: Values,
    data: DataRecord,
    error: float | None,
) -> ScoreRecord:
    """Return the closing score of a run of an earlier version with the protocol that it had.

    `error`: its standard error, where a row of metrics.jsonl has it.
    """
    length, stride = spans(values)
    stamps = [*stamp_phrases(data.stamps, "valid"), *memory_phrases(values)]
    protocol = Protocol(
        split="valid",
        unit=final.unit,
        data=data.name,
        fingerprint=data.fingerprint,
        length=length,
        stride=stride,
        windows=final.windows,
        stamps=tuple(stamps),
    )
    measures = final.model_dump(include=set(Measures.model_fields), exclude_unset=True)
    return ScoreRecord(
        **measures,
        protocol=protocol,
        bits=final.bits,
        units=final.units,
        windows=windows_scored(values, protocol, final.units),
        standard_error=error,
        sees_future=looks_ahead(values),
        selection=selection_words(values),
    )


def windows_scored(values: Values, protocol: Protocol, units: int) -> int | None:
    """Return how many windows made a closing score; None of data whose answers alone are scored."""
    if protocol.windows:
        return protocol.windows
    if values["data.name"] in MADE:
        return None
    beyond_first = max(0, units - values["data.length"])
    return 1 + math.ceil(beyond_first / protocol.stride)


def further_lines(score: ScoreRecord) -> list[str]:
    """Return a line for each measure of a score beside bits per unit."""
    lines = []
    if score.perplexity_per_word is not None:
        foreign = "" if score.words_comparable else ", not comparable"
        over = f"exp(nats / {score.words:,.0f} words), {score.words_are}{foreign}"
        lines.append(f"{score.perplexity_per_word:.4g} perplexity per word: {over}")
    if score.unit != "byte" and score.bits_per_byte is not None:
        lines.append(f"{score.bits_per_byte:.5f} bits/byte of text")
    if score.bits_far_repeated is not None:
        far = f"bits/{score.unit} on far-repeated units, {score.far_repeated:.2%} of all"
        lines.append(f"{score.bits_far_repeated:.5f} {far}")
    if score.accuracy is not None:
        lines.append(f"{score.accuracy:.2%} of the answers right (chance {score.chance:.2%})")
    lines += accuracy_lines("distance", score.accuracy_by_distance, "+")
    lines += accuracy_lines("depth", score.accuracy_by_depth, "%")
    lines += accuracy_lines("hops", score.accuracy_by_hops, "")
    lines += accuracy_lines("pairs", score.accuracy_by_pairs, "")
    return lines


def accuracy_lines(
    kind: str,
    shares: Mapping[str, tuple[float, int]],
    after_value: str,
) -> list[str]:
    """Return the line on the accuracy by values of a `kind`, where there are several values."""
    if len(shares) < 2:
        return []
    parts = [f"{value}{after_value}: {share:.1%}" for value, (share, _) in shares.items()]
    return [f"accuracy by {kind}: {', '.join(parts)}"]
