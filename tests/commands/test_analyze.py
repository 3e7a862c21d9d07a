"""`rtx analyze` on a real run of a few steps."""

from __future__ import annotations

import json
import math

from small_runs import Workshop


def test_the_divergence_of_a_runs_heads_is_printed_and_kept(workshop: Workshop) -> None:
    run = workshop.train("run", "routing=causal")
    printed = workshop.command("analyze", "divergence", str(run), "draws=3", "sequences=2", "split=test")
    (path,) = (run / "analysis").glob("divergence-best-*.json")
    result = json.loads(path.read_text())
    assert str(path) in printed and "local routing" in printed
    assert result["analyze"]["draws"] == 3 and result["bound"] == math.log(2)
    for row in result["layers"]:
        assert len(row["nats_R"]) == 3
        assert 0 <= row["mean"] <= math.log(2)
        assert f"{row['mean']:.4f} ± {row['deviation']:.4f}" in printed


def test_what_is_not_there_to_analyze_is_said(workshop: Workshop) -> None:
    run = workshop.train("plain", "routing.heads=0")
    printed = workshop.command("analyze", "divergence", str(run))
    assert "local local" in printed and "routing" not in printed.splitlines()[1:][0]
    assert "say divergence" in workshop.command("analyze", "diverge", str(run), code=2)
    assert "needs the run's folder" in workshop.command("analyze", "divergence", code=2)
    assert "unknown key 'draw'" in workshop.command("analyze", "divergence", str(run), "draw=3", code=2)
