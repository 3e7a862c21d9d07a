"""The Routing Transformer: from a sequence of tokens to the likelihood of each.

It is a decoder, which predicts a token from those before it, or an encoder (model.causal=false),
which predicts hidden tokens from both sides.

Shapes: B sequences, N positions, A positions of answers, E hidden width, S embedding width, V
vocabulary.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention import Documents
from rtx.attention.precision import widened
from rtx.model.block import Block
from rtx.model.compiling import recomputed_block
from rtx.model.embedding import Embedding, projection
from rtx.model.likelihood import (
    AdaptiveSoftmax,
    fused_mean_nats,
    make_bands,
    token_nats,
)
from rtx.model.linear import use_products
from rtx.model.memory import Memory, MemoryBlock
from rtx.model.multihead import MultiheadAttention
from rtx.model.norm import make_norm
from rtx.model.positions import TABLE_DEVIATION, SinusoidKeys
from rtx.settings.derived import embedding_width
from rtx.settings.schema import Config


class Transformer(nn.Module):
    """The model of a resolved configuration; torch's global generator draws the first weights.

    `loss` computes the loss of whole sequences, and `answers` that of some tokens, which an encoder
    does not see; `rtx.model.decoding` generates token by token.

    Args:
        vocabulary: V.
    """

    def __init__(self, config: Config, vocabulary: int) -> None:
        super().__init__()
        model = config.model
        self.vocabulary = vocabulary
        self.model_config = model
        self.recompute = model.recompute is True
        self.segment = 0
        """The length of the segments that a model with a memory reads; 0: no memory."""
        block_class = Block
        if model.base == "recurrent":
            self.segment = config.data.length
            block_class = MemoryBlock
        # The order of draws and of modules decides the first weights that a seed gives.
        self.embedding = Embedding(config, vocabulary)
        blocks = [block_class(config, layer) for layer in range(model.layers)]
        self.blocks = nn.ModuleList(blocks)
        if model.tie_biases:
            self.tie_biases()
        self.norm: nn.Module = nn.Identity()
        if model.norm == "pre":
            self.norm = make_norm(model, model.hidden)
        output_width = embedding_width(model)
        self.project_out = projection(model.hidden, output_width)
        self.softmax: AdaptiveSoftmax | None = None
        self.add_output()
        # Drawing on the device `meta` changes nothing, and takes most of the time there.
        if not self.embedding.start_S.is_meta:
            self.initialise()
        use_products(self, config.hardware.products)

    def tie_biases(self) -> None:
        """Share the biases u and v of Transformer-XL among all layers."""
        first: SinusoidKeys | None = None
        for table in self.blocks.modules():
            if not isinstance(table, SinusoidKeys):
                continue
            if first is None:
                first = table
            table.content_HD = first.content_HD
            table.place_HD = first.place_HD

    def add_output(self) -> None:
        """Add the output layer: an adaptive softmax, or a matrix and a bias."""
        model = self.model_config
        embedding = self.embedding
        if embedding.bands is not None:
            bands = embedding.bands
            if not model.tie_embeddings:
                bands = make_bands(model, self.vocabulary)
            self.softmax = AdaptiveSoftmax(bands, model.hidden)
            return
        self.output_VS = embedding.table_VS
        if not model.tie_embeddings:
            self.output_VS = nn.Parameter(torch.empty_like(embedding.table_VS))
        zero_V = torch.zeros(self.vocabulary)
        self.output_bias_V = nn.Parameter(zero_V)

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw the first weights.

        Matrices are normal with variance 1 / fan in, divided by 2 * layers at the end of a residual
        branch. Embeddings and the start vector have variance 1, as large as the outputs of the
        first branches. The output matrix has variance 1 / (4 fan in). With tied embeddings, the
        table and the start vector have that variance.

        Smaller embeddings, or an output matrix of zeros, slow learning down (experiment=recall
        shows it): the first steps of the optimizer, which are equally large for all weights, would
        make the vectors of tokens with the same role nearly equal, and it takes many steps until
        these vectors differ again.
        """
        self.initialise_matrices()
        embedding = self.embedding
        tied = self.model_config.tie_embeddings
        output_deviation = 0.5 * len(embedding.start_S) ** -0.5
        table_deviation = 1.0
        if tied:
            table_deviation = output_deviation
        if self.softmax is None:
            nn.init.normal_(embedding.table_VS, std=table_deviation)
        else:
            assert embedding.bands is not None
            embedding.bands.initialise(as_output=False)
            self.softmax.bands.initialise(as_output=True)
        nn.init.normal_(embedding.start_S, std=table_deviation)
        if self.softmax is None:
            if not tied:
                nn.init.normal_(self.output_VS, std=output_deviation)
            if self.model_config.init == "depth_scaled":
                self.shrink_for_depth()

    def initialise_matrices(self) -> None:
        """Draw the weights of matrices and convolutions."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv1d):
                fan_in = module.weight[0].numel()
                nn.init.normal_(module.weight, std=fan_in**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        branch_scale = 1 / math.sqrt(2 * len(self.blocks))
        for block in self.blocks:
            assert isinstance(block, Block)
            block.attention.out.weight.mul_(branch_scale)
            block.feed_forward.outer.weight.mul_(branch_scale)

    def shrink_for_depth(self) -> None:
        """Rescale the first weights for models of many layers (init=depth_scaled).

        Matrices in the blocks have variance 0.125 / fan in. Embeddings, start vector and position
        vectors (the sums over the axes) have a standard deviation of 0.01. An output matrix that is
        not tied is zero (Child et al. 2019).
        """
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(math.sqrt(0.125))
        if not self.model_config.tie_embeddings:
            nn.init.zeros_(self.output_VS)
        nn.init.normal_(self.embedding.table_VS, std=0.01)
        nn.init.normal_(self.embedding.start_S, std=0.01)
        if self.embedding.positions is not None:
            for parameter in self.embedding.positions.parameters():
                parameter.mul_(0.01 / TABLE_DEVIATION)

    def forward(
        self,
        tokens_BN: Tensor,
        streaming: bool = False,
        memory: Memory | None = None,
        first_BN: Tensor | None = None,
        hidden_BN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the last hidden vectors, `[B, N, S]`, and the auxiliary loss.

        The vector at position i predicts token i.

        Args:
            streaming: every selection of keys is made from the prefix alone, which changes the
                outputs of routing=topk and of lsh=reformer.
            memory: the memory of earlier segments of the same streams, to which this one is added.
            first_BN: for each token, the position at which its document starts, see `Documents`. A
                token is predicted from its document alone. None: each sequence is one document.
            hidden_BN: which tokens an encoder must not see; None: it sees all.
        """
        if memory is None:
            documents = several_documents(first_BN)
            x_BNE = self.embedding(tokens_BN, documents=documents, hidden_BN=hidden_BN)
            x_BNE, auxiliary = self.run_blocks(x_BNE, streaming, documents)
        else:
            x_BNE, auxiliary = self.continue_streams(memory, tokens_BN, streaming)
        return self.output(x_BNE), auxiliary

    def run_blocks(
        self,
        x_BNE: Tensor,
        streaming: bool,
        documents: Documents | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the output of the last block, `[B, N, E]`, and the auxiliary loss of all."""
        inputs: tuple[Any, ...] = (streaming,)
        if documents is not None:
            # The third argument of a block with a memory is another one: it takes no documents.
            inputs = (streaming, documents)
        total = x_BNE.new_zeros((), dtype=torch.float32)
        for block in self.blocks:
            x_BNE, loss = self.run_block(block, x_BNE, *inputs)
            total = total + loss
        return x_BNE, total

    def continue_streams(
        self,
        memory: Memory,
        tokens_BN: Tensor,
        streaming: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the result of `run_blocks` for the next segment, and add it to the memory."""
        x_BNE = self.embedding(tokens_BN, memory.last_B)
        total = x_BNE.new_zeros((), dtype=torch.float32)
        inputs = []
        for layer, block in enumerate(self.blocks):
            inputs.append(x_BNE)
            memory_BKE = memory.read(layer)
            x_BNE, loss = self.run_block(block, x_BNE, streaming, memory_BKE)
            total = total + loss
        total = total + memory.update(self.blocks, inputs, tokens_BN)  # type: ignore[arg-type]
        return x_BNE, total

    def run_block(self, block: nn.Module, *inputs: Any) -> tuple[Tensor, Tensor]:
        """Return `block(*inputs)`; with `recompute`, the backward pass computes it again."""
        if self.recompute and self.training and torch.is_grad_enabled():
            return recomputed_block(block, *inputs)
        return block(*inputs)

    def output(self, x_BNE: Tensor) -> Tensor:
        """Return the input of the output layer, `[..., S]`, from the output of the last block."""
        return self.project_out(self.norm(x_BNE))

    def loss(
        self,
        tokens_BN: Tensor,
        streaming: bool = False,
        memory: Memory | None = None,
        first_BN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return -log p of every token, in nats, `[B, N]`, and the auxiliary loss.

        The first token counts, too. A model with a memory reads a long sequence segment by segment.
        For `streaming`, `memory` and `first_BN` see `forward`. An encoder has `answers` instead.
        """
        assert self.model_config.causal, "an encoder would see the tokens that it predicts"
        has_segments = 0 < self.segment < tokens_BN.shape[1]
        if memory is None and has_segments:
            return self.loss_of_segments(tokens_BN, streaming)
        hidden_BNS, auxiliary = self(tokens_BN, streaming, memory, first_BN)
        if self.softmax is not None:
            return self.softmax.token_nats(hidden_BNS, tokens_BN), auxiliary
        nats_BN = token_nats(hidden_BNS, self.output_VS, self.output_bias_V, tokens_BN)
        return nats_BN, auxiliary

    def loss_of_segments(self, tokens_BN: Tensor, streaming: bool) -> tuple[Tensor, Tensor]:
        """Return the nats of every token, `[B, N]`, and the auxiliary losses of all segments."""
        memory = Memory(self.model_config)
        nats = []
        losses = []
        for segment_BN in tokens_BN.split(self.segment, dim=1):
            segment_nats, auxiliary = self.loss(segment_BN, streaming, memory)
            nats.append(segment_nats)
            losses.append(auxiliary)
        nats_BN = torch.cat(nats, dim=1)
        return nats_BN, torch.stack(losses).sum()

    def fused_loss(
        self,
        tokens_BN: Tensor,
        memory: Memory | None = None,
        first_BN: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the mean nats of all tokens, a scalar, and the auxiliary loss.

        This is the mean of `loss`, computed by Liger-Kernel, for training.
        """
        assert self.softmax is None, "the bands of an adaptive softmax have no fused loss"
        hidden_BNS, auxiliary = self(tokens_BN, memory=memory, first_BN=first_BN)
        nats = fused_mean_nats(hidden_BNS, self.output_VS, self.output_bias_V, tokens_BN)
        return nats, auxiliary

    def answers(
        self,
        tokens_BN: Tensor,
        position_BA: Tensor,
        streaming: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the nats of the tokens at some positions, and whether each is the likeliest token.

        Both are `[B, A]`, with 0 and False where `position_BA` is -1. The third result is the
        auxiliary loss of the whole sequences. An encoder does not see these tokens.
        """
        hidden_BN = None
        if not self.model_config.causal:
            hidden_BN = are_among(position_BA, tokens_BN.shape[1])
        hidden_BNS, auxiliary = self(tokens_BN, streaming, hidden_BN=hidden_BN)
        sequence_B = torch.arange(len(tokens_BN), device=position_BA.device)
        sequence_B1 = sequence_B[:, None]
        real_position_BA = position_BA.clamp(min=0)
        target_BA = tokens_BN.gather(1, real_position_BA)
        logits_BAV = self.logits(hidden_BNS[sequence_B1, real_position_BA])
        wide_BVA = widened(logits_BAV).mT
        nats_BA = F.cross_entropy(wide_BVA, target_BA, reduction="none")
        is_missing_BA = position_BA < 0
        likeliest_BA = logits_BAV.argmax(-1)
        is_right_BA = (likeliest_BA == target_BA) & ~is_missing_BA
        return nats_BA.masked_fill(is_missing_BA, 0.0), is_right_BA, auxiliary

    def logits(self, hidden_BS: Tensor) -> Tensor:
        """Return the logits of some vectors, `[..., V]`; for an adaptive softmax log p."""
        if self.softmax is not None:
            return self.softmax.log_shares(hidden_BS)
        return F.linear(hidden_BS, self.output_VS, self.output_bias_V)

    def attentions(self) -> list[MultiheadAttention]:
        """Return the attention of each layer, the lowest first."""
        return [block.attention for block in self.blocks]  # type: ignore[misc]

    @property
    def device(self) -> torch.device:
        return self.embedding.start_S.device

    def count_parameters(self) -> int:
        """Return the number of trained values."""
        return sum(parameter.numel() for parameter in self.parameters())


def are_among(position_BA: Tensor, length: int) -> Tensor:
    """Return for each of N positions whether it is in `position_BA`, bool `[B, N]`.

    Args:
        position_BA: positions; -1: none.
        length: N.
    """
    B = len(position_BA)
    # Each -1 sets one more column, which is then removed.
    column_BA = torch.where(position_BA < 0, length, position_BA)
    none_BN1 = position_BA.new_zeros(B, length + 1, dtype=torch.bool)
    is_among_BN1 = none_BN1.scatter(1, column_BA, True)
    return is_among_BN1[:, :length]


def several_documents(first_BN: Tensor | None) -> Documents | None:
    """Return the documents of sequences; None if each sequence is one document."""
    if first_BN is None or not bool(first_BN.any()):
        return None
    return Documents(first_BN)
