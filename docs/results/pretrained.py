"""The table and the plot of pretrained.md, from the records of `rtx analyze pretrained`.

    python docs/results/pretrained.py keep <record.json> ...   # writes records/pretrained.jsonl
    python docs/results/pretrained.py table                    # prints tables in Markdown
    python docs/results/pretrained.py plot                     # writes pretrained/loss.png

A line of the records is one text. The tables pool the windows of all texts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from rtx.analysis.loss_by_position import estimate
from rtx.commands.analyses.pretrained import draw

HERE = Path(__file__).parent
RECORDS = HERE / "records" / "pretrained.jsonl"
PLOT = HERE / "pretrained" / "loss.png"
DIGITS = 4
"""Of the numbers in the records."""

Record = dict[str, Any]


def keep(paths: list[str]) -> None:
    """Write records to one file, without what names the machine, and without single heads."""
    lines = []
    for path in paths:
        record = json.loads(Path(path).read_text())
        record["analyze"]["model"] = Path(record["analyze"]["model"]).name
        record["data"].pop("folder", None)
        source = record["data"]["source"]
        source["place"] = Path(source["place"]).name
        for row in record["rows"]:
            row.pop("kept_of_heads", None)
        lines.append(json.dumps(rounded(record)))
    RECORDS.write_text("\n".join(lines) + "\n")


def rounded(value: Any) -> Any:
    """Return a value whose numbers have few digits."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def records() -> list[Record]:
    """Return the records, one of each text."""
    return [json.loads(line) for line in RECORDS.read_text().splitlines()]


def pooled(texts: list[Record]) -> list[Record]:
    """Return the rows of all texts as one, with errors over all windows."""
    rows = []
    for same in zip(*(text["rows"] for text in texts), strict=True):
        above = np.concatenate([row["above_of_windows"] for row in same])
        mean, error = estimate(above)
        row: Record = {**same[0], "above": mean, "error": error}
        row["windows"] = above.tolist()
        row["of texts"] = [row_of_text["above"] for row_of_text in same]
        for name in ("late", "kept", "keys", "pairs"):
            if name in same[0]:
                row[name] = float(np.mean([row_of_text[name] for row_of_text in same]))
        rows.append(row)
    return rows


def print_tables(texts: list[Record]) -> None:
    """Print the dense scores and the rows of all choices, the best first."""
    print("| text | windows | bits/token | bits/byte | weight on sinks | far weight |")
    print("|---|---:|---:|---:|---:|---:|")
    for text in texts:
        print(dense_line(text))
    names = [name_of(text) for text in texts]
    print(f"\n| further keys | k | bits above dense | {' | '.join(names)} | kept | keys | pairs |")
    print("|---|---:|---:|" + "---:|" * (len(texts) + 3))
    for row in sorted(pooled(texts), key=lambda row: row["above"]):
        print(line_of(row))


def name_of(text: Record) -> str:
    """Return the name of a text: that of its file or folder."""
    return Path(text["data"]["source"]["place"]).stem


def dense_line(text: Record) -> str:
    """Return a line with the dense scores of a text."""
    dense = text["dense"]
    weight = text["weight"]
    cells = (
        name_of(text),
        str(len(dense["bits_of_windows"])),
        f"{dense['bits']:.3f}",
        f"{dense['bits_per_byte']:.3f}",
        f"{weight['sinks']:.3f}",
        f"{weight['far']:.3f}",
    )
    return f"| {' | '.join(cells)} |"


def line_of(row: Record) -> str:
    """Return a line of the table of choices."""
    kept = "-"
    if "kept" in row:
        kept = f"{row['kept']:.3f}"
    cells = (
        row["label"],
        str(row["k"]),
        f"{row['above']:+.4f} ± {row['error']:.4f}",
        *(f"{above:+.3f}" for above in row["of texts"]),
        kept,
        f"{row['keys']:.0f}",
        f"{row['pairs']:.0f}",
    )
    return f"| {' | '.join(cells)} |"


def print_pairs(texts: list[Record]) -> None:
    """Print how far choices with equal numbers of keys are above `exact`, window by window."""
    rows = {row["label"]: row for row in pooled(texts)}
    exact = np.array(rows["exact"]["windows"])
    for label, row in rows.items():
        if label == "exact":
            continue
        mean, error = estimate(np.array(row["windows"]) - exact)
        print(f"{label} minus exact: {mean:+.4f} ± {error:.4f}")


def main(action: str, paths: list[str]) -> None:
    """Do what the command line says."""
    if action == "keep":
        keep(paths)
    elif action == "table":
        print_tables(records())
        print_pairs(records())
    elif action == "plot":
        PLOT.parent.mkdir(exist_ok=True)
        PLOT.write_bytes(draw({"rows": pooled(records())}))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
