"""What the attention functions refuse: every message names the argument, what was given, and what is allowed.

Shapes: B sequences, H heads, C clusters, N query and M key positions, D head size, T hash rounds, F directions.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable

import torch
from torch import Tensor

from rtx.attention.shaw import Distances

SELECTIONS = ("causal", "topk", "nearest")
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_attention(
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHND: Tensor,
    *,
    mask_BN: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    relative: Distances | None = None,
    needs_keys: bool = False,
    finite: bool = False,
) -> None:
    """Refuse what no pattern over one sequence can read; `finite`: values that are NaN or infinite, too.

    `needs_keys`: nothing stands for keys where there are none.

    Raises:
        ValueError: always with the argument's name.
    """
    if needs_keys and k_BHND is None:
        raise ValueError("k_BHND=None: this pattern needs keys of their own")
    check_queries(q_BHND, k_BHND, v_BHND)
    B, _, N, _ = q_BHND.shape
    check_mask("mask_BN", mask_BN, B, N, q_BHND)
    check_numbers(scale, dropout)
    check_relative(relative, q_BHND, v_BHND)
    if finite:
        check_finite_values(mask_BN, q_BHND=q_BHND, k_BHND=k_BHND, v_BHND=v_BHND)
        if relative is not None:
            check_finite_values(**{"relative.keys_MD": relative.keys_MD, "relative.values_MD": relative.values_MD})


def check_queries(q_BHND: Tensor, k_BHMD: Tensor | None, v_BHMD: Tensor, positions: int | None = None) -> None:
    """Refuse queries, keys and values that do not go together; keys and values have N positions, or M = `positions`."""
    check_tensor("q_BHND", q_BHND)
    if q_BHND.dim() != 4 or q_BHND.dtype not in FLOATS or not q_BHND.shape[-1]:
        allowed = "[B, H, N, D], D at least 1, of float16, bfloat16, float32 or float64"
        raise ValueError(f"q_BHND is {tuple(q_BHND.shape)} of {q_BHND.dtype}: must be {allowed}")
    B, H, N, D = q_BHND.shape
    names = ("k_BHND", "v_BHND") if positions is None else ("k_BHMD", "v_BHMD")
    M = N if positions is None else positions
    check_tensor(names[1], v_BHMD)
    check_shape(names[0], k_BHMD, (B, H, M, D), q_BHND)
    check_shape(names[1], v_BHMD, (B, H, M, v_BHMD.shape[-1] if v_BHMD.dim() else D), q_BHND)
    for name, x in zip(names, (k_BHMD, v_BHMD), strict=True):
        if x is not None and x.dtype != q_BHND.dtype:
            raise ValueError(f"{name} is of {x.dtype}: must be of {q_BHND.dtype}, as q_BHND is")


def check_tensor(name: str, x: object) -> None:
    """Refuse what is not a tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}: must be a torch.Tensor")


def check_shape(name: str, x: Tensor | None, shape: tuple[int, ...], like: Tensor) -> None:
    """Refuse a tensor of another shape, or on another device than the queries."""
    if x is None:
        return
    check_tensor(name, x)
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has the shape {tuple(x.shape)}: must be {shape}")
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}: must be on {like.device}, where q_BHND is")


def check_floats(name: str, x: Tensor | None, shape: tuple[int, ...], like: Tensor) -> None:
    """As `check_shape`; refuse what is not of a float type, too."""
    check_shape(name, x, shape, like)
    if x is not None and not x.is_floating_point():
        raise ValueError(f"{name} is of {x.dtype}: must be of a float type")


def check_mask(name: str, mask_BN: Tensor | None, batch: int, positions: int, like: Tensor) -> None:
    """Refuse a padding mask of another shape or type."""
    check_shape(name, mask_BN, (batch, positions), like)
    if mask_BN is not None and mask_BN.dtype != torch.bool:
        raise ValueError(f"{name} is of {mask_BN.dtype}: must be of torch.bool, true at real positions")


def check_whole(name: str, value: int, allowed: str) -> None:
    """Refuse what is not a whole number, True and False among it."""
    try:
        operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r}: must be a whole number, {allowed}") from None
    if isinstance(value, bool):
        raise ValueError(f"{name}={value!r}: must be a whole number, {allowed}")


def check_positive(name: str, value: int, least: int = 1) -> None:
    """Refuse a count below 1, or below `least`, or a fraction."""
    check_whole(name, value, f"at least {least}")
    if value < least:
        raise ValueError(f"{name}={value}: must be at least {least}")


def check_seed(seed: int) -> None:
    """Refuse what torch's generators cannot be seeded with."""
    allowed = "from -2^63 to 2^64 - 1"
    check_whole("seed", seed, allowed)
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"seed={seed}: must be a whole number, {allowed}")


def check_number(name: str, value: float, allowed: str, valid: Callable[[float], bool]) -> None:
    """Refuse what is not a number, True and False among it, or not a valid one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={value!r}: must be a number, {allowed}")
    if not valid(value):
        raise ValueError(f"{name}={value}: must be {allowed}")


def check_numbers(scale: float | None, dropout: float) -> None:
    """Refuse a factor that is not above 0 (torch's kernel gives NaN) or infinite, and a dropout that leaves nothing."""
    if scale is not None:
        check_number("scale", scale, "finite and above 0", lambda x: 0 < x < math.inf)
    check_number("dropout", dropout, "at least 0 and less than 1", lambda x: 0 <= x < 1)


def check_turned(turned_BHND: Tensor, x_BHND: Tensor) -> None:
    """Refuse turned queries or keys of another shape than they had."""
    check_tensor("what rotate returns", turned_BHND)
    if turned_BHND.shape != x_BHND.shape:
        given, shape = tuple(turned_BHND.shape), tuple(x_BHND.shape)
        raise ValueError(f"rotate returns the shape {given}: must return {shape}, what it was given")


def check_relative(relative: Distances | None, q_BHND: Tensor, v_BHND: Tensor) -> None:
    """Refuse what is not Shaw's tables, and tables that do not fit keys and values."""
    if relative is None:
        return
    if not isinstance(relative, Distances):
        kind = type(relative).__name__
        raise ValueError(f"relative is a {kind}: must be None or rtx.attention.Distances(keys_MD, values_MD)")
    for name, table_MD in zip(("relative.keys_MD", "relative.values_MD"), relative, strict=True):
        check_tensor(name, table_MD)
    distances = max(1, len(relative.keys_MD)) if relative.keys_MD.dim() else 1
    check_floats("relative.keys_MD", relative.keys_MD, (distances, q_BHND.shape[-1]), q_BHND)
    check_floats("relative.values_MD", relative.values_MD, (distances, v_BHND.shape[-1]), q_BHND)


def check_centroids(centroid_HCD: Tensor, q_BHND: Tensor) -> None:
    """Refuse centroids that are not one or more vectors of size D for each head."""
    check_tensor("centroid_HCD", centroid_HCD)
    clusters = centroid_HCD.shape[1] if centroid_HCD.dim() == 3 else 0
    shape = (q_BHND.shape[1], max(clusters, 1), q_BHND.shape[-1])
    check_floats("centroid_HCD", centroid_HCD, shape, q_BHND)


def check_selection(selection: str) -> None:
    """Refuse an unknown selection."""
    if selection not in SELECTIONS:
        raise ValueError(f"selection={selection!r}: must be one of {', '.join(SELECTIONS)}")


def check_routing(
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    centroid_HCD: Tensor,
    selection: str,
    threshold_HC: Tensor | None,
    key_threshold_HC: Tensor | None,
    projection_HDD: Tensor | None,
    finite: bool = False,
) -> None:
    """Refuse what `rtx.attention.routing` cannot choose by; queries and keys are checked already.

    Raises:
        ValueError: always with the argument's name.
    """
    check_selection(selection)
    check_centroids(centroid_HCD, q_BHND)
    H, D = q_BHND.shape[1], q_BHND.shape[-1]
    check_floats("threshold_HC", threshold_HC, (H, centroid_HCD.shape[1]), q_BHND)
    check_floats("key_threshold_HC", key_threshold_HC, (H, centroid_HCD.shape[1]), q_BHND)
    check_floats("projection_HDD", projection_HDD, (H, D, D), q_BHND)
    if selection == "causal" and threshold_HC is None:
        raise ValueError("selection=causal needs threshold_HC")
    separate = k_BHND is not None and projection_HDD is None
    if selection == "causal" and separate and key_threshold_HC is None:
        raise ValueError("selection=causal with k_BHND needs key_threshold_HC")
    if projection_HDD is not None and k_BHND is None:
        raise ValueError("projection_HDD needs k_BHND: it routes by W_R (q + k)")
    if finite:
        check_finite_values(centroid_HCD=centroid_HCD, projection_HDD=projection_HDD)
        # A threshold may be infinite: everybody joins, or nobody.
        infinite = (None if x is None else x.masked_fill(x.isinf(), 0) for x in (threshold_HC, key_threshold_HC))
        check_finite_values(**dict(zip(("threshold_HC", "key_threshold_HC"), infinite, strict=True)))


def check_causal(causal: bool, selection: str, relative: Distances | None = None, streaming: bool = False) -> None:
    """Refuse routing that has no meaning without a causal mask.

    Raises:
        ValueError: see the messages.
    """
    if causal:
        return
    if selection != "topk":
        raise ValueError(f"causal=False with selection={selection!r}: only topk has a meaning without a causal mask")
    if relative is not None:
        raise ValueError("causal=False with relative: the tables hold distances to earlier positions only")
    if streaming:
        raise ValueError("causal=False with streaming=True: a stream has no later positions to read")


def check_streaming(streaming: bool, selection: str, dropout: float) -> None:
    """Refuse streaming top-w with dropout.

    Raises:
        ValueError: names the dropout.
    """
    if streaming and selection == "topk" and dropout:
        raise ValueError(f"streaming=True with dropout={dropout}: streaming top-w is for evaluation, without dropout")


def check_rotations(rotation_HTDF: Tensor, q_BHND: Tensor) -> None:
    """Refuse rotations that are not one or more for each head, of vectors of size D, into two or more buckets."""
    check_tensor("rotation_HTDF", rotation_HTDF)
    given = tuple(rotation_HTDF.shape)
    H, D = q_BHND.shape[1], q_BHND.shape[3]
    if len(given) != 4 or (given[0], given[2]) != (H, D) or 0 in (given[1], given[3]):
        raise ValueError(f"rotation_HTDF has the shape {given}: must be ({H}, rounds, {D}, buckets / 2)")
    check_floats("rotation_HTDF", rotation_HTDF, given, q_BHND)


@torch.no_grad()
def check_finite_values(mask_BN: Tensor | None = None, **named: Tensor | None) -> None:
    """Refuse values that are NaN or infinite; with a mask, `[B, H, N, D]` may hold anything at padding."""
    for name, x in named.items():
        if x is None:
            continue
        bad = ~x.isfinite()
        if mask_BN is not None:
            bad &= mask_BN[:, None, :, None]
        if bool(bad.any()):
            first = tuple(bad.nonzero()[0].tolist())
            found = f"{int(bad.sum())} in all, the first at {first}"
            raise ValueError(f"{name} holds NaN or infinity ({found}): check_finite=True allows neither")
