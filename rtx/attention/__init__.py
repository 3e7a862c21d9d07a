"""The attention patterns, usable without the rest of rtx: modules of heads that say who reads whom."""

from rtx.attention.centroids import Centroids, after_step
from rtx.attention.choices import Blocks, Exact, Indexer, RandomBlocks
from rtx.attention.lsh import Lsh
from rtx.attention.pattern import Pattern, PositionPattern, Spread
from rtx.attention.patterns import AdaptiveSpan, Fixed, Full, Local, Random, Recurrent, Strided
from rtx.attention.routing import Routing
from rtx.attention.softmax import Relative

__all__ = ["AdaptiveSpan", "Blocks", "Centroids", "Exact", "Fixed", "Full", "Indexer", "Local", "Lsh", "Pattern"]
__all__ += ["PositionPattern", "Random", "RandomBlocks", "Recurrent", "Relative", "Routing", "Spread", "Strided"]
__all__ += ["after_step"]
