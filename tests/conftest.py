"""Fixtures of all tests: one thread, since tiny tensors only lose by more; Triton's interpreter where no GPU is."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the commands that tests start inherit it

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: it decides as kernels are defined
