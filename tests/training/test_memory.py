"""Running out of memory, told from other errors."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rtx.compose import compose
from rtx.errors import RunFailed
from rtx.training.memory import OUT_OF_MEMORY, as_chosen, device_memory, out_of_memory, physical_memory
from rtx.training.run_folder import read_status, working_in


def refused_by_torch() -> None:
    """Ask torch for more than any machine has."""
    torch.empty(1 << 50)


def refused_by_numpy() -> None:
    """Ask NumPy for more than any machine has."""
    np.empty(1 << 50)


@pytest.mark.parametrize("ask", [refused_by_torch, refused_by_numpy])
def test_a_refusal_is_known(ask: Callable[[], None]) -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        ask()
    reason = out_of_memory(caught.value)
    assert reason.startswith(OUT_OF_MEMORY + ": ")
    assert "\n" not in reason
    assert len(reason) < 250


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"), True),
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
        refused_by_torch()
    status = read_status(tmp_path)
    assert status is not None
    assert status["state"] == "failed"
    assert status["reason"].startswith("out of memory: ")


def test_what_a_run_has_chosen_is_kept_where_nothing_else_is_asked_for() -> None:
    before = compose(["trainer.micro_batch_size=2", "model.recompute=true"])
    assert as_chosen(compose([]), before) == before
    asked = compose(["trainer.micro_batch_size=1", "model.recompute=false"])
    assert as_chosen(asked, before) == asked


def test_the_memory_of_this_machine_is_shared_by_the_processes_of_a_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    whole = physical_memory()
    assert whole > 2**28
    assert device_memory(compose(["hardware=cpu"])) == whole
    assert device_memory(compose(["hardware=ddp", "hardware.devices=2", "trainer.batch_size=2"])) == whole // 2
    assert device_memory(compose(["hardware=ddp", "trainer.batch_size=4"]), processes=4) == whole // 4
    assert device_memory(compose(["hardware=gpu"])) is None
    monkeypatch.setattr("rtx.training.memory.CONTAINER_LIMIT", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text("268435456\n")
    assert physical_memory() == 2**28
    (tmp_path / "memory.max").write_text("max\n")
    assert physical_memory() >= whole
