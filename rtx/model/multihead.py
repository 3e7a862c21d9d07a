"""The attention layer: which patterns share out its heads by the configuration, and how these are split and joined.

Shapes: B sequences, N positions, E hidden width, H heads, D = E / H head size.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtx.attention.cache import Cache
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.pattern import Pattern
from rtx.config import ROUTED, Config, layer_patterns
from rtx.model.heads import make_pattern
from rtx.model.linear import Linear
from rtx.model.positions import Shaw, SinusoidKeys, rotate


class Stream(NamedTuple):
    """What a stream keeps of one group of heads."""

    cache: Cache
    last_keys: list[Tensor]
    """The keys before the next position that a key shift or convolution reads, `[B, H, K, D]`, in a list of one."""


class MultiheadAttention(nn.Module):
    """One layer's heads, in groups of one pattern each; where keys are the queries there is no key matrix."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        model = config.model
        self.size = model.hidden // model.heads
        patterns = layer_patterns(config, layer)
        self.groups = nn.ModuleDict(
            {name: make_pattern(name, heads, config, layer) for name, heads in patterns.items()}
        )
        self.tied = [name == ROUTED and config.routing.keys == "tied" for name in patterns]
        self.with_keys = [p.has_keys and not tied for p, tied in zip(self.each(), self.tied, strict=True)]
        counts = list(patterns.values())
        key_counts = [count for count, with_keys in zip(counts, self.with_keys, strict=True) if with_keys]
        self.widths = [count * self.size for count in (*counts, *key_counts, *counts)]
        self.qkv = Linear(model.hidden, sum(self.widths), bias=False)
        self.out = Linear(model.hidden, model.hidden, bias=False)
        turned = [name != ROUTED or config.routing.rotary for name in patterns]
        self.rotations = [rotate if model.positions == "rotary" and each else None for each in turned]
        """What turns the queries and keys of each group, None without."""
        self.shaw = nn.ModuleDict()
        if model.positions == "shaw":
            self.shaw.update({name: Shaw(model.max_distance, self.size) for name in patterns})
        with_sinusoids = model.positions == "xl"
        self.xl = SinusoidKeys(model.hidden, model.heads, model.clamp, model.dropout) if with_sinusoids else None
        routing, self.mix = config.routing, nn.ModuleDict()
        if ROUTED in patterns and (routing.key_shift or routing.key_conv > 1):
            self.mix[ROUTED] = KeyMix(patterns[ROUTED], self.size, routing.key_shift, routing.key_conv)
        self.key_loss = routing.key_loss if ROUTED in patterns and self.with_keys[-1] else 0.0

    def each(self) -> list[Pattern]:
        """The groups in order."""
        return list(self.groups.values())  # type: ignore[return-value]

    def split(self, x_BNE: Tensor, streams: list[Stream] | None = None) -> list[tuple[Tensor, Tensor | None, Tensor]]:
        """Return each group's queries, keys (None without keys of its own) and values, `[B, heads, N, D]`.

        Keys are shifted and convolved where that is asked for; streams go on where they are.
        """
        parts = self.qkv(x_BNE).split(self.widths, dim=-1)
        split = [part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts]
        count = len(self.with_keys)
        queries, keys, values = split[:count], iter(split[count:-count]), split[-count:]
        if self.xl is not None:
            queries = [q_BHND + self.xl.content_HD[:, None].to(q_BHND.dtype) for q_BHND in queries]
        kinds = zip(queries, self.tied, self.with_keys, strict=True)
        own_keys = [q_BHND if tied else next(keys) if with_keys else None for q_BHND, tied, with_keys in kinds]
        for number, name in enumerate(self.groups):
            if name in self.mix:
                last = streams[number].last_keys if streams is not None else []
                own_keys[number] = self.mix[name](own_keys[number], last)
        return list(zip(queries, own_keys, values, strict=True))

    def key_distance(self) -> Tensor:
        """Return how far apart the matrices of queries and of keys of the routing heads are, the mean over these heads.

        ||W_Q - W_K|| of a head is the least delta such that no unit of x (W_Q - W_K) exceeds delta times the largest of
        x: the largest sum of absolute differences over what one unit reads (the ICLR version, appendix A, equation 14).
        """
        parts, queries = self.qkv.weight.split(self.widths), len(self.groups)
        apart_FE = parts[queries - 1] - parts[queries + sum(self.with_keys) - 1]
        return apart_FE.abs().sum(-1).unflatten(0, (-1, self.size)).amax(-1).mean()

    def relative(self) -> list[RelativeTables | None]:
        """Return the tables by distance of each group, None without."""
        if self.xl is not None:
            return [self.xl(pattern.keeps) for pattern in self.each()]  # type: ignore[attr-defined]
        return [self.shaw[name]() if name in self.shaw else None for name in self.groups]

    def forward(
        self, x_BNE: Tensor, streaming: bool = False, streams: list[Stream] | None = None, memory: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Return the layer's output `[B, N, E]` and its auxiliary loss; fresh `streams` take the sequence in.

        The first `memory` positions are read, and have no output.
        """
        outputs, total = [], x_BNE.new_zeros((), dtype=torch.float32)
        if self.key_loss and self.training:
            total = total + self.key_loss * self.key_distance()
        groups = list(zip(self.each(), self.rotations, self.split(x_BNE, streams), strict=True))
        for stream, (pattern, rotary, (q, k, v)) in zip(streams or [], groups, strict=False):
            stream.cache.prefill(pattern.inputs(q, k, rotary), v)
        for relative, (pattern, rotary, (q, k, v)) in zip(self.relative(), groups, strict=True):
            out_BHND, loss = pattern(q, k, v, rotate=rotary, relative=relative, streaming=streaming, memory=memory)
            outputs.append(out_BHND)
            total = total + loss
        joined_BNE = torch.cat(outputs, dim=1).transpose(1, 2).flatten(2)
        return self.out(joined_BNE), total

    def start(self) -> list[Stream]:
        """Return what a stream keeps of every group, at position 0."""
        pairs = zip(self.each(), self.relative(), strict=True)
        return [Stream(pattern.start(relative), []) for pattern, relative in pairs]

    def decode(self, x_B1E: Tensor, streams: list[Stream], position: int) -> Tensor:
        """Return the layer's output `[B, 1, E]` at the next position of each stream."""
        split = self.split(x_B1E, streams)
        outputs = [
            stream.cache.decode(pattern.inputs(q, k, rotary, position), v, position)
            for stream, pattern, rotary, (q, k, v) in zip(streams, self.each(), self.rotations, split, strict=True)
        ]
        return self.out(torch.cat(outputs, dim=1).transpose(1, 2).flatten(2))


class KeyMix(nn.Module):
    """Keys that look back: the key of position j is that of j - shift, plus a causal convolution over `width` keys.

    With a shift of 1 a head can match "the unit before was A" (an induction head in one layer); the convolution is one
    for each unit of a head, with SiLU, added to the key (Xiao et al. 2025). It starts at zero.
    """

    def __init__(self, heads: int, size: int, shift: int, width: int) -> None:
        super().__init__()
        self.shift, self.width = shift, width
        self.taps_HDK = nn.Parameter(torch.zeros(heads, size, width)) if width > 1 else None

    def forward(self, k_BHND: Tensor, last: list[Tensor]) -> Tensor:
        """Return mixed keys; `last` holds the keys before them (none at the start), and then those before the next."""
        back = self.shift + self.width - 1
        before = last.pop() if last else k_BHND.new_zeros(*k_BHND.shape[:2], back, k_BHND.shape[-1])
        every, N = torch.cat([before, k_BHND], dim=2), k_BHND.shape[2]
        last.append(every[:, :, N:])
        mixed = every[:, :, self.width - 1 : self.width - 1 + N]
        if self.taps_HDK is None:
            return mixed
        taps = self.taps_HDK.to(k_BHND.dtype).unbind(-1)
        products = [every[:, :, first : first + N] * tap[:, None] for first, tap in enumerate(taps)]
        return mixed + F.silu(torch.stack(products).sum(0))
