"""Caches: the lists of patterns that choose by position, and the tables that engines make of lists.

The lists of a pattern that chooses by position follow from shapes and options. `cached_by_shape`
caches them. They are made on the CPU, then copied to their device: on a GPU the same work would
take about a hundred small kernels, and the CPU would wait for the number of members of each list.

Engines compute tables from lists. `derived_once` stores these tables in the lists
(`RangeReads.derived`), so that they exist as long as the lists.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from rtx.attention.reads import Holes, IndexReads, MemberLists, RangeReads, Reads

MakeReads = Callable[[torch.device], Sequence[Reads]]
"""Makes lists on a device."""

MAX_CACHED = 64
"""The largest number of cache entries; then a new entry replaces the oldest one."""

cached_lists: dict[Hashable, list[Reads]] = {}
"""The lists by their form and device, oldest first."""


def cached_by_shape(
    form: Hashable,
    device: torch.device,
    make: MakeReads,
) -> list[Reads]:
    """Return `make(cpu)`, copied to the device; from the cache after the first call.

    Args:
        form: the key of the cache: all options and shapes that the result of `make` depends on.
    """
    key = (form, device)
    if key not in cached_lists:
        if len(cached_lists) >= MAX_CACHED:
            oldest = next(iter(cached_lists))
            cached_lists.pop(oldest)
        cached_lists[key] = make_on_cpu(make, device)
    return cached_lists[key]


def make_on_cpu(
    make: MakeReads,
    device: torch.device,
) -> list[Reads]:
    """Return `make(cpu)`, copied to the device, with an empty `derived` for `derived_once`.

    The first call may come in inference mode. Tensors made there could not be used in training
    later, so this leaves that mode.
    """
    with torch.inference_mode(False), torch.no_grad():
        parts = make(torch.device("cpu"))
        return [on_device(part, device) for part in parts]


def on_device(part: Reads, device: torch.device) -> Reads:
    """Return the part with its tensors on a device; lists with an empty `derived`.

    Engines test `part.key is part.query` to learn whether queries and keys share their lists. It is
    true of the result if it is true of `part`.
    """
    if isinstance(part, IndexReads):
        index_RK = part.index_RK.to(device)
        return part._replace(index_RK=index_RK)
    query = lists_on_device(part.query, device)
    key = query
    if part.key is not part.query:
        key = lists_on_device(part.key, device)
    holes = part.holes
    if holes is not None:
        holes_on_device = [x.to(device) for x in holes]
        holes = Holes(*holes_on_device)
    return part._replace(
        query=query,
        key=key,
        start_P=part.start_P.to(device),
        stop_P=part.stop_P.to(device),
        holes=holes,
        derived={},
    )


def lists_on_device(lists: MemberLists, device: torch.device) -> MemberLists:
    """Return packed lists on a device."""
    row_M = lists.row_M.to(device)
    count_L = lists.count_L.to(device)
    return MemberLists(row_M, count_L)


def derived_once(part: RangeReads, name: str, make: Callable[[], Any]) -> Any:
    """Return `make()`, and store it in `part.derived` for later calls, unless that is None.

    Args:
        name: the key in `part.derived`.
        make: computes something from the part's lists alone.
    """
    if part.derived is None:
        return make()
    if name not in part.derived:
        # As in `make_on_cpu`: the first pass may run in inference mode, and a later one may train.
        with torch.inference_mode(False), torch.no_grad():
            part.derived[name] = make()
    return part.derived[name]
