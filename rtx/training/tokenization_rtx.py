"""A tokenizer of rtx as one of Hugging Face `transformers`.

`rtx export <run> format=hf` copies this file into the folder that it writes. It needs the package
rtx (`pip install 'rtx[hf]'`), which has the tokenizers: bytes, words or subwords.

The start token pads, and is the prefix of a text whose first token is scored; it is not added to a
text. No text contains it: the characters of its name are encoded as any others.
"""

# transformers declares attributes of the class below as those of an instance.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from transformers import AddedToken, PreTrainedTokenizer

from rtx.data.tokenizers import (
    SentencepieceTokenizer,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
)
from rtx.disk import read_named
from rtx.training.hf_export import TOKENIZER_RECORD, tokenizer_files

START = "<|start|>"


class RtxTokenizer(PreTrainedTokenizer):
    """Text <-> the token ids of an exported run.

    Args:
        record_file: what `Tokenizer.describe` returns, as JSON; other files are in its folder.
        others: those of `PreTrainedTokenizer`.
    """

    # Attributes of the class, as in the tokenizers of transformers.
    vocab_files_names: ClassVar[dict[str, str]] = {
        "record_file": TOKENIZER_RECORD,
        "subwords_file": SentencepieceTokenizer.file,
        "words_file": WordTokenizer.file,
    }
    model_input_names: ClassVar[list[str]] = ["input_ids", "attention_mask"]

    def __init__(
        self,
        record_file: str,
        subwords_file: str | None = None,
        words_file: str | None = None,
        **others: Any,
    ) -> None:
        path = Path(record_file)
        self.described = json.loads(read_named(path))
        self.tokenizer = load_tokenizer(self.described, path.parent, follow=True)
        self.names = names_of(self.tokenizer)
        self.numbers = {name: number for number, name in enumerate(self.names)}
        start = AddedToken(START, special=True, normalized=False)
        self._added_tokens_decoder = {self.tokenizer.vocabulary: start}
        for role in ("bos_token", "eos_token", "pad_token"):
            others[role] = start
        others.setdefault("padding_side", "left")
        others.setdefault("split_special_tokens", True)
        super().__init__(**others)

    @property
    def vocab_size(self) -> int:
        """The number of tokens without the start token."""
        return self.tokenizer.vocabulary

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token by its name."""
        return self.numbers | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        ids = self.tokenizer.encode(text.encode("utf-8", errors="surrogateescape"))
        return [self.names[number] for number in ids.tolist()]

    def _convert_token_to_id(self, token: str) -> int:
        return self.numbers[token]

    def _convert_id_to_token(self, index: int) -> str:
        return self.names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the text of some tokens; bytes that are no UTF-8 become U+FFFD."""
        parts = []
        for token in tokens:
            if token == START:
                parts.append(token.encode())
            else:
                parts.append(self.tokenizer.table[self.numbers[token]])
        return b"".join(parts).decode("utf-8", errors="replace")

    def save_vocabulary(
        self,
        save_directory: str,
        filename_prefix: str | None = None,
    ) -> tuple[str, ...]:
        """Write the files of the tokenizer to a folder, and return their paths."""
        paths = []
        for name, content in tokenizer_files(self.tokenizer).items():
            path = Path(save_directory) / name
            # by path: the caller of transformers names the folder
            path.write_bytes(content)
            paths.append(str(path))
        return tuple(paths)


def names_of(tokenizer: Tokenizer) -> list[str]:
    """Return a name for each token: its text, with its number where another has that text."""
    names: dict[str, None] = {START: None}
    for number, content in enumerate(tokenizer.table):
        name = content.decode("utf-8", errors="backslashreplace")
        while name in names:
            name += f"<{number}>"
        names[name] = None
    return list(names)[1:]
