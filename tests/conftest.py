"""Of all tests: one thread, since tiny tensors only lose by more; this code for all that they start; GPU kernels by an
interpreter where there is no GPU; and signals."""

import os
import signal
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the commands that tests start inherit it
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])

# A shell ignores Ctrl-C for what it runs in the background, nohup SIGHUP; the commands that tests start inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported, which the next line does

from small_runs import copy, forker, run, workshop  # the workshop in which small runs are made, for whoever asks for it

__all__ = ["copy", "forker", "run", "workshop"]

FIRST = ("test_slurm.py", "test_many_processes.py", "test_kills.py", "test_resume.py", "test_network.py")
"""Files with few tests that take long: at the end one of them would keep one worker busy and the others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
