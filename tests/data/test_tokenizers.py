from __future__ import annotations

import numpy as np
import pytest
import torch

from rtx.data.tokenizers import ByteTokenizer


def test_any_bytes_survive_a_round_trip():
    tokenizer = ByteTokenizer()
    raw = bytes(range(256)) + b"\r\n\x00 \xff\xfe"
    ids = tokenizer.encode(raw)
    assert ids.dtype == np.uint8 and ids.tolist() == list(raw)
    assert tokenizer.decode(ids) == raw
    assert tokenizer.decode(ids.tolist()) == raw
    assert tokenizer.decode(torch.tensor(ids.tolist())) == raw
    assert tokenizer.decode([]) == b"" and len(tokenizer.encode("")) == 0


def test_text_is_utf8_and_undecodable_arguments_stay_what_they_were():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("naïve €\n")) == "naïve €\n".encode()
    argument = b"caf\xe9".decode("utf-8", errors="surrogateescape")  # as Python hands over sys.argv
    assert tokenizer.decode(tokenizer.encode(argument)) == b"caf\xe9"


def test_ids_beyond_a_byte_are_a_programming_error():
    with pytest.raises(AssertionError):
        ByteTokenizer().decode([256])
    with pytest.raises(AssertionError):
        ByteTokenizer().decode([-1])
