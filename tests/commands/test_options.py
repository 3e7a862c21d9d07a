"""Every option of hardware, data and experiment that a CPU can run takes steps through the command."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import SIZES, Workshop, counted_rows

from rtx.compose import load_run_config
from rtx.data import text
from rtx.keys import options
from rtx.options import LAUNCHED
from rtx.training.run_folder import read_status

SMALL = tuple(size for size in SIZES if not size.startswith(("trainer.", "data=")))
STEP = ("trainer.steps=1", "trainer.batch_size=2", "trainer.val_windows=1")
NEEDS_A_DOWNLOAD = {"enwik8", "wikitext103", "pg19", "cifar10", "imagenet64", "images"}
DATA = {
    "text": ["data.path=book.txt"],
    "hub": ["data.path=texts"],
    "recall": ["data.pairs=2", "data.sequences=4"],
    **{task: ["data.pairs=2", "data.sequences=4", "data.distance=4"] for task in ("mqar", "copy", "induction")},
}


def is_done(run: Path, steps: int) -> bool:
    """Whether a run has taken its steps and has a final score."""
    status = read_status(run) or {}
    return (status["state"], status["step"]) == ("done", steps) and status["final"]["units"] > 0


@pytest.mark.parametrize("hardware", sorted({*options("hardware")} - {"gpu", *LAUNCHED}))
def test_hardware(workshop: Workshop, hardware: str) -> None:
    process = workshop.start(hardware, *STEP, f"hardware={hardware}", "hardware.devices=1", "hardware.threads=1")
    assert process.wait() == 0, process.log.read_text()
    assert is_done(process.run, 1)
    assert load_run_config(process.run).hardware.name == hardware


@pytest.mark.parametrize("data", sorted({*options("data")} - NEEDS_A_DOWNLOAD))
def test_data(workshop: Workshop, data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop.folder)
    few = text.library_files()[:2]
    monkeypatch.setattr(text, "library_files", lambda: few)
    (workshop.folder / "texts").mkdir(exist_ok=True)
    (workshop.folder / "texts" / "train.txt").write_text("".join(f"line {number}\n" for number in range(2_000)))
    run = workshop.folder / f"data-{data}"
    workshop.command("train", f"data={data}", *DATA.get(data, ()), *SMALL, *STEP, run=run)
    assert is_done(run, 1)
    assert load_run_config(run).data.name == data


def test_the_smoke_experiment(workshop: Workshop) -> None:
    run = workshop.folder / "smoke"
    workshop.command("train", "experiment=smoke", "data=text", workshop.text, *SMALL, run=run)
    assert is_done(run, 20)
    kinds = [(row["kind"], row["step"]) for row in counted_rows(run)]
    assert [step for kind, step in kinds if kind == "train"] == list(range(1, 21))
    assert next(step for kind, step in kinds if kind == "valid") == 10
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt", "previous.ckpt"}
