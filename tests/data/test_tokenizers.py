from __future__ import annotations

import numpy as np
import pytest
import torch

from rtx.data.tokenizers import ByteTokenizer, encode_text, load_tokenizer


def test_any_bytes_survive_a_round_trip(tmp_path):
    tokenizer = ByteTokenizer()
    raw = bytes(range(256)) + b"\r\n\x00 \xff\xfe"
    pieces = list(tokenizer.encode([raw[:100], raw[100:]]))
    assert all(ids.dtype == np.uint8 for ids in pieces) and np.concatenate(pieces).tolist() == list(raw)
    ids = encode_text(tokenizer, raw)
    assert ids.dtype == np.int64 and ids.tolist() == list(raw)
    assert tokenizer.decode(ids) == raw
    assert tokenizer.decode(ids.tolist()) == raw
    assert tokenizer.decode(torch.tensor(ids.tolist())) == raw
    assert tokenizer.decode([]) == b"" and len(encode_text(tokenizer, "")) == 0
    for unit in ("byte", "dim"):
        described = ByteTokenizer(unit).describe()
        assert described == {"name": "bytes", "unit": unit, "vocabulary": 256}
        assert load_tokenizer(described, tmp_path).describe() == described


def test_text_is_utf8_and_undecodable_arguments_stay_what_they_were():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(encode_text(tokenizer, "naïve €\n")) == "naïve €\n".encode()
    argument = b"caf\xe9".decode("utf-8", errors="surrogateescape")  # as Python hands over sys.argv
    assert tokenizer.decode(encode_text(tokenizer, argument)) == b"caf\xe9"


def test_ids_beyond_a_byte_are_a_programming_error():
    with pytest.raises(AssertionError):
        ByteTokenizer().decode([256])
    with pytest.raises(AssertionError):
        ByteTokenizer().decode([-1])
