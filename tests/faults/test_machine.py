"""A machine that fails a run: a disk full or read-only, a wrong clock, no memory, gradients that
are no numbers.
"""

import contextlib
import re
import subprocess
from pathlib import Path

import pytest

from rtx.runs.status import run_state
from tests.helpers.disturbances import NAN_GRADIENT, WRONG_CLOCK, more_memory, small_disk
from tests.helpers.small_runs import SMALL_RUN, Workshop, after, difference, status_of

LONG = "trainer.steps=14"


@pytest.fixture(scope="module")
def undisturbed(workshop: Workshop) -> Path:
    return workshop.train("undisturbed", LONG)


def test_a_disk_that_fills_up_under_a_run_and_is_read_only_then(
    workshop: Workshop, undisturbed: Path
) -> None:
    with small_disk(workshop.folder / "small", 1 << 20) as disk:
        new = disk / "new"
        ballast = disk / "ballast"
        process = workshop.fork(disk / "run", "train", workshop.text, *SMALL_RUN, LONG)
        process.until(after(6))
        with contextlib.suppress(OSError):
            ballast.write_bytes(bytes(1 << 20))  # of which the disk takes what it has room for
        assert process.wait() == 1
        with (
            contextlib.suppress(OSError),
            ballast.open("ab") as file,
        ):  # the room of what it was writing, too
            file.write(bytes(1 << 20))
        said = process.log.read_text()
        assert "Traceback" not in said and said.splitlines()[-1].startswith("rtx: "), said
        assert "No space left on device" in said.splitlines()[-1]
        assert run_state(process.run) == "failed"
        said = workshop.command("train", workshop.text, *SMALL_RUN, run=new, code=2)
        assert said.startswith(
            f"rtx: cannot write to {new}: No space left on device; set RTX_RUN to a folder"
        )
        assert workshop.fork(process.run, "resume", str(process.run)).wait() in (1, 2)
        said = process.log.read_text()
        assert "Traceback" not in said and "No space left on device" in said.splitlines()[-1], said
        ballast.unlink()
        subprocess.run(["mount", str(disk), "-o", "remount,ro"], check=True)
        said = workshop.command("train", workshop.text, *SMALL_RUN, run=new, code=2)
        assert said.startswith(f"rtx: cannot write to {new}: Read-only file system"), said
        for word, code, where in (
            ("resume", 2, "to {}"),
            ("eval", 1, r"{}/\S+"),
            ("sample", 1, r"{}/\S+"),
        ):
            said = workshop.command(word, str(process.run), code=code)
            assert re.search(
                f"rtx: cannot write {where.format(process.run)}: Read-only file system", said
            ), said
        subprocess.run(["mount", str(disk), "-o", "remount,rw"], check=True)
        workshop.command("resume", str(process.run))
        assert difference(process.run, undisturbed) == ""


def test_a_clock_that_jumps_changes_no_bit(workshop: Workshop, undisturbed: Path) -> None:
    process = workshop.start("jumping", LONG, "trainer.max_minutes=60", inside=WRONG_CLOCK)
    process.kill_when(after(6))
    assert run_state(process.run) == "killed"
    resumed = workshop.fork(process.run, "resume", str(process.run), inside=WRONG_CLOCK)
    assert resumed.wait() == 0, process.log.read_text()
    assert difference(process.run, undisturbed, ignoring=("trainer",)) == ""


def test_a_gradient_that_is_no_number(workshop: Workshop, undisturbed: Path) -> None:
    process = workshop.start("poisoned", LONG, inside=NAN_GRADIENT)
    assert process.wait() == 1
    last = process.run / "checkpoints" / "last.ckpt"
    line = process.log.read_text().splitlines()[-1]
    said = (
        r"rtx: step 11: the norm of the gradient is nan at learning rate \S+; the last good "
        r"checkpoint is "
    )
    assert re.fullmatch(said + re.escape(f"{last} (step 9)"), line), line
    assert status_of(process.run).state == "failed"
    workshop.command("resume", str(process.run))
    assert difference(process.run, undisturbed) == ""


LARGE = (
    "trainer.batch_size=2048",
    "trainer.micro_batch_size=2048",
    "model.recompute=false",
    "trainer.steps=2",
)


@pytest.mark.parametrize(
    ("megabytes", "words"),  # with 30 torch loads other kernels, whose rounding differs
    [
        (64, (*LARGE, "trainer.checkpoint_every=1")),
        *((some, (LONG, "model.recompute=false")) for some in (1, 48)),
    ],
)
def test_memory_that_runs_out_anywhere(
    workshop: Workshop, undisturbed: Path, megabytes: int, words: tuple[str, ...]
) -> None:
    process = workshop.start(f"squeezed{megabytes}", *words, inside=more_memory(megabytes << 20))
    code = process.wait()
    said = process.log.read_text()
    assert code in (0, 1) and "Traceback" not in said, said
    if code:
        assert "rtx: out of memory" in said and run_state(process.run) in ("failed", "unknown"), (
            said
        )
        begun = (process.run / "config.yaml").exists()
        again = (
            ("resume", str(process.run)) if begun else ("train", workshop.text, *SMALL_RUN, *words)
        )
        workshop.command(*again, run="" if begun else process.run)
    if megabytes == 64:
        reason, advice = said.splitlines()[-2:]
        assert (
            code and reason.startswith("rtx: out of memory: ") and "can't allocate memory" in reason
        )
        assert advice.startswith(
            "rtx: a smaller trainer.micro_batch_size, or model.recompute=true, needs less"
        )
    assert (
        difference(process.run, workshop.train("fed", *words) if megabytes == 64 else undisturbed)
        == ""
    )
