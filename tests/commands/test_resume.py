"""`rtx resume`: whatever stopped a run, it goes on to the very bits of the run that was never
stopped.
"""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from rtx import __version__
from rtx.runs.checksum import is_whole
from rtx.runs.status import read_status
from rtx.settings.run_config import load_run_config
from tests.helpers.small_runs import (
    SMALL_RUN,
    Workshop,
    after,
    checkpoint_difference,
    children,
    counted_rows,
    difference,
    read_metrics,
    status_of,
)


@pytest.fixture(scope="module")
def undisturbed(workshop: Workshop) -> Path:
    return workshop.train("undisturbed")


@pytest.fixture(scope="module")
def steady(workshop: Workshop) -> Path:
    """A run that can be lengthened: its rates do not depend on the number of steps."""
    return workshop.train("steady", "optimizer.schedule=constant")


@pytest.fixture(scope="module")
def shorter(workshop: Workshop) -> Path:
    """A run of the first steps of `steady`."""
    return workshop.train("shorter", "optimizer.schedule=constant", "trainer.steps=8")


@pytest.mark.parametrize(
    ("number", "code", "state"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGHUP, 143, "preempted")],
)
def test_a_signal_saves_and_leaves_with_its_code(
    workshop: Workshop, undisturbed: Path, number: int, code: int, state: str
) -> None:
    process = workshop.start(
        f"signal{number}", "trainer.checkpoint_every=1000000", "hardware.workers=1"
    )
    assert process.kill_when(after(2), number) == code
    status = status_of(process.run)
    assert status.state == state
    printed = process.log.read_text()
    assert (
        f"stopped by {signal.Signals(number).name} at step" in printed
        and f"rtx resume {process.run}" in printed
    )
    before = (process.run / "config.yaml").read_text()
    for steps in (1, status.step):
        said = workshop.command("resume", str(process.run), f"trainer.steps={steps}", code=2)
        refused = (
            f"trainer.steps={steps}: the newest checkpoint is of step {status.step}; give more "
            "than that"
        )
        assert said == f"rtx: {refused}\n"
    assert (read_status(process.run), (process.run / "config.yaml").read_text()) == (status, before)
    workshop.command("resume", str(process.run), "hardware.workers=0", "trainer.checkpoint_every=3")
    assert difference(process.run, undisturbed) == ""


@pytest.mark.parametrize(("step", "saved"), [(1, 0), (5, 3)])
def test_a_second_interrupt_leaves_at_once(
    workshop: Workshop, undisturbed: Path, step: int, saved: int
) -> None:
    process = workshop.start(f"twice{step}", inside=endless_step(step))
    process.until(lambda run: (run / "endless").exists())
    assert process.wait(send=signal.SIGINT) == 130
    last = process.run / "checkpoints" / "last.ckpt"
    good = (
        f"the last good checkpoint is {last} (step {saved})"
        if saved
        else "no checkpoint had been written yet"
    )
    printed = process.log.read_text()
    assert f"stopped at once; {good}\n" in printed
    assert (f"continue with: rtx resume {process.run}\n" in printed) == bool(saved)
    status = status_of(process.run)
    assert (status.state, status.reason) == ("interrupted", f"stopped at once; {good}")
    assert is_whole(last) if saved else not list(last.parent.iterdir())
    begins = f"from step {saved}\n" if saved else "from the beginning: it has no checkpoint\n"
    environment = (
        process.run / "environment.json"
    ).read_text()  # of the first of the steps that count
    assert f"(interrupted) {begins}" in workshop.command("resume", str(process.run))
    assert difference(process.run, undisturbed) == ""
    assert ((process.run / "environment.json").read_text() == environment) == bool(saved)


def endless_step(step: int) -> str:
    """Return the code for `inside` of a step that does not end; a file shows that it has begun."""
    return f"""
import os, pathlib, time
from rtx.training.module import TrainingModule
real_step = TrainingModule.take_step
def slow(self, micro_batches, optimizer, step):
    if step == {step}:
        pathlib.Path(os.environ["RTX_RUN"], "endless").touch()
        # Python would sleep over a signal that comes just before a long sleep.
        while True:
            time.sleep(0.01)
    return real_step(self, micro_batches, optimizer, step)
TrainingModule.take_step = slow
"""


@pytest.mark.parametrize(
    "place", ["rtx.training.loggers.JsonlLogger.close", "rtx.commands.train.closing_lines"]
)
def test_an_interrupt_after_the_end_does_not_unmake_it(workshop: Workshop, place: str) -> None:
    interrupt = "lambda *_, **__: signal.raise_signal(signal.SIGINT)"
    owner, _, name = place.rpartition(".")
    inside = (
        f"import rtx.commands.train, rtx.training.loggers, signal; {owner}.{name} = {interrupt}"
    )
    process = workshop.start(f"late-{name}", "trainer.steps=2", inside=inside)
    assert process.wait() == 0, process.log.read_text()
    printed = process.log.read_text()
    assert "stopped by SIGINT" in printed and "continue with" not in printed
    assert status_of(process.run).state == "done"


def test_a_loader_process_that_is_killed_is_told_in_a_line(
    workshop: Workshop, undisturbed: Path
) -> None:
    process = workshop.start("loaderless", "hardware.workers=1", inside=endless_step(5))
    process.until(lambda run: (run / "endless").exists())
    for child in children(process.number):
        os.kill(child, signal.SIGKILL)
    assert process.wait() == 1
    line = process.log.read_text().splitlines()[-1]
    assert (
        line.startswith("rtx: a loader process is gone: DataLoader worker") and "(step 3)" in line
    )
    workshop.command("resume", str(process.run))
    assert difference(process.run, undisturbed) == ""


def test_a_full_screen_ends_no_resumed_run(
    workshop: Workshop, undisturbed: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    checkpoints = run / "checkpoints"
    # The run goes back to the checkpoint before the last one.
    (checkpoints / "previous.ckpt").replace(checkpoints / "last.ckpt")
    (run / "status.json").unlink()
    inside = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)"
    process = workshop.fork(run, "resume", str(run), inside=inside)
    process.wait()
    assert status_of(run).state == "done", process.log.read_text()
    assert difference(run, undisturbed) == ""


def test_a_screen_that_nobody_reads_ends_no_run(workshop: Workshop, undisturbed: Path) -> None:
    inside = "import os; read, write = os.pipe(); os.close(read); os.dup2(write, 1)"
    process = workshop.start("unread", inside=inside)
    process.wait()
    assert status_of(process.run).state == "done", process.log.read_text()
    assert difference(process.run, undisturbed) == ""


def test_a_full_disk_in_mid_checkpoint(
    workshop: Workshop, steady: Path, shorter: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(shorter, tmp_path / "run"))
    last = run / "checkpoints" / "last.ckpt"
    most = (run / "checkpoints" / "best.ckpt").stat().st_size + 1000
    quota = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({most},) * 2)"
    process = workshop.fork(run, "resume", str(run), "trainer.steps=12", inside=quota)
    assert process.wait() == 1
    printed = process.log.read_text().splitlines()
    assert (
        printed[-1]
        == f"rtx: cannot write {last}: File too large; the last good checkpoint is {last} (step 8)"
    )
    assert status_of(run).state == "failed"
    assert not list((run / "checkpoints").glob(".*"))
    workshop.command("resume", str(run))
    assert (
        checkpoint_difference(run, steady, "last")
        == ""
        == checkpoint_difference(run, steady, "best")
    )


def test_a_best_without_a_checkpoint_beside_it_is_kept(
    workshop: Workshop, undisturbed: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    best = (run / "checkpoints" / "best.ckpt").read_bytes()
    for name in ("status.json", "checkpoints/last.ckpt", "checkpoints/previous.ckpt"):
        (run / name).unlink()
    said = workshop.command(
        "resume", str(run), "trainer.steps=3", "optimizer.schedule=constant", code=2
    )
    assert "optimizer.schedule" in said and (run / "checkpoints" / "best.ckpt").read_bytes() == best
    said = workshop.command("resume", str(run))
    (kept,) = (run / "checkpoints").glob("best-*.ckpt")
    assert (
        f"{run / 'checkpoints' / 'best.ckpt'} is kept as {kept.name}" in said
        and kept.read_bytes() == best
    )
    assert (
        checkpoint_difference(run, undisturbed, "last")
        == ""
        == checkpoint_difference(run, undisturbed, "best")
    )


def last_rows(run: Path) -> dict[str, dict[str, Any]]:
    """Return the last row of each kind in metrics.jsonl."""
    return {row["kind"]: row for row in counted_rows(run)}


def test_a_run_that_is_done_says_so_and_can_be_lengthened_to_the_same_bits(
    workshop: Workshop, steady: Path, shorter: Path, tmp_path: Path
) -> None:
    short = Path(shutil.copytree(shorter, tmp_path / "short"))
    printed = workshop.command("resume", str(short))
    assert "is done: 8 steps" in printed
    assert "trainer.steps=N with N above 8 continues it" in printed
    assert "bits/byte" in printed
    printed = workshop.command("resume", str(short), "trainer.steps=7", code=2)
    assert printed == "rtx: trainer.steps=7: the run is done with 8 steps; give more than that\n"
    environment = (short / "environment.json").read_text()
    printed = workshop.command("resume", str(short), "trainer.steps=12")
    assert "trainer.steps: 8 -> 12" in printed
    assert "no longer exact" not in printed
    for checkpoint in ("last", "best"):
        assert checkpoint_difference(short, steady, checkpoint) == ""
    assert last_rows(short) == last_rows(steady)
    (resumed,) = (json.loads(line) for line in (short / "resumes.jsonl").read_text().splitlines())
    assert resumed["changed"]["trainer.steps"] == [8, 12]
    assert resumed["threads"] == 1
    assert (short / "environment.json").read_text() == environment
    samples = {path.name for path in (short / "samples").iterdir()}
    assert samples == {"step8-seed0-1.txt", "step12-seed0-1.txt"}


def test_minutes_count_over_all_processes_of_a_run(workshop: Workshop) -> None:
    run = workshop.train("minutes", "trainer.steps=100000", "trainer.max_minutes=1e-6")
    status = status_of(run)
    step = status.step
    assert status.reason == "trainer.max_minutes is up"
    assert "trainer.max_minutes=M with M above 1e-06" in workshop.command("resume", str(run))
    assert status_of(run).step == step
    assert {"valid", "final"} <= {
        row["kind"] for row in read_metrics(run / "metrics.jsonl") if row["step"] == step
    }
    workshop.command("resume", str(run), "trainer.max_minutes=2e-6")
    assert status_of(run).step in (step, step + 1)


def test_another_version_or_number_of_threads_is_no_longer_exact(
    workshop: Workshop, steady: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(steady, tmp_path / "run"))
    threads = torch.get_num_threads()
    (run / "environment.json").write_text(
        (run / "environment.json").read_text().replace(f'"{__version__}"', '"0.2.0"')
    )
    shutil.copy2(workshop.folder / "book.txt", tmp_path / "copy.txt")
    monkeypatch.chdir(tmp_path)
    changed = (
        "trainer.steps=13",
        "hardware.threads=2",
        "hardware.precision=fp64",
        "data.path=copy.txt",
    )
    said = workshop.command("resume", str(run), *changed)
    torch.set_num_threads(threads)
    assert (
        f"no longer exact: rtx 0.2.0 -> {__version__}, threads 1 -> 2, precision fp32 -> fp64\n"
        in said
    )
    assert load_run_config(run).data.path == str(tmp_path / "copy.txt"), (
        "it counts from the current folder"
    )


def test_what_would_make_another_run_of_it_is_refused(
    workshop: Workshop, undisturbed: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(undisturbed, tmp_path / "run"))
    path = run / "config.yaml"
    resume = ("resume", str(run), "trainer.steps=14")
    whole = path.read_text()
    status = (run / "status.json").read_text()
    for key, old, new in (
        ("model.hidden", 16, 32),
        ("data.length", 32, 64),
        ("trainer.batch_size", 4, 8),
    ):
        assert f"{key}: {old} -> {new} is refused" in workshop.command(
            *resume, f"{key}={new}", code=2
        )
    for key, old, new in (("optimizer.warmup", 3, 2), ("seed", 0, 4)):
        path.write_text(
            whole.replace(f"{key.rpartition('.')[2]}: {old}", f"{key.rpartition('.')[2]}: {new}")
        )
        assert f"{key}: {old} -> {new} is refused" in workshop.command(*resume, code=2)
        path.write_text(whole)
    (tmp_path / "other.txt").write_bytes((workshop.folder / "book.txt").read_bytes()[::-1])
    other = f"data.path={tmp_path / 'other.txt'}"
    assert "are not those that the run began with" in workshop.command(*resume, other, code=2)
    assert (path.read_text(), (run / "status.json").read_text()) == (whole, status)
    path.write_text(whole.replace("log_every: 2", "log_every: 3"))
    assert "  trainer.log_every: 2 -> 3\n" in workshop.command(*resume)


def test_train_goes_on_in_the_folder_that_it_is_given(
    workshop: Workshop, undisturbed: Path
) -> None:
    process = workshop.start("idempotent")
    process.kill_when(after(6))
    words = ("train", workshop.text, *SMALL_RUN)
    assert "(killed) from step " in workshop.command(*words, run=process.run)
    assert difference(process.run, undisturbed) == ""
    assert "is done: 12 steps" in workshop.command(*words, run=process.run)
    assert "seed: 0 -> 1 is refused" in workshop.command(*words, "seed=1", run=process.run, code=2)
