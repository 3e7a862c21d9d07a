"""Which implementation of a pattern runs: the one place where that is decided.

All compute the same function. `auto` takes what is known to be the best; a backend asked for by name does what is
asked, or refuses with a sentence. What each cannot do stands in its `..._refusal`.

- `reference`: the oracle's loops (`reference.py`), slow, with gradients, in float32 or wider.
- `torch`: the fast path of every pattern.
- `triton`: kernels for attention inside packed clusters, those of `attend_members`.
- `flex`: PyTorch's FlexAttention, compiled, for patterns that choose by position.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from rtx.attention.by_flex import flex_refusal
from rtx.attention.clusters import attend_members
from rtx.attention.weights import Distances

BACKENDS = ("auto", "reference", "torch", "triton", "flex")
KERNELS = "rtx.attention.triton_clusters"


class Call(NamedTuple):
    """What is asked of a backend."""

    pattern: str
    q_BHND: Tensor
    k_BHND: Tensor | None
    v_BHND: Tensor
    dropout: float = 0.0
    relative: Distances | None = None
    in_clusters: bool = False
    """Whether the pattern may come down to `attend_members`."""
    unpacked_by: str = ""
    """The argument for which it does not."""


def check_backend(backend: str) -> None:
    """Refuse an unknown backend."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}")


def choose(backend: str, call: Call) -> str:
    """Return "reference", "torch", "triton" or "flex".

    `auto` is torch: the Triton kernels were compiled for GPUs and interpreted on a CPU, but have not run on a GPU yet.

    Raises:
        ValueError: an unknown backend, or one asked for by name that cannot do what is asked.
    """
    check_backend(backend)
    if backend == "auto":
        return "torch"
    why = refusal(backend, call)
    if why is None:
        return backend
    able = [name for name in BACKENDS[1:] if refusal(name, call) is None]
    raise ValueError(f"backend={backend!r} cannot run this ({why}); backends that can: {', '.join(able)}")


def refusal(backend: str, call: Call) -> str | None:
    """Return the argument that a backend cannot take, and why, a clause; None where it can do what is asked."""
    if backend == "reference":
        return f"dropout={call.dropout}: the oracle drops no weights" if call.dropout else None
    if backend == "triton":
        return triton_refusal(call)
    if backend == "flex":
        return flex_refusal(call.pattern, call.q_BHND, call.k_BHND, call.v_BHND, call.dropout, call.relative)
    return None


def triton_refusal(call: Call) -> str | None:
    """See `refusal`."""
    if not call.in_clusters or call.unpacked_by:
        what = call.unpacked_by or call.pattern
        return f"{what}: the Triton kernels are for causal attention inside clusters that queries and keys share"
    missing = missing_for_triton()
    if missing:
        return f"{missing} is not installed"
    keys = call.q_BHND if call.k_BHND is None else call.k_BHND
    options = {"dropout": call.dropout, "relative": call.relative}
    return importlib.import_module(KERNELS).triton_refusal(call.q_BHND, keys, call.v_BHND, **options)


@functools.cache
def missing_for_triton() -> str:
    """Return the first module that is missing to run the kernels, an empty string where none is."""
    return next((name for name in ("triton", KERNELS) if importlib.util.find_spec(name) is None), "")


def attend_packed(backend: str) -> Callable[..., Tensor]:
    """Return the `attend_members` of a chosen backend."""
    return importlib.import_module(KERNELS).attend_members_triton if backend == "triton" else attend_members
