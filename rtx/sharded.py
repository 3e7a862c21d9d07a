"""Tensors whose parts are on several processes (hardware=fsdp).

They are DTensors, whose module takes a second to import.
"""

from typing import Any

from torch import Tensor


def is_sharded(value: Any) -> bool:
    """Return whether a value is a sharded tensor."""
    return hasattr(value, "full_tensor")


def whole(value: Any) -> Any:
    """Return the whole of a sharded tensor, on every process, and any other value as it is.

    All processes call it.
    """
    if is_sharded(value):
        return value.full_tensor().detach()
    return value


def sharded_as(value: Tensor, like: Any) -> Tensor:
    """Return a tensor, the same on every process, sharded as `like` is; nothing is sent."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = like.device_mesh
    return distribute_tensor(value.to(like.dtype), mesh, like.placements, src_data_rank=None)
