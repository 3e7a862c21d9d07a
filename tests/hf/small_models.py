"""Small random models of the families that `rtx.hf` is tested on."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 64
BYTES = 256
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": None,
}
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gpt_neox", "gpt2")


def small_model(family: str, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """Return a random model of two layers, in evaluation mode, the same in every call."""
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": vocabulary}
    grouped = {**sizes, "num_key_value_heads": 2}
    match family:
        case "llama":
            model = LlamaForCausalLM(LlamaConfig(**grouped))
        case "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**grouped))
        case "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(head_dim=8, **grouped))
        case "mistral":
            model = MistralForCausalLM(MistralConfig(**grouped))
        case "gpt_neox":
            model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes))
        case "gpt2":
            names = {"n_embd": 32, "n_layer": 2, "n_head": 4, "eos_token_id": None}
            model = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, **names))
        case _:
            raise AssertionError(family)
    for weight in model.parameters():
        if weight.dim() > 1:
            # Larger than at the start of training, so that attention is not nearly uniform.
            torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


def small_mistral(**options: Any) -> PreTrainedModel:
    """Return the small Mistral with changes in its configuration, and the same weights."""
    model = small_model("mistral")
    changed = MistralForCausalLM(MistralConfig(**{**model.config.to_dict(), **options}))
    changed.load_state_dict(model.state_dict())
    return changed.eval()


def random_tokens(sequences: int, length: int) -> torch.Tensor:
    """Return random tokens, `[B, N]`, the same in every call."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCABULARY, (sequences, length), generator=generator)


def save_small_model(family: str, folder: Path) -> Path:
    """Write a small model and a tokenizer of bytes to a folder, and return the folder."""
    model = small_model(family, vocabulary=BYTES)
    model.save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    numbers = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=numbers, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
