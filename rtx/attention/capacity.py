"""Capacity: the fixed number of members that the lists of a GPU can hold.

It corresponds to the capacity of an expert in a mixture of experts. The number of members of a
cluster depends on the data, and the CPU does not wait for a GPU to learn it. So tensors have a
fixed length, the capacity: `capacity_factor` times the expected number of members. In training,
members beyond the capacity are left out of the lists, and counted. `raise_capacities`, which a run
calls at intervals, reads the counts and doubles the capacity of the patterns that have left members
out.

A pattern with such lists has three attributes:

    may_lose_members: bool    whether its lists have a fixed capacity
    capacity_factor: int
    lost_members: Tensor      the number of members left out since the last `raise_capacities`,
                              `[1]`
"""

from typing import Any

import torch
from torch import nn

from rtx.attention.typed_torch import named_modules, tolist


def patterns_with_capacity(model: nn.Module) -> dict[str, Any]:
    """Return the patterns of a model whose lists have a fixed capacity, by their modules' names."""
    patterns: dict[str, Any] = {}
    for name, module in named_modules(model):
        if getattr(module, "may_lose_members", False):
            patterns[name] = module
    return patterns


def raise_capacities(model: nn.Module) -> list[str]:
    """Double the capacity of patterns that have left members out, and return a line about each.

    Reading the counts makes the CPU wait for the GPU. Call this where it waits anyway.
    """
    patterns = patterns_with_capacity(model)
    if not patterns:
        return []
    lost_members = [pattern.lost_members for pattern in patterns.values()]
    # One wait for the counts of all patterns.
    counts = tolist(torch.cat(lost_members))
    lines: list[str] = []
    for (name, pattern), lost in zip(patterns.items(), counts, strict=True):
        if lost:
            pattern.capacity_factor *= 2
            pattern.lost_members.zero_()
            lines.append(line_on(name, pattern.capacity_factor, lost))
    return lines


def line_on(name: str, capacity_factor: int, lost: int) -> str:
    """Return a line about a pattern whose capacity was doubled."""
    return (
        f"{name or 'routing heads'}: {lost:,} members exceeded the capacity of their clusters'"
        f" lists and were left out; from now on the capacity is {capacity_factor} times the"
        " intended number of members"
    )
