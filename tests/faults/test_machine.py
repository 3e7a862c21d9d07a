"""A machine that fails a run: a disk full or read-only, a wrong clock, no memory, gradients that are no numbers."""

import re
import subprocess
from pathlib import Path

import pytest
from disturbances import WRONG_CLOCK, fill, more_memory, nan_gradient, small_disk
from small_runs import SIZES, Workshop, after, difference

from rtx.compose import load_run_config
from rtx.training.run_folder import read_status, run_state

LONG = "trainer.steps=40"


@pytest.fixture(scope="module")
def undisturbed(workshop: Workshop) -> Path:
    return workshop.train("undisturbed", LONG)


def test_a_disk_that_fills_up_under_a_run(workshop: Workshop, undisturbed: Path) -> None:
    with small_disk(workshop.folder / "small", 1 << 20) as disk:
        process = workshop.fork(disk / "run", "train", workshop.text, *SIZES, LONG)
        process.until(after(6))
        ballast = fill(disk)
        assert process.wait() == 1
        said = process.log.read_text()
        assert "Traceback" not in said and said.splitlines()[-1].startswith("rtx: "), said
        assert "No space left on device" in said.splitlines()[-1]
        assert run_state(process.run) == "failed"
        said = workshop.command("train", workshop.text, *SIZES, run=disk / "new", code=2)
        assert said.startswith(f"rtx: cannot write to {disk / 'new'}: No space left on device; set RTX_RUN to a folder")
        resumed = workshop.fork(process.run, "resume", str(process.run))
        assert resumed.wait() in (1, 2)
        said = process.log.read_text()
        assert "Traceback" not in said and "No space left on device" in said.splitlines()[-1], said
        ballast.unlink()
        workshop.command("resume", str(process.run))
        assert difference(process.run, undisturbed) == ""


def test_a_disk_that_is_read_only(workshop: Workshop, undisturbed: Path) -> None:
    with small_disk(workshop.folder / "locked", 4 << 20) as disk:
        process = workshop.fork(disk / "run", "train", workshop.text, *SIZES, LONG)
        process.kill_when(after(10))
        run, remount = process.run, ["mount", str(disk), "-o"]
        subprocess.run([*remount, "remount,ro"], check=True)
        try:
            said = workshop.command("resume", str(run), code=2)
            assert said.startswith(f"rtx: cannot write to {run}: Read-only file system"), said
            said = workshop.command("train", workshop.text, *SIZES, run=disk / "new", code=2)
            assert said.startswith(f"rtx: cannot write to {disk / 'new'}: Read-only file system"), said
            for word in ("eval", "sample"):
                said = workshop.command(word, str(run), code=1)
                assert re.search(rf"rtx: cannot write {run}/\S+: Read-only file system", said), said
        finally:
            subprocess.run([*remount, "remount,rw"], check=True)
        workshop.command("resume", str(run))
        assert difference(run, undisturbed) == ""


def test_a_clock_that_jumps_changes_no_bit(workshop: Workshop, undisturbed: Path) -> None:
    process = workshop.start("jumping", LONG, "trainer.max_minutes=60", inside=WRONG_CLOCK)
    process.kill_when(after(20))
    assert run_state(process.run) == "killed"
    resumed = workshop.fork(process.run, "resume", str(process.run), inside=WRONG_CLOCK)
    assert resumed.wait() == 0, process.log.read_text()
    assert difference(process.run, undisturbed, ignoring=("trainer",)) == ""


def test_a_gradient_that_is_no_number(workshop: Workshop, undisturbed: Path) -> None:
    process = workshop.start("poisoned", LONG, inside=nan_gradient(23))
    assert process.wait() == 1
    last = process.run / "checkpoints" / "last.ckpt"
    line = process.log.read_text().splitlines()[-1]
    said = r"rtx: step 23: the norm of the gradient is nan at learning rate \S+; the last good checkpoint is "
    assert re.fullmatch(said + re.escape(f"{last} (step 21)"), line), line
    assert (read_status(process.run) or {})["state"] == "failed"
    workshop.command("resume", str(process.run))
    assert difference(process.run, undisturbed) == ""


def test_a_run_without_enough_memory(workshop: Workshop) -> None:
    large = ("trainer.batch_size=2048", "trainer.micro_batch_size=2048", "model.recompute=false")
    large += ("trainer.steps=2", "trainer.checkpoint_every=1")
    process = workshop.start("starved", *large, inside=more_memory(64 << 20))
    assert process.wait() == 1
    reason, advice = process.log.read_text().splitlines()[-2:]
    assert reason.startswith("rtx: out of memory: ") and "can't allocate memory" in reason
    assert advice.startswith("rtx: a smaller trainer.micro_batch_size, or model.recompute=true, needs less")
    status = read_status(process.run) or {}
    assert status["state"] == "failed" and status["reason"].startswith("out of memory")
    workshop.command("resume", str(process.run))
    assert difference(process.run, workshop.train("fed", *large)) == ""


@pytest.mark.parametrize("megabytes", [1, 48])  # with 30 torch loads other kernels, whose rounding differs
def test_memory_that_runs_out_anywhere(workshop: Workshop, undisturbed: Path, megabytes: int) -> None:
    chosen = load_run_config(undisturbed)  # given by hand, or less memory would be taken instead of an end
    keys = {"trainer.micro_batch_size": chosen.trainer.micro_batch_size, "model.recompute": chosen.model.recompute}
    long = (LONG, *(f"{key}={value}".lower() for key, value in keys.items()))
    process = workshop.start(f"squeezed{megabytes}", *long, inside=more_memory(megabytes << 20))
    code = process.wait()
    said = process.log.read_text()
    assert code in (0, 1) and "Traceback" not in said, said
    if code:
        assert "rtx: out of memory" in said, said
        begun = (process.run / "config.yaml").exists()
        words = ("resume", str(process.run)) if begun else ("train", workshop.text, *SIZES, *long)
        workshop.command(*words, run="" if begun else process.run)
    assert difference(process.run, undisturbed) == ""
