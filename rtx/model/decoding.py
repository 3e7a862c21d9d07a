"""Autoregressive decoding and sampling, with the KV cache of each pattern.

Shapes: B streams, P positions of a prompt, N positions, E hidden width, S width of the vectors that
the output layer reads, K likeliest tokens, V vocabulary.
"""

import copy
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.model.memory import Memory
from rtx.model.transformer import Transformer


class Decoder:
    """A batch of sequences that a model reads token by token, from position 0 on."""

    def __init__(self, model: Transformer, batch: int = 1) -> None:
        self.model = model
        self.batch = batch
        self.position = 0
        """The number of positions that the streams have read: the start vector, then tokens."""
        self.streams = [attention.streams() for attention in model.attentions()]
        """The streams of each layer."""
        self.memory: Memory | None = None
        """For a model with compressed memory, which reads segments and does not use `streams`."""
        if model.model_config.compressed:
            self.memory = Memory(model.model_config)
        self.segment_BN: Tensor | None = None
        """With compressed memory: the tokens after the last whole segment; None at position 0."""

    @torch.no_grad()
    def prefill(self, prompt_BP: Tensor) -> Tensor:
        """Read a prompt in one pass, and return the logits of the token after it, `[B, V]`.

        Every selection of keys is made from the prefix, so the result is that of P + 1 steps.

        Raises:
            ValueError: the streams have read a position already.
        """
        if self.position > 0:
            raise ValueError(f"a prompt is read at position 0, not at position {self.position}")
        if self.memory is not None:
            return self.read_segments(prompt_BP, self.memory)
        # The embedding shifts tokens right by one, so the appended 0 is never read.
        tokens_BN = F.pad(prompt_BP, (0, 1))
        x_BNE = self.model.embedding(tokens_BN)
        for block, streams in zip(self.model.blocks, self.streams, strict=True):
            x_BNE = block.prefill(x_BNE, streams)  # type: ignore[operator]
        self.position = x_BNE.shape[1]
        last_BE = x_BNE[:, -1]
        return self.logits(last_BE)

    @torch.no_grad()
    def step(self, tokens_B: Tensor | None = None) -> Tensor:
        """Read the last token of each stream, and return the logits of the next one, `[B, V]`.

        Args:
            tokens_B: None at the first step, and only there.

        Raises:
            ValueError: tokens are missing, or the first step has some.
        """
        if tokens_B is None and self.position > 0:
            raise ValueError("tokens_B is None, which only the first step takes")
        if tokens_B is not None and self.position == 0:
            raise ValueError("the first step takes no tokens: it returns the logits of the first")
        if self.memory is not None:
            tokens_BP = self.as_sequences(tokens_B)
            return self.read_segments(tokens_BP, self.memory)
        embedding = self.model.embedding
        if tokens_B is None:
            x_BS = embedding.start_S.expand(self.batch, -1)
        else:
            x_BS = embedding.vectors(tokens_B)
        x_B1S = x_BS[:, None]
        x_B1E = embedding.to_hidden(x_B1S, self.position)
        for block, streams in zip(self.model.blocks, self.streams, strict=True):
            x_B1E = block.decode(x_B1E, streams)  # type: ignore[operator]
        self.position += 1
        return self.logits(x_B1E[:, 0])

    def logits(self, x_BE: Tensor) -> Tensor:
        """Return the logits `[B, V]` from the output of the last block."""
        hidden_BS = self.model.output(x_BE)
        return self.model.logits(hidden_BS)

    def as_sequences(self, tokens_B: Tensor | None) -> Tensor:
        """Return the tokens of a step as sequences of length 1, or of length 0 for None."""
        if tokens_B is None:
            return torch.zeros(self.batch, 0, dtype=torch.int64)
        return tokens_B[:, None]

    def read_segments(self, tokens_BP: Tensor, memory: Memory) -> Tensor:
        """Read tokens with a model with compressed memory, and return the next logits, `[B, V]`.

        Whole segments are read once, and move into the memory. Every call computes the tokens after
        the last whole segment again.
        """
        model = self.model
        tokens_BN = tokens_BP.to(model.device)
        self.position += tokens_BP.shape[1]
        if self.segment_BN is None:
            # Position 0 has the start vector, and no token.
            self.position += 1
        else:
            tokens_BN = torch.cat([self.segment_BN, tokens_BN], dim=1)
        while tokens_BN.shape[1] >= model.segment:
            segment_BN = tokens_BN[:, : model.segment]
            model(segment_BN, memory=memory)
            tokens_BN = tokens_BN[:, model.segment :]
        self.segment_BN = tokens_BN
        # The appended 0 is never read.
        longer_BN = F.pad(tokens_BN, (0, 1))
        # The copy of the memory is discarded, because the segment is not complete.
        discarded_memory = copy.copy(memory)
        hidden_BNS, _ = model(longer_BN, memory=discarded_memory)
        last_BS = hidden_BNS[:, -1]
        return model.logits(last_BS)


def generate(
    model: Transformer,
    prompt_BP: Tensor,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield `length` tokens of each stream, `[B]` at a time, that continue a prompt.

    Args:
        prompt_BP: the prompts; `[B, 0]` for none.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: tokens are drawn from the `top_k` likeliest ones.
        top_p: tokens are drawn from the likeliest ones that together have this likelihood.
        generator: the random generator of the draws, on the CPU.

    Raises:
        ValueError: prompt and length are longer than the table of learned positions.
    """
    positions = model.embedding.positions
    total = prompt_BP.shape[1] + length
    if positions is not None and total > positions.length:
        end = f"learned positions end at {positions.length} (data.length)"
        raise ValueError(f"prompt and length are {total} tokens together; {end}")
    model.eval()
    decoder = Decoder(model, len(prompt_BP))
    logits_BV = decoder.prefill(prompt_BP.to(model.device))
    for left in reversed(range(length)):
        tokens_B = draw(logits_BV, temperature, top_k, top_p, generator)
        yield tokens_B
        if left:
            logits_BV = decoder.step(tokens_B.to(logits_BV.device))


def draw(
    logits_BV: Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    """Draw one token for each stream, `[B]`.

    Draws are made on the CPU, so that a seed gives the same tokens on every device.
    """
    logits_BV = logits_BV.float().cpu()
    if temperature == 0:
        return logits_BV.argmax(-1)
    # In float64, and with 0 as the largest logit, a tiny temperature gives no inf - inf = NaN.
    largest_B1 = logits_BV.amax(-1, keepdim=True)
    below_BV = logits_BV - largest_B1
    logits_BV = below_BV.double() / temperature
    if top_k is not None:
        logits_BV = only_top_k(logits_BV, top_k)
    share_BV = logits_BV.softmax(-1)
    if top_p is not None:
        share_BV = only_top_p(share_BV, top_p)
    tokens_B1 = torch.multinomial(share_BV, 1, generator=generator)
    return tokens_B1[:, 0]


def only_top_k(logits_BV: Tensor, top_k: int) -> Tensor:
    """Return logits with -inf for all but the `top_k` largest."""
    if top_k >= logits_BV.shape[-1]:
        return logits_BV
    top_BK = logits_BV.topk(top_k).values
    smallest_B1 = top_BK[:, -1:]
    is_smaller_BV = logits_BV < smallest_B1
    return logits_BV.masked_fill(is_smaller_BV, -math.inf)


def only_top_p(share_BV: Tensor, top_p: float) -> Tensor:
    """Return likelihoods with 0 for all but the fewest largest ones whose sum reaches `top_p`."""
    sorted_BV, token_BV = share_BV.sort(dim=-1, descending=True, stable=True)
    sum_before_BV = sorted_BV.cumsum(-1) - sorted_BV
    is_beyond_BV = sum_before_BV >= top_p
    sorted_BV = sorted_BV.masked_fill(is_beyond_BV, 0.0)
    zero_BV = torch.zeros_like(share_BV)
    return zero_BV.scatter(-1, token_BV, sorted_BV)
