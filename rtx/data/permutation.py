"""Permutations that need no memory and no generator: a place is computed from a key, the same on every machine."""

from __future__ import annotations

import math
from hashlib import blake2b
from struct import pack

ROUNDS = 6


def permuted(index: int, size: int, key: bytes) -> int:
    """Return where the permutation of 0..size-1 that `key` names sends `index`.

    A Feistel network over pairs (left, right) of digits 0..side-1, side * side >= size; a result beyond `size` is sent
    through again until it falls inside (cycle-walking), which keeps it a permutation.
    """
    side = math.isqrt(size - 1) + 1
    while True:
        left, right = divmod(index, side)
        for turn in range(ROUNDS):
            left, right = right, (left + draw(key, turn, right)) % side
        index = left * side + right
        if index < size:
            return index


def draw(key: bytes, purpose: int, value: int) -> int:
    """Return a 64-bit number that is the same on every machine: a keyed hash, not a generator."""
    return int.from_bytes(blake2b(pack("<QQ", purpose, value), key=key, digest_size=8).digest(), "little")
