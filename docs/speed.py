"""Writes the tables of speed.md, beside this file, from the records in benchmarks/results/.

Run `python docs/speed.py` after a record has changed. The page has a pair of comments around each
table; what stands between them is replaced.
"""

import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PAGE = Path(__file__).with_suffix(".md")
Row = dict[str, Any]

LENGTHS = (4_096, 8_192, 16_384, 32_768, 65_536, 131_072)
STEP_LENGTHS = (8_192, 32_768, 65_536)
ALONE = {
    "sdpa": "full attention, torch's `scaled_dot_product_attention` (cuDNN)",
    "local": "local, our kernels",
    "flash_window": "local, torch's flash kernel with a window",
    "flex_window": "local, FlexAttention",
    "random": "random members",
    "nearest": "`nearest`",
    "topk": "`topk`",
    "causal": "`causal`",
    "probed": "`probed`",
}
"""Rows of attention alone on a GPU, with their names on the page."""
STEPS = {
    "full": "full heads",
    "local": "local heads",
    "topk": "`topk`",
    "causal": "`causal`",
    "probed": "`probed`",
}
"""Columns of whole steps on a GPU."""
MODELS = {
    "routing_topk": "routing, `topk`",
    "routing_causal": "routing, `causal`",
    "full": "full attention",
    "full_torch": "full attention by torch's kernel",
    "peer_routing": "peer",
    "peer_routing_kept": "peer with our memory settings",
    "weights": "products with weights alone, by oneDNN",
    "weights_torch": "the same by torch's own",
}
"""Models whose steps are timed on a CPU."""
BASES = ("full", "full_torch", "peer_routing", "peer_routing_kept")
"""Models that the others are compared with."""
SIZES = (8_192, 16_384, 3_072)
PATTERNS = {
    "routing_topk": "routing, `topk`",
    "routing_causal": "routing, `causal`",
    "local": "local",
    "random": "random members",
}
"""Patterns of attention alone on a CPU."""


def record(name: str) -> Any:
    """Return a record of benchmarks/results/."""
    return json.loads((BENCHMARKS / "results" / name).read_text(encoding="utf-8"))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> str:
    """Return a table, whose first `texts` columns are aligned at their left."""
    rule = ["---"] * texts + ["---:"] * (len(heads) - texts)
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(rule)}|"]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join(lines)


def decimals(value: float | None, places: int) -> str:
    """Return a number with some decimals, "" for None."""
    return "" if value is None else f"{value:,.{places}f}"


def milliseconds(value: float | None) -> str:
    """Return milliseconds on a GPU: two decimals below ten, else one."""
    if value is None:
        return ""
    return decimals(value, 2 if value < 10 else 1)


def gpu_alone() -> str:
    """Return attention alone on a GPU: forward and backward, by pattern and length."""
    rows = {row["key"]: row for row in record("gpu-h200.json")["rows"]}
    lines = []
    for kind, name in ALONE.items():
        found = [rows.get(f"alone/{kind}/{N}", {}).get("graph_ms") for N in LENGTHS]
        lines.append([name, *map(milliseconds, found)])
    return table(["N", *(f"{N:,}" for N in LENGTHS)], lines)


def gpu_steps() -> str:
    """Return whole steps on a GPU, compiled and recorded, by length and heads."""
    rows = {row["key"]: row for row in record("gpu-h200.json")["rows"]}
    lines = []
    for N in STEP_LENGTHS:
        found = {kind: rows.get(f"steps/6x512/{kind}/{N}/recorded", {}).get("ms") for kind in STEPS}
        times = found["full"] / found["causal"]
        cells = [decimals(value, 0 if value and value >= 100 else 1) for value in found.values()]
        lines.append([f"{N:,}", *cells, decimals(times, 1)])
    return table(["N", *STEPS.values(), "full / `causal`"], lines)


def gpu_goals() -> str:
    """Return each goal with what was predicted and measured."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        predicted = importlib.import_module("gpu_sections.predictions").predicted
    finally:
        sys.path.remove(str(BENCHMARKS))
    measured = {goal["goal"]: goal for goal in record("gpu-h200.json")["goals"]}
    lines = []
    for goal in predicted():
        found = measured[goal["goal"]]
        met = {True: "yes", False: "**no**", None: "not measured"}[found["met"]]
        numbers = [decimals(value, 2) for value in (goal["predicted"], found["measured"])]
        lines.append([goal["goal"], goal["target"], *numbers, met])
    return table(["goal", "target", "predicted", "measured", "met"], lines)


def cpu_steps(name: str) -> str:
    """Return training steps on a CPU, each beside the models in `BASES`."""
    ms = {row["pattern"]: row["ms"] for row in record(name)}
    lines = []
    for pattern, title in MODELS.items():
        cells = [decimals(ms[base] / ms[pattern], 2) for base in BASES]
        lines.append([title, decimals(ms[pattern], 0), *cells])
    heads = ["model", "ms", "x full", "x torch's full", "x peer", "x peer, our memory"]
    return table(heads, lines)


def cpu_attention(name: str) -> str:
    """Return attention alone on a CPU by the compiled kernel, beside torch's and the peers."""
    rows = {key_of(row): row for row in record(name)}
    lines = []
    for N in SIZES:
        for pattern, title in PATTERNS.items():
            row = rows[N, pattern, "kept"]
            system = rows.get((N, pattern, "system"), {"ratio": {}})
            peer = "peer_local" if pattern == "local" else "peer_routing"
            case = "" if pattern != next(iter(PATTERNS)) else f"{N}, {row['W']}, {row['C']}"
            ratios = row["ratio"]
            times = [ratios[peer], system["ratio"].get(peer), ratios[pattern]]
            cells = [decimals(row["ms"], 0), decimals(ratios["sdpa"], 1)]
            lines.append([case, title, *cells, *(decimals(value, 2) for value in times)])
    heads = ["N, W, C", "pattern", "ms", "x torch's full", "x peer", "x peer, system's memory"]
    return table([*heads, "x torch's kernels"], lines, texts=2)


def key_of(row: Row) -> tuple[int, str, str] | None:
    """Return length, pattern and memory setting of a row that the page shows, else None."""
    is_shown = (row["what"], row["group"], row["backend"]) == ("forward+backward", "main", "native")
    return (row["N"], row["pattern"], row["memory"]) if is_shown else None


TABLES: dict[str, Callable[[], str]] = {
    "gpu-alone": gpu_alone,
    "gpu-steps": gpu_steps,
    "gpu-goals": gpu_goals,
    "step-cpu": lambda: cpu_steps("step-cpu.json"),
    "step-cpu-epyc25": lambda: cpu_steps("step-cpu-epyc25.json"),
    "attention-cpu-epyc": lambda: cpu_attention("attention-cpu-epyc.json"),
    "attention-cpu": lambda: cpu_attention("attention-cpu.json"),
    "attention-cpu-epyc25": lambda: cpu_attention("attention-cpu-epyc25.json"),
}
"""The tables of the page by the names in its comments."""


def text() -> str:
    """Return the page with its tables as the records have them."""
    page = PAGE.read_text(encoding="utf-8")
    for name, make in TABLES.items():
        place = re.compile(rf"(<!-- table {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        rows = make()
        page, count = place.subn(lambda found, rows=rows: f"{found[1]}\n{rows}\n{found[2]}", page)
        assert count == 1, f"{PAGE.name} has {count} places for the table {name}"
    return page


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
