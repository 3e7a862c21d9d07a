"""Runs with a memory of earlier segments: resumed to the same bits, scored as published, sampled, exported, planned."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from small_runs import Workshop, difference, read_metrics, steps_logged

from rtx.training.checkpoint import read_checkpoint

RECURRENT = (
    *("model.base=recurrent", "model.positions=xl", "model.memory=40", "routing.heads=0", "routing.layers=0"),
    *("model.tie_embeddings=true", "trainer.log_every=1"),
)


@pytest.fixture(scope="module")
def undisturbed(workshop: Workshop) -> Path:
    return workshop.train("recurrent", *RECURRENT)


def test_a_killed_run_resumes_to_the_same_bits(workshop: Workshop, undisturbed: Path) -> None:
    process = workshop.start("killed", *RECURRENT)
    assert process.kill_when(lambda run: steps_logged(run) >= 6) == -signal.SIGKILL, process.log.read_text()
    workshop.command("resume", str(process.run), "hardware.workers=2")
    assert difference(process.run, undisturbed) == ""
    kept = read_checkpoint(undisturbed / "checkpoints" / "last.ckpt")["callbacks"]["Watch"]["ranks"][0]["memory"]
    assert [list(x.shape) for x in kept] == [[2, 2], [2, 2, 40, 16], [2, 2, 40, 16]]


def test_a_run_goes_on_with_other_micro_batches(workshop: Workshop) -> None:
    """Each stream with its own memory; without dropout, whose numbers are drawn by micro-batch."""
    still = ["model.dropout=0", "model.attention_dropout=0", "model.ffn_dropout=0", "optimizer.schedule=constant"]
    whole = workshop.train("whole", *RECURRENT, *still)
    parts = workshop.train("parts", *RECURRENT, *still, "trainer.steps=7")
    workshop.command("resume", str(parts), "trainer.steps=12", "trainer.micro_batch_size=1")
    bits = [[row["bits"] for row in read_metrics(run / "metrics.jsonl") if "bits" in row] for run in (whole, parts)]
    assert bits[0] == pytest.approx(bits[1], abs=1e-6) and len(bits[0]) == 12


def score(workshop: Workshop, run: Path, *overrides: str) -> dict[str, Any]:
    printed = workshop.command("eval", str(run), *overrides)
    (path,) = run.glob("eval/*.json")
    result = json.loads(path.read_text())
    path.unlink()
    assert result["protocol"] in printed and result["units"] == result["split_units"]
    return result


def test_an_evaluation_has_a_memory_of_its_own_and_scores_every_unit_once(
    workshop: Workshop, undisturbed: Path
) -> None:
    own = score(workshop, undisturbed)
    assert "segments of 32 with a memory of 40" in own["protocol"] and own["windows"] == 1
    published = ("data.length=8", "memory=64", "clamp=20", "same_length=true")
    longer = score(workshop, undisturbed, *published)
    assert "segments of 8 with a memory of 64, distances clamped at 20, the same length for all" in longer["protocol"]
    streaming = score(workshop, undisturbed, *published, "mode=streaming")
    assert streaming["bits_per_byte"] == longer["bits_per_byte"] != own["bits_per_byte"]
    parts = score(workshop, undisturbed, *published, "stride=50", "batch_size=3")
    assert parts["windows"] > 1 and abs(parts["bits_per_byte"] - longer["bits_per_byte"]) < 0.05
    assert "no memory" not in score(workshop, undisturbed, "memory=0")["protocol"]


def test_other_commands_take_it(workshop: Workshop, undisturbed: Path) -> None:
    assert workshop.command("sample", str(undisturbed), "length=50", "prompt=abc")
    workshop.command("export", str(undisturbed))
    assert score(workshop, undisturbed / "export")["bits_per_byte"] == score(workshop, undisturbed)["bits_per_byte"]
    assert "sees no future" in workshop.command("audit", str(undisturbed), "windows=2", "positions=2", "prefixes=2")
    workshop.command("analyze", "patterns", str(undisturbed))
    assert "rtx eval memory=0" in workshop.command("analyze", "context", str(undisturbed), code=2)
    planned = " ".join(workshop.command("plan", workshop.text, *RECURRENT, "data.length=32", "data=text").split())
    assert "with a memory of 40" in planned and "memory 0." in planned


def test_bad_lengths_are_told_in_a_line(workshop: Workshop, undisturbed: Path) -> None:
    train = ("train", workshop.text, "data=text", "model=tiny", "data.length=32", *RECURRENT)
    for extra, said in (
        (("trainer.batch_size=100",), "trainer.batch_size=100: expected 100 streams of at least data.length=32 units"),
        (("trainer.batch_size=4", "model.memory=5000"), "model.memory=5000 must be at most 675"),
        (("model.memory=-1",), "model.memory=-1: must be an integer, at least 0"),
        (("model.clamp=0",), "model.clamp=0: must be an integer, at least 1"),
        (("model.base=local",), "model.memory=40 has no effect with model.base=local; it is for recurrent"),
        (("model.base=recurrent+local",), "recurrent heads take no others beside them"),
        (("routing.heads=1", "routing.layers=1"), "routing.heads=1 has no place beside model.base=recurrent"),
        (("model.positions=learned",), "model.positions=learned has no place in model.base=recurrent"),
        (("hardware.compile=true",), "hardware.compile=true is not for model.memory=40"),
        (("model.memory=0", "model.same_length=true"), "model.same_length=true needs model.memory of at least 1"),
        (("data=recall",), "model.memory=40 needs a text that goes on"),
    ):
        words = [word for word in train if not (extra == ("data=recall",) and word.startswith("data"))]
        assert said in workshop.command(*words, *extra, code=2)
    for extra, said in (
        ("memory=-1", "memory=-1: must be an integer, at least 0"),
        ("clamp=0", "clamp=0: must be an integer, at least 1"),
        ("memory=1000", "memory=1000 must be at most 150, the units of split valid"),
    ):
        assert said in workshop.command("eval", str(undisturbed), extra, code=2)
