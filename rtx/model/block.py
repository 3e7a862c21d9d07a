"""One decoder block: attention and a feed-forward layer, each in a residual branch.

Shapes: B sequences or streams, N positions, R = B * N rows, E hidden width, F feed-forward width.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention import Documents
from rtx.attention.recompute import recomputed
from rtx.model.heads import HeadStream
from rtx.model.linear import Linear
from rtx.model.multihead import MultiheadAttention
from rtx.model.norm import make_norm
from rtx.settings.schema import GATED, Config, ModelConfig


class FeedForward(nn.Module):
    """Two matrices with relu or gelu between them, or geglu or swiglu (Shazeer 2020).

    With geglu and swiglu the first matrix has twice as many outputs: the first half is multiplied
    by the gelu or silu of the second. These have no biases.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = config.ffn
        self.dropout = config.ffn_dropout
        self.parts = config.ffn_parts
        inner_width = config.ffn_hidden
        has_bias = True
        if config.ffn in GATED:
            inner_width = 2 * config.ffn_hidden
            has_bias = False
        self.inner = Linear(config.hidden, inner_width, bias=has_bias)
        self.outer = Linear(config.ffn_hidden, config.hidden, bias=has_bias)

    def forward(self, x_BNE: Tensor) -> Tensor:
        """Return the layer's output `[B, N, E]`.

        With `ffn_parts` above 1 it is computed in parts: the hidden units of one part are in memory
        at a time, and the backward pass computes them again.
        """
        if self.parts == 1:
            return self.whole(x_BNE)
        E = x_BNE.shape[-1]
        x_RE = x_BNE.reshape(-1, E)
        rows_of_a_part = math.ceil(len(x_RE) / self.parts)
        outputs = []
        for part_RE in x_RE.split(rows_of_a_part):
            output_RE = recomputed(self.whole, part_RE)
            outputs.append(output_RE)
        return torch.cat(outputs).view(x_BNE.shape)

    def whole(self, x_BNE: Tensor) -> Tensor:
        """Return the output of all rows at once, for any leading dimensions."""
        inner_BNF = self.inner(x_BNE)
        x_BNF = self.activate(inner_BNF)
        x_BNF = F.dropout(x_BNF, self.dropout, self.training)
        return self.outer(x_BNF)

    def activate(self, x_BNF: Tensor) -> Tensor:
        """Return the hidden units from the outputs of the first matrix."""
        if self.activation in GATED:
            x_BNF, gate_BNF = x_BNF.chunk(2, dim=-1)
            if self.activation == "swiglu":
                gate_BNF = F.silu(gate_BNF)
            else:
                gate_BNF = F.gelu(gate_BNF, approximate="tanh")
            return gate_BNF * x_BNF
        if self.activation == "relu":
            return F.relu(x_BNF)
        return F.gelu(x_BNF)


class Block(nn.Module):
    """Two residual branches f with dropout.

    Pre-norm is x + f(norm(x)), and post-norm is norm(x + f(x)).
    """

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        model = config.model
        self.pre = model.norm == "pre"
        self.dropout = model.dropout
        self.attention = MultiheadAttention(config, layer)
        self.feed_forward = FeedForward(model)
        self.attention_norm = make_norm(model, model.hidden)
        self.feed_forward_norm = make_norm(model, model.hidden)

    def forward(
        self,
        x_BNE: Tensor,
        streaming: bool = False,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the block's output `[B, N, E]` and the auxiliary loss of its attention.

        Args:
            streaming: every selection of keys is made from the prefix alone.
            documents: the documents of the sequences; None: each sequence is one.
        """
        x_in_BNE = self.before_attention(x_BNE)
        branch_BNE, loss = self.attention(x_in_BNE, streaming, documents=documents)
        return self.after_attention(x_BNE, branch_BNE), loss

    def before_attention(self, x_BNE: Tensor) -> Tensor:
        """Return the input of the attention: the block's input, normalised with pre-norm."""
        if self.pre:
            return self.attention_norm(x_BNE)
        return x_BNE

    def after_attention(self, x_BNE: Tensor, branch_BNE: Tensor) -> Tensor:
        """Return the block's output from its input and the output of its attention.

        Both have the shape `[..., E]`.
        """
        x_BNE = x_BNE + self.drop(branch_BNE)
        if self.pre:
            normed_BNE = self.feed_forward_norm(x_BNE)
            branch_BNE = self.feed_forward(normed_BNE)
            return x_BNE + self.drop(branch_BNE)
        x_BNE = self.attention_norm(x_BNE)
        branch_BNE = self.feed_forward(x_BNE)
        x_BNE = x_BNE + self.drop(branch_BNE)
        return self.feed_forward_norm(x_BNE)

    def drop(self, branch_BNE: Tensor) -> Tensor:
        """Return the output of a branch after dropout."""
        return F.dropout(branch_BNE, self.dropout, self.training)

    def prefill(self, x_BNE: Tensor, streams: list[HeadStream]) -> Tensor:
        """Return the block's output `[B, N, E]` at the first N positions of new streams."""
        x_in_BNE = self.before_attention(x_BNE)
        branch_BNE = self.attention.prefill(x_in_BNE, streams)
        return self.after_attention(x_BNE, branch_BNE)

    def decode(self, x_B1E: Tensor, streams: list[HeadStream]) -> Tensor:
        """Return the block's output `[B, 1, E]` at the next position of each stream."""
        x_in_B1E = self.before_attention(x_B1E)
        branch_B1E = self.attention.decode(x_in_B1E, streams)
        return self.after_attention(x_B1E, branch_B1E)
