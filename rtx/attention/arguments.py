"""What the routing functions refuse: every message names the argument, what was given, and what is allowed.

Shapes: B sequences, H routing heads, C clusters, N positions, D head size.
"""

from __future__ import annotations

from torch import Tensor

SELECTIONS = ("causal", "topk", "nearest")


def check_selection(selection: str) -> None:
    """Refuse an unknown selection."""
    if selection not in SELECTIONS:
        raise ValueError(f"selection={selection!r}: must be one of {', '.join(SELECTIONS)}")


def check_shape(name: str, x: Tensor | None, shape: tuple[int, ...], like: Tensor) -> None:
    """Refuse a tensor of another shape, or on another device than the queries."""
    if x is None:
        return
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has the shape {tuple(x.shape)}: must be {shape}")
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}: must be on {like.device}, where q_BHND is")


def check_queries(q_BHND: Tensor, k_BHMD: Tensor | None, v_BHMD: Tensor, window: int, positions: int) -> None:
    """Refuse queries, keys and values that do not go together; keys and values have `positions`."""
    if q_BHND.dim() != 4 or not q_BHND.is_floating_point():
        raise ValueError(f"q_BHND is {tuple(q_BHND.shape)} of {q_BHND.dtype}: must be [B, H, N, D] of a float type")
    B, H, _, D = q_BHND.shape
    check_shape("k_BHND", k_BHMD, (B, H, positions, D), q_BHND)
    check_shape("v_BHND", v_BHMD, (B, H, positions, v_BHMD.shape[-1]), q_BHND)
    for name, x in (("k_BHND", k_BHMD), ("v_BHND", v_BHMD)):
        if x is not None and x.dtype != q_BHND.dtype:
            raise ValueError(f"{name} is of {x.dtype}: must be of {q_BHND.dtype}, as q_BHND is")
    check_positive("window", window)


def check_inputs(
    q_BHND: Tensor, k_BHMD: Tensor | None, v_BHMD: Tensor, centroid_HCD: Tensor, window: int, positions: int
) -> None:
    """As `check_queries`, with centroids."""
    check_queries(q_BHND, k_BHMD, v_BHMD, window, positions)
    clusters = centroid_HCD.shape[1] if centroid_HCD.dim() == 3 else 0
    shape = (q_BHND.shape[1], max(clusters, 1), q_BHND.shape[-1])
    check_shape("centroid_HCD", centroid_HCD, shape, q_BHND)


def check_positive(name: str, value: int) -> None:
    """Refuse a count below 1."""
    if value < 1:
        raise ValueError(f"{name}={value}: must be at least 1")


def check_mask(name: str, mask_BN: Tensor | None, batch: int, positions: int, like: Tensor) -> None:
    """Refuse a padding mask of another shape or type."""
    check_shape(name, mask_BN, (batch, positions), like)
    if mask_BN is not None and str(mask_BN.dtype) != "torch.bool":
        raise ValueError(f"{name} is of {mask_BN.dtype}: must be of torch.bool, true at real positions")


def check_routing(
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHND: Tensor,
    centroid_HCD: Tensor,
    window: int,
    selection: str,
    threshold_HC: Tensor | None,
    key_threshold_HC: Tensor | None,
    projection_HDD: Tensor | None,
    mask_BN: Tensor | None,
) -> None:
    """Refuse what `rtx.attention.routing` cannot make sense of.

    Raises:
        ValueError: always with the argument's name.
    """
    check_selection(selection)
    check_inputs(q_BHND, k_BHND, v_BHND, centroid_HCD, window, q_BHND.shape[-2])
    B, H, N, D = q_BHND.shape
    check_shape("threshold_HC", threshold_HC, (H, centroid_HCD.shape[1]), q_BHND)
    check_shape("key_threshold_HC", key_threshold_HC, (H, centroid_HCD.shape[1]), q_BHND)
    check_shape("projection_HDD", projection_HDD, (H, D, D), q_BHND)
    check_mask("mask_BN", mask_BN, B, N, q_BHND)
    if selection == "causal" and threshold_HC is None:
        raise ValueError("selection=causal needs threshold_HC")
    separate = k_BHND is not None and projection_HDD is None
    if selection == "causal" and separate and key_threshold_HC is None:
        raise ValueError("selection=causal with k_BHND needs key_threshold_HC")
    if projection_HDD is not None and k_BHND is None:
        raise ValueError("projection_HDD needs k_BHND: it routes by W_R (q + k)")
