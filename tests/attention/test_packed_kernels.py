"""The packed kernels, in Triton's interpreter: it has to be chosen before Triton is imported, so in a process apart."""

import os
import subprocess
import sys
from pathlib import Path

CASES = Path(__file__).with_name("packed_kernel_cases.py")
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from rtx.attention.engine import packed_attention
import torch
from rtx.attention.engine.softmax import Terms
x = torch.zeros(1, 1, 4, 16)
print(packed_attention.refusal(x, x, Terms(1.0)))
"""


def test_kernels_compute_what_a_dense_softmax_does() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(CASES)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_imports_without_triton() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert done.stdout == "Triton is not installed\n", done.stderr
