"""What chosen positions of one sequence read, head by head: the weight on every key, and the cluster it is read in.

Who reads whom is what the patterns tell the engine (`Pattern.reads`); the weights are worked out here, some positions
at a time. Of heads with a second branch (blocks with routing.compressed) it is the branch that selects.

Shapes: N positions, P of them looked at, H heads of a group, C clusters, Y pairs of a query and a key in a list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention.lsh import Lsh, hash_positions
from rtx.attention.packed import Indexed, Part
from rtx.attention.pattern import Inputs, Pattern
from rtx.attention.patterns import Random
from rtx.attention.routing import Routing
from rtx.attention.softmax import Terms
from rtx.model.block import Block
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer

MAX_PAIRS = 1 << 22
"""Pairs of a position and a key worked on at once."""

Head = tuple[str, int]
"""A head of a layer: its group, and its number in it."""


@torch.no_grad()
def layer_inputs(model: Transformer, tokens_BN: Tensor) -> Iterator[tuple[MultiheadAttention, Tensor]]:
    """Yield the attention of every layer, the lowest first, with what it reads of the sequences, `[B, N, E]`."""
    x_BNE = model.embedding(tokens_BN)
    for block in model.blocks:
        assert isinstance(block, Block)
        yield block.attention, block.attention_norm(x_BNE) if block.pre else x_BNE
        x_BNE, _ = block(x_BNE)


def heads_of(attention: MultiheadAttention) -> dict[str, int]:
    """Return how many heads each group of a layer has."""
    widths = zip(attention.groups, attention.widths, strict=False)
    return {name: width // attention.size for name, width in widths}


@dataclass
class Reading:
    """What one head reads at the positions looked at; all on the CPU."""

    at_P: Tensor
    """The positions, ascending."""
    weight_PN: Tensor
    """Float32; 0: not read. A row sums to 1, or to 0 where the position reads nothing."""
    cluster_PN: Tensor
    """Int16: the cluster in which the key is read (with most weight, where in several); -1: not read, or no clusters.

    Of hashing heads cluster t * buckets + b is bucket b of round t, t the first round that puts both into one bucket.
    """
    clusters: int
    """How many clusters the head has; 0: its pattern has none."""


class Pairs(NamedTuple):
    """Who reads whom, pair by pair."""

    row_Y: Tensor
    """The number of the query's row among those that were asked for."""
    key_Y: Tensor
    """The key's position."""
    reader_Y: Tensor
    """Pairs of one query in one list share a number."""
    list_Y: Tensor


def pairs_of(part: Part, wanted_R: Tensor) -> Pairs:
    """Return what the wanted rows read; `wanted_R` holds a number for each of them, -1 for the others."""
    row_P = part.query_row_P if isinstance(part, Indexed) else part.query.row_M
    reader_X = (wanted_R[row_P] >= 0).nonzero()[:, 0]
    row_X, N = wanted_R[row_P[reader_X]], part.length
    if isinstance(part, Indexed):
        index_XK = part.index_PK[reader_X]
        x_Y, k_Y = (index_XK >= 0).nonzero(as_tuple=True)
        return Pairs(row_X[x_Y], index_XK[x_Y, k_Y] % N, x_Y, torch.zeros_like(x_Y))
    start_X = part.start_P[reader_X]
    count_X = part.stop_P[reader_X] - start_X
    x_Y = torch.arange(len(row_X), device=row_X.device).repeat_interleave(count_X)
    member_Y = (start_X - (count_X.cumsum(0) - count_X))[x_Y] + torch.arange(len(x_Y), device=row_X.device)
    return Pairs(row_X[x_Y], part.key.row_M[member_Y] % N, x_Y, part.query.list_M()[reader_X][x_Y])


def softmax_by(logit_Y: Tensor, group_Y: Tensor) -> Tensor:
    """Return the softmax of the logits of each group."""
    most_G = logit_Y.new_full((int(group_Y.max()) + 1 if len(group_Y) else 0,), -torch.inf)
    share_Y = (logit_Y - most_G.scatter_reduce(0, group_Y, logit_Y, "amax")[group_Y]).exp()
    return share_Y / torch.zeros_like(most_G).index_add(0, group_Y, share_Y)[group_Y]


@dataclass(frozen=True)
class Group:
    """Heads of one pattern, and what they read of one sequence."""

    pattern: Pattern
    given: Inputs
    parts: list[Part]
    terms: Terms

    @property
    def clusters(self) -> int:
        """C, 0 without."""
        if isinstance(self.pattern, Lsh):
            return self.pattern.rotation_HTDF.shape[1] * self.pattern.buckets
        part, H = self.parts[0], self.given.q_BHND.shape[1]
        if isinstance(part, Indexed) or not isinstance(self.pattern, Routing | Random):
            return 0
        return len(part.query.count_L) // H

    @torch.no_grad()
    def read(self, head: int, at_P: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights `[P, N]` of a head at some positions, float32 or wider, and clusters as in `Reading`."""
        _, H, N, _ = self.given.q_BHND.shape
        device = self.given.q_BHND.device
        at_P = at_P.to(device)
        wanted_R = torch.full((H * N,), -1, device=device)
        wanted_R[head * N + at_P] = torch.arange(len(at_P), device=device)
        # Inside one part a position has a softmax in each list and their mean; several parts share one softmax.
        found = [pairs_of(part, wanted_R) for part in self.parts]
        row_Y, key_Y, reader_Y, list_Y = (torch.cat(x) for x in zip(*found, strict=True))
        logit_Y = self.logits(head, at_P, row_Y, key_Y)
        weight_Y = softmax_by(logit_Y, reader_Y if len(found) == 1 else row_Y)
        if len(found) == 1:
            weight_Y = weight_Y / torch.bincount(row_Y[newly(reader_Y)], minlength=len(at_P))[row_Y]
        cell_Y, cells = row_Y * N + key_Y, len(at_P) * N
        weight_PN = weight_Y.new_zeros(cells).index_add(0, cell_Y, weight_Y).view(-1, N)
        cluster_PN = torch.full_like(weight_PN, -1, dtype=torch.int16)
        if self.clusters:
            most_Y = weight_Y.new_zeros(cells).scatter_reduce(0, cell_Y, weight_Y, "amax")[cell_Y]
            best_Y = (weight_Y == most_Y) & (weight_Y > 0)
            cluster_Y = self.cluster_of(head, at_P[row_Y], key_Y, list_Y)[best_Y].to(torch.int16)
            cluster_PN.view(-1).scatter_reduce_(0, cell_Y[best_Y], cluster_Y, "amin", include_self=False)
        return weight_PN, cluster_PN

    def logits(self, head: int, at_P: Tensor, row_Y: Tensor, key_Y: Tensor) -> Tensor:
        """Return the logits of pairs."""
        q_ND, k_ND = (x[0, head] for x in (self.given.turned_q_BHND, self.given.turned_k_BHND))
        wide = torch.promote_types(q_ND.dtype, torch.float32)
        relative, bias_HM = self.terms.relative, self.terms.bias_HM
        with torch.autocast(q_ND.device.type, enabled=False):
            q_PD = q_ND[at_P].to(wide) * self.terms.scale
            logit_Y = (q_PD @ k_ND.to(wide).T)[row_Y, key_Y]
            distance_Y = at_P[row_Y] - key_Y
            if relative is not None:
                by_PM = q_PD @ relative.keys_MD.to(wide).T
                logit_Y = logit_Y + by_PM[row_Y, distance_Y.clamp(max=by_PM.shape[1] - 1)]
            if bias_HM is not None:
                logit_Y = logit_Y + bias_HM[head][distance_Y.clamp(max=bias_HM.shape[1] - 1)].to(wide)
        return logit_Y

    def cluster_of(self, head: int, query_Y: Tensor, key_Y: Tensor, list_Y: Tensor) -> Tensor:
        """Return the cluster of pairs in lists."""
        if not isinstance(self.pattern, Lsh):
            return list_Y % self.clusters
        bucket_TN = hash_positions(self.given.q_BHND, self.pattern.rotation_HTDF)[:, 0, head]
        round_Y = (bucket_TN[:, query_Y] == bucket_TN[:, key_Y]).int().argmax(0)
        return round_Y * self.pattern.buckets + bucket_TN[round_Y, key_Y]


def newly(group_Y: Tensor) -> Tensor:
    """Tell where a group of pairs begins; pairs of one group follow each other."""
    return torch.cat([torch.ones_like(group_Y[:1], dtype=torch.bool), group_Y[1:] != group_Y[:-1]])


@torch.no_grad()
def groups_of(attention: MultiheadAttention, x_1NE: Tensor) -> dict[str, Group]:
    """Return the groups of a layer, with what they read of one sequence."""
    groups = {}
    every = zip(attention.groups, attention.each(), attention.relative(), attention.split(x_1NE), strict=True)
    for name, pattern, relative, (q_1HND, k_1HND, _) in every:
        given = pattern.inputs(q_1HND, k_1HND, attention.rotary)
        groups[name] = Group(pattern, given, pattern.reads(given, None, False), pattern.terms(attention.size, relative))
    return groups


def read_heads(attention: MultiheadAttention, x_1NE: Tensor, at_P: Tensor, kept: set[Head]) -> dict[Head, Reading]:
    """Return what the heads in `kept` of a layer read of one sequence at the positions `at_P`."""
    groups = groups_of(attention, x_1NE)
    found = {}
    for name, head in sorted(kept):
        parts = [groups[name].read(head, at) for at in at_P.split(max(1, MAX_PAIRS // x_1NE.shape[1]))]
        weight_PN, cluster_PN = (torch.cat(x).cpu() for x in zip(*parts, strict=True))
        found[name, head] = Reading(at_P, weight_PN.float(), cluster_PN, groups[name].clusters)
    return found
