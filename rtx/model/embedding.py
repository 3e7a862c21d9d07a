"""The embedding: from tokens to the input of the first block.

Shapes: B sequences, N positions, E hidden width, S embedding width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention import Documents
from rtx.attention.gradients import with_zero_gradients
from rtx.model.likelihood import Bands, make_bands
from rtx.model.linear import Linear
from rtx.model.positions import LearnedPositions
from rtx.settings.derived import embedding_width, sizes_of
from rtx.settings.schema import Config


class Embedding(nn.Module):
    """Token embeddings, shifted right by one position, or those of an encoder, not shifted.

    The input at position 0 is a learned start vector, so that the first token has a likelihood. In
    an encoder (model.causal=false) this vector replaces hidden tokens.
    """

    def __init__(self, config: Config, vocabulary: int) -> None:
        super().__init__()
        model = config.model
        width = embedding_width(model)
        self.bands: Bands | None = None
        if model.embedding == "adaptive":
            self.bands = make_bands(model, vocabulary)
        else:
            table_VS = torch.empty(vocabulary, width)
            self.table_VS = nn.Parameter(table_VS)
        start_S = torch.empty(width)
        self.start_S = nn.Parameter(start_S)
        self.project_in = projection(width, model.hidden)
        self.positions = learned_positions(config)
        self.is_shifted = model.causal
        self.dropout = model.dropout

    def forward(
        self,
        tokens_BN: Tensor,
        before_B: Tensor | None = None,
        documents: Documents | None = None,
        hidden_BN: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the first block, `[B, N, E]`.

        At position i it is the vector of token i - 1; in an encoder that of token i.

        Args:
            before_B: the token before each sequence, if it continues a stream.
            documents: each begins with the start vector, and positions count from its start.
            hidden_BN: which tokens an encoder must not see; None: it sees all.
        """
        if not self.is_shifted:
            visible_BNS = self.visible(tokens_BN, hidden_BN)
            return self.to_hidden(visible_BNS, 0, documents)
        B = len(tokens_BN)
        first_B1S = self.start_S.expand(B, 1, -1)
        if before_B is not None:
            before_B1S = self.vectors(before_B)[:, None]
            first_B1S = with_zero_gradients(before_B1S, [self.start_S])
        later_BNS = self.vectors(tokens_BN[:, :-1])
        x_BNS = torch.cat([first_B1S, later_BNS], dim=1)
        if documents is not None:
            is_start_BN = documents.position_BN == 0
            is_start_BN1 = is_start_BN[..., None]
            x_BNS = torch.where(is_start_BN1, first_B1S, x_BNS)
        return self.to_hidden(x_BNS, 0, documents)

    def visible(self, tokens_BN: Tensor, hidden_BN: Tensor | None) -> Tensor:
        """Return the vectors of tokens, and the start vector for those that are hidden."""
        x_BNS = self.vectors(tokens_BN)
        if hidden_BN is None:
            return x_BNS
        start_S = self.start_S.to(x_BNS.dtype)
        hidden_BN1 = hidden_BN[..., None]
        return torch.where(hidden_BN1, start_S, x_BNS)

    def vectors(self, tokens: Tensor) -> Tensor:
        """Return the vectors of tokens, `[..., S]`."""
        if self.bands is not None:
            return self.bands(tokens)
        return F.embedding(tokens, self.table_VS)

    def to_hidden(self, x_BNS: Tensor, first: int, documents: Documents | None = None) -> Tensor:
        """Return the input of the first block, `[B, N, E]`, from the vectors of tokens.

        They are projected to the hidden width, then get learned positions and dropout.

        Args:
            first: the position of the first vector of each sequence.
            documents: positions count from the starts of these.
        """
        x_BNE = self.project_in(x_BNS)
        N = x_BNE.shape[1]
        if self.positions is not None and documents is not None:
            x_BNE = x_BNE + self.positions.at(documents.position_BN)
        elif self.positions is not None:
            x_BNE = x_BNE + self.positions(first, N)
        return F.dropout(x_BNE, self.dropout, self.training)


def projection(inputs: int, outputs: int) -> nn.Module:
    """Return a linear layer between two widths, or the identity if they are the same."""
    if inputs == outputs:
        return nn.Identity()
    return Linear(inputs, outputs)


def learned_positions(config: Config) -> LearnedPositions | None:
    """Return the position vectors that are added to the embeddings, if any are."""
    model = config.model
    if model.positions == "learned":
        sizes = (config.data.length,)
    elif model.positions == "axial":
        sizes = sizes_of(model.axes)
    else:
        return None
    return LearnedPositions(sizes, model.hidden)
