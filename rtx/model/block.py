"""One decoder block, attention and a feed-forward layer, each inside a residual branch; and what streams keep of what
earlier segments gave it: memory (Dai et al. 2019) and compressed memory (Rae et al. 2020).

Shapes: B sequences or streams, N positions (of a segment), R = B * N rows, E hidden width, F feed-forward width; M
positions of memory, O old ones that leave it, C compressed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.engine.softmax import recomputed
from rtx.config import Config, ModelConfig
from rtx.model.heads import HeadStream
from rtx.model.linear import Linear
from rtx.model.multihead import MultiheadAttention


class FeedForward(nn.Module):
    """Two matrices around relu or gelu; geglu multiplies the gelu with a third (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.ffn
        self.dropout = config.ffn_dropout
        self.parts = config.ffn_parts
        gates = 2 if config.ffn == "geglu" else 1
        self.inner = Linear(config.hidden, gates * config.ffn_hidden, bias=config.ffn != "geglu")
        self.outer = Linear(config.ffn_hidden, config.hidden, bias=config.ffn != "geglu")

    def forward(self, x_BNE: Tensor) -> Tensor:
        """Return the layer's output `[B, N, E]`; in parts, the wide units of one of them are held at a time."""
        if self.parts == 1:
            return self.whole(x_BNE)
        rows_RE = x_BNE.reshape(-1, x_BNE.shape[-1])
        parts = rows_RE.split(-(-len(rows_RE) // self.parts))
        return torch.cat([recomputed(self.whole, part_RE) for part_RE in parts]).view(x_BNE.shape)

    def whole(self, x_BNE: Tensor) -> Tensor:
        """Return the output of all rows at once; any leading shape."""
        x_BNF = self.inner(x_BNE)
        if self.activation == "geglu":
            x_BNF, gate_BNF = x_BNF.chunk(2, dim=-1)
            x_BNF = F.gelu(gate_BNF, approximate="tanh") * x_BNF
        else:
            x_BNF = F.relu(x_BNF) if self.activation == "relu" else F.gelu(x_BNF)
        return self.outer(F.dropout(x_BNF, self.dropout, self.training))


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


class Block(nn.Module):
    """Pre-norm: x + f(norm(x)); post-norm: norm(x + f(x)). Dropout on what each branch adds."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.pre = config.model.norm == "pre"
        self.dropout = config.model.dropout
        self.attention = MultiheadAttention(config, layer)
        self.feed_forward = FeedForward(config.model)
        self.attention_norm = nn.LayerNorm(config.model.hidden)
        self.feed_forward_norm = nn.LayerNorm(config.model.hidden)
        self.compression: Compression | None = None
        if config.model.compressed:
            self.compression = Compression(config.model.hidden, config.model.compression_rate, config.model.compression)

    def forward(
        self,
        x_BNE: Tensor,
        streaming: bool = False,
        memory_BME: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output `[B, N, E]` and the auxiliary loss of its attention.

        Args:
            streaming: every selection of keys is made from the prefix alone.
            memory_BME: inputs of this block at earlier positions, which its attention reads, too.
        """
        memory_length = 0
        read_BKE = x_BNE
        if memory_BME is not None:
            memory_length = memory_BME.shape[1]
            read_BKE = torch.cat([memory_BME, x_BNE], dim=1)
        branch_BNE, loss = self.attention(self.before_attention(read_BKE), streaming, memory_length)
        return self.finish(x_BNE, branch_BNE), loss

    def before_attention(self, x_BNE: Tensor) -> Tensor:
        """Return what the attention reads of the block's input."""
        if self.pre:
            return self.attention_norm(x_BNE)
        return x_BNE

    def finish(self, x_BNE: Tensor, branch_BNE: Tensor) -> Tensor:
        """Add the attention's output to the stream and run the feed-forward branch; any leading shape."""
        x_BNE = x_BNE + F.dropout(branch_BNE, self.dropout, self.training)
        if not self.pre:
            x_BNE = self.attention_norm(x_BNE)
        branch_BNE = self.feed_forward(self.feed_forward_norm(x_BNE) if self.pre else x_BNE)
        x_BNE = x_BNE + F.dropout(branch_BNE, self.dropout, self.training)
        return x_BNE if self.pre else self.feed_forward_norm(x_BNE)

    def prefill(self, x_BNE: Tensor, streams: list[HeadStream]) -> Tensor:
        """Return the block's output `[B, N, E]` at the first N positions of new streams."""
        branch_BNE = self.attention.prefill(self.before_attention(x_BNE), streams)
        return self.finish(x_BNE, branch_BNE)

    def decode(self, x_B1E: Tensor, streams: list[HeadStream]) -> Tensor:
        """Return the block's output `[B, 1, E]` at the next position of each stream."""
        branch_B1E = self.attention.decode(self.before_attention(x_B1E), streams)
        return self.finish(x_B1E, branch_B1E)

    def reconstruction_loss(self, x_BNE: Tensor, old_BOE: Tensor, made_BCE: Tensor) -> Tensor:
        """Return how far attention over compressed positions is from that over the old ones (Rae et al., Algorithm 2).

        The mean square, by content alone, of every head; everything but `made_BCE` is without gradient.
        """
        weights, norm = self.attention.qkv.weight.detach().split(self.attention.widths), self.attention_norm

        def normed(y_BKE: Tensor) -> Tensor:
            fixed = norm.weight.detach(), norm.bias.detach(), norm.eps
            return F.layer_norm(y_BKE, norm.normalized_shape, *fixed) if self.pre else y_BKE

        def attend(read_BKE: Tensor) -> Tensor:
            q, k, v = (
                F.linear(y, weight).unflatten(-1, (-1, self.attention.size)).transpose(1, 2)
                for y, weight in zip((normed(x_BNE.detach()), *[normed(read_BKE)] * 2), weights, strict=True)
            )
            return F.scaled_dot_product_attention(q, k, v)

        return F.mse_loss(attend(made_BCE), attend(old_BOE.detach()))


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
        joined = appended(self.layers, inputs)
        old = max(0, joined[0].shape[1] - self.length)
        old -= old % self.rate if self.compressed_length else 0
        self.layers = [x_BKE[:, old:].clone() for x_BKE in joined]
        self.last_B = tokens_BN[:, -1]
        return [x_BKE[:, :old] for x_BKE in joined]

    def compress(self, made: list[Tensor]) -> None:
        """Take in newly compressed positions of every block, `[B, C, E]`; the oldest are forgotten."""
        joined = appended(self.compressed, made)
        self.compressed = [x_BCE[:, max(0, x_BCE.shape[1] - self.compressed_length) :].clone() for x_BCE in joined]


def appended(kept: list[Tensor], new: list[Tensor]) -> list[Tensor]:
    """Return what each block has kept (nothing at the start) and behind it what is new, without gradient."""
    kept = kept or [x_BKE[:, :0] for x_BKE in new]
    return [torch.cat(pair, dim=1).detach() for pair in zip(kept, new, strict=True)]
