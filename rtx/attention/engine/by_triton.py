"""The engine "triton": attention over packed lists by our GPU kernels (`packed_attention.py`).

It computes parts that are `rtx.attention.reads.RangeReads`: every query reads a range of a list.
"""

from rtx.attention.engine import packed_attention
from rtx.attention.engine.lists import KernelLists, kernel_lists
from rtx.attention.engine.problem import Problem, Result
from rtx.attention.once import derived_once
from rtx.attention.reads import RangeReads

LISTS = "kernel lists"
"""The key of a part's `KernelLists` in `RangeReads.derived`."""


def refusal(problem: Problem) -> str | None:
    """Return why the kernels cannot run the problem, or None if they can."""
    if not isinstance(problem.part, RangeReads):
        return "its keys are an index, not ranges of lists"
    return packed_attention.refusal(problem.q_BHND, problem.v_BHND, problem.terms)


def attend(problem: Problem) -> Result:
    """Return outputs and log-sums, see `Result`."""
    if problem.by_member:
        return attend_and_merge(problem, "none")
    return attend_and_merge(problem, "mean")


def attend_combined(problem: Problem) -> Result:
    """Return outputs `[R, D]` and log-sums `[R]` of one softmax over all keys of each row."""
    return attend_and_merge(problem, "lse")


def attend_and_merge(problem: Problem, merge: str) -> Result:
    """Return the result of `packed_attention.attend`."""
    part = problem.part
    assert isinstance(part, RangeReads)
    B, H, N, _ = problem.q_BHND.shape
    return packed_attention.attend(
        problem.q_BHND,
        problem.k_BHND,
        problem.v_BHND,
        stored_lists(part, rows=B * H * N),
        problem.terms,
        merge,
    )


def stored_lists(part: RangeReads, rows: int) -> KernelLists:
    """Return the lists of `part` as kernels read them.

    If the part is used in several passes (`derived` is a dictionary), they are made once and stored
    there.
    """
    return derived_once(part, LISTS, lambda: kernel_lists(part, rows))
