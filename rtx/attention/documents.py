"""Documents that are packed into sequences: no position reads another document than its own.

A *document* is a run of consecutive positions. Each pattern gives the positions of a document what
they would get if the document were a sequence by itself: windows, blocks, strides and positions
begin anew with it. Two ways lead there:

- Some patterns bound the ranges of their lists by the documents (`Pattern.bounds_documents`). That
  costs little, however short documents are.
- For all others, documents of equal length are attended together as sequences
  (`groups_of_documents`).

For example, a sequence of six positions with documents that start at 0 and 2 has `first_BN`
[[0, 0, 2, 2, 2, 2]] and `position_BN` [[0, 1, 0, 1, 2, 3]].

Shapes: B sequences, H heads, N positions, R = B * H * N rows of all heads, J documents, or the
positions of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from rtx.attention.padding import Group


class Documents:
    """The documents of B sequences of N positions.

    Args:
        first_BN: the position of the first token of the document of each position, integers
            `[B, N]`. A document that began before the sequence has 0.

    Raises:
        ValueError: documents that are no runs of consecutive positions.
    """

    def __init__(self, first_BN: Tensor) -> None:
        self.first_BN = first_BN.long()
        self.position_BN = torch.arange(first_BN.shape[1], device=first_BN.device) - self.first_BN
        """The position of each token in its document, from 0."""
        check_runs(self.position_BN)
        self.made: dict[Hashable, Any] = {}

    @classmethod
    def that_start(cls, is_start_BN: Tensor) -> Documents:
        """Return the documents that start at some positions, bool `[B, N]`, and at position 0."""
        position_BN = torch.arange(is_start_BN.shape[1], device=is_start_BN.device)
        start_BN = torch.where(is_start_BN, position_BN, 0)
        return cls(start_BN.cummax(dim=1).values)

    def to(self, device: torch.device) -> Documents:
        """Return the same documents on a device."""
        return Documents(self.first_BN.to(device))

    def repeated(self, times: int) -> Documents:
        """Return the documents of as many copies of all sequences."""
        return self.made_once(("copies", times), lambda: Documents(self.first_BN.repeat(times, 1)))

    def first_rows(self, heads: int) -> Tensor:
        """Return the row of the first token of the document of each row, `[R]`."""

        def make() -> Tensor:
            B, N = self.first_BN.shape
            head_BH1 = torch.arange(B * heads, device=self.first_BN.device).view(B, heads, 1)
            row_BHN = head_BH1 * N + self.first_BN[:, None]
            return row_BHN.flatten()

        return self.made_once(("first rows", heads), make)

    def made_once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return `make()`; later calls with an equal key return the same result.

        All layers of a model share what depends on the documents alone.
        """
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]


def check_runs(position_BN: Tensor) -> None:
    """Raise ValueError unless positions count up from 0, and again from 0 with each document."""
    before_BN = position_BN[:, :-1]
    after_BN = position_BN[:, 1:]
    goes_on_BN = after_BN == before_BN + 1
    begins_at_0 = bool((position_BN[:, :1] == 0).all())
    if not begins_at_0 or not bool((goes_on_BN | (after_BN == 0)).all()):
        needed = "the position of the first token of its document, which is a run of positions"
        raise ValueError(f"first_BN must have at each position {needed}")


def groups_of_documents(
    documents: Documents,
    real_BN: Tensor | None = None,
) -> tuple[list[Group], Tensor]:
    """Return the documents of equal length as groups of sequences, and the rows of their positions.

    The rows b * N + n are `[J]`, group after group.

    Args:
        real_BN: false at padding, which belongs to no document.
    """
    B, N = documents.first_BN.shape
    device = documents.first_BN.device
    row_R = torch.arange(B * N, device=device)
    document_R = documents.first_rows(heads=1)
    if real_BN is not None:
        is_real_R = real_BN.flatten()
        row_R = row_R[is_real_R]
        document_R = document_R[is_real_R]
    _, length_J = document_R.unique_consecutive(return_counts=True)
    length_of_row_R = length_J.repeat_interleave(length_J)
    order_R = length_of_row_R.argsort(stable=True)
    lengths, counts = length_J.unique(return_counts=True)
    groups = []
    for length, sequences in zip(lengths.tolist(), counts.tolist(), strict=True):
        groups.append(Group(sequences=sequences, length=length, memory=0))
    if not groups:
        # One group of length 0, so that outputs and loss still have gradients.
        groups = [Group(sequences=B, length=0, memory=0)]
    return groups, row_R[order_R]
