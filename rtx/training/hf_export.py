"""What makes an exported model one of Hugging Face `transformers`: files beside its weights.

No `transformers` is needed to write them. modeling_rtx.py and tokenization_rtx.py are copied as
they are.
"""

import json
from pathlib import Path
from typing import Any

from rtx.data.tokenizers import Tokenizer
from rtx.model.transformer import Transformer
from rtx.settings.run_config import on_one_device
from rtx.settings.schema import Config, to_dict
from rtx.version import __version__

MODEL_CODE = "modeling_rtx.py"
TOKENIZER_CODE = "tokenization_rtx.py"
TOKENIZER_RECORD = "rtx_tokenizer.json"
CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
HF_FILES = (CONFIG, MODEL_CODE, TOKENIZER_CONFIG, TOKENIZER_CODE, TOKENIZER_RECORD)


def hf_files(config: Config, model: Transformer, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Return the files by their names; without a tokenizer, those of the model alone."""
    files = {
        CONFIG: as_json(model_config(config, model)),
        MODEL_CODE: code(MODEL_CODE),
    }
    if tokenizer is not None:
        files[TOKENIZER_CONFIG] = as_json(tokenizer_config())
        files[TOKENIZER_CODE] = code(TOKENIZER_CODE)
        files |= tokenizer_files(tokenizer)
    return files


def model_config(config: Config, model: Transformer) -> dict[str, Any]:
    """Return the content of config.json."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    is_tied = len(names) > len(list(model.parameters()))
    start = model.vocabulary
    length = config.data.length
    if model.embedding.positions is not None:
        # A text of `length` tokens without a start token would need one position more.
        length -= 1
    return {
        "architectures": ["RtxForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_rtx.RtxConfig",
            "AutoModelForCausalLM": "modeling_rtx.RtxForCausalLM",
        },
        "model_type": "rtx",
        "dtype": str(model.embedding.start_S.dtype).removeprefix("torch."),
        "vocab_size": start + 1,
        "bos_token_id": start,
        "pad_token_id": start,
        "hidden_size": config.model.hidden,
        "num_hidden_layers": config.model.layers,
        "num_attention_heads": config.model.heads,
        "max_position_embeddings": length,
        "tie_word_embeddings": is_tied,
        "rtx_version": __version__,
        "rtx": to_dict(on_one_device(config)),
    }


def tokenizer_config() -> dict[str, Any]:
    """Return the content of tokenizer_config.json."""
    return {
        "tokenizer_class": "RtxTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_rtx.RtxTokenizer", None]},
    }


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files that a tokenizer is read from: contents by their names."""
    files = {TOKENIZER_RECORD: as_json(tokenizer.describe())}
    if tokenizer.file:
        files[tokenizer.file] = tokenizer.content
    return files


def code(name: str) -> bytes:
    """Return the content of a file in the folder of this one."""
    # by path: installed with rtx
    return Path(__file__).with_name(name).read_bytes()


def as_json(content: Any) -> bytes:
    """Return indented JSON."""
    return f"{json.dumps(content, indent=2)}\n".encode()
