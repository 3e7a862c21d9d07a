"""First weights from a Llama-type model of `transformers` (`model.start`).

They are read from safetensors alone: pickled ones could run any code.

Shapes: V vocabulary, S embedding width.
"""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rtx.disk import read_named
from rtx.errors import UserError, shorten
from rtx.model.multihead import MultiheadAttention
from rtx.model.transformer import Transformer
from rtx.paths import expand_path
from rtx.settings.pretrained import read_llama

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
ANGLES = "rotary_emb.inv_freq"
"""The end of names of tensors that old files have, and that follow from the base of the angles."""
TABLE = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"


class Weights:
    """The tensors of a model in a folder, each read once.

    Args:
        start: the folder, as the user wrote it.

    Raises:
        UserError: the folder has no safetensors, or damaged ones.
    """

    def __init__(self, start: str) -> None:
        self.start = start
        self.files: dict[str, Path] = {}
        """The file of each tensor that was not read yet."""
        for path in weight_files(start):
            try:
                # by path: the user's folder; in the hub's cache its files are links
                with safe_open(path, framework="pt") as file:
                    self.files.update(dict.fromkeys(file.keys(), path))
            except (OSError, SafetensorError) as error:
                raise self.error(f"{path.name} cannot be read: {error}") from error

    def error(self, problem: str) -> UserError:
        return UserError(f"model.start={self.start}: {shorten(problem, 200)}")

    def take(self, name: str) -> Tensor:
        """Return a tensor; UserError where there is none."""
        path = self.files.pop(name, None)
        if path is None:
            raise self.error(f"its *.safetensors have no {name}")
        try:
            # by path: the user's folder; in the hub's cache its files are links
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise self.error(f"{path.name} cannot be read: {error}") from error

    def check_all_read(self) -> None:
        """Raise UserError for a tensor that rtx's decoder has no place for."""
        rest = [name for name in self.files if not name.endswith(ANGLES)]
        if rest:
            raise self.error(f"rtx's decoder has no place for its {min(rest)}")


def weight_files(start: str) -> list[Path]:
    """Return the files of a model's weights; UserError where there are none."""
    folder = expand_path(start, "model.start")
    names = [WHOLE]
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted({*json.loads(read_named(index))["weight_map"].values()})
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise UserError(f"model.start={start}: {INDEX} is damaged") from error
    files = []
    for name in names:
        path = folder / str(name)
        if path.parent != folder or not path.is_file():
            rule = "pickled weights are not read, as they could run code"
            raise UserError(f"model.start={start}: the folder has no {shorten(str(name))}; {rule}")
        files.append(path)
    return files


@torch.no_grad()
def load_pretrained(model: Transformer, start: str) -> None:
    """Set the weights of a model to those of the Llama-type model in the folder `start`.

    The start vector becomes the vector of the model's token for the beginning of a text, and the
    bias of the output zero, so that scores are those of the model after this token. Heads of all
    patterns take the rows of the model's heads in their order; keys that a pattern does not have
    are left out.

    Raises:
        UserError: the data have another vocabulary, or a tensor is missing, is one too many, or
            has another shape.
    """
    file = read_llama(start)
    if file.vocab_size != model.vocabulary:
        tokenizer = f"data.tokenizer=pretrained data.tokenizer_path={start}"
        sizes = f"its vocabulary has {file.vocab_size:,} tokens, the data's {model.vocabulary:,}"
        raise UserError(f"model.start={start}: {sizes}; text is read by its tokenizer: {tokenizer}")
    weights = Weights(start)
    table_VS = weights.take(TABLE)
    copy(weights, TABLE, table_VS, model.embedding.table_VS)
    model.embedding.start_S.copy_(table_VS[file.bos_token_id])
    if file.tie_word_embeddings:
        weights.files.pop(OUTPUT, None)
    else:
        copy(weights, OUTPUT, weights.take(OUTPUT), model.output_VS)
    model.output_bias_V.zero_()
    load_norm(weights, "model.norm.weight", model.norm)
    for number, block in enumerate(model.blocks):
        load_block(weights, f"model.layers.{number}.", block)
    weights.check_all_read()


def copy(weights: Weights, name: str, tensor: Tensor, parameter: Tensor) -> None:
    """Copy a tensor into a parameter; UserError where their shapes differ."""
    if tensor.shape != parameter.shape:
        shapes = f"{[*tensor.shape]}, and not {[*parameter.shape]}"
        raise weights.error(f"{name} has the shape {shapes}")
    parameter.copy_(tensor)


def load_norm(weights: Weights, name: str, norm: torch.nn.Module) -> None:
    """Set the scale of a norm to the tensor `name`."""
    copy(weights, name, weights.take(name), norm.get_parameter("weight"))


def load_block(weights: Weights, prefix: str, block: torch.nn.Module) -> None:
    """Set the weights of a block to the tensors of a layer, whose names begin with `prefix`."""
    attention = block.get_submodule("attention")
    assert isinstance(attention, MultiheadAttention)
    load_attention(weights, f"{prefix}self_attn.", attention)
    # The first half of the rows is multiplied by the silu of the second.
    inner = block.get_parameter("feed_forward.inner.weight")
    for name, half in zip(("up", "gate"), inner.chunk(2), strict=True):
        name = f"{prefix}mlp.{name}_proj.weight"
        copy(weights, name, weights.take(name), half)
    name = f"{prefix}mlp.down_proj.weight"
    copy(weights, name, weights.take(name), block.get_parameter("feed_forward.outer.weight"))
    load_norm(weights, f"{prefix}input_layernorm.weight", block.get_submodule("attention_norm"))
    name = f"{prefix}post_attention_layernorm.weight"
    load_norm(weights, name, block.get_submodule("feed_forward_norm"))


def load_attention(weights: Weights, prefix: str, attention: MultiheadAttention) -> None:
    """Set the matrices of an attention layer."""
    parts = attention.by_group(attention.qkv.weight.split(attention.widths))
    for index, letter in enumerate("qkv"):
        name = f"{prefix}{letter}_proj.weight"
        heads = [group.heads for group in attention.head_groups()]
        if letter != "q":
            heads = [group.kv_heads for group in attention.head_groups()]
        tensor = weights.take(name)
        rows = [number * attention.size for number in heads]
        if len(tensor) != sum(rows):
            raise weights.error(f"{name} has {len(tensor)} rows, and not {sum(rows)}")
        for source, group_parts in zip(tensor.split(rows), parts, strict=True):
            target = group_parts[index]
            if target is not None:
                copy(weights, name, source, target)
    name = f"{prefix}o_proj.weight"
    copy(weights, name, weights.take(name), attention.out.weight)
