"""`rtx audit` on real runs of a few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_runs import Workshop

from rtx.attention import native

SMALL = ("sequences=1", "prefixes=6", "windows=3", "positions=5")


def audited(workshop: Workshop, run: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """Audit a run and return the JSON it leaves, and what was printed."""
    printed = workshop.command("audit", str(run), *SMALL, *overrides)
    assert str(run / "audit.json") in printed
    return json.loads((run / "audit.json").read_text(), parse_constant=pytest.fail), printed


def test_random_membership_is_the_control(workshop: Workshop) -> None:
    backend = "native" if native.available() else "torch"  # neither is that of the audit, which is in float64
    run = workshop.train(
        "random",
        "routing=random",
        f"hardware.attention={backend}",
        "hardware.precision=fp32",
        "model.attention_dropout=0",
    )
    result, printed = audited(workshop, run)
    for mode in ("teacher-forced", "streaming"):
        assert not result["changes"][mode]["sees_future"] and f"{mode}: sees no future" in printed
        assert all(row["largest"] <= 1e-12 and row["moved"] == 0 for row in result["changes"][mode]["rows"])
    assert all(abs(result["price"][name]["bits"]) < 1e-5 for name in ("leak_gives", "competing_costs", "together"))
    assert [(one["layer"], one["gradient"]) for one in result["choices"]] == [(1, None)]
    assert "nothing: it is drawn" in printed and result["seed"] == 0
    assert len(result["price"]["positions"][0]) == 5 and result["price"]["windows"] == 3


def test_top_w_is_found_and_priced(workshop: Workshop) -> None:
    run = workshop.train("topk", "routing=topk")
    result, printed = audited(workshop, run, "tolerance=1e-10", "split=test")
    changes, read = result["changes"], result["changes"]["teacher-forced"]
    assert read["sees_future"] and changes["tolerance"] == 1e-10 and {1, 31} < {*changes["prefixes"]}
    assert read["arises_in"] == [[1, "routed"]], "layers count from 0"
    assert read["rows"][0]["heads"] == "logits" and 0 < read["rows"][0]["moved"] <= 1
    assert "teacher-forced: sees the future; arises in layer 1 routed" in printed
    assert "streaming: sees no future" in printed and not changes["streaming"]["sees_future"]
    assert result["choices"][0]["gradient"] > 0 and "its queries, by the attention; centroids by k-means" in printed
    assert result["price"]["leak_gives"]["bits"] != 0
    first, again, other = (audited(workshop, run, f"seed={seed}")[0] for seed in (3, 3, 4))
    assert first["price"] == again["price"] and first["changes"] == again["changes"]
    assert first["price"]["positions"] != other["price"]["positions"]


def test_mistakes_are_told_in_a_line(workshop: Workshop) -> None:
    run = str(workshop.train("mistaken", "trainer.steps=1"))
    for arguments, said in (
        (["model=tiny"], "rtx audit needs the run's folder first"),
        ([run, "none"], "none: no such folder"),
        ([run, "windws=3"], "did you mean 'windows'?"),
        ([run, "model.layers=3"], "rtx audit does not read model.layers"),
    ):
        printed = workshop.command("audit", *arguments, code=2)
        assert said in printed
        assert sum(line.startswith("rtx: ") for line in printed.splitlines()) == 1
