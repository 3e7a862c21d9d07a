"""Attention patterns: modules of heads in which every query reads some of the keys.

A query *reads* a key if it attends to it. The library imports nothing else of rtx. To know one
pattern, open its file:

    positional.py  Full, Local, Recurrent, Strided, Fixed, FixedBlock, FixedSummary
    adaptive_span.py, lsh.py, probed.py, indexer.py, blocks.py: one pattern and its variants each
    top_keys.py    Exact, and the base class of Probed, Indexer and Blocks
    clusters.py    Random, and the base class of patterns with clusters
    routing.py     TopK, Thresholds, Nearest

It has the rule in plain Python, then the batch form (whole sequences on tensors), then the stream.
To go on from there:

    pattern.py     the base class of all patterns, with the forward pass
    reads.py       how a pattern describes which query reads which keys: packed lists, or an index
    engine/        attention over the keys that are read
    cache.py       the KV caches of streams
    oracle.py      slow attention by the rules, which tests compare everything with
    members.py     selection of the members of clusters by their scores
    centroids.py, centroid_update.py: the centroids of clusters, and how a training step moves them
    ties.py        which scores count as equal
    static.py, room.py: selection in static shapes for GPUs, and lists of limited length for it

Names of tensors end with the letters of their dimensions: `q_BHND` is `[B, H, N, D]`, and 1 is a
dimension of size 1. All files of this folder use these letters:

    A  keys that a query chooses among      N  positions of a sequence
    B  sequences, or streams                O  hash rounds of all heads
    C  clusters (or lists) of a head        P  query members of lists
    D  head size                            Q  queries, or positions, of a piece of work
    E  size of what a choice compares       R  rows: positions of all heads, B * H * N
    F  columns of a random matrix           S  slots of a cache
    G  blocks of a sequence                 T  hash rounds
    H  heads                                U  groups of sequences that are padded alike
    I  repeats                              V  sides with thresholds
    J  some lists, members or blocks        W  attention window: keys that a query reads at most
    K  keys of a query                      X  heads of all sequences, B * H, or some of them
    L  lists of all heads, B * H * C        Y  layers
    M  key members of lists

Three kinds of names differ: M is distances in tables by distance (`keys_MD`, `bias_HM`), X is
conditions in `Holes`, and T is the numbers in a row of statistics (`total_T`).
"""

from rtx.attention.adaptive_span import AdaptiveSpan
from rtx.attention.blocks import Blocks, RandomBlocks
from rtx.attention.centroids import Centroids, after_step
from rtx.attention.clusters import ClusterPattern, Random
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.indexer import Indexer
from rtx.attention.lsh import Lsh
from rtx.attention.pattern import Pattern
from rtx.attention.positional import (
    ContiguousPattern,
    Fixed,
    FixedBlock,
    FixedSummary,
    Full,
    Local,
    PositionLists,
    PositionPattern,
    Recurrent,
    Strided,
)
from rtx.attention.probed import Probed
from rtx.attention.routing import ROUTING_CLASSES, Nearest, Routing, Thresholds, TopK
from rtx.attention.stream import Stream
from rtx.attention.top_keys import Exact

__all__ = [
    "ROUTING_CLASSES",
    "AdaptiveSpan",
    "Blocks",
    "Centroids",
    "ClusterPattern",
    "ContiguousPattern",
    "Exact",
    "Fixed",
    "FixedBlock",
    "FixedSummary",
    "Full",
    "Indexer",
    "Local",
    "Lsh",
    "Nearest",
    "Pattern",
    "PositionLists",
    "PositionPattern",
    "Probed",
    "Random",
    "RandomBlocks",
    "Recurrent",
    "RelativeTables",
    "Routing",
    "Stream",
    "Strided",
    "Thresholds",
    "TopK",
    "after_step",
]
