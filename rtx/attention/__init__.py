"""The attention patterns, usable without the rest of rtx: functions on tensors, and heads that own their centroids."""

from rtx.attention.full import full
from rtx.attention.kmeans import Centroids, update_centroids
from rtx.attention.local import local
from rtx.attention.random import RandomHeads
from rtx.attention.routing import RoutingHeads, routing
from rtx.attention.weights import Distances

__all__ = ["Centroids", "Distances", "RandomHeads", "RoutingHeads", "full", "local", "routing", "update_centroids"]
