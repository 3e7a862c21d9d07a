"""The patterns of the Sparse Transformer: strided and fixed heads (Child et al. 2019, section 4.3).

positional.py has their base class: `sees` is the rule, `position_lists` the batch form, and
`PositionCache` the stream.

Shapes: H heads, N positions.
"""

from typing import Any

import torch
from torch import Tensor

from rtx.attention.arguments import check_positive, check_within
from rtx.attention.positional import FAR, PositionLists, PositionPattern
from rtx.attention.recurrent import Recurrent


class Strided(PositionPattern):
    """Position i reads i, i - stride, i - 2 stride, ... (Child et al. 2019, section 4.3).

    For data with a period, such as the rows of an image. Cost N^2 / (2 stride). With causal=False
    it reads i + stride, i + 2 stride, ..., too.
    """

    may_be_bidirectional = True

    def __init__(self, *, stride: int, **options: Any) -> None:
        super().__init__(**options)
        check_positive(stride=stride)
        self.stride = stride

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        return (i - j) % self.stride == 0

    def position_lists(self, position_N: Tensor, heads: int) -> list[PositionLists]:
        """Return a list for each remainder."""
        remainder_N = position_N % self.stride
        until_N = position_N + 1
        if not self.causal:
            until_N = torch.full_like(position_N, FAR)
        lists = PositionLists(
            list_HN=remainder_N,
            key_list_HN=remainder_N,
            since_N=torch.zeros_like(position_N),
            until_N=until_N,
        )
        return [lists]


class Fixed(PositionPattern):
    """Position i reads its block up to itself, and the summary columns of all earlier blocks.

    Child et al. 2019, section 4.3, for data without a period, such as text. One softmax spans both
    sets. Cost N (block + N summary / block) / 2. With causal=False a position reads its whole
    block, and the summary columns of later blocks, too, for twice the cost.

    Args:
        block: positions of a block.
        summary: c, summary columns of a block. Head 0 takes the last c columns of the block, head 1
            the c columns before these, and so on. After block // c heads the last come again.
    """

    may_be_bidirectional = True

    def __init__(self, *, block: int, summary: int, **options: Any) -> None:
        super().__init__(**options)
        check_positive(block=block)
        check_within("summary", summary, block, "block")
        self.block = block
        self.summary = summary

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        block_of_query = i // self.block
        block_of_key = j // self.block
        is_in_block = block_of_key == block_of_query
        return is_in_block | self.is_summary(head, j)

    def is_summary(self, head: int | Tensor, j: Tensor) -> Tensor:
        """Return whether j is a summary column of its block."""
        sub_blocks = self.block // self.summary
        sub_block = head % sub_blocks
        stop = self.block - self.summary * sub_block
        start = stop - self.summary
        column = j % self.block
        return (column >= start) & (column < stop)

    def position_lists(self, position_N: Tensor, heads: int) -> list[PositionLists]:
        """Return a list for each block, and one list of the summary columns of earlier blocks.

        With causal=False also one of the summary columns of later blocks.
        """
        blocks = lists_of_blocks(position_N, self.block, self.causal)
        first_of_block_N = blocks.list_HN * self.block
        zero_N = torch.zeros_like(position_N)
        earlier = self.summaries(position_N, heads, zero_N, first_of_block_N)
        if self.causal:
            return [blocks, earlier]
        next_block_N = first_of_block_N + self.block
        far_N = torch.full_like(position_N, FAR)
        later = self.summaries(position_N, heads, next_block_N, far_N)
        return [blocks, earlier, later]

    def summaries(
        self,
        position_N: Tensor,
        heads: int,
        since_N: Tensor,
        until_N: Tensor,
    ) -> PositionLists:
        """Return one list of all summary columns.

        Args:
            since_N, until_N: the first position that each query reads, and the one before which it
                stops reading.
        """
        head_H = torch.arange(heads, device=position_N.device)
        is_summary_HN = self.is_summary(head_H[:, None], position_N)
        zero_N = torch.zeros_like(position_N)
        return PositionLists(
            list_HN=zero_N,
            key_list_HN=torch.where(is_summary_HN, 0, -1),
            since_N=since_N,
            until_N=until_N,
        )


def lists_of_blocks(position_N: Tensor, block: int, causal: bool) -> PositionLists:
    """Return a list for each block, which its queries read up to themselves.

    Args:
        block: positions of a block.
        causal: False: its queries read the whole block.
    """
    block_N = position_N // block
    until_N = position_N + 1
    if not causal:
        until_N = torch.full_like(position_N, FAR)
    return PositionLists(
        list_HN=block_N,
        key_list_HN=block_N,
        since_N=torch.zeros_like(position_N),
        until_N=until_N,
    )


class FixedBlock(Recurrent):
    """Position i reads its block up to itself: the first kind of head of `Fixed`.

    Child et al. 2019, section 4.3, first give the pattern as two kinds of heads. With causal=False
    it reads its whole block.
    """

    may_be_bidirectional = True

    def __init__(self, *, block: int, **options: Any) -> None:
        check_positive(block=block)
        super().__init__(length=block, memory=0, **options)

    def until(self, i: Tensor) -> Tensor:
        if self.causal:
            return super().until(i)
        next_block = i // self.length + 1
        return next_block * self.length

    def position_lists(self, position_N: Tensor, heads: int) -> list[PositionLists]:
        """Return a list for each block, so that engines compute whole triangles."""
        return [lists_of_blocks(position_N, self.length, self.causal)]


class FixedSummary(Fixed):
    """Position i reads all summary columns up to itself: the second kind of head of `Fixed`.

    Child et al. 2019, section 4.3. A query reads the summary columns of its block as well. With
    causal=False it reads those of all blocks.
    """

    def sees(self, head: int, i: Tensor, j: Tensor) -> Tensor:
        return self.is_summary(head, j)

    def position_lists(self, position_N: Tensor, heads: int) -> list[PositionLists]:
        zero_N = torch.zeros_like(position_N)
        until_N = position_N + 1
        if not self.causal:
            until_N = torch.full_like(position_N, FAR)
        return [self.summaries(position_N, heads, zero_N, until_N)]
