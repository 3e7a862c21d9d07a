"""Lists that depend on shapes alone, made once: on a CPU, then moved to where they serve.

On a GPU their making would be a hundred small kernels, and a wait for each number of members.
"""

from collections.abc import Callable, Hashable

import torch

from rtx.attention.packed import Hidden, Packed, Reads

MAX_HELD = 16
"""Forms of lists that are held at once; the oldest is dropped for a new one."""
held: dict[Hashable, list[Reads]] = {}


def made_once(form: Hashable, device: torch.device, make: Callable[[torch.device], list[Reads]]) -> list[Reads]:
    """Return make(cpu) on a device, from an earlier call with the same form and device where there was one.

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
    """Return make(cpu) on a device; what engines derive from it is kept with it, for training, too."""
    with torch.inference_mode(False), torch.no_grad():
        parts = make(torch.device("cpu"))
        return [moved(part, device)._replace(derived={}) for part in parts]


def moved(part: Reads, device: torch.device) -> Reads:
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
