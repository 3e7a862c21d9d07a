"""`rtx audit` on real runs of a few steps, and on configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import Workshop

SMALL = ("sequences=1", "prefixes=6", "windows=3", "positions=5")
MODEL = ("model=tiny", "data.length=32", "model.layers=2", "model.window=8", "routing.layers=1", "routing.window=8")
FRESH = (*MODEL, "audit.sequences=1", "audit.prefixes=6")


def audited(workshop: Workshop, run: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """Audit a run and return the JSON it leaves, and what was printed."""
    printed = workshop.command("audit", str(run), *SMALL, *overrides)
    assert str(run / "audit.json") in printed
    return json.loads((run / "audit.json").read_text(), parse_constant=pytest.fail), printed


def test_random_membership_is_the_control(workshop: Workshop) -> None:
    result, printed = audited(workshop, workshop.train("random", "routing=random"))
    for mode in ("teacher-forced", "streaming"):
        assert not result["changes"][mode]["sees_future"] and f"{mode}: sees no future" in printed
        assert all(row["largest"] <= 1e-12 and row["moved"] == 0 for row in result["changes"][mode]["rows"])
    assert all(abs(result["price"][name]["bits"]) < 1e-5 for name in ("leak_gives", "competing_costs", "together"))
    assert [(one["layer"], one["gradient"]) for one in result["choices"]] == [(1, None)]
    assert "nothing: it is drawn" in printed and result["seed"] == 0
    assert len(result["price"]["positions"]) == 5 and result["price"]["windows"] == 3


def test_top_w_is_found_and_priced_and_several_runs_give_an_error_over_seeds(workshop: Workshop) -> None:
    runs = [workshop.train(f"seed{seed}", "routing=topk", f"seed={seed}") for seed in (1, 2)]
    printed = workshop.command("audit", *map(str, runs), *SMALL, "tolerance=1e-10", "split=test")
    results = [json.loads((run / "audit.json").read_text()) for run in runs]
    changes, read = results[0]["changes"], results[0]["changes"]["teacher-forced"]
    assert read["sees_future"] and read["tolerance"] == 1e-10 and {1, 31} < {*changes["prefixes"]}
    assert read["arises_in"] == [[1, "routed"]], "layers count from 0"
    assert read["rows"][0]["heads"] == "logits" and 0 < read["rows"][0]["moved"] <= 1
    assert "teacher-forced: sees the future; arises in layer 1 routed" in printed
    assert "streaming: sees no future" in printed and not changes["streaming"]["sees_future"]
    assert results[0]["choices"][0]["gradient"] > 0 and "its queries, by the attention; centroids by k-means" in printed
    together = results[0]["over_runs"]
    assert together == results[1]["over_runs"] and together["seeds"] == [1, 2] and "over 2 runs" in printed
    leaks = [result["price"]["leak_gives"]["bits"] for result in results]
    assert all(leaks) and together["leak_gives"]["bits"] == pytest.approx(sum(leaks) / 2)
    assert together["leak_gives"]["standard_error"] == pytest.approx(abs(leaks[0] - leaks[1]) / 2)
    assert results[0]["price"]["positions"] == results[1]["price"]["positions"]
    first, again, other = (audited(workshop, runs[0], f"seed={seed}", "streaming=false")[0] for seed in (3, 3, 4))
    assert first["price"] == again["price"] and first["changes"] == again["changes"]
    assert first["price"]["positions"] != other["price"]["positions"] and "streaming" not in first["changes"]
    result, _ = audited(workshop, runs[0], "windows=0", "data.path=nowhere.txt")
    assert "price" not in result and result["changes"]["teacher-forced"]["sees_future"], "no data are read"


@pytest.mark.parametrize(("routing", "sees"), [("topk", True), ("causal", False)])
def test_a_configuration_is_audited_untrained(workshop: Workshop, routing: str, sees: bool) -> None:
    path = workshop.folder / f"{routing}.json"
    printed = workshop.command("audit", *FRESH, f"routing={routing}", f"audit.output={path}")
    result = json.loads(path.read_text())
    assert result["changes"]["teacher-forced"]["sees_future"] is sees
    assert result["config"]["routing"]["selection"] == routing
    assert "a fresh model" in printed and "price" not in printed


def test_mistakes_are_told_in_a_line(workshop: Workshop) -> None:
    run = str(workshop.train("mistaken", "trainer.steps=1"))
    for arguments, said in (
        ([run, "none"], "none: no such folder"),
        ([run, "windws=3"], "did you mean 'windows'?"),
        ([run, "model.layers=3"], "rtx audit does not read model.layers"),
        ([run, "output=x.json"], "audit.json in its folder"),
        ([run, "audit.length=33"], "audit.length=33 must be at most data.length=32"),
        ([*FRESH, "audit.output=no/such/folder.json"], "cannot write"),
    ):
        printed = workshop.command("audit", *arguments, code=1 if "cannot write" in said else 2)
        assert said in printed
        assert sum(line.startswith("rtx: ") for line in printed.splitlines()) == 1
