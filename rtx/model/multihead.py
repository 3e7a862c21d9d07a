"""The attention layer: splits its heads between a base pattern and routing or random heads, and joins them.

Shapes: B sequences, N positions, E hidden width, H heads, D = E / H head size.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rtx.attention.full import FullState, full
from rtx.attention.kmeans import Centroids
from rtx.attention.local import LocalState, local
from rtx.attention.random import RandomHeads, RandomState
from rtx.attention.routing import RoutingHeads, RoutingState
from rtx.config import Config
from rtx.model.positions import Rotary, Shaw


def routing_heads(config: Config, layer: int) -> int:
    """Return how many heads of a layer (0 is the lowest) route: routing layers are the topmost ones."""
    return config.routing.heads if layer >= config.model.layers - config.routing.layers else 0


def make_routed(config: Config, layer: int) -> RoutingHeads | RandomHeads:
    """Return the content-based or random heads of a layer."""
    routing, model = config.routing, config.model
    size = model.hidden // model.heads
    scale = size**-0.5 if routing.logit_scale == "sqrt_d" else 1.0
    assert routing.clusters is not None, "rtx.config.resolve freezes the clusters"
    if routing.selection == "random":
        return RandomHeads(
            routing.heads,
            routing.clusters,
            window=routing.window,
            length=config.data.length,
            seed=config.seed * 1_000 + layer,
            scale=scale,
            attend_self=routing.attend_self,
            dropout=model.attention_dropout,
        )
    centroids = Centroids(
        routing.heads,
        routing.clusters,
        size,
        window=routing.window,
        length=config.data.length,
        decay=routing.decay,
        update=routing.update,
        thresholds=routing.selection == "causal",
        threshold_decay=routing.threshold_decay,
        revive_after=routing.revive_after,
    )
    return RoutingHeads(
        centroids,
        selection=routing.selection,
        scale=scale,
        attend_self=routing.attend_self,
        dropout=model.attention_dropout,
        commitment=routing.commitment,
    )


@dataclass
class AttentionState:
    """The streaming state of one layer."""

    base: FullState | LocalState | None
    routed: RoutingState | RandomState | None


class MultiheadAttention(nn.Module):
    """One layer's heads. Routing and random heads share queries and keys, so they have no key matrix."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        model = config.model
        self.heads, self.size = model.heads, model.hidden // model.heads
        self.routed_heads = routing_heads(config, layer)
        self.base_heads = self.heads - self.routed_heads
        self.base, self.window, self.dropout = model.base, model.window, model.attention_dropout
        base, routed = self.base_heads * self.size, self.routed_heads * self.size
        self.widths = [base, routed, base, base, routed]
        self.qkv = nn.Linear(model.hidden, sum(self.widths), bias=False)
        self.out = nn.Linear(model.hidden, model.hidden, bias=False)
        self.rotary = Rotary(self.size) if model.positions == "rotary" else None
        shaw = model.positions == "shaw"
        self.base_shaw = Shaw(model.max_distance, self.size) if shaw and self.base_heads else None
        self.routed_shaw = Shaw(model.max_distance, self.size) if shaw and self.routed_heads else None
        self.routed = make_routed(config, layer) if self.routed_heads else None

    def split(self, x_BNE: Tensor) -> tuple[Tensor, ...]:
        """Return base queries, routed queries, base keys, base values and routed values, each `[B, heads, N, D]`."""
        parts = self.qkv(x_BNE).split(self.widths, dim=-1)
        return tuple(part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in parts)

    def forward(self, x_BNE: Tensor, streaming: bool = False) -> tuple[Tensor, Tensor]:
        """Return the layer's output `[B, N, E]` and its auxiliary loss."""
        q_BHND, routed_q_BHND, k_BHND, v_BHND, routed_v_BHND = self.split(x_BNE)
        outputs, loss = [], x_BNE.new_zeros((), dtype=torch.float32)
        if self.base_heads:
            outputs.append(self.attend_base(q_BHND, k_BHND, v_BHND))
        if self.routed is not None:
            out_BHND, loss = self.routed(
                routed_q_BHND,
                routed_v_BHND,
                rotate=self.rotary,
                relative=self.routed_shaw() if self.routed_shaw else None,
                streaming=streaming,
            )
            outputs.append(out_BHND)
        joined_BNE = torch.cat(outputs, dim=1).transpose(1, 2).flatten(2)
        return self.out(joined_BNE), loss

    def attend_base(self, q_BHND: Tensor, k_BHND: Tensor, v_BHND: Tensor) -> Tensor:
        """Return the outputs of the base heads."""
        if self.rotary is not None:
            q_BHND, k_BHND = self.rotary(q_BHND), self.rotary(k_BHND)
        pattern = full if self.base == "full" else functools.partial(local, window=self.window)
        dropout = self.dropout if self.training else 0.0
        relative = self.base_shaw() if self.base_shaw else None
        return pattern(q_BHND, k_BHND, v_BHND, dropout=dropout, relative=relative)

    def start(self) -> AttentionState:
        """Return the streaming state of this layer at position 0."""
        base = None
        if self.base_heads:
            relative = self.base_shaw() if self.base_shaw else None
            scale = self.size**-0.5
            full_base = self.base == "full"
            base = FullState(scale, relative) if full_base else LocalState(self.window, scale, relative)
        routed = None
        if self.routed is not None:
            routed = self.routed.start(self.routed_shaw() if self.routed_shaw else None)
        return AttentionState(base, routed)

    def step(self, x_BE: Tensor, state: AttentionState, position: int) -> Tensor:
        """Return the layer's output `[B, E]` at the next position of each stream."""
        q, routed_q, k, v, routed_v = (x_BH1D[:, :, 0] for x_BH1D in self.split(x_BE[:, None]))
        rotate = functools.partial(self.rotary, first=position) if self.rotary is not None else None
        outputs = []
        if state.base is not None:
            if rotate is not None:
                q, k = (rotate(x_BHD[:, :, None])[:, :, 0] for x_BHD in (q, k))
            outputs.append(state.base.step(q, k, v, position))
        if state.routed is not None:
            outputs.append(state.routed.step(routed_q, routed_v, position, rotate))
        return self.out(torch.cat(outputs, dim=1).flatten(1))
