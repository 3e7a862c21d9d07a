"""Runs of every kind of model: resumed to the same bits, taken by every command; memories scored as
published.
"""

import functools
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from rtx.runs.status import run_state
from tests.helpers.small_runs import (
    SMALL_RUN,
    Workshop,
    after,
    difference,
    draw_nothing,
    read_metrics,
    status_of,
)

XL = (
    "model.base=recurrent",
    "model.positions=xl",
    "routing.heads=0",
    "routing.layers=0",
    "model.tie_embeddings=true",
)
KINDS = {
    "causal": ("routing=causal", "model.attention_dropout=0.1"),
    "nearest": (),
    "recurrent": (*XL, "model.memory=40", "trainer.log_every=1"),
    "compressive": (*XL, "model.memory=32", "model.compressed=24", "model.compression_rate=4"),
    "adaptive": (
        *(
            "data.tokenizer=words",
            "model.embedding=adaptive",
            "model.cutoffs=2x5",
            "model.band_factor=2",
        ),
        "model.tie_embeddings=true",
    ),
    "topk": (
        *(
            "routing=topk",
            "routing.init=data",
            "routing.heads=2",
            "model.positions=shaw",
            "model.recompute=true",
        ),
        *("model.base=lsh", "optimizer=adafactor"),
    ),
}
MEMORY = {
    "recurrent": "with a memory of 40",
    "compressive": "with a memory of 32 and 24 compressed",
}
"""What is said of a memory, by evaluations and by the plan."""


Runs = Callable[[str], Path]


@pytest.fixture(scope="module")
def runs(workshop: Workshop) -> Runs:
    """A function that trains the run of a kind at its first call, and returns it."""
    return functools.cache(lambda kind: workshop.train(kind, *KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_run_resumes_to_the_same_bits(workshop: Workshop, runs: Runs, kind: str) -> None:
    process = workshop.start(f"{kind}-killed", *KINDS[kind])
    assert process.kill_when(after(6)) == -signal.SIGKILL, process.log.read_text()
    run = process.run
    assert status_of(run).state == "running" and run_state(run) == "killed"
    assert f"resuming {run} (killed) from " in workshop.command(
        "resume", str(run), "hardware.workers=2"
    )
    assert status_of(run).state == "done" and difference(run, runs(kind)) == ""
    assert {path.name for path in (run / "checkpoints").iterdir()} == {
        "best.ckpt",
        "last.ckpt",
        "previous.ckpt",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_command_takes_it(
    workshop: Workshop, runs: Runs, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    # test_analyze.py draws pictures.
    draw_nothing(monkeypatch)
    run = runs(kind)
    said = MEMORY.get(kind, "")
    assert workshop.command("sample", str(run), "length=50", "prompt=abc")
    workshop.command("export", str(run))
    (own, scored), (exported, _) = (workshop.score(folder) for folder in (run, run / "export"))
    assert own["nats"] == exported["nats"] and said in " ".join(scored.split())
    audited = workshop.command("audit", str(run), "windows=2", "positions=2", "prefixes=2")
    assert "sees no future" in audited and ("sees the future" not in audited or kind == "topk")
    workshop.command("analyze", "patterns", str(run))
    planned = " ".join(workshop.command("plan", workshop.text, *SMALL_RUN, *KINDS[kind]).split())
    assert said in planned and (not said or re.search(r", memory \d+ KiB", planned))
    if said:
        assert "rtx eval memory=0" in workshop.command("analyze", "context", str(run), code=2)


def test_a_run_goes_on_with_other_micro_batches(workshop: Workshop) -> None:
    """Each stream with its own memory; without dropout, whose numbers are drawn by micro-batch."""
    still = [
        "model.dropout=0",
        "model.attention_dropout=0",
        "model.ffn_dropout=0",
        "optimizer.schedule=constant",
    ]
    whole = workshop.train("whole", *KINDS["recurrent"], *still, "trainer.steps=5")
    parts = workshop.train("parts", *KINDS["recurrent"], *still, "trainer.steps=3")
    workshop.command("resume", str(parts), "trainer.steps=5", "trainer.micro_batch_size=1")
    bits = [
        [row["train/bits"] for row in read_metrics(run / "metrics.jsonl") if "train/bits" in row]
        for run in (whole, parts)
    ]
    assert bits[0] == pytest.approx(bits[1], abs=1e-6) and len(bits[0]) == 5


def test_an_evaluation_has_a_memory_of_its_own(workshop: Workshop, runs: Runs) -> None:
    published = ("data.length=8", "memory=64", "clamp=20", "same_length=true")
    asked = (
        (),
        published,
        (*published, "mode=streaming"),
        (*published, "stride=50", "batch_size=3"),
        ("memory=0",),
    )
    results = [workshop.score(runs("recurrent"), *words)[0] for words in asked]
    assert all(one["units"] == one["split_units"] for one in results)
    own, longer, streaming, parts = (one["bits"] for one in results[:4])
    said = [one["protocol"] for one in results]
    assert "segments of 32 with a memory of 40" in said[0] and results[0]["windows"] == 1
    assert (
        "segments of 8 with a memory of 64, distances clamped at 20, the same length for all"
        in said[1]
    )
    assert streaming == longer != own
    assert results[3]["windows"] > 1 and abs(parts - longer) < 0.05
    assert "no memory" not in said[4]
    said = "memory=1000 must be at most 150, the units of split valid"
    assert said in workshop.command("eval", str(runs("recurrent")), "memory=1000", code=2)
