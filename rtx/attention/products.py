"""Float32 matrix products on a CPU by oneDNN's kernels, where torch's own choice, MKL's, leaves AVX-512 alone (on AMD).

torch takes oneDNN's where its precision switch permits bfloat16. Its kernels that round to bfloat16 need AMX; without
it all arithmetic stays float32's, only about twice as fast on AMD's processors. So the switch is turned for single
calls, on processors without AMX alone, and only where a product that bfloat16 would spoil comes out right. It is one
for the whole process: other threads may see it turned.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

SWITCH: Any = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
"""torch's switch, `fp32_precision`."""

MIN_FACTOR = 2048
"""Numbers in a factor from which turning the switch pays: a stream's single vectors have fewer."""

_lock = threading.Lock()
_users: list[int] = []
"""The threads inside `wide_products`."""
_before: str | None = None
"""What the switch goes back to; None while it is not turned."""

_trusted: bool | None = None
"""Whether oneDNN's products are float32's on this machine; None before the first question."""


@contextlib.contextmanager
def wide_products(like: Tensor) -> Iterator[None]:
    """Let matrix products inside go through oneDNN where that is faster and exact; `like` is one of their factors."""
    plain = like.device.type != "cpu" or like.dtype != torch.float32 or like.numel() < MIN_FACTOR
    if plain or not trusted():
        yield
        return
    turn()
    try:
        yield
    finally:
        turn_back()


def turn() -> None:
    """Turn the switch, unless another thread has, or the user has chosen a precision."""
    global _before
    with _lock:
        _users.append(threading.get_ident())
        if len(_users) == 1 and SWITCH.fp32_precision in ("none", "ieee"):
            _before = SWITCH.fp32_precision
            SWITCH.fp32_precision = "bf16"


def turn_back() -> None:
    """Leave the switch as it was found once nobody needs it any more."""
    global _before
    with _lock:
        _users.remove(threading.get_ident())
        if not _users and _before is not None:
            SWITCH.fp32_precision, _before = _before, None


def trusted() -> bool:
    """Tell whether `wide_products` does anything on this machine (never while a model is compiled)."""
    global _trusted
    if torch.compiler.is_compiling():
        return False
    if _trusted is None:
        _trusted = has_wide_kernels() and is_exact()
    return _trusted


def has_wide_kernels() -> bool:
    """Tell whether oneDNN is here and the processor has AVX-512, but not AMX."""
    wide = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"
    return wide and not torch.cpu._is_amx_tile_supported()


def is_exact() -> bool:
    """Tell whether products with the switch turned are float32's, for a few shapes of attention."""
    generator = torch.Generator("cpu").manual_seed(0)
    of_float32: Any = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    turn()
    try:
        with torch.autocast("cpu", enabled=False):
            for rows, inner, columns in ((64, 64, 64), (64, 64, 256), (64, 256, 64), (192, 33, 128)):
                x = torch.randn(2, rows, inner, **of_float32)
                y = torch.randn(2, inner, columns, **of_float32)
                # bfloat16 would be off by about 1e-2 here.
                if not torch.allclose((x @ y).double(), x.double() @ y.double(), rtol=0, atol=1e-4):
                    return False
    finally:
        turn_back()
    return True
