"""Softmax attention for every pattern, once it is known who reads whom.

`attend` hands every part to an engine. All engines compute the same; each says by `refusal` what it
cannot run, and by `attend` what comes out (`Problem` in problem.py says what that is):

| engine | file | for |
|---|---|---|
| native | native.py | packed lists and indexes on a CPU with a C++ compiler, in float32 |
| dense | dense.py | whole sequences on a GPU: torch's scaled_dot_product_attention and flash kernel |
| triton | by_triton.py | packed lists on a GPU: our own kernels |
| flex | flex.py | packed lists on a GPU: torch's FlexAttention |
| windows | windows.py | packed lists on a GPU where our kernels do not run, in static shapes |
| blocks | blocks.py | packed lists anywhere |
| indexed | indexed.py | keys that each query names, anywhere |

Shapes: B sequences, H heads, N positions, D head size, R = B * H * N rows.
"""

from types import ModuleType

import torch
from torch import Tensor

from rtx.attention.engine import blocks, by_triton, dense, flex, indexed, native, windows
from rtx.attention.engine.combine import Partial, combine
from rtx.attention.engine.problem import Problem
from rtx.attention.engine.softmax import Terms
from rtx.attention.packed import Part, Reads

TORCH = (dense, windows, indexed, blocks)
ENGINES: dict[str, tuple[ModuleType, ...]] = {
    "auto": (dense, by_triton, windows, indexed, blocks),
    "torch": TORCH,
    "native": (native,),
    "triton": (by_triton, indexed),
    "flex": (flex, indexed),
}
"""The engines that each backend tries, in this order; the first that does not refuse runs. On a CPU `auto` tries
`native` first where sequences are long enough (`native.wanted`), then the engines of `torch`."""
BACKENDS = tuple(ENGINES)
MERGES = ("mean", "lse")


def attend(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    parts: list[Part],
    terms: Terms,
    backend: str,
    merge: str = "mean",
) -> Tensor:
    """Return the outputs `[B, H, N, D]`; a position that reads nothing gets zero.

    With merge="mean" a position in several lists of one part gets the mean of its outputs over the
    lists in which it reads something (the paper's released code divides by their number + 0.01). With
    merge="lse" it gets one softmax over the keys of all its lists; a key in several counts once for each.

    Several parts are always merged by "lse". No pair of a query and a key may occur in two parts, and a
    position may read at most one list of each part.

    Raises:
        ValueError: no engine of the backend can run a part.
    """
    if q_BHND.is_cpu:  # copied once here; else `Problem.rows` would copy for each part
        shared = k_BHND is q_BHND
        q_BHND = q_BHND.contiguous()
        k_BHND = q_BHND if shared else k_BHND.contiguous()
        v_BHND = v_BHND.contiguous()
    terms = terms._replace(heads=q_BHND.shape[1])
    by_member = merge != "mean" or len(parts) > 1
    problems = [Problem(q_BHND, k_BHND, v_BHND, part, terms, by_member) for part in parts]
    rows = q_BHND.shape[:3].numel()
    if not v_BHND.numel() or not q_BHND.numel():
        out_RD = torch.zeros_like(v_BHND).flatten(0, 2)
    elif is_joined_natively(problems, backend):
        out_RD = native.attend_joined(problems[0])
    elif by_member:
        every_R = torch.arange(rows, device=q_BHND.device)
        partials = []
        for problem in problems:
            out_SD, sum_S = choose(problem, backend).attend(problem)
            row_S = problem.part.query.row_M if isinstance(problem.part, Reads) else every_R
            partials.append(Partial(row_S.long(), out_SD, sum_S))
        out_RD = combine(partials, rows)
    else:
        out_RD, _ = choose(problems[0], backend).attend(problems[0])
    out_RD = with_gradients(out_RD, problems[0])
    return out_RD.to(v_BHND.dtype).view(*q_BHND.shape[:3], v_BHND.shape[-1])


def is_joined_natively(problems: list[Problem], backend: str) -> bool:
    """Tell whether the compiled kernel itself joins what rows read in several lists; it does so within one part."""
    (problem, *others) = problems
    if others or not problem.by_member or not isinstance(problem.part, Reads):
        return False
    return choose(problem, backend) is native


def with_gradients(out_RD: Tensor, problem: Problem) -> Tensor:
    """Return outputs that depend on every input, so that each gets a gradient: zero where no engine has used it."""
    terms = problem.terms
    inputs = [problem.q_BHND, problem.k_BHND, problem.v_BHND, terms.bias_HM, *(terms.relative or ())]
    learned = [x for x in inputs if x is not None and x.requires_grad and torch.is_grad_enabled()]
    if learned and not out_RD.requires_grad:
        # Sums of nothing: 0, with a gradient of zeros.
        return out_RD + sum(x[..., :0].sum() for x in learned)
    return out_RD


def choose(problem: Problem, backend: str) -> ModuleType:
    """Return the engine that runs the problem: by shapes and types alone, never by what tensors hold."""
    engines = ENGINES[backend]
    if backend == "auto" and problem.q_BHND.is_cpu:
        engines = TORCH
        if native.wanted(backend, problem.part.length):
            engines = (native, *engines)
    reasons = []
    for engine in engines:
        reason = engine.refusal(problem)
        if reason is None:
            return engine
        reasons.append(reason)
    raise ValueError(f"backend={backend!r} cannot run this ({reasons[0]}): take backend='torch'")
