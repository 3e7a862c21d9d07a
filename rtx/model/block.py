"""One decoder block: attention and a feed-forward layer, each inside a residual branch.

Shapes: B sequences, N positions, R = B * N rows, E hidden width, F feed-forward width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rtx.config import Config, ModelConfig
from rtx.model.memory import Compression
from rtx.model.multihead import MultiheadAttention, Stream


class FeedForward(nn.Module):
    """Two matrices around relu or gelu; geglu multiplies the gelu with a third (Shazeer 2020)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.ffn
        self.dropout = config.ffn_dropout
        self.parts = config.ffn_parts
        gates = 2 if config.ffn == "geglu" else 1
        self.inner = nn.Linear(config.hidden, gates * config.ffn_hidden, bias=config.ffn != "geglu")
        self.outer = nn.Linear(config.ffn_hidden, config.hidden, bias=config.ffn != "geglu")

    def forward(self, x_BNE: Tensor) -> Tensor:
        """Return the layer's output `[B, N, E]`; in parts, the wide units of one of them are held at a time."""
        if self.parts == 1:
            return self.whole(x_BNE)
        rows_RE = x_BNE.reshape(-1, x_BNE.shape[-1])
        parts = rows_RE.split(-(-len(rows_RE) // self.parts))
        if torch.is_grad_enabled():
            outputs = [checkpoint(self.whole, part_RE, use_reentrant=False) for part_RE in parts]
        else:
            outputs = [self.whole(part_RE) for part_RE in parts]
        return torch.cat(outputs).view(x_BNE.shape)  # type: ignore[arg-type]

    def whole(self, x_BNE: Tensor) -> Tensor:
        """Return the output of all rows at once; any leading shape."""
        x_BNF = self.inner(x_BNE)
        if self.activation == "geglu":
            x_BNF, gate_BNF = x_BNF.chunk(2, dim=-1)
            x_BNF = F.gelu(gate_BNF, approximate="tanh") * x_BNF
        else:
            x_BNF = F.relu(x_BNF) if self.activation == "relu" else F.gelu(x_BNF)
        return self.outer(F.dropout(x_BNF, self.dropout, self.training))


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
        prefix: bool = False,
        streams: list[Stream] | None = None,
        memory_BME: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output `[B, N, E]` and the auxiliary loss of its attention; see `MultiheadAttention`.

        `memory_BME`: what earlier segments gave this block, which its attention reads, too.
        """
        read_BKE = x_BNE if memory_BME is None else torch.cat([memory_BME, x_BNE], dim=1)
        read_BKE, memory = self.attention_norm(read_BKE) if self.pre else read_BKE, read_BKE.shape[1] - x_BNE.shape[1]
        branch_BNE, loss = self.attention(read_BKE, prefix, streams, memory)
        return self.finish(x_BNE, branch_BNE), loss

    def finish(self, x_BNE: Tensor, branch_BNE: Tensor) -> Tensor:
        """Add the attention's output to the stream and run the feed-forward branch; any leading shape."""
        x_BNE = x_BNE + F.dropout(branch_BNE, self.dropout, self.training)
        if not self.pre:
            x_BNE = self.attention_norm(x_BNE)
        branch_BNE = self.feed_forward(self.feed_forward_norm(x_BNE) if self.pre else x_BNE)
        x_BNE = x_BNE + F.dropout(branch_BNE, self.dropout, self.training)
        return x_BNE if self.pre else self.feed_forward_norm(x_BNE)

    def decode(self, x_B1E: Tensor, streams: list[Stream], position: int) -> Tensor:
        """Return the block's output `[B, 1, E]` at the next position of each stream."""
        branch_B1E = self.attention.decode(self.attention_norm(x_B1E) if self.pre else x_B1E, streams, position)
        return self.finish(x_B1E, branch_B1E)
