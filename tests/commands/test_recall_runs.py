"""`rtx train`, `resume`, `eval`, `plan` and `sample` on data=recall, and `ablate=` behind `rtx
eval`.
"""

import math
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.small_runs import (
    SMALL_RUN,
    Workshop,
    after,
    counted_rows,
    difference,
    draw_nothing,
    final,
)

RECALL = (
    *(size for size in SMALL_RUN if not size.startswith("data")),
    *(
        "data=recall",
        "data.length=32",
        "data.pairs=3",
        "data.keys=5",
        "data.values=4",
        "data.sequences=9",
    ),
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


ACCURACY = {
    "train": "train/accuracy",
    "valid": "valid/accuracy",
    "final": "valid/final_accuracy",
}
"""By the kind of a row."""


def is_whole(count: float) -> bool:
    """Whether a number of right answers, computed from their share, is whole."""
    return count == pytest.approx(round(count), abs=1e-4)


def test_accuracy_is_logged_with_every_row(recall_run: Path) -> None:
    rows = counted_rows(recall_run)
    counts = {"train": 2 * 4 * 3, "valid": 5 * 3, "final": ANSWERS}
    for row in rows:
        kind = row["kind"]
        assert is_whole(row[ACCURACY[kind]] * counts[kind])
    assert [row["valid/units"] for row in rows if row["kind"] == "valid"] == [15, 15, 15]
    closing = final(recall_run)
    assert closing["unit"] == "answer"
    assert 0 <= closing["accuracy"] <= 1


@pytest.mark.parametrize("mode", ["parallel", "streaming"])
def test_every_answer_is_scored_once(workshop: Workshop, recall_run: Path, mode: str) -> None:
    result, printed = workshop.score(recall_run, f"mode={mode}", "checkpoint=last")
    assert result["units"] == result["split_units"] == ANSWERS
    assert (result["windows"], result["chance"]) == (9, 0.25)
    assert not result["partial"]
    assert is_whole(result["accuracy"] * ANSWERS)
    assert result["bits"] == pytest.approx(result["nats"] / ANSWERS / math.log(2))
    assert f"all {ANSWERS} of the split's {ANSWERS} answers scored" in printed
    if mode == "parallel":
        assert result["bits"] == pytest.approx(final(recall_run)["bits"])
        assert result["accuracy"] == final(recall_run)["accuracy"]


def test_a_sample_and_another_split_have_their_own_answers(
    workshop: Workshop, recall_run: Path
) -> None:
    for words, units in (("limit=2", 6), ("split=test", ANSWERS)):
        assert workshop.score(recall_run, words)[0]["units"] == units


def test_a_killed_run_resumes_to_the_same_bits(workshop: Workshop, recall_run: Path) -> None:
    process = workshop.fork(workshop.folder / "killed", "train", *RECALL, "routing=topk")
    assert process.kill_when(after(6)) == -signal.SIGKILL, process.log.read_text()
    workshop.command("resume", str(process.run), "hardware.workers=2")
    assert difference(process.run, recall_run) == ""


@pytest.mark.parametrize("mode", ["parallel", "streaming"])
def test_an_ablation_is_named_and_kept_beside_the_plain_score(
    workshop: Workshop, recall_run: Path, mode: str
) -> None:
    kept = (f"mode={mode}", "limit=7")
    scores: set[float] = set()
    for how, said in (
        ("routing", "outputs of the routing heads set to zero"),
        ("local", "routing heads read the last W positions"),
        ("random", "routing heads read random members"),
    ):
        result, _ = workshop.score(recall_run, *kept, f"ablate={how}")
        assert result["ablate"] == how and not result["sees_future"]
        assert result["protocol"].endswith(
            f"; ablated ({said}; trained with selection=topk): sees no future"
        )
        scores.add(result["bits"])
    plain, _ = workshop.score(recall_run, *kept)
    assert plain["ablate"] == "none" and "ablated" not in plain["protocol"]
    assert plain["sees_future"] == (mode == "parallel")
    assert len(scores | {plain["bits"]}) > 1


def test_what_recall_does_not_have_is_refused_in_a_line(
    workshop: Workshop, recall_run: Path
) -> None:
    task = [word for word in RECALL if word.startswith("data")]
    for arguments, said in (
        (("analyze", "context", str(recall_run)), "there is no loss by position"),
        (("sample", str(recall_run)), "a run on data=recall has no text to write"),
        (("eval", str(recall_run), "split=train"), "data=recall has no train split"),
        (("eval", str(recall_run), "stride=5"), "trainer.val_stride=5 has no place in data=recall"),
        (("data", "verify", *task), "nothing on disk"),
    ):
        printed = workshop.command(*arguments, code=2)
        assert said in printed and printed.count("\n") <= 2
    assert "N = 32 units of recall" in workshop.command("plan", *RECALL)
    assert "made on the fly; 27 answers in valid, 27 answers in test" in workshop.command(
        "data", "prepare", *task
    )


def words_of(task: str) -> list[str]:
    """Return the overrides of a small run on a task whose answers may be at any place."""
    words = [word for word in RECALL if word not in ("data=recall", "data.length=32")]
    words += [f"data={task}", "data.length=64", "data.distance=20", "data.pairs=4"]
    words.append("trainer.steps=2")
    if task != "induction":
        words.append("data.gaps=power")
    return words


def check_accuracies(score: dict[str, Any]) -> None:
    """Check that accuracies by distance and by pairs count each answer once."""
    assert {*score["accuracy_by_pairs"]} == {"1", "2", "4"}
    assert {*score["accuracy_by_distance"]} <= {"16", "32"}
    for table in (score["accuracy_by_distance"], score["accuracy_by_pairs"]):
        assert sum(count for _, count in table.values()) == score["units"]
        right = sum(share * count for share, count in table.values())
        assert right == pytest.approx(score["accuracy"] * score["units"])


@pytest.mark.parametrize("task", ["mqar", "copy", "induction"])
def test_answers_at_any_place_are_scored_once_and_counted_by_distance_and_pairs(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    draw_nothing(monkeypatch)
    run = workshop.folder / task
    words = words_of(task)
    printed = workshop.command("train", *words, run=run)
    assert "accuracy by pairs: 1: " in printed
    assert "accuracy by distance: 16+: " in printed
    closing = final(run)
    check_accuracies(closing)
    result, _ = workshop.score(run, "mode=streaming", "checkpoint=last")
    assert result["units"] == result["split_units"] == closing["units"]
    assert result["accuracy_by_pairs"] == closing["accuracy_by_pairs"]
    of_data = [word for word in words if "data" in word]
    info = workshop.command("data", "info", *of_data)
    assert f"{closing['units']} answers in valid" in info
    small = ("sequences=1", "prefixes=4", "windows=3", "positions=5")
    assert "1 position in each of 3 windows" in workshop.command("audit", str(run), *small)
    report = workshop.command("report", str(run))
    assert "accuracy" in report
    assert "baseline: chance" in report


def test_steps_are_the_same_in_parts(workshop: Workshop) -> None:
    task = (
        "data=mqar",
        "data.distance=4",
        "model.dropout=0",
        "model.attention_dropout=0",
        "model.ffn_dropout=0",
    )
    words = [word for word in RECALL if word != "data=recall"]
    words += [*task, "routing.heads=0", "trainer.steps=4"]
    bits: list[float] = []
    for size in (1, 4):
        run = workshop.folder / f"parts{size}"
        workshop.command("train", *words, f"trainer.micro_batch_size={size}", run=run)
        bits.append(final(run)["bits"])
    assert bits[0] == pytest.approx(bits[1], rel=1e-5)
