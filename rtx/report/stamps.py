"""What makes data other than a benchmark's, in words that a report puts beside each number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def stamp_phrases(stamps: Mapping[str, Any], split: str) -> list[str]:
    """Return a phrase for each stamp of the data that a score on `split` must be read with."""
    try:
        from rtx.report import measures  # type: ignore[attr-defined]
    except ImportError:
        return plain_phrases(stamps, split)
    return list(measures.stamp_phrases(stamps, split))


def plain_phrases(stamps: Mapping[str, Any], split: str) -> list[str]:
    """Return the phrases of the stamps known here; an unknown one is shown as it is."""
    phrases = []
    for name, value in stamps.items():
        match name, value:
            case "lossy", True:
                phrases.append("lossy JPEG, not comparable")
            case "scaled", str(size):
                phrases.append(f"scaled to {size}, not comparable")
            case "newlines", "drop":
                phrases.append("newlines dropped, not comparable")
            case "complete", False:
                phrases.append("a part of the data set, not comparable")
            case "variant", str(variant):
                phrases.append(f"variant {variant!r}, not comparable")
            case "valid", "test":
                phrases.append("split valid is split test" if split == "valid" else "chosen by split test")
            case _, False | None | "":
                pass
            case _:
                phrases.append(f"{name}: {value}")
    return phrases
