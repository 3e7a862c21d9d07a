"""A Routing Transformer as a model of Hugging Face `transformers`.

`rtx export <run> format=hf` copies this file into the folder that it writes. It needs the package
rtx (`pip install 'rtx[hf]'`), which has the model; here is the interface alone.

Token V, the last of the vocabulary, is the start token. The model reads its start vector before
the first token of every text, so `<start> a b` and `a b` give the same logits for `b`; with the
start token there are also logits for `a`. It is the padding token, too: all start tokens before a
text count as one, and those after it are not read. The model never predicts it.

Every decision of the model is made from the prefix, as by `rtx eval mode=streaming`.

Shapes: B rows, N positions, V tokens of the run's vocabulary, S width of the output layer's input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from rtx.model.decoding import Decoder
from rtx.model.memory import Memory
from rtx.model.transformer import Transformer
from rtx.settings.schema import to_config


class RtxConfig(PretrainedConfig):
    """The configuration of an exported run.

    Args:
        rtx: the configuration of the run, as nested dictionaries.
        others: those of `PretrainedConfig`; `vocab_size` is V + 1.
    """

    model_type = "rtx"

    def __init__(self, rtx: dict[str, Any] | None = None, **others: Any) -> None:
        self.rtx = rtx or {}
        super().__init__(**others)


class RtxCache:
    """What the model keeps of the tokens that it has read: the streams of each pattern."""

    def __init__(self) -> None:
        self.decoders: list[Decoder] = []
        """One for all rows; one for each row where the texts of the rows differ in length."""
        self.length = 0

    def get_seq_length(self) -> int:
        """Return the number of positions that were read, padding included."""
        return self.length

    def prefill(self, model: Transformer, tokens_BN: Tensor, lead_B: Tensor) -> Tensor:
        """Read the first tokens, and return the logits of the next one, `[B, V]`.

        Args:
            lead_B: the number of positions before the text of each row.
        """
        leads = lead_B.tolist()
        texts = [tokens_BN[:, leads[0] :]]
        if len(set(leads)) > 1:
            rows = zip(tokens_BN.split(1), leads, strict=True)
            texts = [row_1N[:, lead:] for row_1N, lead in rows]
        self.decoders = [Decoder(model, len(text_BN)) for text_BN in texts]
        self.length = tokens_BN.shape[1]
        pairs = zip(self.decoders, texts, strict=True)
        return torch.cat([decoder.prefill(text_BN) for decoder, text_BN in pairs])

    def read(self, tokens_BN: Tensor) -> Tensor:
        """Read further tokens one by one, and return the logits after each, `[B, N, V]`."""
        sizes = [decoder.batch for decoder in self.decoders]
        logits = []
        for tokens_B in tokens_BN.unbind(1):
            parts = zip(self.decoders, tokens_B.split(sizes), strict=True)
            logits.append(torch.cat([decoder.step(part_B) for decoder, part_B in parts]))
        self.length += tokens_BN.shape[1]
        return torch.stack(logits, dim=1)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Raise ValueError: the streams of a row cannot become those of another."""
        raise ValueError("beam search works without a cache alone: generate(..., use_cache=False)")


class RtxForCausalLM(PreTrainedModel, GenerationMixin):
    """A decoder of rtx with the interface of `transformers`."""

    config_class = RtxConfig
    base_model_prefix = "model"
    # A cache cannot go back, which assisted generation needs.
    _is_stateful = True

    def __init__(self, config: RtxConfig) -> None:
        super().__init__(config)
        self.start = config.vocab_size - 1
        self.model = make_model(config).to(torch.get_default_dtype())
        self.constants = constants_of(self)
        self._tied_weights_keys = shared_parameters(self)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Restore the buffers that no file has: `from_pretrained` overwrites them.

        All other values come from the file, or are the first weights of `Transformer`.
        """
        for name, value in self.constants.items():
            self.get_buffer(name).copy_(value)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        """Return False: the cache is an `RtxCache`, which `forward` makes."""
        return False

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: RtxCache | None = None,
        use_cache: bool | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Return the logits of the token after each position, `[B, N, V + 1]`.

        Args:
            attention_mask: 0 where a row is padded, before its text or after it; a cache takes
                padding before texts alone.
            cache: of an earlier call, whose positions `input_ids` follow.
            use_cache: return a cache; without gradients.
            labels: token ids, as `input_ids`, for the mean loss; start tokens and -100 are left
                out.
            logits_to_keep: for how many of the last positions, or for which positions, logits are
                computed; 0: all.

        Raises:
            ValueError: padding inside a text, or more tokens than learned positions.
        """
        kept = logits_to_keep
        if isinstance(kept, int):
            kept = slice(-kept, None)
        if cache is not None and cache.decoders:
            self.refuse_too_long(cache.decoders[0].position + input_ids.shape[1])
            # A row that has ended goes on with padding, and its logits are not used.
            tokens_BN = input_ids.clamp(max=self.start - 1)
            logits_BNV = cache.read(tokens_BN)[:, kept]
        else:
            is_pad_BN = padding(input_ids, attention_mask, self.start)
            lead_B = leading(is_pad_BN)
            if use_cache:
                refuse_padding_after(is_pad_BN, lead_B)
                cache = RtxCache()
            logits_BNV = self.first_logits(input_ids, lead_B, kept, cache)
        # The start token is never predicted.
        logits_BNV = F.pad(logits_BNV, (0, 1), value=float("-inf"))
        loss = None
        if labels is not None:
            loss = self.mean_loss(logits_BNV, labels)
        output = CausalLMOutputWithPast(loss=loss, logits=logits_BNV, cache=cache)  # type: ignore[arg-type]
        return output.to_tuple() if return_dict is False else output

    def first_logits(
        self,
        tokens_BN: Tensor,
        lead_B: Tensor,
        kept: slice | Tensor,
        cache: RtxCache | None,
    ) -> Tensor:
        """Return the logits after the kept positions, `[B, kept, V]`, and fill the cache."""
        self.refuse_too_long(tokens_BN.shape[1] - int(lead_B.min()) + 1)
        last_logits_BV = None
        if cache is not None:
            last_logits_BV = cache.prefill(self.model, tokens_BN, lead_B)
        if last_logits_BV is not None and kept == slice(-1, None):
            return last_logits_BV[:, None]
        hidden_BNS = self.hidden(tokens_BN, lead_B)
        return self.model.logits(hidden_BNS[:, kept])

    def hidden(self, tokens_BN: Tensor, lead_B: Tensor) -> Tensor:
        """Return the vectors that predict the token after each position, `[B, N, S]`."""
        length = tokens_BN.shape[1]
        place_N = torch.arange(length, device=tokens_BN.device)
        # All texts move to the left. What follows a text changes no vector before it.
        from_BN = (place_N + lead_B[:, None]).clamp(max=length - 1)
        text_BN = tokens_BN.gather(1, from_BN).clamp(max=self.start - 1)
        # Vector i predicts token i from those before it, so the appended 0 is never read.
        text_BN = F.pad(text_BN, (0, 1))[:, : length + 1 - int(lead_B.min())]
        hidden_BNS = self.vectors(text_BN)
        to_BN = (place_N - lead_B[:, None] + 1).clamp(min=0)
        to_BNS = to_BN[..., None].expand(-1, -1, hidden_BNS.shape[-1])
        return hidden_BNS.gather(1, to_BNS)

    def vectors(self, text_BN: Tensor) -> Tensor:
        """Return the last hidden vectors of texts, `[B, N, S]`; with a memory, by segments."""
        segment = self.model.segment
        if not 0 < segment < text_BN.shape[1]:
            hidden_BNS, _ = self.model(text_BN, streaming=True)
            return hidden_BNS
        memory = Memory(self.model.model_config)
        parts = []
        for segment_BN in text_BN.split(segment, dim=1):
            part_BNS, _ = self.model(segment_BN, streaming=True, memory=memory)
            parts.append(part_BNS)
        return torch.cat(parts, dim=1)

    def mean_loss(self, logits_BNV: Tensor, labels_BN: Tensor) -> Tensor:
        """Return the mean nats of the labels that follow a position."""
        labels_BN = labels_BN.masked_fill(labels_BN == self.start, -100)
        target_BN = labels_BN[:, 1:].flatten()
        return F.cross_entropy(logits_BNV[:, :-1].flatten(0, 1).float(), target_BN)

    def refuse_too_long(self, length: int) -> None:
        """Raise ValueError for more positions than a table of learned positions has."""
        positions = self.model.embedding.positions
        if positions is not None and length > positions.length:
            most = f"learned positions end at {positions.length}, the start token included"
            raise ValueError(f"the text has {length - 1} tokens; {most}")


def make_model(config: RtxConfig) -> Transformer:
    """Return the model on the CPU in float32, its constants as in rtx.

    `from_pretrained` sets the device "meta", on which constants have no values, and the type of
    the weights, with which random constants would be others.
    """
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            return Transformer(to_config(config.rtx), config.vocab_size - 1)
    finally:
        torch.set_default_dtype(dtype)


def padding(tokens_BN: Tensor, mask_BN: Tensor | None, start: int) -> Tensor:
    """Return which positions are no text, bool `[B, N]`; ValueError where text follows them.

    Start tokens and padding before a text are allowed, and padding after it.
    """
    is_pad_BN = tokens_BN == start
    if mask_BN is not None:
        is_pad_BN = is_pad_BN | (mask_BN == 0)
    is_text_BN = ~is_pad_BN
    has_begun_BN = is_text_BN.cumsum(1) > 0
    has_ended_BN = (is_pad_BN & has_begun_BN).cumsum(1) > 0
    if bool((has_ended_BN & is_text_BN).any()):
        raise ValueError("a row has padding or a start token inside its text: one text a row")
    return is_pad_BN


def leading(is_pad_BN: Tensor) -> Tensor:
    """Return how many positions of each row are before its text, `[B]`."""
    return is_pad_BN.long().cumprod(1).sum(1)


def refuse_padding_after(is_pad_BN: Tensor, lead_B: Tensor) -> None:
    """Raise ValueError where a text is followed by padding, which a cache cannot leave out."""
    has_text_B = lead_B < is_pad_BN.shape[1]
    if bool((is_pad_BN[:, -1] & has_text_B).any()):
        raise ValueError("with a cache, rows are padded on the left: padding_side='left'")


def constants_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the buffers that are not saved with a model, by their names."""
    saved = model.state_dict().keys()
    buffers = dict(model.named_buffers())
    return {name: buffer.clone() for name, buffer in buffers.items() if name not in saved}


def shared_parameters(model: nn.Module) -> dict[str, str]:
    """Return the names of parameters that are the same as an earlier one, with its name."""
    first: dict[int, str] = {}
    shared = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        source = first.setdefault(id(parameter), name)
        if source != name:
            shared[name] = source
    return shared
