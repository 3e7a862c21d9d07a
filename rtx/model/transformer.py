"""The Routing Transformer: a decoder that turns a sequence of units into the likelihood of each.

Shapes: B sequences, N positions, A of them, E hidden width, S embedding width, V vocabulary.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # the option below has no public door
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rtx.attention.centroids import statistics_paused
from rtx.attention.pattern import Pattern
from rtx.model.block import Block
from rtx.model.likelihood import AdaptiveSoftmax, Bands, band_ends, fused_mean_nats, token_nats
from rtx.model.linear import Linear
from rtx.model.memory import Memory, MemoryBlock
from rtx.model.positions import TABLE_DEVIATION, LearnedPositions, SinusoidKeys
from rtx.settings.derived import embedding_width, sizes_of
from rtx.settings.schema import Config

RECOMPUTED_ONCE = "skip_fwd_side_effects_in_bwd_under_checkpoint"
"""torch's option, without a public name, by which a recomputed block gathers no statistics for a second time."""
COMPILER_OPTIONS = {RECOMPUTED_ONCE: True} if hasattr(torch._dynamo.config, RECOMPUTED_ONCE) else {}


class Embedding(nn.Module):
    """Unit ids to vectors, shifted right behind a learned start vector, so that the first unit is scored too."""

    def __init__(self, config: Config, vocabulary: int) -> None:
        super().__init__()
        model = config.model
        width = embedding_width(model)
        self.bands: Bands | None = None
        if model.embedding == "adaptive":
            self.bands = Bands(band_ends(model, vocabulary), model.hidden, model.band_factor)
        else:
            self.table_VS = nn.Parameter(torch.empty(vocabulary, width))
        self.start_S = nn.Parameter(torch.empty(width))
        self.widen = Linear(width, model.hidden) if width != model.hidden else nn.Identity()
        self.positions: LearnedPositions | None = None
        if model.positions in ("learned", "axial"):
            sizes = (config.data.length,) if model.positions == "learned" else sizes_of(model.axes)
            self.positions = LearnedPositions(sizes, model.hidden)
        self.dropout = model.dropout

    def forward(self, tokens_BN: Tensor, before_B: Tensor | None = None) -> Tensor:
        """Return the input of the first block: at position i the vector of unit i - 1, `[B, N, E]`.

        `before_B`: the unit before each sequence, where it goes on with a stream.
        """
        start_B1S = self.start_S.expand(len(tokens_BN), 1, -1)
        if (
            before_B is not None
        ):  # the sum keeps the start vector in the graph, where DDP looks for its gradient
            start_B1S = self.vectors(before_B)[:, None] + 0 * start_B1S
        return self.finish(torch.cat([start_B1S, self.vectors(tokens_BN[:, :-1])], dim=1), 0)

    def vectors(self, ids: Tensor) -> Tensor:
        """Return the vectors of units, `[..., S]`."""
        return F.embedding(ids, self.table_VS) if self.bands is None else self.bands(ids)

    def finish(self, x_BNS: Tensor, first: int) -> Tensor:
        """Widen, add positions from `first` on, and drop."""
        x_BNE = self.widen(x_BNS)
        if self.positions is not None:
            x_BNE = x_BNE + self.positions(first, x_BNE.shape[1])
        return F.dropout(x_BNE, self.dropout, self.training)


class Transformer(nn.Module):
    """The decoder of a resolved configuration over `vocabulary` units.

    `loss` scores sequences; `rtx.model.decoding` streams. Initialisation draws from torch's global generator.
    """

    def __init__(self, config: Config, vocabulary: int) -> None:
        super().__init__()
        model = config.model
        self.vocabulary = vocabulary
        self.recompute = model.recompute is True
        self.segment = config.data.length if model.base == "recurrent" else 0
        self.config = model
        self.embedding = Embedding(config, vocabulary)
        block_class = MemoryBlock if model.base == "recurrent" else Block
        self.blocks = nn.ModuleList(block_class(config, layer) for layer in range(model.layers))
        if model.tie_biases:
            self.tie_biases()
        self.norm = nn.LayerNorm(model.hidden) if model.norm == "pre" else nn.Identity()
        width = embedding_width(model)
        self.narrow = Linear(model.hidden, width) if width != model.hidden else nn.Identity()
        tied, bands = model.tie_embeddings, self.embedding.bands
        self.softmax: AdaptiveSoftmax | None = None
        if bands is not None:
            own = (
                bands
                if tied
                else Bands(band_ends(model, vocabulary), model.hidden, model.band_factor)
            )
            self.softmax = AdaptiveSoftmax(own, model.hidden)
        else:
            self.output_VS = (
                self.embedding.table_VS if tied else nn.Parameter(torch.empty(vocabulary, width))
            )
            self.output_bias_V = nn.Parameter(torch.zeros(vocabulary))
        self.initialise()
        for module in self.modules():
            if isinstance(module, Linear):
                module.products = config.hardware.products

    def tie_biases(self) -> None:
        """Let the tables of Transformer-XL of all layers share their biases u and v."""
        tables = [module for module in self.blocks.modules() if isinstance(module, SinusoidKeys)]
        for table in tables[1:]:
            table.content_HD = tables[0].content_HD
            table.place_HD = tables[0].place_HD

    @torch.no_grad()
    def initialise(self) -> None:
        """Matrices: normal with variance 1 / fan in; those that end a residual branch smaller by 2 * layers.

        Embeddings and start vector have variance 1, as large as what the first branches add, and the output matrix has
        1/4 / fan in. Small embeddings, or an output matrix of zeros, would leave the optimizer's first, equal steps to
        make units of one role alike, and a model then needs long to tell them apart again (experiment=recall shows it).
        A tied table starts as an output matrix.

        "depth_scaled", for models of many layers (Child et al. 2019): variance 0.125 / fan in inside the blocks,
        embeddings, start vector and positions with a standard deviation of 0.01, that of a position over all axes, and
        an output matrix of zeros.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv1d):
                nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:
            assert isinstance(block, Block)
            for ends in (block.attention.out, block.feed_forward.outer):
                ends.weight.mul_(1 / math.sqrt(2 * len(self.blocks)))
        embedding, tied = self.embedding, self.config.tie_embeddings
        output_deviation = 0.5 * len(embedding.start_S) ** -0.5
        if self.softmax is None:
            nn.init.normal_(embedding.table_VS, std=output_deviation if tied else 1.0)
        else:
            assert embedding.bands is not None
            embedding.bands.initialise(as_output=False)
            self.softmax.bands.initialise(as_output=True)
        nn.init.normal_(embedding.start_S, std=output_deviation if tied else 1.0)
        if self.softmax is None and not tied:
            nn.init.normal_(self.output_VS, std=output_deviation)
        if self.softmax is None and self.config.init == "depth_scaled":
            self.shrink_for_depth(tied)

    def shrink_for_depth(self, tied: bool) -> None:
        """Bring the standard initialisation to the scales of `depth_scaled`."""
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(math.sqrt(0.125))
        if not tied:
            nn.init.zeros_(self.output_VS)
        for parameter in (self.embedding.table_VS, self.embedding.start_S):
            nn.init.normal_(parameter, std=0.01)
        if self.embedding.positions is not None:
            for parameter in self.embedding.positions.parameters():
                parameter.mul_(0.01 / TABLE_DEVIATION)

    def forward(
        self, tokens_BN: Tensor, streaming: bool = False, memory: Memory | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the vectors that predict each token, `[B, N, S]`, and the auxiliary loss.

        Args:
            streaming: every selection of keys is made from the prefix alone, which changes the
                outputs of top-w and of lsh=reformer.
            memory: the tokens go on where it ends, and are appended to it.
        """
        before_B = None
        if memory is not None:
            before_B = memory.last_B
        x_BNE = self.embedding(tokens_BN, before_B)
        total = x_BNE.new_zeros((), dtype=torch.float32)
        inputs = []
        for layer, block in enumerate(self.blocks):
            arguments = [x_BNE, streaming]
            if memory is not None:
                inputs.append(x_BNE)
                arguments.append(memory.read(layer))
            x_BNE, loss = self.run_block(block, *arguments)
            total = total + loss
        if memory is not None:
            total = total + memory.update(self.blocks, inputs, tokens_BN)  # type: ignore[arg-type]
        return self.narrow(self.norm(x_BNE)), total

    def run_block(self, block: nn.Module, *arguments: Any) -> tuple[Tensor, Tensor]:
        """Return what a block returns; in training with `recompute` it keeps its inputs alone."""
        if self.recompute and self.training and torch.is_grad_enabled():
            return recomputed_block(block, *arguments)
        return block(*arguments)

    def loss(
        self, tokens_BN: Tensor, streaming: bool = False, memory: Memory | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the nats of every unit `[B, N]`, the first included, and the auxiliary loss.

        A model of segments reads a sequence of several as a stream; `memory`: see `forward`.
        """
        if memory is None and 0 < self.segment < tokens_BN.shape[1]:
            memory = Memory(self.config)
            nats = [
                self.loss(part_BN, streaming, memory)[0]
                for part_BN in tokens_BN.split(self.segment, dim=1)
            ]
            return torch.cat(nats, dim=1), nats[0].new_zeros(())
        hidden_BNS, auxiliary = self(tokens_BN, streaming, memory)
        if self.softmax is not None:
            return self.softmax.token_nats(hidden_BNS, tokens_BN), auxiliary
        return token_nats(hidden_BNS, self.output_VS, self.output_bias_V, tokens_BN), auxiliary

    def fused_loss(self, tokens_BN: Tensor, memory: Memory | None = None) -> tuple[Tensor, Tensor]:
        """Return the mean nats of all units, a scalar, and the auxiliary loss: `loss` for training by Liger-Kernel."""
        assert self.softmax is None, "the bands of an adaptive softmax have no fused loss"
        hidden_BNS, auxiliary = self(tokens_BN, memory=memory)
        return fused_mean_nats(hidden_BNS, self.output_VS, self.output_bias_V, tokens_BN), auxiliary

    def answers(
        self, tokens_BN: Tensor, at_BA: Tensor, streaming: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the nats of the units at positions `at_BA` alone and whether each is the likeliest, `[B, A]`.

        Where the position is -1: 0 and false. The third result is the auxiliary loss, of the whole sequence.
        """
        hidden_BNS, auxiliary = self(tokens_BN, streaming)
        row_B1, chosen_BA = (
            torch.arange(len(tokens_BN), device=at_BA.device)[:, None],
            at_BA.clamp(min=0),
        )
        targets_BA = tokens_BN.gather(1, chosen_BA)
        logits_BAV = self.logits(hidden_BNS[row_B1, chosen_BA])
        wide = torch.promote_types(logits_BAV.dtype, torch.float32)
        nats_BA = F.cross_entropy(logits_BAV.to(wide).mT, targets_BA, reduction="none")
        right_BA = (logits_BAV.argmax(-1) == targets_BA) & (at_BA >= 0)
        return nats_BA.masked_fill(at_BA < 0, 0.0), right_BA, auxiliary

    def logits(self, hidden_BS: Tensor) -> Tensor:
        """Return the logits `[..., V]` of a few rows."""
        if self.softmax is not None:
            return self.softmax.log_shares(hidden_BS)
        return F.linear(hidden_BS, self.output_VS, self.output_bias_V)

    @property
    def device(self) -> torch.device:
        return self.embedding.start_S.device

    def count_parameters(self) -> int:
        """Return the number of trained values."""
        return sum(parameter.numel() for parameter in self.parameters())


def recomputed_block(block: nn.Module, *inputs: Any) -> Any:
    """Return block(*inputs), computed again in the backward pass; statistics are gathered once."""
    if torch.compiler.is_compiling():  # which takes no such contexts, and has an option instead
        return checkpoint(block, *inputs, use_reentrant=False)
    return checkpoint(block, *inputs, use_reentrant=False, context_fn=recompute_contexts)


def recompute_contexts() -> tuple[
    contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]
]:
    """Contexts of the first and the second forward pass of recomputation: the second gathers no statistics."""
    return contextlib.nullcontext(), statistics_paused()


def compile_loss(model: nn.Module, loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return `loss`, a method of `model`, compiled at its first call; on a CPU patterns of the model are changed.

    On a GPU attention and selection are operators of static shapes, and the loss is one graph. On a CPU what is
    selected has sizes that depend on data: patterns run eagerly there, and matrices, norms and activations around them
    are compiled.
    """

    @functools.cache
    def compiled_loss() -> Callable[..., Any]:
        # Not before the first call: a model is made on a CPU, and moved to its device later.
        if next(model.parameters()).device.type == "cpu":
            exclude_patterns(model)
        return torch.compile(loss)

    # Lists depend on shapes, so they are made before the loss is compiled for shapes that it has not had.
    shapes_seen: set[tuple[torch.Size | None, ...]] = set()

    @functools.wraps(loss)
    def call(*arguments: Any, **named: Any) -> Any:
        device = next(model.parameters()).device
        given = (*arguments, *named.values())
        shapes = tuple(x.shape if isinstance(x, Tensor) else None for x in given)
        if device.type != "cpu" and shapes not in shapes_seen:
            shapes_seen.add(shapes)
            make_lists(lambda: loss(*arguments, **named), device)
        with torch._dynamo.config.patch(COMPILER_OPTIONS):
            return compiled_loss()(*arguments, **named)

    return call


def exclude_patterns(model: nn.Module) -> None:
    """Let the compiler leave out the patterns of a model, except those of our kernels, which it takes for operators."""
    for pattern in model.modules():
        if isinstance(pattern, Pattern) and pattern.backend != "triton":
            pattern.forward = torch.compiler.disable(pattern.forward)  # type: ignore[method-assign]


@torch.no_grad()
def make_lists(run: Callable[[], Any], device: torch.device) -> None:
    """Run once what is to be compiled, which makes the lists that follow from shapes alone.

    A compiler cannot trace how they are made, but takes lists that exist as constants. No statistics are gathered, and
    random streams are left as they were.
    """
    devices = [device] if device.type == "cuda" else []
    with statistics_paused(), torch.random.fork_rng(devices):
        run()
