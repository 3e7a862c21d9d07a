from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from corpora import BrokenPart, MadePart, made_source, prose

from rtx.config import DataConfig
from rtx.data.tokenizers import ByteTokenizer, encode_text, load_tokenizer, tokenizer_for
from rtx.errors import UserError

TEXT = prose(5_000)
TRAINED = [
    DataConfig(tokenizer="words"),
    DataConfig(tokenizer="sentencepiece", vocabulary=400, tokenizer_sample=20_000),
]


def test_any_bytes_survive_a_round_trip():
    tokenizer = ByteTokenizer()
    raw = bytes(range(256)) + b"\r\n\x00 \xff\xfe"
    ids = tokenizer.encode(raw)
    assert ids.dtype == np.uint8 and ids.tolist() == list(raw)
    assert tokenizer.decode(ids) == raw
    assert tokenizer.decode(ids.tolist()) == raw
    assert tokenizer.decode(torch.tensor(ids.tolist())) == raw
    assert tokenizer.decode([]) == b"" and len(tokenizer.encode("")) == 0
    assert b"".join(part.tobytes() for part in tokenizer.encode([b"a", b"\xff"])) == b"a\xff"


def test_text_is_utf8_and_undecodable_arguments_stay_what_they_were():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("naïve €\n")) == "naïve €\n".encode()
    argument = b"caf\xe9".decode("utf-8", errors="surrogateescape")  # as Python hands over sys.argv
    assert tokenizer.decode(tokenizer.encode(argument)) == b"caf\xe9"
    assert tokenizer.decode(encode_text(tokenizer, argument)) == b"caf\xe9" and len(encode_text(tokenizer, "")) == 0


def test_ids_beyond_a_byte_are_a_programming_error():
    with pytest.raises(AssertionError):
        ByteTokenizer().decode([256])
    with pytest.raises(AssertionError):
        ByteTokenizer().decode([-1])


def test_bytes_and_dims_need_no_training(tmp_path, said):
    for source, unit in [(made_source([BrokenPart()]), "byte"), (made_source([BrokenPart()], image=(8, 8)), "dim")]:
        tokenizer = tokenizer_for(DataConfig(), source, [BrokenPart()], tmp_path, said.append, 1)
        assert tokenizer.unit == unit and tokenizer.vocabulary == 256
        assert load_tokenizer(tokenizer.describe(), tmp_path).describe() == tokenizer.describe()
    assert list(tmp_path.iterdir()) == [] and said == []


@pytest.mark.parametrize("data", TRAINED, ids=lambda data: data.tokenizer)
def test_a_trained_tokenizer_is_saved_described_and_loaded(data, tmp_path, said):
    parts = [MadePart((TEXT,))]
    tokenizer = tokenizer_for(data, made_source(parts), parts, tmp_path / "new", said.append, 1)
    described = json.loads(json.dumps(tokenizer.describe()))
    assert {"name", "unit", "vocabulary", "settings", "file", "sha256"} == set(described)
    again = load_tokenizer(described, tmp_path / "new")
    assert again.describe() == tokenizer.describe()
    assert encode_text(again, TEXT).tolist() == encode_text(tokenizer, TEXT).tolist()
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == sorted([described["file"], "tokenizer.json"])


@pytest.mark.parametrize("data", TRAINED, ids=lambda data: data.tokenizer)
def test_what_a_killed_preparation_finished_is_taken_and_nothing_else(data, tmp_path, said):
    parts = [MadePart((TEXT,))]
    first = tokenizer_for(data, made_source(parts), parts, tmp_path, said.append, 1)
    again = tokenizer_for(data, made_source(parts), [BrokenPart()], tmp_path, said.append, 1)
    assert again.describe() == first.describe()
    with pytest.raises(AssertionError, match="it was read"):
        tokenizer_for(data, made_source(parts, "another source"), [BrokenPart()], tmp_path, said.append, 1)
    record, file = tmp_path / "tokenizer.json", tmp_path / first.describe()["file"]
    for path, spoilt in [(file, file.read_bytes()[:-5]), (record, record.read_bytes()[:-9]), (record, b"[]")]:
        whole = path.read_bytes()
        path.write_bytes(spoilt)
        with pytest.raises(AssertionError, match="it was read"):
            tokenizer_for(data, made_source(parts), [BrokenPart()], tmp_path, said.append, 1)
        path.write_bytes(whole)


def test_other_settings_train_another(tmp_path, said):
    parts = [MadePart((TEXT,))]
    for vocabulary in (400, 390):
        data = DataConfig(tokenizer="sentencepiece", vocabulary=vocabulary, tokenizer_sample=20_000)
        assert tokenizer_for(data, made_source(parts), parts, tmp_path, said.append, 1).vocabulary == vocabulary


@pytest.mark.parametrize("data", TRAINED, ids=lambda data: data.tokenizer)
def test_a_tokenizer_that_is_not_the_described_one_is_refused(data, tmp_path, said):
    parts = [MadePart((TEXT,))]
    described = tokenizer_for(data, made_source(parts), parts, tmp_path, said.append, 1).describe()
    file = tmp_path / described["file"]
    with pytest.raises(ValueError, match=r"expected a vocabulary of 7, found \d+"):
        load_tokenizer(described | {"vocabulary": 7}, tmp_path)
    file.write_bytes(file.read_bytes() + b"x\n")
    with pytest.raises(ValueError, match=f"expected the {data.tokenizer} tokenizer with sha256 .*, found") as error:
        load_tokenizer(described, tmp_path)
    assert "\n" not in str(error.value)
    file.unlink()
    with pytest.raises(ValueError, match=r"expected the .* tokenizer of this store, found No such file"):
        load_tokenizer(described, tmp_path)
    with pytest.raises(ValueError, match="found 'runes'"):
        load_tokenizer({"name": "runes"}, tmp_path)


def test_training_on_nothing_leaves_nothing(tmp_path, said):
    for data in TRAINED:
        with pytest.raises(UserError, match="found none"):
            tokenizer_for(data, made_source([]), [], tmp_path / "new", said.append, 1)
    assert not (tmp_path / "new").exists()
