"""Jobs of Slurm without accounts: what the queue says of a job, and when one that it no longer has is over."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rtx.commandline.slurm import QueueWatcher, kill_wait, watch_jobs


def command(folder: Path, name: str, does: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program of this name onto the PATH."""
    (folder / name).write_text(f"#!/bin/sh\n{does}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def listing(folder: Path, *jobs: str) -> None:
    """Write what the queue has."""
    (folder / "queue").write_text("".join(f"{job}|node\n" for job in jobs))


def test_what_the_states_of_a_queue_mean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(tmp_path, "squeue", f"cat {tmp_path}/queue", monkeypatch)
    watcher = QueueWatcher(1)
    states = {"1": "PENDING", "2": "CONFIGURING", "3": "SUSPENDED", "4": "FAILED", "5": "REQUEUE_HOLD", "6": "RUNNING"}
    for job in states:
        watcher.register_job(job)
    listing(tmp_path, *(f"{job}|{state}" for job, state in states.items()), "99|RUNNING")
    watcher.update()
    assert [job for job in states if watcher.is_done(job, mode="cache")] == ["4"]
    watcher.register_job("7")  # not in the queue yet
    listing(tmp_path, "1|RUNNING", "2|COMPLETED")
    watcher.update()
    assert [job for job in (*states, "7") if watcher.is_done(job, mode="cache")] == ["2", "3", "4", "5", "6"]
    listing(tmp_path, "1|PENDING", "7|PENDING")  # put back
    watcher.update()
    assert not watcher.is_done("1", mode="cache") and not watcher.is_done("7", mode="cache")


def test_a_slow_answer_ends_no_job_that_came_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look takes its list before the second job is submitted, and answers after the second look began."""
    command(tmp_path, "squeue", f"cat {tmp_path}/queue > {tmp_path}/$$; sleep 0.5; cat {tmp_path}/$$", monkeypatch)
    watcher = QueueWatcher(1)
    watcher.register_job("1")
    listing(tmp_path, "1|RUNNING")
    first = threading.Thread(target=watcher.update)
    first.start()
    watcher.register_job("2")
    listing(tmp_path, "1|RUNNING", "2|PENDING")
    second = threading.Thread(target=watcher.update)
    second.start()
    first.join()
    second.join()
    assert not watcher.is_done("1", mode="cache") and not watcher.is_done("2", mode="cache")


def test_the_queue_is_asked_only_where_there_are_no_accounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import submitit

    usual = submitit.SlurmJob.watcher
    monkeypatch.setattr(submitit.SlurmJob, "watcher", usual)
    command(tmp_path, "sacct", "exit 0", monkeypatch)
    watch_jobs()
    assert submitit.SlurmJob.watcher is usual
    command(tmp_path, "sacct", "echo Slurm accounting storage is disabled >&2; exit 1", monkeypatch)
    watch_jobs()
    assert isinstance(submitit.SlurmJob.watcher, QueueWatcher)


def test_how_long_slurm_waits_before_it_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(
        tmp_path, "scontrol", "echo 'KillOnBadExit           = 0'; echo 'KillWait                = 45 sec'", monkeypatch
    )
    assert kill_wait() == 45.0
    command(tmp_path, "scontrol", "exit 1", monkeypatch)
    assert kill_wait() == 600.0
