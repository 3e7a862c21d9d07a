"""What streams keep of earlier segments: memory (Dai et al. 2019) and compressed memory (Rae et al. 2020).

Shapes: B streams, N positions of a segment, M of memory, O old ones that leave it, C compressed, E hidden width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.config import ModelConfig
from rtx.model.multihead import MultiheadAttention


class Memory:
    """What parallel streams keep: what each block was given at the last positions, without gradient."""

    def __init__(self, model: ModelConfig) -> None:
        self.length, self.compressed_length, self.rate = model.memory, model.compressed, model.compression_rate
        self.layers: list[Tensor] = []  # `[B, M, E]` for each block
        self.compressed: list[Tensor] = []  # `[B, C, E]` for each block; none while nothing has left the memory
        self.last_B: Tensor | None = None  # the last unit of each stream

    def read(self, layer: int) -> Tensor | None:
        """Return what a block reads before its segment, `[B, C + M, E]`, oldest first; None at the start."""
        if not self.layers:
            return None
        return torch.cat([*self.compressed[layer : layer + 1], self.layers[layer]], dim=1)

    def take(self, inputs: list[Tensor], tokens_BN: Tensor) -> list[Tensor]:
        """Take in what the blocks were given for a segment, `[B, N, E]` each, and its units; return what leaves.

        `[B, O, E]` for each block, O a multiple of the rate where it is to be compressed.
        """
        kept = self.layers or [x_BNE[:, :0] for x_BNE in inputs]
        joined = [torch.cat(pair, dim=1).detach() for pair in zip(kept, inputs, strict=True)]
        old = max(0, joined[0].shape[1] - self.length)
        old -= old % self.rate if self.compressed_length else 0
        self.layers = [x_BKE[:, old:].clone() for x_BKE in joined]
        self.last_B = tokens_BN[:, -1]
        return [x_BKE[:, :old] for x_BKE in joined]

    def compress(self, made: list[Tensor]) -> None:
        """Take in newly compressed positions of every block, `[B, C, E]`; the oldest are forgotten."""
        kept = self.compressed or [x_BCE[:, :0] for x_BCE in made]
        joined = [torch.cat(pair, dim=1).detach() for pair in zip(kept, made, strict=True)]
        self.compressed = [x_BCE[:, max(0, x_BCE.shape[1] - self.compressed_length) :].clone() for x_BCE in joined]


class Compression(nn.Module):
    """One position of every `rate`: a convolution of that stride, their mean or maximum (Rae et al., section 3)."""

    def __init__(self, hidden: int, rate: int, kind: str) -> None:
        super().__init__()
        self.rate, self.kind = rate, kind
        self.conv = nn.Conv1d(hidden, hidden, rate, stride=rate) if kind == "conv" else None

    def forward(self, old_BOE: Tensor) -> Tensor:
        """Return the compressed positions `[B, O / rate, E]`."""
        if self.conv is not None:
            return self.conv(old_BOE.mT).mT
        parts = old_BOE.unflatten(1, (-1, self.rate))
        return parts.mean(2) if self.kind == "mean" else parts.amax(2)


def reconstruction_loss(
    attention: MultiheadAttention, norm: nn.LayerNorm | None, x_BNE: Tensor, old_BOE: Tensor, made_BCE: Tensor
) -> Tensor:
    """Return how far attention over compressed positions is from that over the old ones (Rae et al., Algorithm 2).

    The mean square, by content alone, of every head; everything but `made_BCE` is without gradient.
    """

    def attend(read_BKE: Tensor) -> Tensor:
        q, k, v = (
            F.linear(y, weight).unflatten(-1, (-1, attention.size)).transpose(1, 2)
            for y, weight in zip((normed(x_BNE.detach()), *[normed(read_BKE)] * 2), weights, strict=True)
        )
        return F.scaled_dot_product_attention(q, k, v)

    def normed(y_BKE: Tensor) -> Tensor:
        if norm is None:
            return y_BKE
        return F.layer_norm(y_BKE, norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps)

    weights = attention.qkv.weight.detach().split(attention.widths)
    return F.mse_loss(attend(made_BCE), attend(old_BOE.detach()))
