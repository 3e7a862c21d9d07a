"""The attention patterns, usable without the rest of rtx: modules of heads that say who reads whom."""

from rtx.attention.choices import Blocks, Exact, Indexer, RandomBlocks
from rtx.attention.engine.softmax import Relative
from rtx.attention.lsh import Lsh
from rtx.attention.pattern import ClusterPattern, ContiguousPattern, Pattern, PositionPattern, Spread
from rtx.attention.patterns import (
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
__all__ += ["Recurrent", "Relative", "Routing", "Spread", "Strided", "after_step"]
