"""The paper's encoder as a command: data=masked model=encoder, and what it refuses."""

from pathlib import Path

import pytest

from tests.helpers.small_runs import SMALL_RUN, Workshop, draw_nothing

LEFT_OUT = ("data", "routing=", "model=", "model.window", "routing.heads", "routing.layers")
MASKED = (
    *(size for size in SMALL_RUN if not size.startswith(LEFT_OUT)),
    *("data=masked", "model=encoder", "model.heads=2", "model.window=8"),
    *("data.length=64", "data.pairs=4", "data.keys=9", "data.values=4", "data.sequences=9"),
    *("data.distance=8", "routing.heads=1", "routing.layers=1"),
)


@pytest.fixture(scope="module")
def encoder_run(workshop: Workshop) -> Path:
    run = workshop.folder / "encoder"
    printed = workshop.command("train", *MASKED, "routing=topk", "trainer.steps=2", run=run)
    assert "of the answers right (chance 25.00%)" in printed
    return run


def test_an_encoder_trains_and_is_scored_as_one_that_reads_both_sides(
    workshop: Workshop, encoder_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_nothing(monkeypatch)
    result, said = workshop.score(encoder_run, "split=test")
    assert result["sees_future"] and result["windows"] == 9
    assert "selection=topk, an encoder" in said.replace("\n", " ")
    ablated, _ = workshop.score(encoder_run, "split=test", "ablate=local")
    assert ablated["bits"] != result["bits"]
    assert "reading, %" in workshop.command("analyze", "patterns", str(encoder_run))


def test_an_encoder_has_a_plan(workshop: Workshop) -> None:
    planned = workshop.command("plan", *MASKED, "routing=topk")
    assert "encoder: 2 layers, local heads; routing=topk" in planned


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("eval {run} mode=streaming", "mode=streaming is not for model.causal=false: an encoder"),
        ("audit {run}", "model.causal=false: an encoder reads both sides, so it has no streams"),
        ("sample {run}", "model.causal=false: an encoder reads both sides, so it has no streams"),
    ],
)
def test_streams_and_causal_scores_are_refused(
    workshop: Workshop, encoder_run: Path, words: str, said: str
) -> None:
    _, err = workshop.answer(*words.format(run=encoder_run).split(), code=2)
    assert said in err.replace("\n", " ")
