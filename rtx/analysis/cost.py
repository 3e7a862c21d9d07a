"""What a run costs, from its configuration alone: parameters, and operations.

Multiplications and additions count as one operation each. Attention is counted by the pairs of
positions that patterns read, not by what a kernel computes and discards. Each pattern has its own
numbers (`Pattern.pairs_of_head`, `Pattern.choice_operations`).
"""

from dataclasses import dataclass

import torch
from torch import nn

from rtx.attention.pairs import triangle
from rtx.model.heads import head_size
from rtx.model.transformer import Transformer
from rtx.settings.derived import memory_slots
from rtx.settings.schema import Config


@dataclass(frozen=True)
class Cost:
    """The cost of a configuration; operations are for one sequence, forward only."""

    parameters: int
    embedding_parameters: int
    matrix_parameters: int
    """Weights of the matrices in the blocks."""
    dense: float
    """Operations of matrix products with weights."""
    attention: float
    """Operations of logits and weighted sums of the pairs that are read."""
    selection: float
    """Operations of scores of centroids, blocks or keys, by which heads choose what to read; an
    indexer's loss is left out."""
    full_attention: float
    """What `attention` would be if every head read everything before it."""

    @property
    def forward(self) -> float:
        """All operations of one sequence, forward."""
        return self.dense + self.attention + self.selection

    def step(self, config: Config) -> float:
        """Operations of one optimizer step; a selection is not computed backward."""
        passes = passes_of_step(config)
        each_sequence = passes * (self.dense + self.attention) + self.selection
        return config.trainer.batch_size * each_sequence


def passes_of_step(config: Config) -> int:
    """Return how many forward passes have the operations of a step.

    A backward pass counts twice, and recomputation once.
    """
    if config.model.recompute is True:
        return 4
    return 3


def cost(config: Config, vocabulary: int) -> Cost:
    """Return the cost of a resolved configuration; no weight is allocated."""
    with torch.device("meta"):
        model = Transformer(config, vocabulary)
    attention = 0.0
    selection = 0.0
    operations_of_pair = products_of_pair(config) * 2.0 * head_size(config)
    N = config.data.length
    for layer in model.attentions():
        for group in layer.head_groups():
            pattern = group.pattern
            attention += operations_of_pair * group.heads * pattern.pairs_of_head(N)
            selection += group.choosing_heads * pattern.choice_operations(N, group.size)
    all_heads = config.model.heads * config.model.layers
    return Cost(
        parameters=model.count_parameters(),
        embedding_parameters=sum(parameter.numel() for parameter in vocabulary_parameters(model)),
        matrix_parameters=matrix_parameters(model),
        dense=dense_operations(model, config),
        attention=attention,
        selection=selection,
        full_attention=4.0 * head_size(config) * all_heads * triangle(N),
    )


def matrix_parameters(model: Transformer) -> int:
    """Return the number of weights of the linear layers in the blocks."""
    weights = 0
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            weights += module.weight.numel()
    return weights


def products_of_pair(config: Config) -> int:
    """Return the products of D numbers for each pair: with its key, its value, and its distance."""
    if config.model.positions == "xl":
        return 3
    return 2


def vocabulary_parameters(model: Transformer) -> list[nn.Parameter]:
    """Return the parameters whose number depends on the vocabulary, each once."""
    if model.softmax is None:
        parameters = [model.embedding.table_VS, model.output_VS, model.output_bias_V]
    else:
        assert model.embedding.bands is not None
        parameters = [*model.embedding.bands.parameters(), *model.softmax.parameters()]
    return list({id(parameter): parameter for parameter in parameters}.values())


def dense_operations(model: Transformer, config: Config) -> float:
    """Return the operations of matrix products with weights.

    Of an adaptive softmax they are counted as if no token were of a rarer band.
    """
    weights = 0
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weights += module.weight.numel()
    if model.softmax is None:
        weights += model.output_VS.numel()
    else:
        weights += model.softmax.bands.tables[0].numel()
    # A memory gets queries, keys and values again.
    projections = 0
    for attention in model.attentions():
        projections += attention.qkv.weight.numel()
    return 2.0 * (config.data.length * weights + memory_slots(config.model) * projections)
