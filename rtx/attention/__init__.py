"""Attention patterns: modules of heads in which every query reads some of the keys.

The library imports nothing else of rtx. To know one pattern, open its file: it has the rule in
plain Python, then the batch form, then the stream. To go on from there:

    reads.py       how a pattern says who reads whom: packed lists, or an index
    pattern.py     the base class of all patterns, with the forward pass
    engine/        the attention over what a pattern reads
    cache.py       the keys and values that streams keep
    oracle.py      attention by rules, slow, which tests compare everything with

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
