"""`rtx train`, `resume`, `eval`, `plan` and `sample` on data=recall, and `ablate=` behind `rtx eval`."""

from __future__ import annotations

import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
from small_runs import SIZES, Workshop, counted_rows, difference, steps_logged

RECALL = (
    *(size for size in SIZES if not size.startswith("data")),
    *("data=recall", "data.length=32", "data.pairs=3", "data.keys=5", "data.values=4", "data.sequences=9"),
)
ANSWERS = 9 * 3


@pytest.fixture(scope="module")
def recall_run(workshop: Workshop) -> Path:
    run = workshop.folder / "recall"
    printed = workshop.command("train", *RECALL, "routing=topk", run=run)
    assert "recall, 12 steps of 4 x 32" in printed
    assert "(15 units), accuracy " in printed  # trainer.val_windows=5
    assert "of the answers right (chance 25.00%)" in printed
    assert f"bits/answer on valid, {ANSWERS} answers each scored once" in " ".join(printed.split())
    assert "a sample" not in printed and "rtx sample" not in printed
    return run


def test_accuracy_is_logged_with_every_row(recall_run: Path) -> None:
    rows = counted_rows(recall_run)
    for row in rows:
        share = row["accuracy" if row["kind"] == "train" else "val_accuracy"]
        count = {"train": 2 * 4 * 3, "valid": 5 * 3, "final": ANSWERS}[row["kind"]]
        assert share * count == pytest.approx(round(share * count), abs=1e-4)
    assert [row["val_units"] for row in rows if row["kind"] == "valid"] == [15, 15, 15]
    status = json.loads((recall_run / "status.json").read_text())
    assert status["final"]["unit"] == "answer" and 0 <= status["final"]["accuracy"] <= 1


def test_a_killed_run_resumes_to_the_same_bits(workshop: Workshop, recall_run: Path) -> None:
    process = workshop.fork(workshop.folder / "killed", "train", *RECALL, "routing=topk")
    assert process.kill_when(lambda run: steps_logged(run) >= 6) == -signal.SIGKILL, process.log.read_text()
    workshop.command("resume", str(process.run), "hardware.workers=2")
    assert difference(process.run, recall_run) == ""
    assert "data.pairs: 3 -> 2 is refused" in workshop.command("resume", str(recall_run), "data.pairs=2", code=2)


def score(workshop: Workshop, run: Path, *overrides: str) -> dict[str, Any]:
    """Score a run and return the JSON that it adds."""
    before = set(run.glob("eval/*.json"))
    printed = workshop.command("eval", str(run), *overrides)
    (path,) = set(run.glob("eval/*.json")) - before
    result = json.loads(path.read_text())
    assert result["protocol"] in printed
    return result | {"printed": printed}


def test_every_answer_is_scored_once(workshop: Workshop, recall_run: Path) -> None:
    final = json.loads((recall_run / "status.json").read_text())["final"]
    for mode in ("parallel", "streaming"):
        result = score(workshop, recall_run, f"mode={mode}", "checkpoint=last")
        assert result["units"] == result["split_units"] == ANSWERS
        assert result["windows"] == 9 and not result["partial"]
        assert result["accuracy"] * ANSWERS == pytest.approx(round(result["accuracy"] * ANSWERS))
        assert result["chance"] == 0.25
        assert result["bits_per_answer"] == pytest.approx(result["nats"] / ANSWERS / math.log(2))
        assert f"all {ANSWERS} of the split's {ANSWERS} answers scored" in result["printed"]
        if mode == "parallel":
            assert result["bits_per_answer"] == pytest.approx(final["bits"])
            assert result["accuracy"] == final["accuracy"]
    assert score(workshop, recall_run, "limit=2")["units"] == 6
    assert score(workshop, recall_run, "split=test")["units"] == ANSWERS


@pytest.mark.parametrize("mode", ["parallel", "streaming"])
def test_an_ablation_is_named_and_kept_beside_the_plain_score(workshop: Workshop, recall_run: Path, mode: str) -> None:
    kept = f"mode={mode}", "limit=7"
    plain = score(workshop, recall_run, *kept)
    results = {}
    for how, said in (
        ("routing", "outputs of the routing heads set to zero"),
        ("local", "routing heads read the last W positions"),
        ("random", "routing heads read random members"),
    ):
        result = results[how] = score(workshop, recall_run, *kept, f"ablate={how}")
        assert result["ablate"] == how
        assert result["protocol"].endswith(f"; ablated ({said}; trained with selection=topk): sees no future")
        assert not result["selection_sees_future"]
    assert plain["ablate"] == "none" and "ablated" not in plain["protocol"]
    assert plain["selection_sees_future"] == (mode == "parallel")
    assert len({result["bits_per_answer"] for result in (plain, *results.values())}) > 1


def test_an_ablation_of_nothing_is_refused(workshop: Workshop) -> None:
    run = workshop.folder / "local"
    workshop.command("train", *RECALL, "routing.heads=0", "trainer.steps=1", run=run)
    printed = workshop.command("eval", str(run), "ablate=routing", code=2)
    assert "ablate=routing: the model has no routing heads" in printed


def test_what_recall_does_not_have_is_refused_in_a_line(workshop: Workshop, recall_run: Path) -> None:
    for arguments, said in (
        (("sample", str(recall_run)), "a run on data=recall has no text to write"),
        (("eval", str(recall_run), "split=train"), "data=recall has no train split"),
        (("eval", str(recall_run), "stride=5"), "trainer.val_stride=5 has no place in data=recall"),
    ):
        printed = workshop.command(*arguments, code=2)
        assert said in printed and printed.count("\n") <= 2


def test_plan_and_data_know_recall(workshop: Workshop) -> None:
    printed = workshop.command("plan", *RECALL)
    assert "N = 32 units of recall" in printed
    task = [word for word in RECALL if word.startswith("data")]
    assert "made on the fly; 27 answers in valid, 27 answers in test" in workshop.command("data", "prepare", *task)
    assert "nothing on disk" in workshop.command("data", "verify", *task, code=2)


@pytest.mark.parametrize("task", ["mqar", "copy", "induction"])
def test_answers_at_any_place_are_scored_once_and_told_by_distance_and_pairs(workshop: Workshop, task: str) -> None:
    run = workshop.folder / task
    words = [word for word in RECALL if word not in ("data=recall", "data.length=32")]
    words += [f"data={task}", "data.length=64", "data.distance=20", "data.pairs=4", "data.gaps=power"]
    words = [word for word in words if task != "induction" or "gaps" not in word]
    printed = workshop.command("train", *words, run=run)
    assert "accuracy by pairs: 1: " in printed and "accuracy by distance: 16+: " in printed
    final = json.loads((run / "status.json").read_text())["final"]
    for table in (final["accuracy_by_distance"], final["accuracy_by_pairs"]):
        assert sum(count for _, count in table.values()) == final["units"]
        right = sum(share * count for share, count in table.values())
        assert right == pytest.approx(final["accuracy"] * final["units"])
    assert {*final["accuracy_by_pairs"]} == {"1", "2", "4"} and {*final["accuracy_by_distance"]} <= {"16", "32"}
    result = score(workshop, run, "mode=streaming", "checkpoint=last")
    assert result["units"] == result["split_units"] == final["units"]
    assert result["accuracy_by_pairs"] == final["accuracy_by_pairs"]
    assert f"{final['units']} answers in valid" in workshop.command("data", "info", *[w for w in words if "data" in w])
    audited = workshop.command("audit", str(run), "sequences=1", "prefixes=4", "windows=3", "positions=5")
    assert "1 position in each of 3 windows" in audited
    report = workshop.command("report", str(run))
    assert "accuracy" in report and "baseline: chance" in report


def test_steps_are_the_same_in_parts(workshop: Workshop) -> None:
    task = ("data=mqar", "data.distance=4", "model.dropout=0", "model.attention_dropout=0", "model.ffn_dropout=0")
    words = [*(word for word in RECALL if word != "data=recall"), *task, "routing.heads=0", "trainer.steps=4"]
    runs = {size: workshop.folder / f"parts{size}" for size in (1, 4)}
    for size, run in runs.items():
        workshop.command("train", *words, f"trainer.micro_batch_size={size}", run=run)
    one, other = (json.loads((run / "status.json").read_text())["final"] for run in runs.values())
    assert one["bits"] == pytest.approx(other["bits"], rel=1e-5)
