"""`rtx analyze` and `rtx audit` on real runs of a few steps: what they print, keep, and refuse."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rtx.attention.engine import native
from tests.helpers.small_runs import Workshop, draw_nothing


@pytest.fixture(scope="module")
def topk(workshop: Workshop) -> Path:
    return workshop.train("topk", "routing=topk", "routing.window=5", "trainer.steps=2")


def analyzed(
    workshop: Workshop, what: str, run: Path, *options: str
) -> tuple[dict[str, Any], str, Path]:
    """Return the record that an analysis keeps, what it prints, and where the record stands."""
    printed = workshop.command("analyze", what, str(run), *options)
    # A slow machine prints lines of progress, too.
    paths = [line for line in printed.splitlines() if line.startswith(f"{run / 'analysis'}/")]
    path = Path(paths[-1])
    return json.loads(path.read_text()), printed, path


def test_the_divergence_of_a_runs_heads_by_layer_and_over_layers(
    workshop: Workshop, run: Path
) -> None:
    result, printed, _ = analyzed(
        workshop, "divergence", run, "draws=3", "sequences=2", "split=test"
    )
    assert (
        "local routing" in printed and "Wikitext" not in printed and result["analyze"]["draws"] == 3
    )
    assert [row["layer"] for row in result["layers"]] == [0, 1], (
        "of one head of a kind there is no pair"
    )
    for row in [*result["layers"], *result["over_layers"]]:
        assert len(row["nats_R"]) == 3 and 0 <= row["mean"] <= math.log(2)
        assert f"{row['mean']:.4f} ± {row['deviation']:.4f}" in printed
    assert [line.split()[0] for line in printed.splitlines()[3:7]] == ["layer", "0", "1", "mean"]


UNNAMED = (
    "over_windows",
    "over_positions",
    "reads_share",
    "self_weight",
    "gain_error",
    "trained_by",
    "missing",
)
"""Keys of records that no table shows."""


def test_tables_have_names_that_a_reader_knows_and_fit_a_terminal(
    workshop: Workshop, topk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    draw_nothing(monkeypatch)
    heads = {
        "context mode=streaming windows=3": (
            "positions",
            "units before",
            "gain of the whole window",
        ),
        "patterns": ("keys read", "own weight", "reading, %"),
    }
    for words, names in heads.items():
        what, *options = words.split()
        printed = analyzed(workshop, what, topk, *options)[1]
        check_table(printed, names)
    printed = audited(workshop, topk)[1]
    check_table(printed, ("largest relative change", "outputs moved, %", "difference", "windows"))
    row = next(
        line
        for line in printed.splitlines()
        if line.startswith("competing costs (streaming - prefix rerun)")
    )
    assert all(re.fullmatch(r"\N{MINUS SIGN}?\d\.\d{4}", word) for word in row.split()[-3:])


def check_table(printed: str, names: tuple[str, ...]) -> None:
    lines = [line for line in printed.splitlines() if "/" not in line]
    assert all(len(line) <= 80 for line in lines)
    assert all(name in printed for name in names)
    assert not [name for name in UNNAMED if name in "\n".join(lines)]


def test_patterns_are_a_table_and_one_picture(
    workshop: Workshop, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, printed, path = analyzed(workshop, "patterns", run, "layer=0")
    with Image.open(path.with_suffix(".png")) as picture:
        assert picture.size == (1200, 600)
        colours = np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)
    assert len(colours) > 20, "shades of several weights"
    assert all(len(line) <= 80 for line in printed.splitlines() if "/" not in line)
    head = result["heads"][0]
    assert head["keys"] == pytest.approx((sum(range(1, 9)) + 24 * 8) / 32), "a local head of 8 keys"
    assert head["farthest"] == 7 and 0 < head["self_weight"] < 1
    draw_nothing(monkeypatch)
    result, _, top = analyzed(workshop, "patterns", run)
    kinds = [(row["layer"], row["head"], row["pattern"]) for row in result["heads"]]
    assert kinds == [(1, 0, "local"), (1, 1, "routing")]
    again, other = (
        analyzed(workshop, "patterns", run, option)[2] for option in ("layer=0", "seed=5")
    )
    assert again == path and other not in (path, top), (
        "the same again replaces itself, another stands beside"
    )
    said = workshop.command("analyze", "patterns", str(run), "layer=2", code=2)
    assert "layer=2: the topmost layer is layer=1" in said


def test_loss_by_position_and_by_context(workshop: Workshop, run: Path) -> None:
    result, printed, _ = analyzed(workshop, "context", run, "windows=3")
    ranges = [(row["first"], row["last"]) for row in result["positions"]]
    assert ranges == [(first, first + 1) for first in range(0, 32, 2)]
    first, second = result["gains"]
    assert (first["context"], second["context"]) == ([16, 31], [8, 15])
    assert first["gain"] == 0
    halves = [row["bits"] for row in result["positions"][8:]]
    assert first["bits"] == pytest.approx(sum(halves) / 8), "the same units as in the second half"
    assert second["gain"] == pytest.approx(second["bits"] - first["bits"])
    assert second["gain_error"] > 0
    assert f"{second['bits']:.4f} ± {second['error']:.4f}" in printed
    assert "96 bytes each scored once (a sample of 3 windows)" in " ".join(printed.split())
    for split, windows in (("train", 64), ("valid", 4)):  # of 150 bytes 4 windows of 32 are whole
        assert analyzed(workshop, "context", run, f"split={split}")[0]["windows"] == windows


def test_no_gain_from_context_where_selection_sees_the_future(
    workshop: Workshop, topk: Path
) -> None:
    result, printed, _ = analyzed(workshop, "context", topk, "windows=3")
    assert result["gains"] == []
    assert "no gain from far context" in printed
    assert "sees the future" in printed
    result, printed, _ = analyzed(workshop, "context", topk, "windows=3", "mode=streaming")
    assert len(result["gains"]) == 2
    assert "streaming" in printed


COVERED = {"exact", "blocks", "blocks_random", "causal", "nearest", "random", "next keys"}


def check_shares(rows: list[dict[str, Any]]) -> None:
    """Check that selections retain shares, at equal keys, and that the best comes first."""
    assert rows[0]["selection"] == "exact"
    for row in rows:
        assert row["keys"] == 4
        assert row["error"] > 0
        for point in (row, *row["curve"]):
            assert 0 <= point["share"] <= 1


def test_coverage_of_full_heads_by_every_selection_but_the_indexer(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = workshop.train("full", "model.base=full", "routing.heads=0", "trainer.steps=1")
    options = ("keys=4", "steps=2", "split=train", "windows=2")
    result, printed, path = analyzed(workshop, "coverage", run, *options)
    check_shares(result["rows"])
    rows = {row["selection"]: row for row in result["rows"]}
    assert {*COVERED, "topk (sees the future)"} <= rows.keys()
    assert "indexer" not in rows
    assert 0 < result["beyond"]["layer 0"] < 1
    assert result["window"] == 8
    row = rows["blocks"]
    assert row["of all"] == pytest.approx(row["share"] * result["beyond"]["mean"], rel=0.02)
    assert f"{row['share']:.3f} ± {row['error']:.3f}" in printed
    assert "over 2 windows" in printed
    with Image.open(path.with_suffix(".png")) as picture:
        assert picture.size[0] > 600
    # A picture takes a second.
    monkeypatch.setattr("rtx.commands.analyses.coverage.draw_curves", lambda rows: b"")
    again, _, _ = analyzed(workshop, "coverage", run, *options)
    assert again["rows"] == result["rows"]
    every, _, _ = analyzed(workshop, "coverage", run, "keys=32", "steps=1", "window=0", "windows=2")
    for row in every["rows"]:
        assert row["share"] == pytest.approx(1)
        assert row["keys"] == 16.5
    refusal = workshop.command("analyze", "coverage", str(run), "window=32", code=2)
    assert "window=32: must be less" in refusal


def test_coverage_needs_full_heads(workshop: Workshop, topk: Path) -> None:
    refusal = workshop.command("analyze", "coverage", str(topk), code=2)
    assert "model.base=local: no layer has full" in refusal


def audited(
    workshop: Workshop, run: Path, *overrides: str, prefixes: int = 2
) -> tuple[dict[str, Any], str]:
    """Audit a run and return the JSON it leaves, and what was printed."""
    small = ("sequences=1", f"prefixes={prefixes}", "windows=3", "positions=5")
    printed = workshop.command("audit", str(run), *small, *overrides)
    assert str(run / "audit.json") in printed
    return json.loads((run / "audit.json").read_text(), parse_constant=pytest.fail), printed


def check_no_future(audit: dict[str, Any]) -> None:
    """Check that nothing moves in a mode when later units change."""
    assert not audit["sees_future"]
    for row in audit["rows"]:
        assert row["largest"] <= 1e-12
        assert row["moved"] == 0


def test_random_membership_is_the_control(workshop: Workshop) -> None:
    # Neither is the backend of the audit, which is in float64.
    backend = "native" if native.library() else "torch"
    exactly = ("hardware.precision=fp32", "trainer.steps=2")
    run = workshop.train("random", "routing=random", f"hardware.attention={backend}", *exactly)
    result, printed = audited(workshop, run)
    for mode in ("teacher-forced", "streaming"):
        check_no_future(result["changes"][mode])
        assert f"{mode}: sees no future" in printed
    price = result["price"]
    for name in ("leak_gives", "competing_costs", "together"):
        assert abs(price[name]["bits"]) < 1e-5
    (choice,) = result["choices"]
    assert (choice["layer"], choice["gradient"]) == (1, None)
    assert "nothing: it is drawn" in printed
    assert result["seed"] == 0
    assert len(price["positions"][0]) == 5
    assert price["windows"] == 3


def test_top_w_is_found_and_priced(workshop: Workshop, topk: Path) -> None:
    result, printed = audited(workshop, topk, "tolerance=1e-10", "split=test", prefixes=6)
    changes = result["changes"]
    assert changes["tolerance"] == 1e-10
    assert {1, 31} < {*changes["prefixes"]}
    forced = changes["teacher-forced"]
    assert forced["sees_future"]
    assert forced["arises_in"] == [[1, "routed"]], "layers count from 0"
    assert forced["rows"][0]["heads"] == "logits"
    assert 0 < forced["rows"][0]["moved"] <= 1
    assert not changes["streaming"]["sees_future"]
    assert "teacher-forced: sees the future; arises in layer 1 (routing heads)" in printed
    assert "streaming: sees no future" in printed
    assert result["choices"][0]["gradient"] > 0
    assert "its queries, by the attention; centroids" in " ".join(printed.split())
    assert result["price"]["leak_gives"]["bits"] != 0


def test_an_audit_is_the_same_with_the_same_seed(workshop: Workshop, topk: Path) -> None:
    first, again, other = (audited(workshop, topk, f"seed={seed}")[0] for seed in (3, 3, 4))
    assert first["price"] == again["price"]
    assert first["changes"] == again["changes"]
    assert first["price"]["positions"] != other["price"]["positions"]
