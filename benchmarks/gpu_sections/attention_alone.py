"""Section `alone`: attention of 8 heads of 64 units, forward and backward, beside torch's own.

Shapes: H heads, N positions, D head size, C clusters, W keys of a query.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from rtx import attention
from rtx.attention import Pattern, after_step
from rtx.attention.reads import RangeReads

from .journal import Found, Row, said_of, turn

LENGTHS = (8192, 65_536, 4096, 32_768, 16_384, 131_072, 2048)
"""Those of the goals first."""
OURS = ("full", "local", "causal", "topk", "probed", "nearest", "random")
SELECTION = "topk_selection"
"""What of topk comes before attention: scores, members, lists, statistics."""
PEERS = ("flex_window", "flash_window")
SETTLING = 30
"""Steps behind which thresholds hold about W members in a cluster, as in training."""
SECONDS = 0.25
"""How long something is repeated."""
FEWEST = 5
MOST = 20
"""How often it is repeated at least, and at the most, whatever it takes."""

Run = Callable[[], object]


def rows(dry: bool) -> list[Row]:
    """Return the rows of this section."""
    found = []
    for N in (64,) if dry else LENGTHS:
        for name in ("sdpa", *OURS, SELECTION, *PEERS):
            measure = functools.partial(measure_attention, name, N, dry)
            found.append(Row(f"alone/{name}/{N}", measure, needs_cuda=name in PEERS))
    return found


def measure_attention(name: str, N: int, dry: bool) -> Found:
    """Time one kind of attention."""
    torch.manual_seed(0)
    heads, size, window = (1, 16, 16) if dry else (8, 64, 256)
    device, dtype = ("cpu", torch.float16) if dry else ("cuda", torch.bfloat16)
    q, k, v, gradient = (torch.randn(1, heads, N, size, device=device).to(dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    forward = callable_of(name, leaves, window, dry)

    def both() -> None:
        out = forward()
        if out.requires_grad:
            torch.autograd.grad(out, leaves, gradient, allow_unused=True)

    def alone() -> None:
        with torch.no_grad():
            forward()

    found: Found = {"N": N, "W": window, "H": heads, "D": size}
    if dry:
        return found | {"python_ms": python_ms(both, dry), "graph_refused": "there is no GPU"}
    both()  # compiles
    with turn():
        found |= {"python_ms": python_ms(both, dry), "forward_python_ms": python_ms(alone, dry)}
        found["peak_bytes"] = peak_bytes(both)
        return found | graph_ms(both, "graph") | graph_ms(alone, "forward_graph")


def callable_of(name: str, leaves: list[Tensor], window: int, dry: bool) -> Callable[[], Tensor]:
    """Return what computes the outputs `[1, H, N, D]`."""
    q, k, v = leaves
    if name == "sdpa":
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    if name == "flex_window":
        return flex_window(leaves, window)
    if name == "flash_window":
        return flash_window(leaves, window)
    kind = name.removesuffix("_selection")
    pattern = settled(pattern_of(kind, leaves, window, "triton" if dry else "auto"), leaves)
    if name == SELECTION:
        return functools.partial(select, pattern, q)
    keys = k if pattern.has_keys else None
    return lambda: pattern(q, keys, v)[0]


@torch.no_grad()
def select(pattern: Pattern, q_BHND: Tensor) -> Tensor:
    """Choose who reads whom, and nothing else; returns the rows of the members."""
    part = pattern.reads(pattern.inputs(q_BHND, None, None), False)[0]
    assert isinstance(part, RangeReads)
    return part.query.row_M


def pattern_of(name: str, leaves: list[Tensor], window: int, backend: str) -> Pattern:
    """Return the heads of a pattern in training mode: centroids gather statistics in that time."""
    _, H, N, D = leaves[0].shape
    clusters = N // window
    options: dict[str, Any] = {"backend": backend}
    if name == "full":
        pattern: Pattern = attention.Full(**options)
    elif name == "local":
        pattern = attention.Local(window=window, **options)
    elif name == "random":
        pattern = attention.Random(H, clusters, window=window, length=N, seed=0, **options)
    elif name == "probed":
        pattern = attention.Probed(
            H, D, clusters=4 * clusters, decay=0.99, window=window, qk_norm=True, **options
        )
    else:
        rate = 0.1 if name == "causal" else 0.0
        rule = "nearest" if name == "topk" else "members"
        sizes = {"window": window, "length": N, "decay": 0.999}
        store = attention.Centroids(H, clusters, D, **sizes, update=rule, threshold_rate=rate)
        pattern = attention.ROUTING_CLASSES[name](store, **options)
    return pattern.to(leaves[0].device).train()


def settled(pattern: Pattern, leaves: list[Tensor]) -> Pattern:
    """Return the pattern behind some steps, where its thresholds follow counts."""
    if getattr(pattern, "selection", "") != "causal" or leaves[0].is_cpu:
        return pattern
    for _ in range(SETTLING):
        with torch.no_grad():
            pattern(leaves[0], None, leaves[2])
        after_step(pattern)
    return pattern


def flex_window(leaves: list[Tensor], window: int) -> Callable[[], Tensor]:
    """Return FlexAttention, compiled, with a sliding window of as many keys."""

    def sliding(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (i - j < window)

    q, k, v = leaves
    N = q.shape[2]
    mask = create_block_mask(sliding, None, None, N, N, device=q.device, _compile=True)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask)


def flash_window(leaves: list[Tensor], window: int) -> Callable[[], Tensor]:
    """Return torch's flash kernel with a window of as many keys."""
    N = leaves[0].shape[2]
    ends = torch.tensor([0, N], dtype=torch.int32, device=leaves[0].device)

    def forward() -> Tensor:
        q_NHD, k_NHD, v_NHD = (x[0].transpose(0, 1) for x in leaves)
        out_NHD = varlen_attn(q_NHD, k_NHD, v_NHD, ends, ends, N, N, window_size=(window - 1, 0))
        assert isinstance(out_NHD, Tensor)
        return out_NHD.transpose(0, 1)[None]

    return forward


def python_ms(run: Run, dry: bool) -> float:
    """Return the median milliseconds from the call by Python until the result is there."""

    def once() -> float:
        began = time.perf_counter()
        run()
        if not dry:
            torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)

    if dry:
        return round(once(), 3)
    warm = [once() for _ in range(3)]
    return round(statistics.median(once() for _ in range(repeats(warm[-1]))), 4)


def repeats(ms: float) -> int:
    """Return how often to repeat something that takes so long."""
    return max(FEWEST, min(MOST, int(1e3 * SECONDS / max(ms, 1e-3))))


def graph_ms(run: Run, name: str) -> Found:
    """Return the milliseconds on the GPU alone, by a CUDA graph, or why none could be captured."""
    try:
        graph = captured(run)
    except Exception as error:  # a wait for the GPU, say
        torch.cuda.synchronize()
        return {f"{name}_refused": said_of(error)}
    first = graph_times(graph, 1)[0]
    return {f"{name}_ms": round(statistics.median(graph_times(graph, repeats(first))), 4)}


def captured(run: Run) -> torch.cuda.CUDAGraph:
    """Return a graph of a call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def graph_times(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Return the milliseconds of some replays."""
    times = []
    for _ in range(count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return times


def peak_bytes(run: Run) -> int:
    """Return the most that is allocated at one time, beyond what was there."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
