"""Attention over packed lists by our own kernels for GPUs (`packed_attention.py`)."""

from rtx.attention.engine import packed_attention
from rtx.attention.engine.lists import KernelLists, kernel_lists
from rtx.attention.engine.problem import Problem, Result
from rtx.attention.once import derived_once
from rtx.attention.packed import Reads

LISTS = "kernel lists"
"""Under which name a part holds its lists as kernels read them."""


def refusal(problem: Problem) -> str | None:
    """Return why the kernels cannot run the problem; None where they can."""
    if not isinstance(problem.part, Reads):
        return "its keys are an index, not ranges of lists"
    return packed_attention.refusal(problem.q_BHND, problem.v_BHND, problem.terms)


def attend(problem: Problem) -> Result:
    """Return outputs and log-sums, see `Problem`."""
    part = problem.part
    assert isinstance(part, Reads)
    lists = lists_of(part, problem.q_BHND.shape[:3].numel())
    tensors = problem.q_BHND, problem.k_BHND, problem.v_BHND
    return packed_attention.attend(*tensors, lists, problem.terms, problem.by_member)


def lists_of(part: Reads, rows: int) -> KernelLists:
    """Return the lists as kernels read them, from the part itself where it has them already."""
    return derived_once(part, LISTS, lambda: kernel_lists(part, rows))
