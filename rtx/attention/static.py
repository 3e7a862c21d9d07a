"""Content-based selection in static shapes: on a GPU, which the CPU need not ask for the number of members."""

from types import ModuleType

import torch
from torch import Tensor

from rtx.attention.engine import packed_attention, static_selection, triton_selection


def is_static(x: Tensor, backend: str) -> bool:
    """Tell whether members are selected in static shapes: on a GPU, or with backend="triton"."""
    return not x.is_cpu or backend == "triton"


def selection_functions(x: Tensor, backend: str) -> ModuleType:
    """Return the module that selects among vectors: our kernels where they can run, else torch's operations."""
    by_kernels = backend != "torch" and x.dtype == torch.float32 and packed_attention.can_run(x.device)
    return triton_selection if by_kernels else static_selection
