"""The engine "triton": attention over packed lists by our GPU kernels (`packed_attention.py`).

It runs parts that are `rtx.attention.reads.Reads`, where every query reads a range of a list.
"""

from rtx.attention.engine import packed_attention
from rtx.attention.engine.lists import KernelLists, kernel_lists
from rtx.attention.engine.problem import Problem, Result
from rtx.attention.once import derived_once
from rtx.attention.reads import RangeReads

LISTS = "kernel lists"
"""The key of a part's `KernelLists` in `RangeReads.derived`."""


def refusal(problem: Problem) -> str | None:
    """Return why the kernels cannot run the problem; None where they can."""
    if not isinstance(problem.part, RangeReads):
        return "its keys are an index, not ranges of lists"
    return packed_attention.refusal(problem.q_BHND, problem.v_BHND, problem.terms)


def attend(problem: Problem) -> Result:
    """Return outputs and log-sums, as `Result` says."""
    return merged(problem, "none" if problem.by_member else "mean")


def attend_joined(problem: Problem) -> Result:
    """Return outputs `[R, D]` and log-sums `[R]` by row: one softmax over all that a row reads in
    the lists of a part."""
    return merged(problem, "lse")


def merged(problem: Problem, merge: str) -> Result:
    """Return what `packed_attention.attend` does."""
    part = problem.part
    assert isinstance(part, RangeReads)
    B, H, N, _ = problem.q_BHND.shape
    return packed_attention.attend(
        problem.q_BHND,
        problem.k_BHND,
        problem.v_BHND,
        lists_of(part, rows=B * H * N),
        problem.terms,
        merge,
    )


def lists_of(part: RangeReads, rows: int) -> KernelLists:
    """Return the lists of `part` as kernels read them.

    They are made once and stored in `part.derived` where the part serves several passes (there
    `derived` is a dictionary), and made anew where it is None.
    """
    return derived_once(part, LISTS, lambda: kernel_lists(part, rows))
