"""Attention patterns: modules of heads in which every query reads some of the keys.

A query *reads* a key if it attends to it. The library imports nothing else of rtx. To know one
pattern, open its file:

    positional.py           Full, Local, and the base classes of the next six
    recurrent.py            Recurrent
    sparse_transformer.py   Strided, Fixed, FixedBlock, FixedSummary
    adaptive_span.py        AdaptiveSpan
    lsh.py                  Lsh
    random_members.py       Random
    routing_topk.py         TopK, which is Algorithm 1 of the Routing Transformer
    routing_thresholds.py   Thresholds
    routing_nearest.py      Nearest
    top_keys.py             Exact, and the base class of Probed, Indexer and Blocks
    probed.py               Probed
    indexer.py              Indexer
    blocks.py               Blocks, RandomBlocks

Each of these files has the rule in plain Python first, then the batch form (whole sequences on
tensors), then the stream. The first lines of a file say what the names from other files mean. The
other files, in the order in which they help to read on:

    pattern.py         the base class of all patterns, with the forward pass and streams
    reads.py           how a pattern describes which query reads which keys: lists, or an index
    clusters.py        the base classes of patterns with clusters (of Lsh, Random, TopK, Thresholds
                       and Nearest), and their KV cache
    centroids.py       the centroids of clusters, and how a training step moves them
    engine/            attention over the keys that are read
    padding.py         attention over padded sequences
    documents.py       sequences of several documents, which read nothing of each other
    grouped.py         grouped queries: query heads that share keys and values
    oracle.py          slow attention by the rules, with which tests compare everything
    ties.py            which scores count as equal
    members.py         selection of the members of clusters by their scores
    key_centroids.py, inverted_file.py, probed_lists.py, candidates.py: the parts of Probed
    static.py, capacity.py: selection in static shapes for GPUs, and lists of fixed capacity
    once.py            caches of lists that follow from shapes
    pairs.py           numbers of pairs, for plans
    typed_torch.py     functions of torch that torch declares without types
    arguments.py, precision.py, pieces.py, recompute.py, gradients.py: small helpers of all others

Names of tensors end with the letters of their dimensions: `q_BHND` is `[B, H, N, D]`, and 1 is a
dimension of size 1. All files of this folder use these letters; those of engine/ have a few more,
which each file explains:

    A  keys that a query chooses among      O  hash rounds of all heads
    B  sequences, or streams                P  query members of lists
    b  positions of a block                 Q  queries, or positions, of a piece of work; in caches
    C  clusters (or lists) of a head           those of a head at the newest position
    D  head size                            R  rows: positions of all heads, B * H * N
    E  size of what a choice compares       S  slots of a cache
    F  columns of a random matrix           T  hash rounds
    G  key-value heads                      U  groups of sequences that are padded alike
    g  blocks of a sequence                 V  roles with thresholds
    H  heads; in caches those that choose   W  attention window: keys that a query reads at most
    I  query heads of a key-value head      X  heads of all sequences, B * H, or some of them
    i  conditions of `Holes`                x  copies of sequences, I * B (grouped.py)
    J  some lists, members or blocks        Y  layers
    K  keys of a query                      Z  numbers in a row of statistics
    L  lists of all heads, B * H * C
    M  key members of lists; distances in the tables by distance (`keys_MD`, `bias_HM`), because
       users and checkpoints have these names
    N  positions of a sequence
"""

from rtx.attention.adaptive_span import AdaptiveSpan
from rtx.attention.blocks import Blocks, RandomBlocks
from rtx.attention.centroids import Centroids, after_step
from rtx.attention.clusters import ClusterPattern, Routing
from rtx.attention.documents import Documents
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.indexer import Indexer
from rtx.attention.lsh import Lsh
from rtx.attention.pattern import Pattern, Stream
from rtx.attention.positional import (
    ContiguousPattern,
    Full,
    Local,
    PositionLists,
    PositionPattern,
)
from rtx.attention.probed import Probed
from rtx.attention.random_members import Random
from rtx.attention.recurrent import Recurrent
from rtx.attention.routing_nearest import Nearest
from rtx.attention.routing_thresholds import Thresholds
from rtx.attention.routing_topk import TopK
from rtx.attention.sparse_transformer import Fixed, FixedBlock, FixedSummary, Strided
from rtx.attention.top_keys import Exact

ROUTING_CLASSES: dict[str, type[Routing]] = {
    "topk": TopK,
    "causal": Thresholds,
    "nearest": Nearest,
}
"""The classes of routing heads, by the value of `routing.selection`."""

__all__ = [
    "ROUTING_CLASSES",
    "AdaptiveSpan",
    "Blocks",
    "Centroids",
    "ClusterPattern",
    "ContiguousPattern",
    "Documents",
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
