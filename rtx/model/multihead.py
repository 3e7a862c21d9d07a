"""The attention layer: splits its heads among patterns, and joins them.

Shapes: B sequences, N positions, E hidden width, H heads, D = E / H head size.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from rtx.attention.heads import Heads, HeadState
from rtx.attention.weights import Distances
from rtx.config import Config
from rtx.model.linear import Linear
from rtx.model.patterns import has_keys, layer_patterns, make_heads
from rtx.model.positions import Rotary, Shaw


class MultiheadAttention(nn.Module):
    """One layer's heads, in groups of one pattern each; a group without keys of its own has no key matrix."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        model = config.model
        self.size = model.hidden // model.heads
        patterns = layer_patterns(config, layer)
        self.with_keys = [has_keys(name, config) for name in patterns]
        counts = list(patterns.values())
        key_counts = [count for count, with_keys in zip(counts, self.with_keys, strict=True) if with_keys]
        self.widths = [count * self.size for count in (*counts, *key_counts, *counts)]
        self.qkv = Linear(model.hidden, sum(self.widths), bias=False)
        self.out = Linear(model.hidden, model.hidden, bias=False)
        self.rotary = Rotary(self.size) if model.positions == "rotary" else None
        self.shaw = nn.ModuleDict()
        if model.positions == "shaw":
            self.shaw.update({name: Shaw(model.max_distance, self.size) for name in patterns})
        self.groups = nn.ModuleDict({name: make_heads(name, count, config, layer) for name, count in patterns.items()})

    def each(self) -> list[Heads]:
        """The groups in order."""
        groups = list(self.groups.values())
        assert all(isinstance(heads, Heads) for heads in groups)
        return groups  # type: ignore[return-value]

    def split(self, x_BNE: Tensor) -> list[tuple[Tensor, Tensor | None, Tensor]]:
        """Return each group's queries, keys (None without keys of its own) and values, `[B, heads, N, D]`."""
        parts = self.qkv(x_BNE).split(self.widths, dim=-1)
        split = [part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts]
        count = len(self.with_keys)
        queries, keys, values = split[:count], iter(split[count:-count]), split[-count:]
        maybe_keys = [next(keys) if with_keys else None for with_keys in self.with_keys]
        return list(zip(queries, maybe_keys, values, strict=True))

    def relative(self) -> list[Distances | None]:
        """Shaw's tables of each group, None without."""
        return [self.shaw[name]() if name in self.shaw else None for name in self.groups]

    def forward(
        self, x_BNE: Tensor, streaming: bool = False, states: list[HeadState] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output `[B, N, E]` and its auxiliary loss; fresh `states` are filled with the sequence."""
        outputs, total = [], x_BNE.new_zeros((), dtype=torch.float32)
        split = self.split(x_BNE)
        for state, (q, k, v) in zip(states or [], split, strict=False):
            state.fill(q, k, v, self.rotary)
        for heads, relative, (q, k, v) in zip(self.each(), self.relative(), split, strict=True):
            out_BHND, loss = heads(q, k, v, rotate=self.rotary, relative=relative, streaming=streaming)
            outputs.append(out_BHND)
            total = total + loss
        joined_BNE = torch.cat(outputs, dim=1).transpose(1, 2).flatten(2)
        return self.out(joined_BNE), total

    def start(self) -> list[HeadState]:
        """Return the streaming state of every group at position 0."""
        return [heads.start(relative) for heads, relative in zip(self.each(), self.relative(), strict=True)]

    def step(self, x_BE: Tensor, states: list[HeadState], position: int) -> Tensor:
        """Return the layer's output `[B, E]` at the next position of each stream."""
        rotate = functools.partial(self.rotary, first=position) if self.rotary is not None else None
        outputs = []
        for state, (q, k, v) in zip(states, self.split(x_BE[:, None]), strict=True):
            k_BHD = None if k is None else k[:, :, 0]
            outputs.append(state.step(q[:, :, 0], k_BHD, v[:, :, 0], position, rotate))
        return self.out(torch.cat(outputs, dim=1).flatten(1))
