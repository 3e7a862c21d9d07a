"""The centroids of keys that `Probed` compares queries with.

Shapes: B sequences, H heads, C clusters, N positions, D head size.
"""

import torch
from torch import Tensor

from rtx.attention.centroids import SPLIT, Centroids
from rtx.attention.typed_torch import register_load_state_dict_post_hook

NOT_STARTED = -1
"""The value of `steps` before the centroids have been initialised with keys."""


class KeyCentroids(Centroids):
    """C centroids of the keys of each of H heads, in float32: k-means over the course of training.

    They are initialised with keys of the first training sequence, and are not normalised. After a
    step a centroid moves towards the mean of the keys of its cluster in the step. A centroid
    without keys restarts close to the centroid of a large cluster, which splits it, as in FAISS
    (`centroid_update`, "split").

    Args:
        heads, clusters, size: H, C and D.
        decay: the share of a centroid that remains after one step.

    Raises:
        ValueError: for a count below 1 (heads below 0), or a decay outside 0 to 1.
    """

    def __init__(self, heads: int, clusters: int, size: int, *, decay: float) -> None:
        # Window and length set thresholds, which are not used here.
        super().__init__(
            heads,
            clusters,
            size,
            window=1,
            length=clusters,
            decay=decay,
        )
        del self.threshold_HC
        self.update_rule = SPLIT
        self.seed_with_next = True
        self.steps.fill_(NOT_STARTED)
        register_load_state_dict_post_hook(self, KeyCentroids.seed_unless_started)

    def thresholds(self) -> list[Tensor]:
        return []

    def seed_unless_started(self, _: object) -> None:
        """Initialise with the next batch, unless the loaded centroids have been initialised."""
        self.seed_with_next = int(self.steps) == NOT_STARTED

    @torch.no_grad()
    def seed_from(self, clustered: list[Tensor]) -> None:
        """Initialise with keys of the first sequence of a batch, if it is not empty.

        Args:
            clustered: the keys alone, `[B, H, N, D]`.
        """
        (k_BHND,) = clustered
        if not k_BHND.numel():
            return
        start_HCD = self.drawn_from(k_BHND[0])
        self.centroid_HCD.copy_(start_HCD.float())
        self.steps.clamp_(min=0)
        self.seed_with_next = False
