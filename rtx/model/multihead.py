"""The attention layer: one projection, groups of heads, and one matrix that joins their outputs.

Shapes: B sequences, N positions, E hidden width, H heads of a group, D head size.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from rtx.attention import Documents
from rtx.model.heads import HeadGroup, HeadStream
from rtx.model.linear import Linear
from rtx.settings.derived import layer_patterns
from rtx.settings.schema import Config

Part = TypeVar("Part")
Parts = tuple[Part, Part | None, Part]
"""The parts of a group for queries, keys and values; keys without a matrix have None."""


class MultiheadAttention(nn.Module):
    """The heads of one layer, which share a projection; each group of them has a pattern."""

    groups: nn.ModuleDict

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        hidden = config.model.hidden
        groups = []
        widths = []
        key_widths = []
        value_widths = []
        for name, heads in layer_patterns(config, layer).items():
            group = HeadGroup(name, heads, config, layer)
            groups.append(group)
            widths.append(group.width)
            value_widths.append(group.kv_width)
            if group.key_source == "matrix":
                key_widths.append(group.kv_width)
        self.size = groups[0].size
        self.widths = [*widths, *key_widths, *value_widths]
        """The numbers of columns of the projection, in this order: the queries of each group, the
        keys of each group with a matrix for them, and the values of each group."""
        # The order of draws and of modules decides the first weights that a seed gives: patterns,
        # matrices, tables.
        columns = sum(self.widths)
        self.qkv = Linear(hidden, columns, bias=False)
        self.out = Linear(hidden, hidden, bias=False)
        groups_by_name = {group.name: group for group in groups}
        self.groups = nn.ModuleDict(groups_by_name)
        for group in groups:
            group.add_tables(config)
        self.has_key_loss = any(group.key_loss for group in groups)

    def head_groups(self) -> list[HeadGroup]:
        """Return the groups of heads, in the order in which `out` joins them."""
        return list(self.groups.values())  # type: ignore[return-value]

    def by_group(self, parts: Sequence[Part]) -> list[Parts[Part]]:
        """Return the parts of each group.

        Args:
            parts: one for each item of `widths`, in its order.
        """
        groups = self.head_groups()
        count = len(groups)
        queries = parts[:count]
        # Groups without a matrix of keys have none of these.
        keys = iter(parts[count:-count])
        values = parts[-count:]
        parts_of_groups: list[Parts[Part]] = []
        for group, query, value in zip(groups, queries, values, strict=True):
            key = None
            if group.key_source == "matrix":
                key = next(keys)
            parts_of_groups.append((query, key, value))
        return parts_of_groups

    def project(self, x_BNE: Tensor) -> list[Parts[Tensor]]:
        """Return the queries, keys and values of each group, `[B, H, N, D]`.

        With `model.kv_heads`, keys and values have fewer heads than queries (grouped queries).
        """
        parts = []
        qkv = self.qkv(x_BNE)
        for columns in qkv.split(self.widths, dim=-1):
            x_BNHD = columns.unflatten(-1, (-1, self.size))
            parts.append(x_BNHD.transpose(1, 2))
        return self.by_group(parts)

    def join(self, outputs: list[Tensor]) -> Tensor:
        """Return the layer's output `[B, N, E]` from the outputs of each group, `[B, H, N, D]`."""
        out_BHND = torch.cat(outputs, dim=1)
        out_BNHD = out_BHND.transpose(1, 2)
        return self.out(out_BNHD.flatten(2))

    def forward(
        self,
        x_BNE: Tensor,
        streaming: bool = False,
        memory_length: int = 0,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output `[B, N, E]` and its auxiliary loss.

        Args:
            streaming: every selection of keys is made from the prefix alone.
            memory_length: the number of positions at the start that serve as keys and values alone.
            documents: the documents of the sequences; None: each sequence is one.
        """
        loss = x_BNE.new_zeros((), dtype=torch.float32)
        if self.training and self.has_key_loss:
            loss = loss + self.key_loss()
        outputs = []
        projected = self.project(x_BNE)
        for group, qkv in zip(self.head_groups(), projected, strict=True):
            out_BHND, group_loss = group(*qkv, streaming, memory_length, documents)
            outputs.append(out_BHND)
            loss = loss + group_loss
        return self.join(outputs), loss

    def key_loss(self) -> Tensor:
        """Return the weighted distances between the matrices of queries and of keys."""
        losses = []
        parts = self.qkv.weight.split(self.widths)
        matrices = self.by_group(parts)
        for group, matrices_of_group in zip(self.head_groups(), matrices, strict=True):
            query_FE, key_FE, _ = matrices_of_group
            if group.key_loss and key_FE is not None:
                distance = matrix_distance(query_FE, key_FE, self.size)
                losses.append(group.key_loss * distance)
        return torch.stack(losses).sum()

    def streams(self) -> list[HeadStream]:
        """Return a stream of each group, at position 0."""
        return [HeadStream(group) for group in self.head_groups()]

    def prefill(self, x_BNE: Tensor, streams: list[HeadStream]) -> Tensor:
        """Return the layer's output `[B, N, E]` at the first N positions of new streams."""
        outputs = []
        projected = self.project(x_BNE)
        for stream, qkv in zip(streams, projected, strict=True):
            out_BHND = stream.prefill(*qkv)
            outputs.append(out_BHND)
        return self.join(outputs)

    def decode(self, x_B1E: Tensor, streams: list[HeadStream]) -> Tensor:
        """Return the layer's output `[B, 1, E]` at the next position of each stream."""
        outputs = []
        projected = self.project(x_B1E)
        for stream, qkv in zip(streams, projected, strict=True):
            out_BH1D = stream.decode(*qkv)
            outputs.append(out_BH1D)
        return self.join(outputs)


def matrix_distance(query_FE: Tensor, key_FE: Tensor, size: int) -> Tensor:
    """Return the mean over heads of the infinity norm of W_Q - W_K.

    It is the largest sum, over the outputs of a head, of the absolute differences of all weights of
    one output (the ICLR version of the paper, appendix A, equation 14).

    Args:
        query_FE, key_FE: the matrices of a group, with `size` rows (outputs) for each head.
    """
    distance_FE = (query_FE - key_FE).abs()
    sum_F = distance_FE.sum(-1)
    sum_HD = sum_F.unflatten(0, (-1, size))
    return sum_HD.amax(-1).mean()
