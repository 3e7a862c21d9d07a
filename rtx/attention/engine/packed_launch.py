"""Launch the kernels of `packed_kernels.py`: their inputs, tiles and grids.

Shapes: B sequences, H heads, N positions, R = B * H * N rows, P query members, M key members, T
distances, D and E head sizes of keys and values, W columns.
"""

import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtx.attention.engine.lists import KernelLists, RowMembers
from rtx.attention.engine.rounding import power_of_two, whole_pieces

ROWS_OF_SUM = 32
"""Rows of a program of `reduce_kernel` and of `combine_kernel`."""
MAX_COLUMNS_OF_SUM = 128
"""The most columns of such a program."""


class Tile(NamedTuple):
    """Launch constants of a kernel."""

    queries: int
    """BQ, query members of a tile."""
    keys: int
    """BK, key members of a tile."""
    warps: int
    """`num_warps` of a program."""
    stages: int
    """`num_stages` of its loop: tiles that are loaded ahead."""


class KernelTiles(NamedTuple):
    """The tiles of one kernel; "by distance" means with logits by distance."""

    up_to_64: Tile
    """For head sizes up to 64."""
    up_to_128: Tile
    up_to_64_by_distance: Tile
    up_to_128_by_distance: Tile


TILES = {
    "attend": KernelTiles(
        up_to_64=Tile(64, 64, 4, 2),
        up_to_128=Tile(128, 64, 8, 3),
        up_to_64_by_distance=Tile(64, 64, 8, 2),
        up_to_128_by_distance=Tile(64, 64, 8, 2),
    ),
    "weigh": KernelTiles(
        up_to_64=Tile(64, 64, 8, 2),
        up_to_128=Tile(64, 64, 8, 2),
        up_to_64_by_distance=Tile(64, 64, 8, 2),
        up_to_128_by_distance=Tile(64, 64, 8, 2),
    ),
    "dq": KernelTiles(
        up_to_64=Tile(64, 64, 4, 1),
        up_to_128=Tile(64, 64, 4, 2),
        up_to_64_by_distance=Tile(32, 64, 8, 1),
        up_to_128_by_distance=Tile(32, 64, 8, 1),
    ),
    "dkv": KernelTiles(
        up_to_64=Tile(32, 64, 4, 2),
        up_to_128=Tile(32, 64, 4, 3),
        up_to_64_by_distance=Tile(32, 64, 8, 1),
        up_to_128_by_distance=Tile(32, 64, 8, 2),
    ),
}
"""Tiles in float16 and bfloat16.

Those of attend, dq and dkv up to 64 are the fastest of a dozen on an H100, where a query read 256
keys of a list. Where it read 64 keys in each of several lists, other tiles are faster: attend takes
15% less time with (64, 32, 4, 3), and dq and dkv take at most 5% less. The tiles above 64 and by
distance are chosen such that almost no form of a kernel needs more than the 255 registers of a
thread; more would be spilled to slow memory (`benchmarks/results/aot.txt`).
"""
FLOAT32_UP_TO_64 = Tile(32, 32, 8, 1)
FLOAT32_UP_TO_128 = Tile(16, 16, 8, 1)
"""Smaller: no tensor core multiplies float32 in full precision, so products take registers."""


class ListTensors(NamedTuple):
    """The tensors of `KernelLists` that kernels read, without nesting.

    A custom operator takes a list of tensors, but no NamedTuple.
    """

    query_row_P: Tensor
    key_row_M: Tensor
    start_P: Tensor
    stop_P: Tensor
    low_M: Tensor
    high_M: Tensor
    query_first_R1: Tensor
    query_member_P: Tensor
    key_first_R1: Tensor
    key_member_M: Tensor

    @property
    def query_members(self) -> RowMembers:
        """The query members of each row."""
        return RowMembers(self.query_first_R1, self.query_member_P)

    @property
    def key_members(self) -> RowMembers:
        """The key members of each row."""
        return RowMembers(self.key_first_R1, self.key_member_M)


def list_tensors(lists: KernelLists) -> ListTensors:
    """Return the tensors of lists that kernels read."""
    return ListTensors(
        query_row_P=lists.query_row_P,
        key_row_M=lists.key_row_M,
        start_P=lists.start_P,
        stop_P=lists.stop_P,
        low_M=lists.low_M,
        high_M=lists.high_M,
        query_first_R1=lists.query_members.first_R1,
        query_member_P=lists.query_members.member_M,
        key_first_R1=lists.key_members.first_R1,
        key_member_M=lists.key_members.member_M,
    )


class KernelInputs(NamedTuple):
    """What forward and backward kernels read alike."""

    q_BHND: Tensor
    k_BHND: Tensor
    v_BHNE: Tensor
    lists: ListTensors
    holes: list[Tensor]
    """The three tensors of `rtx.attention.reads.Holes`, or none."""
    keys_HTD: Tensor | None
    """Keys by distance."""
    bias_HT: Tensor | None
    """Bias by distance; only with keys by distance."""
    values_TE: Tensor | None
    """Values by distance; only with keys by distance."""
    seed_1: Tensor | None
    """Of dropout, int64."""
    scale: float
    dropout: float
    in_order: bool
    """Of `KernelLists`."""

    @property
    def P(self) -> int:
        """Query members."""
        return len(self.lists.query_row_P)

    @property
    def M(self) -> int:
        """Key members."""
        return len(self.lists.key_row_M)

    @property
    def D(self) -> int:
        """Head size of queries and keys."""
        return self.q_BHND.shape[-1]

    @property
    def E(self) -> int:
        """Head size of values."""
        return self.v_BHNE.shape[-1]

    @property
    def R(self) -> int:
        """Rows."""
        return self.q_BHND.shape[:3].numel()

    @property
    def T(self) -> int:
        """Distances; 1 without terms by distance, of which kernels then read nothing."""
        return 1 if self.keys_HTD is None else self.keys_HTD.shape[1]


def launch(
    name: str, inputs: KernelInputs, logit_table_RT: Tensor | None, **arguments: Any
) -> None:
    """Run a kernel for all query members, or "dkv" for all key members.

    Args:
        name: a key of `TILES`.
        arguments: the kernel's parameters that not all kernels have, by name.
    """
    by_distance = logit_table_RT is not None
    tile = tile_of(name, max(inputs.D, inputs.E), inputs.q_BHND.dtype, by_distance)
    programs = programs_of(inputs, name, tile)
    if programs == 0:
        return
    kernel = getattr(kernels(), f"{name}_kernel")
    kernel[(programs,)](
        **tensor_arguments(inputs),
        **number_arguments(inputs),
        **arguments,
        **head_sizes(inputs.D, inputs.E),
        logit_table=logit_table_RT,
        HOLES=len(inputs.holes[0]) if inputs.holes else 0,
        KEYS_BY_DISTANCE=by_distance,
        DROPOUT=inputs.dropout > 0,
        IN_ORDER=inputs.in_order,
        BQ=tile.queries,
        BK=tile.keys,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )


def programs_of(inputs: KernelInputs, name: str, tile: Tile) -> int:
    """Return how many programs a kernel has: one for each tile of query or of key members."""
    size = tile.keys if name == "dkv" else tile.queries
    if inputs.in_order:
        # No tile has members of two sequences.
        B, H, N, _ = inputs.q_BHND.shape
        return B * H * whole_pieces(N, size)
    return whole_pieces(inputs.M if name == "dkv" else inputs.P, size)


def kernels() -> ModuleType:
    """Return the kernels' module."""
    # Imported here because it imports Triton, without which this module must be importable.
    from rtx.attention.engine import packed_kernels

    return packed_kernels


def tile_of(name: str, size: int, dtype: torch.dtype, by_distance: bool) -> Tile:
    """Return the tile of a kernel for heads of `size`, the greater of both head sizes."""
    is_small = size <= 64
    if dtype == torch.float32:
        return FLOAT32_UP_TO_64 if is_small else FLOAT32_UP_TO_128
    tiles = TILES[name]
    if by_distance:
        return tiles.up_to_64_by_distance if is_small else tiles.up_to_128_by_distance
    return tiles.up_to_64 if is_small else tiles.up_to_128


def tensor_arguments(inputs: KernelInputs) -> dict[str, Tensor | None]:
    """Return the tensors that all kernels read, by their names in a kernel."""
    hole_value_iM, hole_low_iP, hole_high_iP = inputs.holes or (None, None, None)
    return {
        "q": inputs.q_BHND,
        "k": inputs.k_BHND,
        "v": inputs.v_BHNE,
        "query_row": inputs.lists.query_row_P,
        "key_row": inputs.lists.key_row_M,
        "hole_value": hole_value_iM,
        "hole_low": hole_low_iP,
        "hole_high": hole_high_iP,
        "seed": inputs.seed_1,
    }


def number_arguments(inputs: KernelInputs) -> dict[str, int | float]:
    """Return the numbers that all kernels read, by their names in a kernel."""
    arguments: dict[str, int | float] = {}
    for name, tensor in (("q", inputs.q_BHND), ("k", inputs.k_BHND), ("v", inputs.v_BHNE)):
        b_stride, h_stride, n_stride, unit = tensor.stride()
        assert unit == 1
        arguments |= {f"{name}_b": b_stride, f"{name}_h": h_stride, f"{name}_n": n_stride}
    # With dropout 1 every weight is dropped, so that no kernel reads the infinity.
    rescale = 1 / (1 - inputs.dropout) if inputs.dropout < 1 else math.inf
    return arguments | {
        "H": inputs.q_BHND.shape[1],
        "N": inputs.q_BHND.shape[2],
        "P": inputs.P,
        "M": inputs.M,
        "last_distance": inputs.T - 1,
        "scale": inputs.scale,
        "dropout": inputs.dropout,
        "rescale": rescale,
    }


def head_sizes(D: int, E: int) -> dict[str, int]:
    """Return head sizes and the powers of 2 they are padded to, by their names in a kernel."""
    return {"D": D, "E": E, "D_PADDED": power_of_two(D), "E_PADDED": power_of_two(E)}


def sum_by_row(
    x_PW: Tensor,
    members: RowMembers,
    out_RW: Tensor,
    plus_PW: Tensor | None = None,
) -> None:
    """Write to `out_RW` the sum of x, and of `plus_PW` if there is one, over each row's members."""
    reduce_by_row(members, out_RW, x=x_PW, y=plus_PW, lse=None, share=None)


def mean_by_row(
    x_PW: Tensor,
    members: RowMembers,
    lse_P: Tensor,
    out_RW: Tensor,
    share_R: Tensor,
) -> None:
    """Write to `out_RW` the mean of x over each row's members that read something; 0 without any.

    And to `share_R` 1 / the number of these members, 1 without any.
    """
    reduce_by_row(members, out_RW, x=x_PW, y=None, lse=lse_P, share=share_R)


def reduce_by_row(
    members: RowMembers,
    out_RW: Tensor,
    *,
    x: Tensor,
    y: Tensor | None,
    lse: Tensor | None,
    share: Tensor | None,
) -> None:
    """Run `reduce_kernel`: a mean with `lse` and `share`, else a sum."""
    launch_by_row(
        kernels().reduce_kernel,
        members,
        out_RW,
        x=x,
        y=y,
        lse=lse,
        share=share,
        HAS_Y=y is not None,
        MEAN=lse is not None,
    )


def combine_by_row(
    x_PW: Tensor,
    members: RowMembers,
    lse_P: Tensor,
    out_RW: Tensor,
    lse_R: Tensor,
) -> None:
    """Write to `out_RW` and `lse_R` one softmax over the keys of all members of each row.

    Args:
        x_PW, lse_P: outputs and log-sums of members.
    """
    launch_by_row(kernels().combine_kernel, members, out_RW, x=x_PW, lse=lse_P, row_lse=lse_R)


def launch_by_row(kernel: Any, members: RowMembers, out_RW: Tensor, **arguments: Any) -> None:
    """Run a kernel whose programs have some rows and some columns of `out_RW` each."""
    R, W = out_RW.shape
    if R == 0:
        return
    columns = min(MAX_COLUMNS_OF_SUM, power_of_two(W))
    grid = whole_pieces(R, ROWS_OF_SUM), whole_pieces(W, columns)
    kernel[grid](
        **arguments,
        first=members.first_R1,
        member=members.member_M,
        out=out_RW,
        R=R,
        WIDTH=W,
        BR=ROWS_OF_SUM,
        BW=columns,
        num_warps=4,
    )
