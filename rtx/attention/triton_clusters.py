"""Attention inside clusters by Triton kernels: what `clusters.attend_members` computes, without gathered copies.

Nothing here imports Triton until it is asked to compute. Every step is deterministic: the same bits at every run.

Shapes: B sequences, H heads, N positions, D size of queries and keys, E of values, L lists, M members of all lists
together, R = B * H * N rows, T tiles.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtx.attention.derivatives import first_alone
from rtx.attention.lists import Members
from rtx.attention.shaw import Distances

TYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 128
"""The largest size of a head: beyond it a tile's gradients do not fit into registers."""


class Tiles(NamedTuple):
    """The lists cut into neighbouring slots, list after list; tiles behind the last have no members."""

    first_T: Tensor
    """The number in M of the first member of the tile's list."""
    count_T: Tensor
    """Members of the tile's list; 0: an empty tile."""
    slot_T: Tensor
    """The tile's first slot."""


class Inverse(NamedTuple):
    """The members of each row, in the order of their clusters."""

    member_M: Tensor
    """Numbers into M, sorted by row."""
    begin_R1: Tensor
    """Where the members of row r begin in `member_M`; those of row r + 1 begin where they end."""


class Shape(NamedTuple):
    """What the kernels are compiled for."""

    D: int
    WIDE_D: int
    E: int
    WIDE_E: int
    TILE: int
    """Slots of a tile."""
    PRECISION: str
    """How float32 is multiplied: "ieee" is exact to the last bits, as torch is by default."""


class Settings(NamedTuple):
    """What is not differentiated."""

    members: Members
    window: int
    scale: float
    attend_self: bool


def triton_refusal(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    *,
    dropout: float = 0.0,
    relative: Distances | None = None,
) -> str | None:
    """Return why the kernels cannot run a case, a clause that names the reason; None where they can."""
    if dropout:
        return f"dropout={dropout}: the Triton kernels have none"
    if relative is not None:
        return "the Triton kernels have no relative (Shaw) terms"
    for name, x_BHND in (("q_BHND", q_BHND), ("k_BHND", k_BHND), ("v_BHND", v_BHND)):
        if x_BHND.dtype != q_BHND.dtype:
            return f"{name} is of {x_BHND.dtype}: the Triton kernels need {q_BHND.dtype}, as q_BHND is"
        refusal = size_refusal(name, x_BHND)
        if refusal is not None:
            return refusal
    return device_refusal("q_BHND", q_BHND)


def size_refusal(name: str, x_BHND: Tensor) -> str | None:
    """Return why the type or the head size of a tensor is not for the kernels; None where it is."""
    if x_BHND.dtype not in TYPES:
        return f"{name} is of {x_BHND.dtype}: the Triton kernels take float16, bfloat16 or float32"
    if not 1 <= x_BHND.shape[-1] <= WIDEST:
        return f"{name} has the head size {x_BHND.shape[-1]}: the Triton kernels take 1 to {WIDEST}"
    return None


def device_refusal(name: str, x: Tensor) -> str | None:
    """Return why no kernel can run where a tensor is; None where one can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if x.device.type == "cuda":
        return None
    if x.device.type != "cpu":
        return f"{name} is on {x.device}: the Triton kernels run on CUDA devices"
    from rtx.attention import triton_kernels

    if not triton_kernels.INTERPRETED:
        return (
            f"{name} is on the CPU: Triton kernels run there by its interpreter alone (TRITON_INTERPRET=1, for tests)"
        )
    return None


def attend_members_triton(
    q_BHND: Tensor,
    k_BHND: Tensor,
    v_BHND: Tensor,
    members: Members,
    *,
    window: int,
    scale: float,
    attend_self: bool = True,
    dropout: float = 0.0,
    relative: Distances | None = None,
    slot_distance: bool = False,
) -> Tensor:
    """Return the mean of each position's outputs over its clusters, zero where it has none, `[B, H, N, E]`.

    As `attend_members`; float32 inside, whatever the inputs are of. `slot_distance` belongs to `relative`.

    Raises:
        ValueError: what `triton_refusal` says.
    """
    refusal = triton_refusal(q_BHND, k_BHND, v_BHND, dropout=dropout, relative=relative)
    if refusal is not None:
        raise ValueError(refusal)
    settings = Settings(members, window, scale, attend_self)
    keys_BHND = None if k_BHND is q_BHND else k_BHND
    with torch.cuda.device_of(q_BHND):
        return TritonAttention.apply(q_BHND, keys_BHND, v_BHND, settings)  # type: ignore[return-value]


class TritonAttention(torch.autograd.Function):
    """Kernels forward and backward; the backward pass keeps the inputs, and an output and a number for each member."""

    @staticmethod
    def forward(ctx: Any, q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor, settings: Settings) -> Tensor:
        """Return the outputs; without `k_BHND` the queries are the keys."""
        q_RD, v_RE = as_rows(q_BHND), as_rows(v_BHND)
        k_RD = q_RD if k_BHND is None else as_rows(k_BHND)
        members = settings.members
        inverse = invert(members)
        shape = choose_shape(q_RD, v_RE, settings.window)
        tiles = cut(members, shape.TILE)
        out_ME, norm_M = attend_tiles(q_RD, k_RD, v_RE, tiles, settings, shape)
        ctx.save_for_backward(q_RD, k_RD, v_RE, out_ME, norm_M, members.row_M, *tiles, *inverse)
        ctx.settings, ctx.tile_shape, ctx.shared = settings, shape, k_BHND is None
        return combine(out_ME, inverse, members.rows, mean=True).view(v_BHND.shape)

    @staticmethod
    @first_alone
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of queries, keys and values."""
        q_RD, k_RD, v_RE, out_ME, norm_M, row_M, *rest = ctx.saved_tensors
        tiles, inverse = Tiles(*rest[:3]), Inverse(*rest[3:])
        settings: Settings = ctx.settings
        grad_BHNE = gradients[0]
        grad_RE = as_rows(grad_BHNE)
        saved = q_RD, k_RD, v_RE, grad_RE, row_M, norm_M
        shares = share_and_delta(grad_RE, out_ME, row_M, inverse)
        parts = tile_gradients(saved, shares, tiles, settings, ctx.tile_shape, ctx.shared)
        leading = grad_BHNE.shape[:-1]
        sums = [
            None
            if part is None
            else combine(part, inverse, settings.members.rows, mean=False).view(*leading, part.shape[-1])
            for part in parts
        ]
        return *sums, None


def as_rows(x_BHND: Tensor) -> Tensor:
    """Return the rows `[R, D]` in one piece of memory."""
    return x_BHND.reshape(-1, x_BHND.shape[-1]).contiguous()


def choose_shape(q_RD: Tensor, v_RE: Tensor, window: int) -> Shape:
    """Return tiles no longer than the window asks for, of what fits into a program's registers."""
    D, E = q_RD.shape[-1], v_RE.shape[-1]
    most = 32 if q_RD.dtype == torch.float32 else 128
    return Shape(D, wide(D), E, wide(E), min(most, wide(window)), "ieee")


def pace(shape: Shape, dtype: torch.dtype, backward: bool) -> dict[str, int]:
    """Return how many slots a program reads at a time, how many warps share it, and how far its loads run ahead.

    Chosen so that nothing spills to memory and shared memory stays under 99 KiB, what most devices have.
    """
    if dtype == torch.float32:
        return {"STEP": 16, "num_warps": 8, "num_stages": 2}
    large = shape.TILE == 128 and max(shape.WIDE_D, shape.WIDE_E) > 64
    step = min(shape.TILE, 32 if backward else 64)
    return {"STEP": step, "num_warps": 8 if large else 4, "num_stages": 2 if large and backward else 3}


def wide(size: int) -> int:
    """Return the next power of two, 16 at least: what a matrix product on tiles takes."""
    return max(16, 1 << (size - 1).bit_length())


def cut(members: Members, size: int) -> Tiles:
    """Cut the lists into tiles of `size` slots. Their number has a bound that needs no look at the counts."""
    count_L = members.count_L
    most = len(members.row_M) // size + len(count_L)
    tiles_L = (count_L + (size - 1)) // size
    end_L = tiles_L.cumsum(0)
    number_T = torch.arange(most, device=count_L.device)
    list_T = torch.searchsorted(end_L, number_T, right=True)
    real_T, list_T = list_T < len(count_L), list_T.clamp(max=len(count_L) - 1)
    first_L = count_L.cumsum(0) - count_L
    slot_T = (number_T - (end_L - tiles_L)[list_T]) * size
    return Tiles(first_L[list_T], torch.where(real_T, count_L[list_T], 0).int(), slot_T.int())


def invert(members: Members) -> Inverse:
    """Return which members each row has."""
    row_M = members.row_M.int() if members.rows < 1 << 31 else members.row_M  # a radix sort takes half as long
    sorted_M, member_M = torch.sort(row_M, stable=True)
    row_R1 = torch.arange(members.rows + 1, device=row_M.device, dtype=row_M.dtype)
    return Inverse(member_M, torch.searchsorted(sorted_M, row_R1))


def attend_tiles(
    q_RD: Tensor, k_RD: Tensor, v_RE: Tensor, tiles: Tiles, settings: Settings, shape: Shape
) -> tuple[Tensor, Tensor]:
    """Return each member's output `[M, E]` and the base-2 logarithm `[M]` of the sum of its weights."""
    from rtx.attention import triton_kernels as kernels

    row_M = settings.members.row_M
    out_ME = v_RE.new_empty(len(row_M), shape.E)
    norm_M = torch.empty(len(row_M), dtype=torch.float32, device=v_RE.device)
    if len(row_M):
        launch(
            kernels.forward_tiles,
            (len(tiles.slot_T),),
            q_RD,
            k_RD,
            v_RE,
            row_M,
            *tiles,
            out_ME,
            norm_M,
            settings.window,
            float(settings.scale * math.log2(math.e)),
            SKIP=skip(settings),
            **shape._asdict(),
            **pace(shape, q_RD.dtype, backward=False),
        )
    return out_ME, norm_M


def share_and_delta(grad_RE: Tensor, out_ME: Tensor, row_M: Tensor, inverse: Inverse) -> tuple[Tensor, Tensor]:
    """Return each member's share in the mean of its position, and that share of gradient · output."""
    from rtx.attention import triton_kernels as kernels

    M, E = out_ME.shape
    share_M, delta_M = torch.empty(2, M, dtype=torch.float32, device=out_ME.device)
    if M:
        sizes = {"E": E, "WIDE_E": wide(E), "SPAN": 32}
        grid = (-(-M // sizes["SPAN"]),)
        launch(kernels.prepare_members, grid, grad_RE, out_ME, row_M, inverse.begin_R1, share_M, delta_M, M, **sizes)
    return share_M, delta_M


def tile_gradients(
    saved: tuple[Tensor, ...],
    shares: tuple[Tensor, Tensor],
    tiles: Tiles,
    settings: Settings,
    shape: Shape,
    shared: bool,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return each member's gradients as a query (and key, where these are the same), a key and a value."""
    from rtx.attention import triton_kernels as kernels

    q_RD, k_RD, v_RE, grad_RE, row_M, norm_M = saved
    M = len(row_M)
    grad_q_MD, grad_v_ME = q_RD.new_empty(M, shape.D), v_RE.new_empty(M, shape.E)
    grad_k_MD = None if shared else k_RD.new_empty(M, shape.D)
    if M:
        launch(
            kernels.backward_tiles,
            (len(tiles.slot_T),),
            q_RD,
            k_RD,
            v_RE,
            grad_RE,
            row_M,
            *tiles,
            norm_M,
            *shares,
            grad_q_MD,
            grad_q_MD if grad_k_MD is None else grad_k_MD,
            grad_v_ME,
            settings.window,
            float(settings.scale),
            float(settings.scale * math.log2(math.e)),
            SHARED=shared,
            SKIP=skip(settings),
            **shape._asdict(),
            **pace(shape, q_RD.dtype, backward=True),
        )
    return grad_q_MD, grad_k_MD, grad_v_ME


def combine(part_MD: Tensor, inverse: Inverse, rows: int, mean: bool) -> Tensor:
    """Return for each row the sum or the mean over its members, in the order of their clusters, `[R, D]`."""
    from rtx.attention import triton_kernels as kernels

    D = part_MD.shape[-1]
    out_RD = part_MD.new_empty(rows, D)
    if rows:
        sizes = {"D": D, "WIDE_D": wide(D), "SPAN": 32}
        grid = (-(-rows // sizes["SPAN"]),)
        launch(kernels.sum_members, grid, part_MD, *inverse, out_RD, rows, MEAN=mean, **sizes)
    return out_RD


def launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    """Start a kernel's programs; to type checkers, which know nothing of Triton, kernels are functions."""
    kernel[grid](*arguments, **options)


def skip(settings: Settings) -> int:
    """Return 1 where a member reads itself only as the first of its list, else 0."""
    return 0 if settings.attend_self or settings.window == 1 else 1
