"""The attention patterns, usable without the rest of rtx: functions on tensors, and heads that own their centroids."""

from rtx.attention.cross import CrossRoutingHeads, cross_routing
from rtx.attention.fixed import FixedHeads, fixed
from rtx.attention.full import FullHeads, full
from rtx.attention.hashing import rotations
from rtx.attention.kmeans import Centroids, update_centroids
from rtx.attention.local import LocalHeads, local
from rtx.attention.lsh import LshHeads, lsh
from rtx.attention.random import RandomHeads, random
from rtx.attention.routing import RoutingHeads, routing
from rtx.attention.span import SpanHeads, adaptive_span
from rtx.attention.strided import StridedHeads, strided
from rtx.attention.weights import Distances

__all__ = [
    "Centroids",
    "CrossRoutingHeads",
    "Distances",
    "FixedHeads",
    "FullHeads",
    "LocalHeads",
    "LshHeads",
    "RandomHeads",
    "RoutingHeads",
    "SpanHeads",
    "StridedHeads",
    "adaptive_span",
    "cross_routing",
    "fixed",
    "full",
    "local",
    "lsh",
    "random",
    "rotations",
    "routing",
    "strided",
    "update_centroids",
]
