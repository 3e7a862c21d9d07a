"""What a split costs without a neural network: two compressors and the byte models of order 0, 1 and 2."""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Iterator

import numpy as np

SMOOTHING = 0.01
CHUNK = 1 << 23  # bytes counted at once: bounds the memory of their keys to 64 MiB
XZ_LARGEST_DICTIONARY = 1 << 26  # that of preset 9


def baselines(train: np.ndarray, held_out: np.ndarray) -> dict[str, float]:
    """Return bits/byte of the split `held_out` under zlib (level 9), xz (preset 9) and byte models of order 1 and 2.

    The compressors see the split alone, so they start from nothing, and their headers count; the byte models are
    counted on `train`. Both arrays are bytes (uint8), memory-mapped or not. Needs about 350 MB of memory.
    """
    return {
        "zlib": 8 * len(zlib.compress(held_out.tobytes(), 9)) / len(held_out),
        "xz": xz_bits(held_out),
        "order-1": byte_model_bits(train, held_out, 1),
        "order-2": byte_model_bits(train, held_out, 2),
    }


def xz_bits(data: np.ndarray) -> float:
    """Return bits/byte of xz at preset 9; a dictionary no larger than the data need gives the same in less memory."""
    dictionary = min(XZ_LARGEST_DICTIONARY, max(1 << 16, 1 << (len(data) - 1).bit_length()))
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary}]
    return 8 * len(lzma.compress(data.tobytes(), filters=filters)) / len(data)


def byte_model_bits(train: np.ndarray, held_out: np.ndarray, order: int) -> float:
    """Return bits/byte of `held_out`, each byte predicted from the `order` bytes before it by counts over `train`.

    p(byte | context) = (n(context, byte) + a) / (n(context) + 256 a) with a = 0.01 (SMOOTHING); scoring does not change
    the counts. The first `order` bytes, which have no whole context, cost 8 bits each. Order is 0, 1 or 2.
    """
    counts = np.zeros(256 ** (order + 1), dtype=np.uint32)
    for keys in contexts(train, order):
        np.add(counts, np.bincount(keys, minlength=counts.size), out=counts, casting="unsafe")
    totals = counts.reshape(-1, 256).sum(axis=1)
    bits = 8.0 * min(order, len(held_out))
    for keys in contexts(held_out, order):
        likelihood = (counts[keys] + SMOOTHING) / (totals[keys >> 8] + 256 * SMOOTHING)
        bits -= float(np.log2(likelihood).sum())
    return bits / len(held_out)


def contexts(data: np.ndarray, order: int) -> Iterator[np.ndarray]:
    """Yield, for each byte after the first `order`, those before it and itself as one number: int64, chunk by chunk."""
    for first in range(order, len(data), CHUNK):
        stop = min(first + CHUNK, len(data))
        keys = np.zeros(stop - first, dtype=np.int64)
        for back in range(order, -1, -1):
            keys = (keys << 8) | data[first - back : stop - back]
        yield keys
