"""Sequences of several documents: a position reads only positions of the same document.

A *document* is a run of consecutive positions. A pattern returns the same outputs for it as if it
were a whole sequence: windows, blocks, strides and positions start anew with each document. A
pattern does so in one of two ways:

- Some patterns end the ranges of their lists where documents end (`Pattern.bounds_documents`). The
  cost is small even for short documents.
- For all others, each document becomes a sequence. Documents of equal length are attended in one
  pass (`groups_of_documents`).

For example, a sequence of six positions with documents that start at 0 and 2 has `first_BN`
[[0, 0, 2, 2, 2, 2]] and `position_BN` [[0, 1, 0, 1, 2, 3]].

Shapes: B sequences, H heads, N positions, R = B * H * N rows of all heads, J positions of all
documents, without padding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from rtx.attention.padding import Group
from rtx.attention.typed_torch import run_lengths, tolist, unique_with_counts


class Documents:
    """The documents of B sequences of N positions.

    Args:
        first_BN: for each position, the position at which its document starts, integers `[B, N]`.
            It is 0 for a document that started before the sequence.

    Raises:
        ValueError: a document is not a run of consecutive positions.
    """

    def __init__(self, first_BN: Tensor) -> None:
        self.first_BN = first_BN.long()
        N = first_BN.shape[1]
        position_N = torch.arange(N, device=first_BN.device)
        self.position_BN = position_N - self.first_BN
        """The position of each token in its document, from 0."""
        check_runs(self.position_BN)
        self.cache: dict[Hashable, Any] = {}
        """The results of `cached` by key."""

    @classmethod
    def that_start(cls, is_start_BN: Tensor) -> Documents:
        """Return the documents that start at position 0 and at each position marked as a start.

        Args:
            is_start_BN: true at the first position of each document, bool `[B, N]`.
        """
        N = is_start_BN.shape[1]
        position_N = torch.arange(N, device=is_start_BN.device)
        start_BN = torch.where(is_start_BN, position_N, 0)
        latest_start_BN = start_BN.cummax(dim=1).values
        return cls(latest_start_BN)

    def to(self, device: torch.device) -> Documents:
        """Return the same documents on a device."""
        return Documents(self.first_BN.to(device))

    def repeated(self, times: int) -> Documents:
        """Return the documents of a batch that has all sequences `times` times."""

        def make() -> Documents:
            first_XN = self.first_BN.repeat(times, 1)
            return Documents(first_XN)

        return self.cached(("copies", times), make)

    def start_rows(self, heads: int) -> Tensor:
        """Return, for each row, the row at which its document starts, `[R]`."""

        def make() -> Tensor:
            B, N = self.first_BN.shape
            head_X = torch.arange(B * heads, device=self.first_BN.device)
            head_BH1 = head_X.view(B, heads, 1)
            first_B1N = self.first_BN[:, None]
            first_row_BHN = head_BH1 * N + first_B1N
            return first_row_BHN.flatten()

        return self.cached(("start rows", heads), make)

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return the result of `make()`, which runs only in the first call with a key.

        Thus all layers of a model share results that depend only on the documents.
        """
        if key not in self.cache:
            self.cache[key] = make()
        return self.cache[key]


def check_runs(position_BN: Tensor) -> None:
    """Raise ValueError unless the positions in each document are 0, 1, 2, and so on."""
    is_0_B1 = position_BN[:, :1] == 0
    before_BN = position_BN[:, :-1]
    after_BN = position_BN[:, 1:]
    continues_BN = after_BN == before_BN + 1
    restarts_BN = after_BN == 0
    is_run_BN = continues_BN | restarts_BN
    if not bool(is_0_B1.all()) or not bool(is_run_BN.all()):
        needed = "the position of the first token of its document, which is a run of positions"
        raise ValueError(f"first_BN must have at each position {needed}")


def groups_of_documents(
    documents: Documents,
    real_BN: Tensor | None = None,
) -> tuple[list[Group], Tensor]:
    """Return a group for each length of documents, and the rows of the positions of all groups.

    Each document is a sequence of the group of its length; shorter lengths come first. The rows
    are b * N + n, `[J]`, in the order of the groups.

    Args:
        real_BN: false at padding, which belongs to no document; None: there is no padding.
    """
    B, N = documents.first_BN.shape
    row_J = torch.arange(B * N, device=documents.first_BN.device)
    first_row_J = documents.start_rows(heads=1)
    if real_BN is not None:
        is_real_R = real_BN.flatten()
        row_J = row_J[is_real_R]
        first_row_J = first_row_J[is_real_R]
    # Positions are of the same document if their documents start at the same row.
    document_lengths = run_lengths(first_row_J)
    length_J = document_lengths.repeat_interleave(document_lengths)
    order_J = length_J.argsort(stable=True)
    lengths, counts = unique_with_counts(document_lengths)
    sizes = zip(tolist(lengths), tolist(counts), strict=True)
    groups: list[Group] = []
    for length, sequences in sizes:
        group = Group(sequences=sequences, length=length, memory=0)
        groups.append(group)
    if not groups:
        # All is padding. A group of length 0 gives outputs and loss gradients nevertheless.
        groups = [Group(sequences=B, length=0, memory=0)]
    return groups, row_J[order_J]
