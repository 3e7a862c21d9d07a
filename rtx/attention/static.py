"""Choose how content-based selection runs: in static shapes or not, and by which functions.

In *static shapes* every tensor has a size that follows from the shapes of the inputs. The CPU then
never waits for a GPU to learn how many members the clusters have.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from rtx.attention import ties
from rtx.attention.engine import packed_attention, static_selection, triton_selection


def is_static(x: Tensor, backend: str) -> bool:
    """Return whether members of `x`'s vectors are selected in static shapes.

    They are on a GPU, and on a CPU with `backend="triton"`, where Triton's interpreter runs.
    """
    return not x.is_cpu or backend == "triton"


def selection_functions(x: Tensor, backend: str) -> ModuleType:
    """Return the module whose functions select among `x`'s vectors in static shapes.

    `triton_selection` and `static_selection` both have the functions `by_thresholds`,
    `nearest_clusters`, `nearest_members`, `top_members`, `top_lists`, `best_places`, `list_sums`
    and `score_moments`, with the same arguments and results. Triton's take float32 alone, and need
    Triton and a GPU, or Triton's interpreter.

    Args:
        backend: "torch" takes `static_selection` everywhere.
    """
    is_for_triton = backend != "torch" and x.dtype == torch.float32
    if is_for_triton and packed_attention.can_run(x.device):
        return triton_selection
    return static_selection


def best_places(
    score: Tensor,
    count: int,
    margin: Callable[[Tensor], Tensor],
    backend: str,
) -> Tensor:
    """Return the places of the `count` best along the last dimension, see `ties.best_places`.

    It runs in static shapes where `is_static` says so.
    """
    if is_static(score, backend):
        return selection_functions(score, backend).best_places(score, count, margin)
    return ties.best_places(score, count, margin)
