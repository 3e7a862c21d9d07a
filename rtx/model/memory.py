"""Memory of earlier segments, as in Transformer-XL and the Compressive Transformer.

Dai et al. 2019; Rae et al. 2020. A stream is read in segments. Every block stores its inputs at the
last M positions, its *memory*; its attention reads them as positions before the segment. Positions
that leave the memory may be compressed, several to one. The attention reads the last C compressed
positions as positions before the memory.

Shapes: B streams, N positions of a segment, E hidden width, M positions of memory, C compressed
ones, K positions that attention reads, O positions that leave the memory, D head size.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.gradients import with_zero_gradients
from rtx.model.block import Block
from rtx.model.norm import without_gradient
from rtx.settings.schema import Config, ModelConfig


class Compression(nn.Module):
    """Compresses `rate` positions to one: by a convolution, or to their mean or maximum.

    Rae et al. 2020, section 3.
    """

    def __init__(self, hidden: int, rate: int, kind: str) -> None:
        super().__init__()
        self.rate = rate
        self.kind = kind
        self.conv: nn.Conv1d | None = None
        if kind == "conv":
            self.conv = nn.Conv1d(hidden, hidden, rate, stride=rate)

    def forward(self, old_BOE: Tensor) -> Tensor:
        """Return the compressed positions `[B, O / rate, E]`."""
        if self.conv is not None:
            return self.conv(old_BOE.mT).mT
        parts = old_BOE.unflatten(1, (-1, self.rate))
        if self.kind == "mean":
            return parts.mean(2)
        return parts.amax(2)


class MemoryBlock(Block):
    """A block whose attention also reads the block's inputs of earlier segments."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__(config, layer)
        model = config.model
        self.compression: Compression | None = None
        if model.compressed:
            self.compression = Compression(
                hidden=model.hidden,
                rate=model.compression_rate,
                kind=model.compression,
            )

    # Other blocks take documents in the place of a memory (`Transformer.run_blocks`).
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x_BNE: Tensor,
        streaming: bool = False,
        memory_BKE: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output `[B, N, E]` and the auxiliary loss of its attention.

        Args:
            memory_BKE: the block's inputs at earlier positions: compressed ones, then others.
        """
        if memory_BKE is None:
            return super().forward(x_BNE, streaming)
        longer_BKE = torch.cat([memory_BKE, x_BNE], dim=1)
        memory_length = memory_BKE.shape[1]
        normed_BKE = self.before_attention(longer_BKE)
        branch_BNE, loss = self.attention(normed_BKE, streaming, memory_length)
        return self.after_attention(x_BNE, branch_BNE), loss

    def compression_loss(self, x_BNE: Tensor, old_BOE: Tensor, compressed_BCE: Tensor) -> Tensor:
        """Return how far attention over compressed positions is from attention over the old ones.

        It is the mean square over all heads, by content alone (Rae et al., Algorithm 2). Only
        `compressed_BCE` has a gradient.
        """
        weight_FE = self.attention.qkv.weight.detach()
        query_FE, key_FE, value_FE = weight_FE.split(self.attention.widths)
        (group,) = self.attention.head_groups()
        q_BHND = self.heads_of(x_BNE.detach(), query_FE)
        if group.query_norm is not None:
            q_BHND = without_gradient(group.query_norm, q_BHND)

        def outputs_over(x_BKE: Tensor) -> Tensor:
            k_BHKD = self.heads_of(x_BKE, key_FE)
            v_BHKD = self.heads_of(x_BKE, value_FE)
            if group.key_norm is not None:
                k_BHKD = without_gradient(group.key_norm, k_BHKD)
            has_groups = group.queries_of_key_head > 1
            return F.scaled_dot_product_attention(q_BHND, k_BHKD, v_BHKD, enable_gqa=has_groups)

        out_BHND = outputs_over(compressed_BCE)
        old_out_BHND = outputs_over(old_BOE.detach())
        return F.mse_loss(out_BHND, old_out_BHND)

    def heads_of(self, x_BKE: Tensor, weight_FE: Tensor) -> Tensor:
        """Return the vectors projected by a matrix, `[B, H, K, D]`; the norm gets no gradient."""
        if self.pre:
            x_BKE = without_gradient(self.attention_norm, x_BKE)
        columns = F.linear(x_BKE, weight_FE)
        size = self.attention.size
        x_BKHD = columns.unflatten(-1, (-1, size))
        return x_BKHD.transpose(1, 2)


class Memory:
    """The memory of B parallel streams in every block, without gradient; empty at the start."""

    def __init__(self, model: ModelConfig) -> None:
        self.length = model.memory
        self.compressed_length = model.compressed
        self.rate = model.compression_rate
        self.layers: list[Tensor] = []
        """The memory of each block, `[B, M, E]`."""
        self.compressed: list[Tensor] = []
        """The compressed memory of each block, `[B, C, E]`; empty before the first compression."""
        self.last_B: Tensor | None = None
        """The last token of each stream."""

    def read(self, layer: int) -> Tensor | None:
        """Return the memory that a block reads, `[B, C + M, E]`; None in the first segment."""
        if not self.layers:
            return None
        memory_BME = self.layers[layer]
        if not self.compressed:
            return memory_BME
        compressed_BCE = self.compressed[layer]
        return torch.cat([compressed_BCE, memory_BME], dim=1)

    def update(
        self,
        blocks: Sequence[MemoryBlock],
        inputs: list[Tensor],
        tokens_BN: Tensor,
    ) -> Tensor:
        """Append a segment, compress the positions that leave the memory, and return the loss.

        Args:
            blocks: the blocks of the model.
            inputs: the inputs of each block in the segment, `[B, N, E]`.
        """
        leaving = self.append(inputs, tokens_BN)
        if not self.compressed_length:
            return inputs[0].new_zeros(())
        return self.compress(blocks, inputs, leaving)

    def append(self, inputs: list[Tensor], tokens_BN: Tensor) -> list[Tensor]:
        """Append the inputs of each block, and return those that leave its memory, `[B, O, E]`.

        With compression, O is a multiple of its rate.
        """
        longer = appended(self.layers, inputs)
        positions = longer[0].shape[1]
        leaving = max(0, positions - self.length)
        if self.compressed_length:
            leaving -= leaving % self.rate
        self.layers = without_first(longer, leaving)
        self.last_B = tokens_BN[:, -1]
        return [x_BKE[:, :leaving] for x_BKE in longer]

    def append_compressed(self, compressed: list[Tensor]) -> None:
        """Append compressed positions of each block, and drop the oldest."""
        longer = appended(self.compressed, compressed)
        positions = longer[0].shape[1]
        oldest = max(0, positions - self.compressed_length)
        self.compressed = without_first(longer, oldest)

    def compress(
        self,
        blocks: Sequence[MemoryBlock],
        inputs: list[Tensor],
        leaving: list[Tensor],
    ) -> Tensor:
        """Compress the inputs that leave the memory of each block, and return the loss."""
        compressions = []
        for block in blocks:
            assert block.compression is not None
            compressions.append(block.compression)
        loss = inputs[0].new_zeros(())
        if not leaving[0].shape[1]:
            parameters = nn.ModuleList(compressions).parameters()
            return with_zero_gradients(loss, parameters)
        compressed = []
        for compression, old_BOE in zip(compressions, leaving, strict=True):
            compressed.append(compression(old_BOE))
        self.append_compressed(compressed)
        is_trained = blocks[0].training and compressions[0].conv is not None
        if is_trained:
            for block, *tensors in zip(blocks, inputs, leaving, compressed, strict=True):
                block_loss = block.compression_loss(*tensors)
                loss = loss + block_loss
        return loss


def appended(memories: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """Return the memory of each block with its inputs appended, without gradient.

    Args:
        memories: empty at the start.
    """
    if not memories:
        return [x_BNE.detach() for x_BNE in inputs]
    longer = []
    for memory_BME, x_BNE in zip(memories, inputs, strict=True):
        longer_BKE = torch.cat([memory_BME, x_BNE], dim=1)
        longer.append(longer_BKE.detach())
    return longer


def without_first(memories: list[Tensor], count: int) -> list[Tensor]:
    """Return copies of the memory of each block without its first positions."""
    return [x_BKE[:, count:].clone() for x_BKE in memories]
