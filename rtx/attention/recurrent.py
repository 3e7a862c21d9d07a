"""Recurrent heads: a position reads its segment, and a memory of the positions before the segment.

Example: segments of 4 positions and a memory of 3. Position 6 is in the segment from 4 to 7. It
reads 4 to 6, and the memory 1 to 3.

positional.py has the base class, with the batch form and the stream.
"""

from typing import Any

from torch import Tensor

from rtx.attention.arguments import check_positive
from rtx.attention.positional import ContiguousPattern


class Recurrent(ContiguousPattern):
    """Position i reads its segment up to itself, and a memory: the positions before the segment.

    The pattern of Transformer-XL (Dai et al. 2019, section 3.2).

    Args:
        length: the number of positions of a segment.
        memory: the number of positions before the segment that are read as well.
        same_length: position i reads the `memory` positions that end with i, in whatever segment,
            as the released code does in evaluation.
    """

    def __init__(
        self,
        *,
        length: int,
        memory: int,
        same_length: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        check_positive(length=length)
        least = 0
        if same_length:
            # The position itself is one of these.
            least = 1
        check_positive(least, memory=memory)
        self.length = length
        self.memory = memory
        self.same_length = same_length
        self.cache_size = length + memory
        if same_length:
            self.cache_size = memory

    def since(self, i: Tensor) -> Tensor:
        if self.same_length:
            return i + 1 - self.memory
        segment = i // self.length
        return segment * self.length - self.memory

    def pairs_of_head(self, length: int) -> float:
        """Return the number of pairs of head 0 after a full memory."""
        return self.counted_pairs(length, self.memory)
