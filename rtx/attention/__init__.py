"""The attention patterns, usable without the rest of rtx: modules of heads that say who reads whom."""

from rtx.attention.blocks import Blocks, RandomBlocks
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.indexer import Indexer
from rtx.attention.lsh import Lsh
from rtx.attention.pattern import ClusterPattern, ContiguousPattern, Pattern, PositionLists, PositionPattern
from rtx.attention.positional import (
    AdaptiveSpan,
    Fixed,
    FixedBlock,
    FixedSummary,
    Full,
    Local,
    Random,
    Recurrent,
    Strided,
)
from rtx.attention.probed import Probed
from rtx.attention.routing import Centroids, Routing, after_step
from rtx.attention.top_keys import Exact

__all__ = ["AdaptiveSpan", "Blocks", "Centroids", "ClusterPattern", "ContiguousPattern", "Exact", "Fixed", "FixedBlock"]
__all__ += [
    "FixedSummary",
    "Full",
    "Indexer",
    "Local",
    "Lsh",
    "Pattern",
    "PositionPattern",
    "Probed",
    "Random",
    "RandomBlocks",
]
__all__ += ["PositionLists", "Recurrent", "RelativeTables", "Routing", "Strided", "after_step"]
