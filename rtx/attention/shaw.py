"""Shaw's relative terms (Shaw et al. 2018, equations 3 and 4): tables of keys and values by distance, and which row of
them each pair of slots in a block takes.

A rule knows the distances of all pairs without writing them down where it can: logits gain the term of their distance
(`add`), and weights are summed by the row they belong to (`collect`).

Shapes: G blocks, Q queries, K keys, D head size, M distances (rows of a table).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Distances(NamedTuple):
    """The tables, shared by all heads of a kind; row m is for distance m, the last for every distance beyond."""

    keys_MD: Tensor
    values_MD: Tensor


class Tile(NamedTuple):
    """A piece of all pairs that is worked on at once."""

    part: slice
    """Which blocks."""
    rows: slice
    """Which of their query slots."""
    columns: slice
    """Which of their key slots: at least those that one of the queries may read."""


class Rule(Protocol):
    """Which row of the tables each pair of slots of a tile takes."""

    def add(self, logits_GQK: Tensor, terms_GQM: Tensor, tile: Tile) -> None:
        """Add to each logit, in place, the term of its query and its row."""
        ...

    def collect(self, x_GQK: Tensor, count: int, tile: Tile) -> Tensor:
        """Return the sums over the keys of each row, `[G, Q, M]`; masked pairs hold zeros."""
        ...


class Dense:
    """Any distances, given for all pairs as `[G, Q, K]` (may be an expanded view)."""

    def __init__(self, distance_GQK: Tensor) -> None:
        self.distance_GQK = distance_GQK

    def rows(self, count: int, tile: Tile) -> Tensor:
        """Return the row numbers of a tile."""
        return self.distance_GQK[tile].clamp(0, count - 1)

    def add(self, logits_GQK: Tensor, terms_GQM: Tensor, tile: Tile) -> None:
        """See `Rule`."""
        rows_GQK = self.rows(terms_GQM.shape[-1], tile)
        logits_GQK += terms_GQM.gather(-1, rows_GQK.expand(logits_GQK.shape))

    def collect(self, x_GQK: Tensor, count: int, tile: Tile) -> Tensor:
        """See `Rule`."""
        rows_GQK = self.rows(count, tile).expand(x_GQK.shape)
        return x_GQK.new_zeros(*x_GQK.shape[:2], count).scatter_add_(-1, rows_GQK, x_GQK)


class Band:
    """W queries that stand at the end of 2 W keys, each reading the W keys up to itself (as in local attention).

    In memory, the pairs of a distance lie on a diagonal: K + 1 numbers from one query to the next.
    """

    def __init__(self, window: int) -> None:
        self.window = window

    def diagonals(self, x_GQK: Tensor, tile: Tile) -> Tensor:
        """Return a view `[G, Q, W]` of the pairs at distances W - 1 down to 0."""
        G, Q, K = x_GQK.shape
        first = tile.rows.start + 1 - tile.columns.start
        assert x_GQK.is_contiguous() and 0 <= first <= K - Q - self.window + 1
        return x_GQK.as_strided((G, Q, self.window), (Q * K, K + 1, 1), x_GQK.storage_offset() + first)

    def add(self, logits_GQK: Tensor, terms_GQM: Tensor, tile: Tile) -> None:
        """See `Rule`; logits of masked pairs are left alone."""
        far_first_GQM = terms_GQM[..., : self.window].flip(-1)
        near = far_first_GQM.shape[-1]
        diagonals_GQW = self.diagonals(logits_GQK, tile)
        diagonals_GQW[..., self.window - near :] += far_first_GQM
        diagonals_GQW[..., : self.window - near] += terms_GQM[..., -1:]

    def collect(self, x_GQK: Tensor, count: int, tile: Tile) -> Tensor:
        """See `Rule`."""
        diagonals_GQW = self.diagonals(x_GQK, tile)
        near = min(count, self.window)
        sums_GQM = x_GQK.new_zeros(*x_GQK.shape[:2], count)
        sums_GQM[..., :near] = diagonals_GQW[..., self.window - near :].flip(-1)
        sums_GQM[..., -1] += diagonals_GQW[..., : self.window - near].sum(-1)
        return sums_GQM


class Sorted:
    """Distances between positions in order, most of them beyond the tables (as in clusters): the few near pairs are
    listed, all others take the last row. Pairs that look ahead are masked, whatever row they take.
    """

    def __init__(self, query_GQ: Tensor, key_GK: Tensor) -> None:
        self.query_GQ, self.key_GK = query_GQ, key_GK
        self.listed: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}

    def near(self, count: int, tile: Tile) -> tuple[Tensor, Tensor]:
        """Return the pairs before the last row: their numbers in a flat `[G, Q, K]` and in a flat `[G, Q, M]`."""
        asked = (count, tile.part.start, tile.rows.start)
        if asked not in self.listed:
            query_GQ = self.query_GQ[tile.part, tile.rows].contiguous()
            key_GK = self.key_GK[tile.part, tile.columns].contiguous()
            first_GQ = torch.searchsorted(key_GK, query_GQ - (count - 1), right=True)
            many_GQ = torch.searchsorted(key_GK, query_GQ, right=True) - first_GQ
            row_P = torch.repeat_interleave(many_GQ.flatten())
            before_R = many_GQ.flatten().cumsum(0) - many_GQ.flatten()
            slot_P = first_GQ.flatten()[row_P] + torch.arange(len(row_P), device=row_P.device) - before_R[row_P]
            K = key_GK.shape[1]
            distance_P = query_GQ.flatten()[row_P] - key_GK.flatten()[row_P // query_GQ.shape[1] * K + slot_P]
            self.listed[asked] = row_P * K + slot_P, row_P * count + distance_P
        return self.listed[asked]

    def add(self, logits_GQK: Tensor, terms_GQM: Tensor, tile: Tile) -> None:
        """See `Rule`."""
        pair_P, term_P = self.near(terms_GQM.shape[-1], tile)
        logits_GQK += terms_GQM[..., -1:]
        closer_GQM = (terms_GQM - terms_GQM[..., -1:]).flatten()
        logits_GQK.view(-1).index_add_(0, pair_P, closer_GQM[term_P])

    def collect(self, x_GQK: Tensor, count: int, tile: Tile) -> Tensor:
        """See `Rule`."""
        pair_P, term_P = self.near(count, tile)
        sums_GQM = x_GQK.new_zeros(*x_GQK.shape[:2], count)
        sums_GQM.view(-1).index_add_(0, term_P, x_GQK.flatten()[pair_P])
        sums_GQM[..., -1] = x_GQK.sum(-1) - sums_GQM[..., :-1].sum(-1)
        return sums_GQM
