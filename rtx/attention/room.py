"""Room: the fixed number of members that the lists of a GPU have space for.

It corresponds to the capacity of an expert in a mixture of experts. The number of members of a
cluster depends on the data, and the CPU does not wait for a GPU to learn it. So tensors have a
fixed length, the room: `room_factor` times the expected number of members. In training, members
without room are left out of the lists, and counted. `make_room`, which a run calls at intervals,
reads the counts and doubles the room of the patterns that have left members out.

A pattern with such lists has three attributes:

    may_lose_members: bool    whether its lists may lack room
    room_factor: int
    lost_members: Tensor      the number of members left out since the last `make_room`, `[1]`
"""

from typing import Any

import torch
from torch import nn


def patterns_with_room(model: nn.Module) -> dict[str, Any]:
    """Return the patterns of a model whose lists may lack room, by the names of their modules."""
    patterns: dict[str, Any] = {}
    for name, module in model.named_modules():
        if getattr(module, "may_lose_members", False):
            patterns[name] = module
    return patterns


def make_room(model: nn.Module) -> list[str]:
    """Double the room of each pattern that has left members out, and return a line about each.

    Reading the counts makes the CPU wait for the GPU. Call this where it waits anyway.
    """
    patterns = patterns_with_room(model)
    if not patterns:
        return []
    lost_members = [pattern.lost_members for pattern in patterns.values()]
    # One wait for the counts of all patterns.
    counts = torch.cat(lost_members).tolist()
    lines = []
    for (name, pattern), lost in zip(patterns.items(), counts, strict=True):
        if lost:
            pattern.room_factor *= 2
            pattern.lost_members.zero_()
            lines.append(line_on(name, pattern.room_factor, lost))
    return lines


def line_on(name: str, room_factor: int, lost: int) -> str:
    """Return a line about a pattern that gets more room."""
    return (
        f"{name or 'routing heads'}: {lost:,} members had no room in their clusters' lists and were"
        f" left out; from now on the lists have room for {room_factor} times the intended number of"
        " members"
    )
