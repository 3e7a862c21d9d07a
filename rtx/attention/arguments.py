"""What the patterns refuse: every message names the argument, what was given, and what is allowed.

Shapes: B sequences, H heads, N positions, D head size, M distances.
"""

import numbers
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rtx.attention.engine.softmax import RelativeTables

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_call(
    has_keys: bool,
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHND: Tensor,
    real_BN: Tensor | None,
    relative: RelativeTables | None,
    finite: bool,
) -> None:
    """Refuse what a pattern cannot attend over; `finite`: values that are NaN or infinite, too."""
    if has_keys and k_BHND is None:
        raise ValueError("k_BHND=None: this pattern needs keys of their own")
    if not has_keys and k_BHND is not None:
        raise ValueError("k_BHND is given: must be None, as the queries of this pattern stand for keys")
    check_tensor("q_BHND", q_BHND)
    if q_BHND.dim() != 4 or q_BHND.dtype not in FLOATS or not q_BHND.shape[-1]:
        allowed = "[B, H, N, D], D at least 1, of float16, bfloat16, float32 or float64"
        raise ValueError(f"q_BHND is {tuple(q_BHND.shape)} of {q_BHND.dtype}: must be {allowed}")
    B, H, N, D = q_BHND.shape
    check_tensor("v_BHND", v_BHND)
    check_shape("k_BHND", k_BHND, (B, H, N, D), q_BHND, q_BHND.dtype)
    check_shape("v_BHND", v_BHND, (B, H, N, v_BHND.shape[-1] if v_BHND.dim() else D), q_BHND, q_BHND.dtype)
    check_shape("real_BN", real_BN, (B, N), q_BHND, torch.bool)
    check_relative(relative, q_BHND, v_BHND)
    if finite:
        check_finite_values(real_BN, q_BHND=q_BHND, k_BHND=k_BHND, v_BHND=v_BHND)
        for name, table in (relative._asdict() if relative else {}).items():
            check_finite_values(**{f"relative.{name}": table})


def check_relative(relative: RelativeTables | None, q_BHND: Tensor, v_BHND: Tensor) -> None:
    """Refuse what is not tables by distance, and tables that do not fit queries, keys and values."""
    if relative is None:
        return
    if not isinstance(relative, RelativeTables):
        kind = type(relative).__name__
        raise ValueError(f"relative is a {kind}: must be None or rtx.attention.RelativeTables(keys_MD, values_MD)")
    check_tensor("relative.keys_MD", relative.keys_MD)
    heads, distances = q_BHND.shape[1], max(1, relative.keys_MD.shape[-2]) if relative.keys_MD.dim() > 1 else 1
    by_head = (heads,) if relative.keys_MD.dim() == 3 else ()
    shapes = {"keys_MD": (*by_head, distances, q_BHND.shape[-1]), "values_MD": (distances, v_BHND.shape[-1])}
    for name, shape in (shapes | {"bias_HM": (heads, distances)}).items():
        if (table := getattr(relative, name)) is not None:
            check_shape(f"relative.{name}", table, shape, q_BHND)
            if not table.is_floating_point():
                raise ValueError(f"relative.{name} is of {table.dtype}: must be of a float type")


def check_heads(q_BHND: Tensor, heads: int | None, size: int | None) -> None:
    """Refuse another number of heads, or heads of another size, than a pattern has (None: any)."""
    H, D = q_BHND.shape[1], q_BHND.shape[3]
    if heads not in (None, H) or size not in (None, D):
        raise ValueError(f"q_BHND has {H} heads of size {D}: must have {heads} of size {size or D}, as the pattern")


def check_tensor(name: str, x: object) -> None:
    """Refuse what is not a tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}: must be a torch.Tensor")


def check_shape(
    name: str, x: Tensor | None, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None
) -> None:
    """Refuse a tensor of another shape, or on another device than the queries, or of another type than `dtype`."""
    if x is None:
        return
    check_tensor(name, x)
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has the shape {tuple(x.shape)}: must be {shape}")
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}: must be on {like.device}, where q_BHND is")
    if dtype not in (None, x.dtype):
        raise ValueError(f"{name} is of {x.dtype}: must be of {dtype}")


def check_whole(name: str, value: int, least: int, most: int | None, allowed: str) -> None:
    """Refuse what is not a whole number, True and False among it, or out of range."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={value!r}: must be a whole number, {allowed}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name}={value}: must be {allowed}")


def check_positive(least: int = 1, /, **named: int) -> None:
    """Refuse counts below 1, or below `least`, and fractions."""
    for name, value in named.items():
        check_whole(name, value, least, None, f"at least {least}")


def check_within(name: str, value: int, most: int, whose: str) -> None:
    """Refuse a count that is not from 1 to another argument's."""
    check_whole(name, value, 1, most, f"from 1 to {whose}={most}")


def check_seed(seed: int) -> None:
    """Refuse what torch's generators cannot be seeded with."""
    check_whole("seed", seed, -(1 << 63), (1 << 64) - 1, "from -2^63 to 2^64 - 1")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a word that is not one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")


def check_number(name: str, value: float, allowed: str, valid: Callable[[float], bool]) -> None:
    """Refuse what is not a number, True and False among it, or not a valid one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={value!r}: must be a number, {allowed}")
    if not valid(value):
        raise ValueError(f"{name}={value}: must be {allowed}")


@torch.no_grad()
def check_finite_values(real_BN: Tensor | None = None, **named: Tensor | None) -> None:
    """Refuse values that are NaN or infinite; with a mask, `[B, H, N, D]` may hold anything at padding."""
    for name, x in named.items():
        if x is None:
            continue
        bad = ~x.isfinite() if real_BN is None else ~x.isfinite() & real_BN[:, None, :, None]
        if bool(bad.any()):
            first = tuple(bad.nonzero()[0].tolist())
            found = f"{int(bad.sum())} in all, the first at {first}"
            raise ValueError(f"{name} holds NaN or infinity ({found}): check_finite=True allows neither")
