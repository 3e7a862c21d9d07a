"""The processes that the first one of a run starts: one that dies is noticed, whatever the first one is doing."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

import rtx.training.distributed as room
from rtx.compose import compose
from rtx.training.hardware import resolve_hardware
from rtx.training.signals import PARENT_VARIABLE


def told(monkeypatch: pytest.MonkeyPatch, *commands: str, kill: signal.Signals | None = None) -> list[str]:
    """Return what is told of shell commands that are watched as ranks."""
    monkeypatch.setattr(room, "PATIENCE_SECONDS", 0.0)
    children, lines = [subprocess.Popen(["sh", "-c", command]) for command in commands], []
    if kill:
        children[0].send_signal(kill)
    room.watch_ranks(children, lines.append)
    for child in children:
        child.kill()
        child.wait()
    return [line.partition(" of ")[2] for line in lines]


def test_a_child_that_leaves_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, "true", "sleep 0.05") == []


def test_a_child_that_ends_otherwise_is_told_of_while_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(monkeypatch, "exit 3", "exec sleep 60") == ["the run ended with 3"]
    assert told(monkeypatch, "exec sleep 60", "true", kill=signal.SIGKILL) == ["the run was killed by SIGKILL"]


def test_a_process_that_the_first_one_started_starts_no_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv(PARENT_VARIABLE, str(os.getppid()))
    hardware = resolve_hardware(compose(["hardware=ddp", "hardware.devices=2", "trainer.batch_size=2"]))
    assert hardware.rank == 1 and room.start_ranks(hardware, tmp_path, print) == []
