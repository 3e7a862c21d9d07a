"""Windows of whole sequences on a GPU by `varlen_attn`, torch's flash kernel for packed sequences.

Every list is one whole sequence, and a position reads the last positions of it, up to itself
(`rtx.attention.reads.Window`). There may be a memory: positions before the sequence that serve as
keys alone. On an H100 our kernels (`by_triton.py`) take less than half the time for the same pairs,
so this engine is for problems that they refuse.

Shapes: B sequences, H heads, N positions (those of the memory included), D head size, R = B * H * N
rows, S positions of all sequences, one sequence after the other, without the memory.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.attention.engine.dense import whole_refusal
from rtx.attention.engine.problem import Problem, Result
from rtx.attention.reads import RangeReads, Window

MAX_SIZE = 256
"""The largest head size of torch's flash kernel."""
FLASH_CAPABILITY = (8, 0)
"""The least compute capability of torch's flash kernel."""


def refusal(problem: Problem) -> str | None:
    """Return why this engine cannot run the problem, or None if it can."""
    part = problem.part
    if not isinstance(part, RangeReads) or part.window is None:
        return "its lists are not whole sequences with a window"
    if why := whole_refusal(problem):
        return why
    return flash_refusal(problem.q_BHND, problem.v_BHND, problem.terms.dropout)


def flash_refusal(q_BHND: Tensor, v_BHND: Tensor, dropout: float) -> str | None:
    """Return why torch's flash kernel cannot run windows of these tensors, or None if it can."""
    size = q_BHND.shape[-1]
    if q_BHND.dtype not in (torch.float16, torch.bfloat16):
        return "its windows need float16 or bfloat16"
    if dropout:
        return "its windows have no dropout"
    if size != v_BHND.shape[-1] or size > MAX_SIZE or size % 8:
        return f"its windows need heads of a multiple of 8 units, {MAX_SIZE} at most"
    if not has_flash(q_BHND.device):
        return "this GPU is too old for torch's flash kernel"
    return None


def has_flash(device: torch.device) -> bool:
    """Return whether a device can run torch's flash kernel.

    The meta device counts as one that can: with it engines are chosen without a GPU.
    """
    if device.type != "cuda":
        return device.type == "meta"
    return torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


# So torch.compile takes the result as a constant. The decorator for it,
# `torch.compiler.assume_constant_result`, imports the compiler, which takes a second.
has_flash._dynamo_marked_constant = True  # type: ignore[attr-defined]


def attend(problem: Problem) -> Result:
    """Return the outputs `[R, D]` by row, and an empty tensor for the log-sums."""
    part = problem.part
    assert isinstance(part, RangeReads) and part.window is not None
    out_BHND = by_flash(
        problem.q_BHND,
        problem.k_BHND,
        problem.v_BHND,
        part.window,
        problem.terms.scale,
    )
    return out_BHND.flatten(0, 2), out_BHND.new_empty(0, dtype=torch.float32)


def by_flash(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    window: Window,
    scale: float,
) -> Tensor:
    """Return the outputs `[B, H, N, D]` by torch's flash kernel; those of the memory are zero.

    The kernel gets N keys and N - memory queries of each sequence, and aligns the last query with
    the last key.
    """
    B, _, N, _ = q_BHND.shape
    queries = N - window.memory
    # The kernel's window counts the keys before a query's own; -1 means all of them.
    back = window.keys - 1
    if window.keys >= N:
        back = -1
    # Imported here, because it imports torch's compiler, which takes a second.
    from torch.nn.attention.varlen import varlen_attn

    out_SHD = varlen_attn(
        q_BHND[:, :, window.memory :].transpose(1, 2).flatten(0, 1),
        k_BHND.transpose(1, 2).flatten(0, 1),
        v_BHND.transpose(1, 2).flatten(0, 1),
        cumulative_lengths(B, queries, q_BHND.device),
        cumulative_lengths(B, N, q_BHND.device),
        queries,
        N,
        scale=scale,
        window_size=(back, 0),
    )
    assert isinstance(out_SHD, Tensor)
    out_BHND = torch.unflatten(out_SHD, 0, (B, queries)).transpose(1, 2)
    if window.memory == 0:
        return out_BHND
    return F.pad(out_BHND, (0, 0, window.memory, 0))


def cumulative_lengths(sequences: int, length: int, device: torch.device) -> Tensor:
    """Return where each of B packed sequences begins, and where the last one ends, `[B + 1]`.

    All sequences have one length.
    """
    return torch.arange(sequences + 1, dtype=torch.int32, device=device) * length
