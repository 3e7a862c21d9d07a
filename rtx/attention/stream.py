"""Autoregressive decoding with a KV cache, for the heads of one pattern.

Shapes: B sequences, H heads, N positions, D head size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rtx.attention.cache import Cache
from rtx.attention.reads import QueriesKeys, Reads


class Stream:
    """B sequences that grow by one position at a time; `Pattern.stream` makes it.

    Its outputs are those of the pattern's forward pass with `streaming=True`. It has no gradients,
    no dropout and no padding: use it in evaluation mode.

    Args:
        cache: an empty cache of the pattern.
        inputs: prepares queries and keys; its third argument is the position of the first.
        read_prompt: see `Pattern.read_prompt`.
    """

    def __init__(
        self,
        cache: Cache,
        inputs: Callable[[Tensor, Tensor | None, int], QueriesKeys],
        read_prompt: Callable[
            [Tensor, Tensor | None, Tensor],
            tuple[Tensor, QueriesKeys, list[Reads] | None],
        ],
    ) -> None:
        self.cache = cache
        self.inputs = inputs
        self.read_prompt = read_prompt
        self.position = 0
        """The number of positions that have been read."""
        self.shape_BH: tuple[int, int] | None = None
        """The numbers of sequences and of heads of values; None: nothing has been read yet."""

    @torch.no_grad()
    def prefill(self, q_BHND: Tensor, k_BHND: Tensor | None, v_BHND: Tensor) -> Tensor:
        """Return the outputs `[B, H, N, D]` of the first N positions, read in one pass.

        Raises:
            ValueError: the stream has read positions already.
        """
        if self.position:
            raise ValueError(
                f"prefill reads the first positions of a stream, and this one is at position"
                f" {self.position}: use decode for the next one, or begin a new stream"
            )
        out_BHND, qk, parts = self.read_prompt(q_BHND, k_BHND, v_BHND)
        self.cache.prefill(qk, v_BHND, parts)
        self.position = v_BHND.shape[2]
        if self.position:
            self.shape_BH = (v_BHND.shape[0], v_BHND.shape[1])
        return out_BHND

    @torch.no_grad()
    def decode(self, q_BH1D: Tensor, k_BH1D: Tensor | None, v_BH1D: Tensor) -> Tensor:
        """Return the output `[B, H, 1, D]` of the next position.

        Raises:
            ValueError: more or fewer than one position, or other numbers of sequences or heads than
                before.
        """
        B, H, N, _ = v_BH1D.shape
        if N != 1:
            raise ValueError(
                f"v_BH1D has {N} positions: decode reads one at a time, and prefill the first ones"
            )
        if self.shape_BH is not None and self.shape_BH != (B, H):
            streams, heads = self.shape_BH
            raise ValueError(f"v_BH1D has B={B}, H={H}: this stream has B={streams}, H={heads}")
        qk = self.inputs(q_BH1D, k_BH1D, self.position)
        out_BH1D = self.cache.decode(qk, v_BH1D, self.position)
        self.position += 1
        self.shape_BH = (B, H)
        return out_BH1D
