"""Streaming: one unit at a time, with the KV cache that each pattern needs.

Shapes: B streams, V vocabulary.
"""

import copy
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from rtx.model.memory import Memory
from rtx.model.transformer import Transformer


class Decoder:
    """A batch of streams through a model, from position 0 on; earlier outputs are never revised."""

    def __init__(self, model: Transformer, batch: int = 1) -> None:
        self.model, self.batch = model, batch
        self.position = 0
        self.streams = [block.attention.streams() for block in model.blocks]  # type: ignore[union-attr,operator]
        self.memory = Memory(model.config) if model.config.compressed else None
        self.segment_BN: Tensor | None = (
            None  # units of the segment that is not finished, of a model that compresses
        )

    @torch.no_grad()
    def prefill(self, prompt_BP: Tensor) -> Tensor:
        """Take in a whole prompt (at the start alone) in one pass and return the logits `[B, V]` of the unit behind it.

        Every decision is made from the prefix of its position, as P + 1 steps would make it.
        """
        assert self.position == 0, "a prompt is taken in at the start"
        model = self.model
        if self.memory is not None:
            return self.go_on(prompt_BP)
        # The input of the last position is the last unit of the prompt: what stands at that position is not read.
        x_BNE = model.embedding(
            torch.cat([prompt_BP, prompt_BP.new_zeros(len(prompt_BP), 1)], dim=1)
        )
        for block, streams in zip(model.blocks, self.streams, strict=True):
            x_BNE = block.prefill(x_BNE, streams)  # type: ignore[operator]
        self.position = x_BNE.shape[1]
        return model.logits(model.narrow(model.norm(x_BNE[:, -1])))

    @torch.no_grad()
    def step(self, tokens_B: Tensor | None = None) -> Tensor:
        """Take in the last unit of each stream (None at the start) and return the logits `[B, V]` of the next one."""
        assert (tokens_B is None) == (self.position == 0), (
            "the first step, and only it, takes no unit"
        )
        if self.memory is not None:
            return self.go_on(
                torch.zeros(self.batch, 0, dtype=torch.int64)
                if tokens_B is None
                else tokens_B[:, None]
            )
        embedding = self.model.embedding
        x_BS = (
            embedding.start_S.expand(self.batch, -1)
            if tokens_B is None
            else embedding.vectors(tokens_B)
        )
        x_B1E = embedding.finish(x_BS[:, None], self.position)
        for block, streams in zip(self.model.blocks, self.streams, strict=True):
            x_B1E = block.decode(x_B1E, streams)  # type: ignore[operator]
        self.position += 1
        return self.model.logits(self.model.narrow(self.model.norm(x_B1E[:, 0])))

    def go_on(self, tokens_BP: Tensor) -> Tensor:
        """Take in units of a model that compresses and return the next logits; the open segment is read anew."""
        model, memory = self.model, self.memory
        assert memory is not None
        tokens_BP = tokens_BP.to(model.device)
        self.position += tokens_BP.shape[1] + (self.segment_BN is None)
        every_BN = (
            tokens_BP if self.segment_BN is None else torch.cat([self.segment_BN, tokens_BP], dim=1)
        )
        while every_BN.shape[1] >= model.segment:
            model(every_BN[:, : model.segment], memory=memory)
            every_BN = every_BN[:, model.segment :]
        self.segment_BN = every_BN
        # What stands at the last position is not read, and the memory not kept.
        hidden_BNS, _ = model(F.pad(every_BN, (0, 1)), memory=copy.copy(memory))
        return model.logits(hidden_BNS[:, -1])


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
    """Yield `length` units `[B]`, one position after the other, that continue a prompt (which may be empty, `[B, 0]`).

    Raises:
        ValueError: learned positions end before prompt and length do.
    """
    positions = model.embedding.positions
    total = prompt_BP.shape[1] + length
    if positions is not None and total > positions.length:
        end = f"learned positions end at {positions.length} (data.length)"
        raise ValueError(f"prompt and length make {total} units; {end}")
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
    """Draw one unit for each stream; the draw is made on the CPU, so that a seed means the same everywhere."""
    logits_BV = logits_BV.float().cpu()
    if temperature == 0:
        return logits_BV.argmax(-1)
    # In float64, and with a largest value of 0: dividing by the smallest temperatures gives no infinity to subtract.
    logits_BV = (logits_BV - logits_BV.amax(-1, keepdim=True)).double() / temperature
    if top_k is not None and top_k < logits_BV.shape[-1]:
        worst_B1 = logits_BV.topk(top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < worst_B1, float("-inf"))
    share_BV = logits_BV.softmax(-1)
    if top_p is not None:
        sorted_BV, order_BV = share_BV.sort(dim=-1, descending=True, stable=True)
        before_BV = sorted_BV.cumsum(-1) - sorted_BV
        kept_BV = sorted_BV.masked_fill(before_BV >= top_p, 0.0)
        share_BV = torch.zeros_like(share_BV).scatter(-1, order_BV, kept_BV)
    return torch.multinomial(share_BV, 1, generator=generator)[:, 0]
