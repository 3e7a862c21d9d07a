"""Faults that tests cause from outside a run: damaged files, full disks, wrong clocks."""

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rtx.errors import RunFailed
from rtx.runs.checksum import is_whole
from rtx.training.checkpoint import newest_checkpoint
from tests.helpers.small_runs import Workshop


def newest_step(run: Path) -> int:
    """Return the step of a run's newest whole checkpoint; 0: there is none."""
    with contextlib.suppress(RunFailed):
        found = newest_checkpoint(run / "checkpoints", set_aside=False, report=lambda line: None)
        return found["step"] if found else 0
    return 0


def damaged_bytes(run: Path) -> int:
    return sum(
        path.stat().st_size for path in (run / "checkpoints").glob("*.ckpt") if not is_whole(path)
    )


def damage(path: Path, keep: int | None = None, flip: int | None = None) -> None:
    """Cut a file off, or flip one of its bits."""
    content = bytearray(path.read_bytes())[:keep]
    if flip is not None:
        content[flip // 8] ^= 1 << flip % 8
    path.write_bytes(content)


@contextlib.contextmanager
def deadline(seconds: float = 300.0) -> Iterator[None]:
    """Fail where what is done inside never ends."""

    def late(*_: object) -> None:
        raise AssertionError(f"not done after {seconds} s")

    former = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def asked(workshop: Workshop, *words: str, run: Path | str = "") -> tuple[int, str]:
    """Run a command in this process on hostile files; return its exit code and all its output.

    It must end with a documented exit code, without a traceback and without terminal escapes.
    """
    with deadline():
        code, out, err = workshop.called(*words, run=run)
    said = out + err
    assert code in (0, 1, 2) and "Traceback" not in said and "\x1b" not in said, said
    return code, said


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[Path]:
    """Mount a disk of `size` bytes at `folder`; the test is skipped where that is not allowed."""
    folder.mkdir()
    asked = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(asked, capture_output=True).returncode:
        pytest.skip("a small disk may not be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


WRONG_CLOCK = """
import datetime, itertools, time
jumps = itertools.cycle([0, 400 * 86_400, -3_600, 86_400, -30 * 365 * 86_400])
class Jumping(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=next(jumps))
real_time = time.time
time.time = lambda: real_time() + next(jumps)
datetime.datetime = Jumping
"""
"""Every call of `time.time` and `datetime.now` returns another year."""


NAN_GRADIENT = """
from rtx.training.module import TrainingModule
real_pass = TrainingModule.backward_pass
def poisoned(self, loss, is_last):
    real_pass(self, loss, is_last)
    if self.global_step == 10 and is_last:
        next(p.grad for p in self.parameters() if p.grad is not None).view(-1)[0] = float("nan")
TrainingModule.backward_pass = poisoned
"""
"""A gradient of step 11 is NaN before it is clipped."""


def more_memory(size: int) -> str:
    """Let the process take no more than so many bytes beside those that it has."""
    return f"""
import resource
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + {size},) * 2)
"""
