"""One decoder block: attention and a feed-forward layer, each in a residual branch.

Shapes: B sequences or streams, N positions, R = B * N rows, E hidden width, F feed-forward width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.engine.softmax import recomputed
from rtx.model.heads import HeadStream
from rtx.model.linear import Linear
from rtx.model.multihead import MultiheadAttention
from rtx.settings.schema import Config, ModelConfig


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


class Block(nn.Module):
    """Two residual branches f, with dropout: pre-norm, x + f(norm(x)), or post-norm, norm(x + f(x))."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.pre = config.model.norm == "pre"
        self.dropout = config.model.dropout
        self.attention = MultiheadAttention(config, layer)
        self.feed_forward = FeedForward(config.model)
        self.attention_norm = nn.LayerNorm(config.model.hidden)
        self.feed_forward_norm = nn.LayerNorm(config.model.hidden)

    def forward(self, x_BNE: Tensor, streaming: bool = False) -> tuple[Tensor, Tensor]:
        """Return the block's output `[B, N, E]` and the auxiliary loss of its attention.

        Args:
            streaming: every selection of keys is made from the prefix alone.
        """
        branch_BNE, loss = self.attention(self.before_attention(x_BNE), streaming)
        return self.after_attention(x_BNE, branch_BNE), loss

    def before_attention(self, x_BNE: Tensor) -> Tensor:
        """Return what the attention reads of the block's input."""
        if self.pre:
            return self.attention_norm(x_BNE)
        return x_BNE

    def after_attention(self, x_BNE: Tensor, branch_BNE: Tensor) -> Tensor:
        """Return the block's output from its input and its attention's output; any leading shape."""
        x_BNE = x_BNE + F.dropout(branch_BNE, self.dropout, self.training)
        if self.pre:
            branch_BNE = self.feed_forward(self.feed_forward_norm(x_BNE))
            return x_BNE + F.dropout(branch_BNE, self.dropout, self.training)
        x_BNE = self.attention_norm(x_BNE)
        branch_BNE = self.feed_forward(x_BNE)
        return self.feed_forward_norm(x_BNE + F.dropout(branch_BNE, self.dropout, self.training))

    def prefill(self, x_BNE: Tensor, streams: list[HeadStream]) -> Tensor:
        """Return the block's output `[B, N, E]` at the first N positions of new streams."""
        branch_BNE = self.attention.prefill(self.before_attention(x_BNE), streams)
        return self.after_attention(x_BNE, branch_BNE)

    def decode(self, x_B1E: Tensor, streams: list[HeadStream]) -> Tensor:
        """Return the block's output `[B, 1, E]` at the next position of each stream."""
        branch_B1E = self.attention.decode(self.before_attention(x_B1E), streams)
        return self.after_attention(x_B1E, branch_B1E)
