"""`rtx eval length=` on long-context tasks and texts, and the tables of `rtx report` by length."""

import json
import signal
from pathlib import Path

import pytest

from rtx.runs.records import EvaluationRecord
from tests.helpers.small_runs import SMALL_RUN, Workshop, after, difference, draw_nothing, final

NEEDLES = (
    *(size for size in SMALL_RUN if not size.startswith(("data", "routing"))),
    "routing=exact",
    "routing.heads=1",
    "routing.layers=1",
    "routing.window=32",
    "data=needles",
    "data.length=32",
    "data.pairs=4",
    "data.distance=4",
    "data.queries=2",
    "data.keys=6",
    "data.values=4",
    "data.sequences=9",
)
"""Exact heads read the whole sequence."""
ANSWERS = 9 * 2


@pytest.fixture(scope="module")
def needles_run(workshop: Workshop) -> Path:
    run = workshop.folder / "needles"
    printed = workshop.command("train", *NEEDLES, "trainer.steps=2", run=run)
    assert "accuracy by depth: 0%: " in printed
    return run


def records_of(run: Path) -> dict[int, EvaluationRecord]:
    """Return the evaluations of a run by the length of their windows."""
    records = {}
    for path in run.glob("eval/*.json"):
        record = EvaluationRecord.model_validate_json(path.read_text())
        records[record.protocol.length] = record
    return records


def test_a_run_is_scored_at_several_lengths_in_one_table(
    workshop: Workshop, needles_run: Path
) -> None:
    printed = workshop.command("eval", str(needles_run), "length=32,64,128", "checkpoint=last")
    assert "other data than the run's" not in printed
    assert "routing.window=128: as wide as a sequence, as it was in training (32)" in printed
    table = printed.partition("By length: valid split of needles")[2].splitlines()
    rows = [line.split() for line in table[2:5]]
    assert [row[:2] for row in rows] == [["32", "1.00"], ["64", "2.00"], ["128", "4.00"]]
    records = records_of(needles_run)
    assert [records[length].trained_length for length in (32, 64, 128)] == [None, 32, 32]
    for length, row in zip((32, 64, 128), rows, strict=True):
        record = records[length]
        assert row[2] == f"{record.bits:.4f}"
        assert record.units == record.split_units == ANSWERS
        assert record.own_data
        assert record.chance == 0.25
        counts = [count for _, count in record.accuracy_by_depth.values()]
        assert sum(counts) == ANSWERS
        right = [share * count for share, count in record.accuracy_by_depth.values()]
        assert record.accuracy is not None
        assert sum(right) == pytest.approx(record.accuracy * ANSWERS)
    assert records[32].bits == pytest.approx(final(needles_run)["bits"])
    assert "Accuracy in %, by depth" in printed


def test_a_report_has_scores_by_length_and_by_depth(
    workshop: Workshop, needles_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_nothing(monkeypatch)
    workshop.command("eval", str(needles_run), "length=32,64", "checkpoint=last")
    printed = workshop.command("report", str(needles_run))
    assert "By length of the window, accuracy in %: valid split of needles" in printed
    assert "Accuracy in %, by depth of what the answer repeats" in printed
    report = json.loads((needles_run / "report" / "report.json").read_text())
    tables = {table["title"]: table["rows"] for table in report["tables"]}
    (row,) = tables["By length of the window, accuracy in %: valid split of needles"]
    records = records_of(needles_run)
    assert row["trained"] == 32
    for length in (32, 64):
        accuracy = records[length].accuracy
        assert accuracy is not None
        assert row[str(length)] == pytest.approx(100 * accuracy)


@pytest.mark.parametrize("task", ["tracking", "counting"])
def test_a_killed_run_of_a_task_resumes_to_the_same_bits(workshop: Workshop, task: str) -> None:
    words = [word for word in NEEDLES if word != "data=needles"]
    words.append(f"data={task}")
    if task == "counting":
        words = [word for word in words if not word.startswith(("data.pairs", "data.keys"))]
        words.append("data.length=48")
    run = workshop.folder / task
    printed = workshop.command("train", *words, run=run)
    assert ("accuracy by hops: 1: " in printed) == (task == "tracking")
    process = workshop.fork(workshop.folder / f"killed_{task}", "train", *words)
    assert process.kill_when(after(6)) == -signal.SIGKILL, process.log.read_text()
    workshop.command("resume", str(process.run))
    assert difference(process.run, run) == ""
    info = [word for word in words if word.startswith("data")]
    verified = workshop.command("data", "verify", *info)
    assert f"all {final(run)['units']} answers of valid follow from their prompts" in verified


@pytest.mark.parametrize(
    ("positions", "heads"),
    [
        ("rotary", ("routing=probed",)),
        ("shaw", ("routing=causal",)),
        ("none", ("routing=random",)),
        ("xl", ("routing=none", "routing.heads=0", "model.base=recurrent")),
    ],
)
def test_a_text_is_scored_once_at_every_length(
    workshop: Workshop, positions: str, heads: tuple[str, ...]
) -> None:
    run = workshop.train(
        f"text_{positions}", f"model.positions={positions}", *heads, "trainer.steps=2"
    )
    workshop.command("eval", str(run), "length=16,64")
    records = records_of(run)
    assert records[16].units == records[64].units == records[64].split_units
    assert records[16].bits != records[64].bits


def test_what_does_not_extend_is_refused_in_a_line(workshop: Workshop) -> None:
    untrained = ("routing=none", "trainer.steps=1")
    learned = workshop.train("learned", "model.positions=learned", *untrained)
    reason = "model.positions=learned has a vector for each of the 32 positions of training"
    printed = workshop.command("eval", str(learned), "length=64,128", code=2)
    assert f"length=64: {reason}" in printed
    assert printed.count("\n") <= 2
    run = workshop.train("short", *untrained)
    for words, message in (
        (("length=4",), "model.window=8 must be at most length=4"),
        (("length=1000",), "length=1000 must be at most"),
        (("length=64", "data.length=64"), "length= is data.length=; give one of them"),
        (("length=64,64",), "names 64 twice"),
    ):
        printed = workshop.command("eval", str(run), *words, code=2)
        assert message in printed
        assert printed.count("\n") <= 4
