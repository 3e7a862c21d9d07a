"""The embedding: from tokens to the input of the first block.

Shapes: B sequences, N positions, E hidden width, S embedding width, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.gradients import with_zero_gradients
from rtx.model.likelihood import Bands, make_bands
from rtx.model.linear import Linear
from rtx.model.positions import LearnedPositions
from rtx.settings.derived import embedding_width, sizes_of
from rtx.settings.schema import Config


class Embedding(nn.Module):
    """Token embeddings, shifted right by one position.

    The input at position 0 is a learned start vector, so that the first token has a likelihood.
    """

    def __init__(self, config: Config, vocabulary: int) -> None:
        super().__init__()
        model = config.model
        width = embedding_width(model)
        self.bands: Bands | None = None
        if model.embedding == "adaptive":
            self.bands = make_bands(model, vocabulary)
        else:
            self.table_VS = nn.Parameter(torch.empty(vocabulary, width))
        self.start_S = nn.Parameter(torch.empty(width))
        self.project_in = projection(width, model.hidden)
        self.positions = learned_positions(config)
        self.dropout = model.dropout

    def forward(self, tokens_BN: Tensor, before_B: Tensor | None = None) -> Tensor:
        """Return the input of the first block, `[B, N, E]`.

        At position i it is the vector of token i - 1.

        Args:
            before_B: the token before each sequence, if it continues a stream.
        """
        first_B1S = self.start_S.expand(len(tokens_BN), 1, -1)
        if before_B is not None:
            before_B1S = self.vectors(before_B)[:, None]
            first_B1S = with_zero_gradients(before_B1S, [self.start_S])
        later_BNS = self.vectors(tokens_BN[:, :-1])
        x_BNS = torch.cat([first_B1S, later_BNS], dim=1)
        return self.to_hidden(x_BNS, 0)

    def vectors(self, tokens: Tensor) -> Tensor:
        """Return the vectors of tokens, `[..., S]`."""
        if self.bands is not None:
            return self.bands(tokens)
        return F.embedding(tokens, self.table_VS)

    def to_hidden(self, x_BNS: Tensor, first: int) -> Tensor:
        """Return the input of the first block, `[B, N, E]`, from the vectors of tokens.

        They are projected to the hidden width, then get learned positions and dropout.

        Args:
            first: the position of the first vector of each sequence.
        """
        x_BNE = self.project_in(x_BNS)
        if self.positions is not None:
            x_BNE = x_BNE + self.positions(first, x_BNE.shape[1])
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
        return LearnedPositions((config.data.length,), model.hidden)
    if model.positions == "axial":
        return LearnedPositions(sizes_of(model.axes), model.hidden)
    return None
