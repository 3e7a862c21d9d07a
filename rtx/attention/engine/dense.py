"""Full causal attention of whole sequences on a GPU, by torch's `scaled_dot_product_attention`.

Every list is one whole sequence, and a position reads all positions up to itself
(`rtx.attention.reads.Window`).
"""

import torch
import torch.nn.functional as F

from rtx.attention.engine.problem import Problem, Result
from rtx.attention.reads import RangeReads, Window


def refusal(problem: Problem) -> str | None:
    """Return why this engine cannot run the problem, or None if it can."""
    part = problem.part
    if not isinstance(part, RangeReads) or part.window is None:
        return "its lists are not whole sequences"
    if not reads_everything(part.window):
        return "its positions do not read all earlier ones"
    return whole_refusal(problem)


def whole_refusal(problem: Problem) -> str | None:
    """Return why torch's kernels for whole sequences cannot run a problem, or None if they can."""
    if problem.by_member:
        return "it gives no log-sums"
    if problem.terms.by_distance:
        return "it has no terms by distance"
    if problem.q_BHND.is_cpu:
        return "it is for GPUs"
    if problem.q_BHND.dtype == torch.float64:
        return "it computes in float32 or narrower"
    return None


def reads_everything(window: Window) -> bool:
    """Return whether every position reads all positions up to itself, and there is no memory."""
    return window.memory == 0 and window.keys >= window.length


def attend(problem: Problem) -> Result:
    """Return the outputs `[R, D]` by row, and an empty tensor for the log-sums."""
    out_BHND = F.scaled_dot_product_attention(
        problem.q_BHND,
        problem.k_BHND,
        problem.v_BHND,
        is_causal=True,
        dropout_p=problem.terms.dropout,
        scale=problem.terms.scale,
    )
    return out_BHND.flatten(0, 2), out_BHND.new_empty(0, dtype=torch.float32)
