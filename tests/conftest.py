"""Fixtures of all tests: one thread, since tiny tensors only lose by more."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; the commands that tests start inherit it
