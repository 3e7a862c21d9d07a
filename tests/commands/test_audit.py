"""`rtx audit` on real runs of a few steps, and on configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import Workshop

SMALL = ("sequences=1", "prefixes=6", "windows=3", "positions=5")
LONG = [f"audit.{key}" for key in SMALL[:2]]
MODEL = ("model=tiny", "data.length=32", "model.layers=2", "model.window=8", "routing.layers=1", "routing.window=8")


def audited(workshop: Workshop, run: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """Audit a run and return the JSON it leaves, and what was printed."""
    printed = workshop.command("audit", str(run), *SMALL, *overrides)
    assert str(run / "audit.json") in printed
    return json.loads((run / "audit.json").read_text(), parse_constant=pytest.fail), printed


def test_random_membership_is_the_control(workshop: Workshop) -> None:
    result, printed = audited(workshop, workshop.train("random", "routing=random"))
    for reading in ("teacher_forced", "streaming"):
        changes = result["changes"][reading]
        assert not changes["sees_future"]
        assert max(group["largest"] for group in [changes["logits"], *changes["groups"]]) <= 1e-12
    for name in ("leak_gives", "competing_costs", "together"):
        assert abs(result["price"][name]["bits"]) < 1e-5
    assert "teacher-forced: sees no future" in printed
    assert [(one["layer"], one["gradient"]) for one in result["choices"]] == [(1, None)]
    assert "layer 1 routed: the choice is trained by nothing" in printed
    assert result["changes"]["type"] == "float64" and result["seed"] == 0
    assert result["price"]["precision"] == "fp32"
    assert len(result["price"]["positions"]) == 5 and result["price"]["windows"] == 3


def test_top_w_is_found_and_priced(workshop: Workshop) -> None:
    result, printed = audited(workshop, workshop.train("topk", "routing=topk"), "tolerance=1e-10", "split=test")
    changes, read = result["changes"], result["changes"]["teacher_forced"]
    assert read["sees_future"] and read["tolerance"] == 1e-10
    assert read["arises_in"] == [{"layer": 1, "heads": "routed"}], "layers count from 0"
    assert 0 < read["logits"]["moved"] <= 1 and len(changes["prefixes"]) == 6
    assert not changes["streaming"]["sees_future"]
    assert result["price"]["together"]["bits"] != 0
    assert "teacher-forced: sees the future; arises in layer 1 routed" in printed
    assert "streaming: sees no future" in printed
    assert result["choices"][0]["gradient"] > 0 and not result["choices"][0]["missing"]
    assert "trained by its queries, by the attention; centroids by k-means" in printed
    assert all(len(line) <= 100 for line in printed.splitlines() if "/" not in line)
    assert f"{result['price']['leak_gives']['bits']:+.5f}" in printed


def test_several_runs_give_an_error_over_seeds(workshop: Workshop) -> None:
    runs = [workshop.train(f"seed{seed}", "routing=topk", f"seed={seed}") for seed in (1, 2)]
    printed = workshop.command("audit", *map(str, runs), *SMALL, "streaming=false")
    results = [json.loads((run / "audit.json").read_text()) for run in runs]
    together = results[0]["over_runs"]
    assert together == results[1]["over_runs"] and together["seeds"] == [1, 2]
    leaks = [result["price"]["leak_gives"]["bits"] for result in results]
    assert together["leak_gives"]["bits"] == pytest.approx(sum(leaks) / 2)
    assert together["leak_gives"]["standard_error"] == pytest.approx(abs(leaks[0] - leaks[1]) / 2)
    assert results[0]["price"]["positions"] == results[1]["price"]["positions"]
    assert "over 2 runs" in printed and "differ by more than their seed" not in printed
    assert "streaming" not in results[0]["changes"]
    other = workshop.train("wider", "routing=topk", "model.ffn_hidden=24")
    printed = workshop.command("audit", str(runs[0]), str(other), *SMALL)
    assert "differ by more than their seed: model.ffn_hidden" in printed


def test_seed_is_that_of_the_audit_and_without_a_price_no_data_are_read(workshop: Workshop) -> None:
    run = workshop.train("priced", "routing=topk")
    first, again, other = (audited(workshop, run, f"seed={seed}", "streaming=false")[0] for seed in (3, 3, 4))
    assert first["price"] == again["price"] and first["changes"] == again["changes"]
    assert first["price"]["positions"] != other["price"]["positions"]
    assert first["seed"] == other["seed"] == 0
    result, _ = audited(workshop, run, "windows=0", "data.path=nowhere.txt")
    assert "price" not in result and result["changes"]["teacher_forced"]["sees_future"]


@pytest.mark.parametrize(("routing", "sees"), [("topk", True), ("causal", False)])
def test_a_configuration_is_audited_untrained(workshop: Workshop, routing: str, sees: bool) -> None:
    path = workshop.folder / f"{routing}.json"
    printed = workshop.command("audit", *MODEL, f"routing={routing}", *LONG, f"audit.output={path}")
    result = json.loads(path.read_text())
    assert result["changes"]["teacher_forced"]["sees_future"] is sees
    assert result["config"]["routing"]["selection"] == routing
    assert "a fresh model" in printed and "price" not in printed


def test_mistakes_are_told_in_a_line(workshop: Workshop) -> None:
    run = str(workshop.train("mistaken", "trainer.steps=1"))
    for arguments, said in (
        (["none"], "none: no such folder"),
        (["."], "has no config.yaml"),
        ([run, "none"], "none: no such folder"),
        ([run, "windws=3"], "did you mean 'windows'?"),
        ([run, "model.layers=3"], "rtx audit does not read model.layers"),
        ([run, "output=x.json"], "audit.json in its folder"),
        ([run, "audit.length=33"], "audit.length=33 must be at most data.length=32"),
        ([*MODEL, *LONG, "audit.output=no/such/folder.json"], "cannot write"),
    ):
        printed = workshop.command("audit", *arguments, code=1 if "cannot write" in said else 2)
        assert said in printed
        assert sum(line.startswith("rtx: ") for line in printed.splitlines()) == 1
