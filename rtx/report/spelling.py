"""Samples side by side, and the share of their words that the training text does not have.

The paper marks spelling mistakes of samples by hand (Tables 6 and 7 of its submission). A word that the training text
does not have once is what a machine can count of that; names and rare words are among them, so the share of held-out
text is given beside it.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from rtx.report.text import printable

WORD = re.compile(r"[^\W\d_]+")
"""Letters in a row, of any script."""

COLUMNS = 80


def words(text: str, *, cut_start: bool = False, cut_end: bool = True) -> list[str]:
    """Return the words of a text in small letters; a word at a cut end may be half of one and is left out."""
    found = [match for match in WORD.finditer(text) if not (cut_end and match.end() == len(text))]
    return [match[0].casefold() for match in found if not (cut_start and match.start() == 0)]


def known_words(candidates: Collection[str], texts: Iterable[str]) -> set[str]:
    """Return those of the candidates that stand in some text; texts must not break inside a word."""
    missing = set(candidates)
    for text in texts:
        missing.difference_update(WORD.findall(text.casefold()))
        if not missing:
            break
    return set(candidates) - missing


def shares(samples: Sequence[Sequence[str]], known: Collection[str]) -> dict[str, Any]:
    """Return the share of all samples' words that are not known, with its standard error over the samples.

    Args:
        samples: the words of each.
        known: words of the training text.
    """
    counts = [(len(sample), sum(word not in known for word in sample)) for sample in samples]
    total, unknown = sum(count for count, _ in counts), sum(missing for _, missing in counts)
    if not total:
        return {"words": 0, "unknown": 0, "share": None, "error": None}
    share = unknown / total
    residual = sum((missing - share * count) ** 2 for count, missing in counts)
    several = len(samples) > 1
    error = math.sqrt(residual * len(samples) / (len(samples) - 1)) / total if several else None
    return {"words": total, "unknown": unknown, "share": share, "error": error}


def shares_table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each text, of what `shares` found, and of two runs the difference."""
    widest = max(len("words of"), *(len(name) for name in rows))
    lines = [f"{'words of':<{widest}}  {'words':>7}  not in the training text"]
    for name, row in rows.items():
        lines.append(f"{name:<{widest}}  {row['words']:>7,}  {percent(row['share'], row['error'])}")
    found = [row for row in rows.values() if row["share"] is not None]
    if len(rows) > 2 and len(found) == len(rows):
        first, second = found[:2]
        errors = [row["error"] for row in (first, second)]
        error = math.hypot(*errors) if None not in errors else None
        lines.append(f"{'difference':<{widest}}  {'':>7}  {percent(first['share'] - second['share'], error, '+')}")
    return lines


def percent(share: float | None, error: float | None, sign: str = "") -> str:
    """Return a share with its standard error."""
    if share is None:
        return "no words"
    return f"{share:{sign}.2%}" + ("" if error is None else f" ± {error:.2%}")


def side_by_side(texts: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return one text, or two beside each other, in lines of at most 80 columns below their names."""
    width = (COLUMNS - 3 * (len(texts) - 1)) // len(texts)
    columns = [[name[-width:], "-" * width, *folded(text, width)] for name, text in zip(names, texts, strict=True)]
    height = max(map(len, columns))
    rows = zip(*(column + [""] * (height - len(column)) for column in columns), strict=True)
    return [" | ".join(cell.ljust(width) for cell in row).rstrip() for row in rows]


def folded(text: str, width: int) -> list[str]:
    """Return the lines of a text, long ones folded where they have a blank, else anywhere."""
    lines: list[str] = []
    for line in printable(text).expandtabs(4).split("\n"):
        lines += textwrap.wrap(line, width, drop_whitespace=True, replace_whitespace=False) or [""]
    return lines


def samples_page(title: str, lines: Sequence[str], table: Sequence[str], samples: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown that is kept: protocol, shares, and each sample of every run with its unknown words.

    Args:
        samples: for each sample `prompt`, and by the runs' names `texts` and `unknown`.
    """
    parts = [f"# {title}", *lines, indented(table)]
    for number, sample in enumerate(samples, start=1):
        parts.append(f"## Sample {number}")
        if sample["prompt"]:
            parts += ["Given:", indented(folded(sample["prompt"], COLUMNS)), "Gone on with:"]
        parts.append(indented(side_by_side(list(sample["texts"].values()), list(sample["texts"]))))
        for name, unknown in sample["unknown"].items():
            listed = ", ".join(dict.fromkeys(unknown)) or "none"
            parts.append(f"Not in the training text, {name}: {listed}.")
    return "\n\n".join(parts) + "\n"


def indented(lines: Sequence[str]) -> str:
    """Return lines as a block that Markdown shows as it is."""
    return "\n".join(f"    {line}".rstrip() for line in lines)
