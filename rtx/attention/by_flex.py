"""backend="flex": the patterns that choose by position, by PyTorch's FlexAttention, compiled, with a block mask.

The functions take what their namesakes take, checked. A pattern is a rule about a head and the positions of a query and
a key; its numbers are tensors, so that other ones do not compile anew (another type, shape or scale does, which takes
seconds). Making the block mask writes down the mask of all pairs, once a call.

Shapes: B sequences, H heads, N positions, D head size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rtx.attention.weights import Distances, in_graph, logit_scale, without_padding
from rtx.compiler import has_compiler

PATTERNS = ("full", "local", "strided", "fixed")
SMALLEST_ON_CUDA = 16
"""The head size below which FlexAttention's CUDA kernels do not go."""
RECOMPILE_LIMIT = 1 << 10
"""Compiled forms kept; beyond them PyTorch refuses."""

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From numbers of a head, a query and a key to whether the query reads the key; all integer tensors without shape."""


def flex_refusal(
    pattern: str,
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHND: Tensor,
    dropout: float = 0.0,
    relative: Distances | None = None,
) -> str | None:
    """Return why FlexAttention cannot run a case, a clause that names the argument; None where it can."""
    if pattern not in PATTERNS or k_BHND is None:
        return f"{pattern}: FlexAttention is for {', '.join(PATTERNS)} alone"
    if dropout:
        return f"dropout={dropout}: FlexAttention has none"
    if relative is not None:
        return "relative: FlexAttention adds nothing to keys and values"
    if q_BHND.dtype == torch.float64:
        return "q_BHND is of torch.float64: FlexAttention takes float16, bfloat16 or float32"
    named = {"q_BHND": q_BHND, "k_BHND": k_BHND, "v_BHND": v_BHND}
    device = q_BHND.device.type
    if device == "cuda":
        small = [name for name, x in named.items() if x.shape[-1] < SMALLEST_ON_CUDA]
        return f"{small[0]}: FlexAttention's heads on CUDA have a size of {SMALLEST_ON_CUDA} or more" if small else None
    if device != "cpu":
        return f"q_BHND is on {q_BHND.device}: FlexAttention runs on CUDA devices and CPUs"
    graded = [name for name, x in named.items() if x.requires_grad]
    if graded and torch.is_grad_enabled():
        return f"{graded[0]} requires a gradient: FlexAttention has no backward pass on a CPU"
    return None if has_compiler() else "CPU tensors: FlexAttention is compiled, and there is no C++ compiler"


@functools.cache
def compiled() -> Callable[..., Any]:
    """Return FlexAttention compiled; what it cannot compile is an error, and never runs uncompiled."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def attend(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    rule: Rule,
    scale: float | None,
    mask_BN: Tensor | None,
    by_head: bool = False,
) -> Tensor:
    """Return attention over the keys that a rule lets each query read, `[B, H, N, D]`; every query must read its own.

    `by_head`: the rule differs between heads.
    """
    if not q_BHND.numel() or not v_BHND.numel():
        return in_graph(torch.zeros_like(v_BHND), q_BHND, k_BHND, v_BHND)
    from torch.nn.attention.flex_attention import create_block_mask

    q_BHND, k_BHND, v_BHND = (without_padding(x, mask_BN) for x in (q_BHND, k_BHND, v_BHND))

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return rule(h, i, j)

    def seen_and_real(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert mask_BN is not None
        # Padding reads itself, so that its softmax is defined, and is zeroed below.
        return (rule(h, i, j) & mask_BN[b, j]) | (i == j)

    B, H, N, D = q_BHND.shape
    sizes = (None if mask_BN is None else B, H if by_head else None, N, N)
    pairs = create_block_mask(seen if mask_BN is None else seen_and_real, *sizes, device=q_BHND.device)
    with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
        out_BHND = compiled()(q_BHND, k_BHND, v_BHND, block_mask=pairs, scale=logit_scale(scale, D))
    return without_padding(out_BHND, mask_BN)


def full(
    q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, *, causal: bool, scale: float | None, mask_BN: Tensor | None
) -> Tensor:
    """See `rtx.attention.full`."""
    rule = (lambda h, i, j: i >= j) if causal else (lambda h, i, j: i >= 0)
    return attend(q_BHND, k_BHND, v_BHND, rule, scale, mask_BN)


def local(
    q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, *, window: int, scale: float | None, mask_BN: Tensor | None
) -> Tensor:
    """See `rtx.attention.local`."""
    W = torch.tensor(window, device=q_BHND.device)
    return attend(q_BHND, k_BHND, v_BHND, lambda h, i, j: (i >= j) & (i - j < W), scale, mask_BN)


def strided(
    q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, *, stride: int, scale: float | None, mask_BN: Tensor | None
) -> Tensor:
    """See `rtx.attention.strided`."""
    L = torch.tensor(stride, device=q_BHND.device)
    return attend(q_BHND, k_BHND, v_BHND, lambda h, i, j: (i >= j) & ((i - j) % L == 0), scale, mask_BN)


def fixed(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    *,
    block: int,
    summary: int,
    scale: float | None,
    mask_BN: Tensor | None,
) -> Tensor:
    """See `rtx.attention.fixed`."""
    L, c = (torch.tensor(size, device=q_BHND.device) for size in (block, summary))
    end_H = block - summary * (torch.arange(q_BHND.shape[1], device=q_BHND.device) % (block // summary))

    def rule(h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        column = j % L
        in_summary = (column < end_H[h]) & (column >= end_H[h] - c)
        return (i >= j) & ((i // L == j // L) | in_summary)

    return attend(q_BHND, k_BHND, v_BHND, rule, scale, mask_BN, by_head=True)
