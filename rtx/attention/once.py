"""A cache of lists that depend on shapes alone. They are made on the CPU, then moved to their device.

Made on a GPU, they would take about a hundred small kernels, and the CPU would wait for each count of members.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch

from rtx.attention.packed import Hidden, Packed, Reads

MAX_HELD = 64
"""The most forms of lists that are kept; the one made first is dropped for a new one."""
held: dict[Hashable, list[Reads]] = {}


def made_once(form: Hashable, device: torch.device, make: Callable[[torch.device], list[Reads]]) -> list[Reads]:
    """Return make(cpu), moved to the device; the result for the same form and device is returned again.

    Args:
        form: all that `make` depends on.
    """
    key = form, device
    if key not in held:
        if len(held) >= MAX_HELD:
            held.pop(next(iter(held)))
        held[key] = on_device(make, device)
    return held[key]


def on_device(make: Callable[[torch.device], list[Reads]], device: torch.device) -> list[Reads]:
    """Return make(cpu) on a device, as tensors for training, too; `derived` is empty, and engines fill it."""
    with torch.inference_mode(False), torch.no_grad():
        parts = make(torch.device("cpu"))
        return [to_device(part, device)._replace(derived={}) for part in parts]


def to_device(part: Reads, device: torch.device) -> Reads:
    """Return the part on a device; lists that queries and keys share stay one."""
    query = Packed(part.query.row_M.to(device), part.query.count_L.to(device))
    key = query
    if part.key is not part.query:
        key = Packed(part.key.row_M.to(device), part.key.count_L.to(device))
    hidden = part.hidden
    if hidden is not None:
        hidden = Hidden(*(x.to(device) for x in hidden))
    start_P, stop_P = part.start_P.to(device), part.stop_P.to(device)
    return part._replace(query=query, key=key, start_P=start_P, stop_P=stop_P, hidden=hidden)


def derived_once(part: Reads, name: str, make: Callable[[], Any]) -> Any:
    """Return make(), which depends on the lists alone; from the part itself where these serve many passes."""
    if part.derived is None:
        return make()
    if name not in part.derived:
        with torch.inference_mode(False), torch.no_grad():  # a later pass may be one of training
            part.derived[name] = make()
    return part.derived[name]
