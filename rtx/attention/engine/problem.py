"""What an engine computes: one part of a call of attention."""

from typing import NamedTuple

from torch import Tensor

from rtx.attention.engine.softmax import Terms
from rtx.attention.packed import Part


class Problem(NamedTuple):
    """Queries, keys and values of B sequences and H heads, and who reads whom.

    An engine returns outputs and log-sums. Outputs are those of rows, `[R, D]`, each the mean over
    the lists in which the row reads something; or, `by_member`, those of query members, `[P, D]`.
    Log-sums, `[P]`, are natural logarithms of summed exponentials, -inf where nothing is read. They
    are defined with `by_member` alone.
    """

    q_BHND: Tensor
    k_BHND: Tensor
    """The tensor of the queries itself where these stand for keys."""
    v_BHND: Tensor
    part: Part
    terms: Terms
    by_member: bool

    @property
    def shared(self) -> bool:
        """Whether queries stand for keys."""
        return self.k_BHND is self.q_BHND

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values by row, `[R, D]`; views where the tensors are contiguous."""
        q_RD = self.q_BHND.flatten(0, 2)
        k_RD = q_RD if self.shared else self.k_BHND.flatten(0, 2)
        return q_RD, k_RD, self.v_BHND.flatten(0, 2)


Result = tuple[Tensor, Tensor]
"""Outputs and log-sums, see `Problem`."""
