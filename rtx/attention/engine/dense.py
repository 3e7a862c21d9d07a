"""Attention of whole sequences on a GPU, without copies: torch's own kernels where a user would take them.

Full attention is `scaled_dot_product_attention`; a window of the last W positions, and sequences
behind a memory, are torch's flash kernel for packed sequences.

Shapes: B sequences, H heads, N positions, D head size, M positions of a memory in front.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rtx.attention.engine.problem import Problem, Result
from rtx.attention.packed import Reads, Window

MAX_SIZE = 256
"""Head size up to which torch's flash kernel computes."""
FLASH_CAPABILITY = (8, 0)
"""The least compute capability of torch's flash kernel."""


def refusal(problem: Problem) -> str | None:
    """Return why this engine cannot run the problem; None where it can."""
    q_BHND, v_BHND, part, terms = problem.q_BHND, problem.v_BHND, problem.part, problem.terms
    if not isinstance(part, Reads) or part.window is None:
        return "its lists are not whole sequences with a window"
    if problem.by_member:
        return "it gives no log-sums"
    if terms.by_distance:
        return "it has no terms by distance"
    if q_BHND.is_cpu:
        return "it is for GPUs"
    if q_BHND.dtype == torch.float64:
        return "it computes in float32 or narrower"
    if reads_everything(part.window):
        return None
    return flash_refusal(q_BHND, v_BHND, terms.dropout)


def flash_refusal(q_BHND: Tensor, v_BHND: Tensor, dropout: float) -> str | None:
    """Return why torch's flash kernel cannot run this; None where it can."""
    size = q_BHND.shape[-1]
    if q_BHND.dtype not in (torch.float16, torch.bfloat16):
        return "its windows need float16 or bfloat16"
    if dropout:
        return "its windows have no dropout"
    if size != v_BHND.shape[-1] or size > MAX_SIZE or size % 8:
        return f"its windows need heads of a multiple of 8 units, {MAX_SIZE} at the most"
    if not has_flash(q_BHND.device):
        return "this GPU is too old for torch's flash kernel"
    return None


@torch.compiler.assume_constant_result
def has_flash(device: torch.device) -> bool:
    """Tell whether a device can run torch's flash kernel; tensors of shapes alone can."""
    if device.type != "cuda":
        return device.type == "meta"
    return torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


def reads_everything(window: Window) -> bool:
    """Tell whether every position reads all positions up to itself, and none of them is a memory."""
    return window.memory == 0 and window.keys >= window.length


def attend(problem: Problem) -> Result:
    """Return the outputs by row; the log-sums are empty."""
    part, terms = problem.part, problem.terms
    assert isinstance(part, Reads) and part.window is not None
    q_BHND, k_BHND, v_BHND = problem.q_BHND, problem.k_BHND, problem.v_BHND
    if reads_everything(part.window):
        options = {"is_causal": True, "dropout_p": terms.dropout, "scale": terms.scale}
        out_BHND = F.scaled_dot_product_attention(q_BHND, k_BHND, v_BHND, **options)
    else:
        out_BHND = by_flash(q_BHND, k_BHND, v_BHND, part.window, terms.scale)
    return out_BHND.flatten(0, 2), out_BHND.new_empty(0, dtype=torch.float32)


def by_flash(q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor, window: Window, scale: float) -> Tensor:
    """Return the outputs `[B, H, N, D]` by torch's flash kernel; those of the memory are zero."""
    B, _, N, _ = q_BHND.shape
    queries = N - window.memory
    # The kernel aligns the last query with the last key, and counts the keys before a query's own.
    back = -1 if window.keys >= N else window.keys - 1
    out_SHD = varlen_attn(
        q_BHND[:, :, window.memory :].transpose(1, 2).flatten(0, 1),
        k_BHND.transpose(1, 2).flatten(0, 1),
        v_BHND.transpose(1, 2).flatten(0, 1),
        ends(B, queries, q_BHND.device),
        ends(B, N, q_BHND.device),
        queries,
        N,
        scale=scale,
        window_size=(back, 0),
    )
    assert isinstance(out_SHD, Tensor)
    out_BHND = out_SHD.unflatten(0, (B, queries)).transpose(1, 2)
    return F.pad(out_BHND, (0, 0, window.memory, 0)) if window.memory else out_BHND


def ends(sequences: int, length: int, device: torch.device) -> Tensor:
    """Return where each of some packed sequences begins, and where the last ends, int32."""
    return torch.arange(sequences + 1, dtype=torch.int32, device=device) * length
