"""Runs with a memory of earlier segments: resumed to the same bits, scored as published, sampled, exported, planned."""

import signal
from pathlib import Path

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


def test_an_evaluation_has_a_memory_of_its_own_and_scores_every_unit_once(
    workshop: Workshop, undisturbed: Path
) -> None:
    published = ("data.length=8", "memory=64", "clamp=20", "same_length=true")
    asked = ((), published, (*published, "mode=streaming"), (*published, "stride=50", "batch_size=3"), ("memory=0",))
    results = [workshop.score(undisturbed, *words)[0] for words in asked]
    assert all(one["units"] == one["split_units"] for one in results)
    own, longer, streaming, parts = (one["bits_per_byte"] for one in results[:4])
    said = [one["protocol"] for one in results]
    assert "segments of 32 with a memory of 40" in said[0] and results[0]["windows"] == 1
    assert "segments of 8 with a memory of 64, distances clamped at 20, the same length for all" in said[1]
    assert streaming == longer != own
    assert results[3]["windows"] > 1 and abs(parts - longer) < 0.05
    assert "no memory" not in said[4]


def test_other_commands_take_it(workshop: Workshop, undisturbed: Path) -> None:
    assert workshop.command("sample", str(undisturbed), "length=50", "prompt=abc")
    workshop.command("export", str(undisturbed))
    one, other = (workshop.score(run)[0]["bits_per_byte"] for run in (undisturbed / "export", undisturbed))
    assert one == other
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
