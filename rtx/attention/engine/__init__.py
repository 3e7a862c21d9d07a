"""Softmax attention of every pattern, over the keys that its queries read.

A pattern returns which query reads which keys in one or several *parts* (`rtx.attention.reads`). A
part is either packed lists (`RangeReads`: every query reads a range of one list of keys) or an
index (`IndexReads`: the keys of every query). `attend` makes a `Problem` of each part, `choose`
selects the engine that computes it, and `combine` merges the results of several parts.

An engine is a module with two functions. `refusal(problem)` returns why the engine cannot compute
the problem, or None if it can. `attend(problem)` returns the outputs and the log-sums (`Result` in
problem.py). All engines give the same results, up to rounding:

| engine | file | computes |
|---|---|---|
| native | native.py | packed lists and indexes on a CPU with a C++ compiler, in float32 |
| dense | dense.py | full causal attention on a GPU: torch's scaled_dot_product_attention |
| triton | by_triton.py | packed lists on a GPU: our own kernels |
| flash | flash.py | windows of whole sequences on a GPU: torch's flash kernel |
| flex | flex.py | packed lists on a GPU: torch's FlexAttention |
| windows | windows.py | packed lists on a GPU if our kernels cannot, in static shapes |
| blocks | blocks.py | packed lists anywhere |
| indexed | indexed.py | indexes anywhere |

Streams do not call `attend`: newest.py attends at one position, over slots of a cache.

Shapes: B sequences, H heads, N positions, D head size, R = B * H * N rows, P query members of a
part (`rtx.attention.reads` explains rows, lists and members by an example).
"""

from types import ModuleType

import torch
from torch import Tensor

from rtx.attention.engine import blocks, by_triton, dense, flash, flex, indexed, native, windows
from rtx.attention.engine.combine import Partial, combine, sinks_alone, with_sink
from rtx.attention.engine.problem import Problem
from rtx.attention.engine.softmax import LogitTerms
from rtx.attention.gradients import with_zero_gradients
from rtx.attention.reads import RangeReads, Reads

TORCH = (dense, flash, windows, indexed, blocks)
"""The engines that use PyTorch's operations; for every problem one of them does not refuse."""
ENGINES: dict[str, tuple[ModuleType, ...]] = {
    "auto": (dense, by_triton, flash, windows, indexed, blocks),
    "torch": TORCH,
    "native": (native,),
    "triton": (by_triton, indexed),
    "flex": (flex, indexed),
}
"""The engines that each backend tries, in this order; the first that does not refuse computes.

On a CPU `auto` tries other ones, see `choose`.
"""
BACKENDS = tuple(ENGINES)
MERGES = ("mean", "lse")
"""How the outputs of a position in several lists are merged, see `attend`."""


def attend(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    parts: list[Reads],
    terms: LogitTerms,
    backend: str,
    merge: str = "mean",
) -> Tensor:
    """Return the outputs `[B, H, N, D]`; a position that reads nothing gets zero.

    With merge="mean" a position in several lists of one part gets the mean of its outputs over the
    lists in which it reads something (the paper's released code divides by their number + 0.01).
    With merge="lse" it gets one softmax over the keys of all its lists; a key in several counts
    once for each.

    Several parts are always merged by "lse". So that no key counts twice there, no pair of a query
    and a key may occur in two parts, and a position may read at most one list of each part.

    Args:
        k_BHND: the same object as `q_BHND` if queries serve as keys.
        parts: at least one.
        terms: the other terms of logits and weights; this function sets its `heads`.
        backend: one of `BACKENDS`.

    Raises:
        ValueError: no engine of the backend can run a part.
    """
    if q_BHND.is_cpu:
        # Engines for CPUs read rows. Those of contiguous tensors are views, so there is at most one
        # copy for all parts. Kernels for GPUs read tensors of any strides.
        q_BHND, k_BHND, v_BHND = contiguous(q_BHND, k_BHND, v_BHND)
    sink_IH = terms.sink_IH
    terms = terms._replace(heads=q_BHND.shape[1], sink_IH=None)
    is_mean = merge == "mean" and len(parts) == 1
    # One softmax over several lists, and sinks, need the log-sums of query members.
    by_member = not is_mean or sink_IH is not None
    problems = [Problem(q_BHND, k_BHND, v_BHND, part, terms, by_member) for part in parts]
    first = problems[0]
    if not v_BHND.numel() or not q_BHND.numel():
        out_RD = torch.zeros_like(v_BHND).flatten(0, 2)
    elif sink_IH is not None:
        sink_R = sinks_of_rows(sink_IH, q_BHND)
        out_RD = attend_with_sinks(problems, backend, is_mean, sink_R)
    elif is_mean:
        out_RD, _ = choose(first, backend).attend(first)
    else:
        out_RD = attend_combined(problems, backend)
    out_RD = with_gradients(out_RD, first, sink_IH)
    B, H, N, _ = q_BHND.shape
    return out_RD.to(v_BHND.dtype).view(B, H, N, v_BHND.shape[-1])


def contiguous(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return contiguous tensors; keys that are the same object as the queries remain so."""
    contiguous_q_BHND = q_BHND.contiguous()
    if k_BHND is q_BHND:
        return contiguous_q_BHND, contiguous_q_BHND, v_BHND.contiguous()
    return contiguous_q_BHND, k_BHND.contiguous(), v_BHND.contiguous()


def attend_combined(problems: list[Problem], backend: str) -> Tensor:
    """Return one softmax over the keys of all lists of all problems, `[R, D]`.

    Two engines combine the lists of one part themselves. Everything else goes through `combine`.
    """
    problem = problems[0]
    if len(problems) == 1 and isinstance(problem.part, RangeReads):
        engine = choose(problem, backend)
        if engine is native:
            return native.attend_combined(problem)
        if engine is by_triton:
            out_RD, _ = by_triton.attend_combined(problem)
            return out_RD
    partials = [partial_of(problem, backend) for problem in problems]
    rows = problem.q_BHND.shape[:3].numel()
    return combine(partials, rows)


def partial_of(problem: Problem, backend: str) -> Partial:
    """Return outputs and log-sums of a part: by row from our GPU kernels, otherwise by member."""
    engine = choose(problem, backend)
    if engine is by_triton:
        out_RD, log_sum_R = by_triton.attend_combined(problem)
        row_R = torch.arange(len(out_RD), device=out_RD.device)
        return Partial(row_R, out_RD, log_sum_R)
    out_PD, log_sum_P = engine.attend(problem)
    return Partial(problem.query_rows(), out_PD, log_sum_P)


def sinks_of_rows(sink_IH: Tensor, q_BHND: Tensor) -> Tensor:
    """Return the sink of each row, `[R]`; see `LogitTerms.sink_IH`."""
    B, H, N, _ = q_BHND.shape
    sequences_of_row = B // len(sink_IH)
    sink_BH = sink_IH.repeat_interleave(sequences_of_row, dim=0)
    sink_BHN = sink_BH[:, :, None].expand(B, H, N)
    return sink_BHN.flatten()


def attend_with_sinks(
    problems: list[Problem],
    backend: str,
    is_mean: bool,
    sink_R: Tensor,
) -> Tensor:
    """Return attention whose softmaxes also have a sink, a logit without a value, `[R, D]`.

    As in gpt-oss (OpenAI 2025).

    Args:
        is_mean: a row gets the mean over its lists, each of which has the sink. Otherwise one
            softmax spans all of its keys, and the sink once.
    """
    partials: list[Partial] = []
    for problem in problems:
        out_PD, log_sum_P = choose(problem, backend).attend(problem)
        partials.append(Partial(problem.query_rows(), out_PD, log_sum_P))
    rows = len(sink_R)
    first = partials[0]
    sink_R = sink_R.to(first.log_sum_S.dtype)
    if is_mean:
        sink_P = sink_R[first.row_S]
        return combine([with_sink(first, sink_P)], rows)
    # The sink of a row is one more key, whose value is zero.
    partials.append(sinks_alone(sink_R, first))
    return combine(partials, rows)


def with_gradients(out_RD: Tensor, problem: Problem, sink_IH: Tensor | None) -> Tensor:
    """Return the outputs, with a gradient for every input that requires one, read or not.

    Otherwise `backward` would fail if no query reads any key. These gradients are zeros.
    """
    if out_RD.requires_grad or not torch.is_grad_enabled():
        return out_RD
    terms = problem.terms
    inputs = [problem.q_BHND, problem.k_BHND, problem.v_BHND, terms.bias_HM, sink_IH]
    if terms.relative is not None:
        inputs.extend(terms.relative)
    return with_zero_gradients(out_RD, inputs)


def choose(problem: Problem, backend: str) -> ModuleType:
    """Return the engine that computes the problem.

    Shapes and types alone decide, never numbers in tensors. On a CPU `auto` tries `native` first if
    sequences are long enough (`native.wanted`), then the engines that use PyTorch's operations.

    Raises:
        ValueError: all engines of the backend refuse, which cannot happen for "auto" and "torch".
            The message has the reason of the first one, which has the name of the backend.
    """
    engines = ENGINES[backend]
    if backend == "auto" and problem.q_BHND.is_cpu:
        engines = TORCH
        if native.wanted(backend, problem.part.length):
            engines = (native, *engines)
    reasons: list[str] = []
    for engine in engines:
        reason = engine.refusal(problem)
        if reason is None:
            return engine
        reasons.append(reason)
    raise ValueError(f"backend={backend!r} cannot run this ({reasons[0]}): take backend='torch'")
