"""A sample taken evenly from a training split, in one pass, the same every time."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rtx.data.source import Document, Part

LARGEST = 1 << 16  # bytes of a block


class Block(NamedTuple):
    """A piece of a document."""

    content: bytes
    first: bool
    """Whether a document starts with it."""
    last: bool
    """Whether a document ends with it."""


def even_sample(parts: Sequence[Part], size: int) -> tuple[list[Block], int]:
    """Return blocks of at most `size` bytes together, in order, and how many bytes `parts` have.

    The documents are cut into blocks of 64 KiB (fewer for a small sample). Of n blocks those stay whose numbers, bits
    reversed, are smallest: every second, fourth, eighth ... one, and some of those halfway between. No more than `size`
    bytes are held at a time.
    """
    length = max(256, min(LARGEST, size // 256))
    kept: list[tuple[int, int, Block]] = []  # a heap: the first to go is the first
    held = total = number = 0
    for part in parts:
        for document in part.documents():
            for block in _blocks(document, length):
                total += len(block.content)
                rank = -int(f"{number:064b}"[::-1], 2)
                if held + len(block.content) <= size or rank > kept[0][0]:
                    heapq.heappush(kept, (rank, number, block))
                    held += len(block.content)
                while held > size:
                    held -= len(heapq.heappop(kept)[2].content)
                number += 1
    return [block for _, _, block in sorted(kept, key=lambda entry: entry[1])], total


def _blocks(document: Document, length: int) -> Iterator[Block]:
    """Yield a document in blocks of `length` bytes, the last one shorter."""
    rest = b""
    first = True
    for chunk in document:
        text = rest + chunk
        start = 0
        while len(text) - start > length:
            yield Block(text[start : start + length], first, False)
            start += length
            first = False
        rest = text[start:]
    if rest:
        yield Block(rest, first, True)


def count_runs(blocks: Sequence[Block], runs: Callable[[bytes], list[bytes]]) -> dict[bytes, int]:
    """Count the runs (a blank and what follows it) of a sample; those that a block's border cuts are left out."""
    words: Counter[bytes] = Counter()
    heads: Counter[bytes] = Counter()
    for block in blocks:
        found = block.content.split(b" ")
        if not block.last and len(found) > 1:
            found.pop()
        if block.first:
            heads[found[0]] += 1
        words.update(found[1:])
    counts: Counter[bytes] = Counter()
    for word, times in words.items():
        for run in runs(b" " + word):
            counts[run] += times
    for head, times in heads.items():
        for run in runs(head):
            counts[run] += times
    counts.pop(b"\n", None)
    return counts
