"""Choices by content in static shapes: what a GPU takes, which nobody asks how many members there are."""

from types import ModuleType

import torch
from torch import Tensor

from rtx.attention.engine import packed_attention, static_selection, triton_selection


def is_static(x: Tensor, backend: str) -> bool:
    """Tell whether choices among vectors are made in static shapes: on a GPU, or where its kernels are chosen."""
    return not x.is_cpu or backend == "triton"


def functions(x: Tensor, backend: str) -> ModuleType:
    """Return the module whose functions choose among vectors: our kernels, or torch's operations."""
    by_kernels = backend != "torch" and x.dtype == torch.float32 and packed_attention.can_run(x.device)
    return triton_selection if by_kernels else static_selection
