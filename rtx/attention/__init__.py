"""The attention patterns, usable without the rest of rtx: modules of heads that say who reads whom."""

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
