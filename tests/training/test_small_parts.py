"""Small parts of training: differences of configurations, random streams, memory, lines of a run, whole files."""

from __future__ import annotations

import ctypes
import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest
import torch

from rtx.compose import compose
from rtx.disk import is_full, remove_leftovers, replace_file, write_beside, write_json
from rtx.errors import RunFailed
from rtx.progress import say
from rtx.training.hardware import OUT_OF_MEMORY, device_memory, out_of_memory
from rtx.training.module import seed_everything
from rtx.training.run_folder import read_status, working_in


def test_seeds_and_ranks_have_streams_of_their_own() -> None:
    seen = set()
    for seed, rank in [(0, 0), (0, 1), (1, 0), (1, 1), (2**32 - 1, 7)]:
        seed_everything(seed, rank)
        seen.add(torch.rand(()).item())
    assert len(seen) == 5


@pytest.mark.parametrize("ask", [lambda: torch.empty(1 << 50), lambda: np.empty(1 << 50)], ids=["torch", "numpy"])
def test_a_refusal_of_memory_is_known(ask: Callable[[], object]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        ask()
    reason = out_of_memory(caught.value)
    assert reason.startswith(OUT_OF_MEMORY + ": ") and "\n" not in reason and len(reason) < 250


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_other_errors_are_not_taken_for_it(error: BaseException, known: bool) -> None:
    assert bool(out_of_memory(error)) == known


def test_a_run_that_is_out_of_memory_says_so_and_what_helps(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"out of memory: .*\n.*trainer.micro_batch_size"), working_in(tmp_path):
        torch.empty(1 << 50)
    status = read_status(tmp_path) or {}
    assert status["state"] == "failed" and status["reason"].startswith("out of memory: ")


def test_the_memory_of_this_machine_is_shared_by_the_processes_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    whole = device_memory(compose(["hardware=cpu"])) or 0
    assert whole > 2**28
    assert device_memory(compose(["hardware=ddp", "hardware.devices=2", "trainer.batch_size=2"])) == whole // 2
    assert device_memory(compose(["hardware=ddp", "trainer.batch_size=4"]), processes=4) == whole // 4
    assert device_memory(compose(["hardware=gpu"])) is None
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("rtx.training.hardware.CONTAINER_LIMIT", limit)
    for text, bytes_there in (("268435456\n", 2**28), ("max\n", whole)):
        limit.write_text(text)
        there = device_memory(compose(["hardware=cpu"])) or 0
        assert there >= whole if text == "max\n" else there == bytes_there


PROGRAM = """
import resource
from rtx.training.hardware import keep_freed_memory
import torch

keep_freed_memory()
for turn in range(9):
    parts = [torch.ones(2**22) for _ in range(4)]
    if turn == 6:  # by then the places have settled
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del parts
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_memory_is_kept() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    answer = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert int(answer.stdout) < 64


def test_a_reader_that_has_gone_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    say("a")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    def fill_the_disk(file: BinaryIO) -> None:
        file.write(b"half of the n")
        raise OSError(errno.ENOSPC, "No space left on device")

    for content in ({"a": 1}, {"b": "ü"}):
        write_json(tmp_path / "a.json", content)
    with pytest.raises(OSError, match="No space") as caught:
        replace_file(tmp_path / "a.json", fill_the_disk)
    assert is_full(caught.value)
    assert (tmp_path / "a.json").read_text() == '{\n  "b": "ü"\n}\n'
    assert names(tmp_path) == ["a.json"]


def test_leftovers_of_killed_writers_go_and_other_files_stay(tmp_path: Path) -> None:
    write_beside(tmp_path / "last.ckpt", lambda file: file.write(b"cut"))
    (tmp_path / ".hidden").touch()
    (tmp_path / "last.ckpt").touch()
    remove_leftovers(tmp_path)
    assert names(tmp_path) == [".hidden", "last.ckpt"]
