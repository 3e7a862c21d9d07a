"""Tensors that are shared out among the processes of a run (hardware=fsdp), and whole ones of them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

from rtx.model.block import Block

# Torch takes a second to import what shares tensors out, and every command that reads a model would wait for it.
if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Share out the parameters of a model among the processes of `mesh`, in place; buffers stay whole.

    Each block is gathered for its own forward and backward pass. What lies outside of the blocks (embedding, output
    matrix) stays gathered from the forward pass to the end of the backward pass: the loss reads it after `forward`.
    """
    from torch.distributed.fsdp import fully_shard

    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    if mesh.device_type == "cpu":  # gloo adds, and has no mean
        for module in (*blocks, model):
            module.set_force_sum_reduction_for_comms(True)  # type: ignore[attr-defined, operator]


def is_part(value: Any) -> TypeGuard[DTensor]:
    """Tell whether a value is a shared-out tensor; there is none before torch's module of them is imported."""
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(value, tensors.DTensor)


def whole(value: Any) -> Any:
    """Return the whole of a shared-out tensor, on every process (all call it); all else as it is."""
    return value.full_tensor().detach() if is_part(value) else value


def local(value: Tensor) -> Tensor:
    """Return this process's own part of a shared-out tensor, a view of it; all else as it is."""
    return value.to_local() if is_part(value) else value


def shared_as(value: Tensor, like: Tensor) -> Tensor:
    """Return a whole tensor, the same on every process, shared out as `like` is; nothing is sent."""
    if not is_part(like) or is_part(value):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(like.dtype), like.device_mesh, like.placements, src_data_rank=None)
