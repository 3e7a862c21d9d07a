"""Stores by strangers, whose checksums are right: their values are checked before use."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtx.data.catalog import listing, verify_data
from rtx.data.store import RECORD, DamagedStore, TokenStore, open_store, record_sha256
from rtx.settings.schema import DataConfig
from tests.helpers.made_sets import opened, prose

LENGTH = 16


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, and with its store in `stores`."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "words.txt").write_bytes(prose(2_000))
    opened(folder / "stores", "text", folder / "words.txt", LENGTH, tokenizer="words")
    return folder


@pytest.fixture
def data(made: Path) -> DataConfig:
    path = str(made / "words.txt")
    return DataConfig(name="text", path=path, length=LENGTH, tokenizer="words")


@pytest.fixture
def store(made: Path, data: DataConfig, root: Path) -> TokenStore:
    """A copy of the store, to be spoilt."""
    shutil.copytree(made / "stores", root)
    return opened(root, "text", data.path, LENGTH, tokenizer="words")


def rewrite(folder: Path, **changes: Any) -> None:
    """Change fields of a store's record, and write it with a sha256 that is right."""
    record = json.loads((folder / RECORD).read_text()) | changes
    (folder / RECORD).write_text(json.dumps({**record, "sha256": record_sha256(record)}))


def test_ids_beyond_the_vocabulary_are_refused(data, root, store):
    path = store.folder / "train.bin"
    tokens = np.fromfile(path, store.tokenizer.dtype)
    tokens[len(tokens) // 2] = store.vocabulary
    tokens.tofile(path)
    record = json.loads((store.folder / RECORD).read_text())
    record["splits"]["train"]["sha256"]["bin"] = hashlib.sha256(path.read_bytes()).hexdigest()
    rewrite(store.folder, splits=record["splits"])
    damage = rf"train\.bin: damaged: expected ids below {store.vocabulary:,}, found"
    for open_it in (
        lambda: verify_data(data, root),
        lambda: opened(root, "text", data.path, LENGTH, tokenizer="words"),
    ):
        with pytest.raises(DamagedStore, match=damage):
            open_it()


ODD = {
    "splits": {"../train": {}},
    "source": ["a list"],
    "stamps": "text",
    "options": 7,
    "name": None,
    "dtype": "object",
    "image": [1, 2, 3],
    "fingerprint": "../../etc",
    "tokenizer": 5,
    "made": [],
}


@pytest.mark.parametrize("field", ODD)
def test_a_field_of_another_type_is_named(root, store, field):
    rewrite(store.folder, **{field: ODD[field]})
    with pytest.raises(DamagedStore, match=rf"damaged: expected .*, found another \({field}"):
        open_store(store.folder, "data=text")
    assert "damaged: expected" in "\n".join(listing(root))


@pytest.mark.parametrize("units", ["5", 5.0, -1, 2**70, True, None])
def test_a_size_that_is_no_count_is_named(store, units):
    record = json.loads((store.folder / RECORD).read_text())
    record["splits"]["valid"]["units"] = units
    rewrite(store.folder, splits=record["splits"])
    with pytest.raises(DamagedStore, match=r"found another \(splits\.valid\.units"):
        open_store(store.folder, "data=text")
