"""Checks of arguments, which raise a ValueError that names the argument and the allowed values.

Shapes: B sequences, H heads, N positions, D head size, M distances.
"""

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rtx.attention.documents import Documents
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.typed_torch import tolist

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_call(
    has_keys: bool,
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHND: Tensor,
    real_BN: Tensor | None,
    relative: RelativeTables | None,
    queries_of_key_head: int = 1,
) -> None:
    """Refuse tensors that are no valid arguments of `Pattern.forward`.

    Args:
        queries_of_key_head: the number of query heads of each key-value head.
    """
    if has_keys and k_BHND is None:
        raise ValueError("k_BHND=None: this pattern needs keys")
    if not has_keys and k_BHND is not None:
        raise ValueError("k_BHND is given: must be None, as queries serve as keys in this pattern")
    check_tensor("q_BHND", q_BHND)
    if q_BHND.dim() != 4 or q_BHND.dtype not in FLOATS or not q_BHND.shape[-1]:
        allowed = "[B, H, N, D], D at least 1, of float16, bfloat16, float32 or float64"
        raise ValueError(f"q_BHND is {tuple(q_BHND.shape)} of {q_BHND.dtype}: must be {allowed}")
    check_tensor("v_BHND", v_BHND)
    B, H, N, D = q_BHND.shape
    if H % queries_of_key_head:
        allowed = f"a multiple of {queries_of_key_head}, the query heads of a key-value head"
        raise ValueError(f"q_BHND has {H} heads: must have {allowed}")
    width = D
    if v_BHND.dim():
        width = v_BHND.shape[-1]
    key_heads = H // queries_of_key_head
    check_shape("k_BHND", k_BHND, (B, key_heads, N, D), q_BHND, q_BHND.dtype)
    check_shape("v_BHND", v_BHND, (B, key_heads, N, width), q_BHND, q_BHND.dtype)
    check_shape("real_BN", real_BN, (B, N), q_BHND, torch.bool)
    check_relative(relative, q_BHND, v_BHND)


def check_relative(relative: object, q_BHND: Tensor, v_BHND: Tensor) -> None:
    """Refuse tables by distance that do not fit queries, keys and values; None passes."""
    if relative is None:
        return
    if not isinstance(relative, RelativeTables):
        kind = type(relative).__name__
        allowed = "None or rtx.attention.RelativeTables(keys_MD, values_MD)"
        raise ValueError(f"relative is a {kind}: must be {allowed}")
    keys_MD = relative.keys_MD
    check_tensor("relative.keys_MD", keys_MD)
    _, H, _, D = q_BHND.shape
    distances = 1
    if keys_MD.dim() > 1:
        distances = max(1, keys_MD.shape[-2])
    keys_shape = (distances, D)
    if keys_MD.dim() == 3:
        keys_shape = (H, distances, D)
    check_table("relative.keys_MD", keys_MD, keys_shape, q_BHND)
    check_table("relative.values_MD", relative.values_MD, (distances, v_BHND.shape[-1]), q_BHND)
    check_table("relative.bias_HM", relative.bias_HM, (H, distances), q_BHND)


def check_table(name: str, table: Tensor | None, shape: tuple[int, ...], q_BHND: Tensor) -> None:
    """Refuse a table of a wrong shape, on a wrong device, or of integers; None passes."""
    if table is None:
        return
    check_shape(name, table, shape, q_BHND)
    if not table.is_floating_point():
        raise ValueError(f"{name} is of {table.dtype}: must be of a float type")


def check_memory(memory: int, length: int, takes_memory: bool) -> None:
    """Refuse a memory of more than N positions, and any memory if the pattern takes none."""
    if takes_memory:
        check_whole("memory", memory, 0, length, f"from 0 to N={length}")
    else:
        check_whole("memory", memory, 0, 0, "0 for this pattern")


def check_bidirectional(pattern: Any) -> None:
    """Refuse causal=False of patterns that are always causal."""
    name = type(pattern).__name__
    if not pattern.may_be_bidirectional:
        others = "another pattern, such as Full, Local or TopK"
        raise ValueError(f"causal=False: {name} reads earlier positions alone: take {others}")


def check_causal(is_causal: bool, what: str) -> None:
    """Refuse what needs a left-to-right mask."""
    if not is_causal:
        raise ValueError(f"{what}: needs causal=True, as positions read later ones without it")


def check_bidirectional_call(
    relative: RelativeTables | None,
    streaming: bool,
    memory: int,
) -> None:
    """Refuse arguments of `Pattern.forward` that need a left-to-right mask."""
    check_causal(relative is None, "relative")
    check_causal(not streaming, "streaming=True")
    check_causal(not memory, "memory")


def check_across(
    pattern: Any,
    qkv: tuple[Tensor, Tensor, Tensor],
    others: tuple[object, ...],
) -> None:
    """Refuse cross-attention of patterns that need positions, and tensors that do not fit.

    Args:
        others: the rotation, padding and documents, which must be None.
    """
    q_BHND, k_BHND, v_BHND = qkv
    if not pattern.takes_other_keys:
        name = type(pattern).__name__
        counts = f"{k_BHND.shape[2]} keys for {q_BHND.shape[2]} queries"
        needs = f"{name} chooses by the positions of queries: take Full, Exact or Indexer"
        raise ValueError(f"k_BHND has {counts}: {needs}, or TopK with keys='separate'")
    if not pattern.attend_self:
        raise ValueError("attend_self=False: must be True for keys of another sequence")
    if any(other is not None for other in others):
        allowed = "neither rotate nor real_BN nor documents"
        raise ValueError(f"k_BHND has another length than q_BHND: cross-attention takes {allowed}")
    check_tensor("v_BHND", v_BHND)
    # Keys and values are checked as those of queries with the shape of the keys.
    check_call(True, k_BHND, k_BHND, v_BHND, None, None)
    B, H, _, D = k_BHND.shape
    check_tensor("q_BHND", q_BHND)
    shape = (B, H * pattern.queries_of_key_head, q_BHND.shape[2], D)
    check_shape("q_BHND", q_BHND, shape, k_BHND, k_BHND.dtype)


def check_documents(documents: object, q_BHND: Tensor, memory: int) -> None:
    """Refuse documents of other sequences than the queries', and beside a memory; None passes."""
    if documents is None:
        return
    if not isinstance(documents, Documents):
        kind = type(documents).__name__
        raise ValueError(
            f"documents is a {kind}: must be None or rtx.attention.Documents(first_BN)"
        )
    B, _, N, _ = q_BHND.shape
    check_shape("documents.first_BN", documents.first_BN, (B, N), q_BHND)
    if memory:
        raise ValueError(f"memory={memory}: must be 0 with documents")


def check_heads(q_BHND: Tensor, heads: int | None, size: int | None) -> None:
    """Refuse queries of other numbers of heads or head sizes than the pattern has.

    Args:
        heads, size: H and D of the pattern; None: any.
    """
    _, H, _, D = q_BHND.shape
    if heads not in (None, H) or size not in (None, D):
        allowed = f"{heads} of size {size or D}, as the pattern"
        raise ValueError(f"q_BHND has {H} heads of size {D}: must have {allowed}")


def check_tensor(name: str, x: object) -> None:
    """Refuse anything but a tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}: must be a torch.Tensor")


def check_shape(
    name: str,
    x: Tensor | None,
    shape: tuple[int, ...],
    like: Tensor,
    dtype: torch.dtype | None = None,
) -> None:
    """Refuse a tensor of a wrong shape, device or type; None passes.

    Args:
        like: the queries; `x` must be on their device.
        dtype: the required type; None: any.
    """
    if x is None:
        return
    check_tensor(name, x)
    if tuple(x.shape) != shape:
        raise ValueError(f"{name} has the shape {tuple(x.shape)}: must be {shape}")
    if x.device != like.device:
        raise ValueError(f"{name} is on {x.device}: must be on {like.device}, where q_BHND is")
    if dtype not in (None, x.dtype):
        raise ValueError(f"{name} is of {x.dtype}: must be of {dtype}")


@torch.no_grad()
def check_finite_call(
    q_BHND: Tensor,
    k_BHND: Tensor | None,
    v_BHND: Tensor,
    real_BN: Tensor | None,
    relative: RelativeTables | None,
) -> None:
    """Refuse NaN and infinity in the inputs of a pattern; padding may contain them."""
    is_real_B1N1 = None
    if real_BN is not None:
        is_real_B1N1 = real_BN[:, None, :, None]
    check_finite_values("q_BHND", q_BHND, is_real_B1N1)
    check_finite_values("k_BHND", k_BHND, is_real_B1N1)
    check_finite_values("v_BHND", v_BHND, is_real_B1N1)
    if relative is not None:
        check_finite_values("relative.keys_MD", relative.keys_MD)
        check_finite_values("relative.values_MD", relative.values_MD)
        check_finite_values("relative.bias_HM", relative.bias_HM)


def check_finite_values(name: str, x: Tensor | None, is_checked: Tensor | None = None) -> None:
    """Refuse NaN and infinity in a tensor; None passes.

    Args:
        is_checked: true where values are checked; None: everywhere.
    """
    if x is None:
        return
    is_bad = ~x.isfinite()
    if is_checked is not None:
        is_bad = is_bad & is_checked
    if bool(is_bad.any()):
        first = tuple(tolist(is_bad.nonzero()[0]))
        bad = f"{int(is_bad.sum())} in all, the first at {first}"
        raise ValueError(f"{name} holds NaN or infinity ({bad}): check_finite=True allows neither")


def check_whole(name: str, value: int, least: int, most: int | None, allowed: str) -> None:
    """Refuse a value that is no whole number or is out of range; True is no whole number.

    Args:
        most: the largest allowed value; None: no limit.
        allowed: the range in words.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"{name}={value!r}: must be a whole number, {allowed}")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name}={value}: must be {allowed}")


def check_positive(least: int = 1, /, **named: int) -> None:
    """Refuse arguments that are no whole numbers of at least `least`, given as `name=value`."""
    for name, value in named.items():
        check_whole(name, value, least, None, f"at least {least}")


def check_within(name: str, value: int, most: int, bound: str) -> None:
    """Refuse a count that is not from 1 to `most`, the value of the argument named `bound`."""
    check_whole(name, value, 1, most, f"from 1 to {bound}={most}")


def check_seed(seed: int) -> None:
    """Refuse a seed that torch's generators do not take."""
    check_whole("seed", seed, -(1 << 63), (1 << 64) - 1, "from -2^63 to 2^64 - 1")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a word that is not one of the allowed ones."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")


def check_number(name: str, value: float, allowed: str, is_valid: Callable[[float], bool]) -> None:
    """Refuse a value that is no number or is not valid; True is no number.

    Args:
        allowed: the valid numbers in words.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{name}={value!r}: must be a number, {allowed}")
    if not is_valid(value):
        raise ValueError(f"{name}={value}: must be {allowed}")
