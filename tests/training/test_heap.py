"""Memory that comes and goes on a CPU is kept: the same tensors find it again without a fault."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource
from rtx.training.heap import keep_freed_memory
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
