"""Of all tests: one thread, since tiny tensors only lose by more; this code for all that they start; GPU kernels by an
interpreter where there is no GPU; and signals."""

import contextlib
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported; the commands that tests start inherit it
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
# Who keeps no bytecode compiles this code and its tests anew in every process: a third of a command's time to start.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# A shell ignores Ctrl-C for what it runs in the background, nohup SIGHUP; the commands that tests start inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # before Triton is imported, which the next line does

from tests.helpers.small_runs import (
    copy,
    forker,
    run,
    workshop,
)  # the workshop in which small runs are made, for whoever asks for it

__all__ = ["copy", "forker", "run", "workshop"]


def quicken_interpreter() -> None:
    """Leave out what makes up most of the time of Triton's interpreter and changes no number.

    For every launch of a kernel and for every function that one calls, be it a sum, it looks through Triton's whole
    language and puts its own functions there: once is enough. It computes sums of integers a second time to see whether
    they overflow, and tells nobody, since its option `debug` is off.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    numpy_type = interpreter._get_np_dtype
    types: dict[str, Any] = {}

    def known_type(of: Any) -> Any:
        if of.name not in types:
            types[of.name] = numpy_type(of)
        return types[of.name]

    interpreter._get_np_dtype = known_type


if os.environ.get("TRITON_INTERPRET") == "1":
    with contextlib.suppress(ImportError):  # there is Triton for Linux alone
        quicken_interpreter()

FIRST = (
    "test_slurm.py",
    "test_many_processes.py",
    "test_kills.py",
    "test_resume.py",
    "test_network.py",
)
"""Files with few tests that take long: at the end one of them would keep one worker busy and the others idle."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(
        key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST)
    )
