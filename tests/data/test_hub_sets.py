"""data=hub: splits and column of any data set, the commit in the record, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from made_sets import write_table

from rtx.config import DataConfig
from rtx.data import files
from rtx.data.catalog import open_data
from rtx.data.store import TokenStore
from rtx.errors import RunFailed, UserError

LINES = [f"line {number} of some text" for number in range(100)]


def opened(root: Path, path: Path | str, **options: Any) -> TokenStore:
    found = open_data(DataConfig(name="hub", path=str(path), length=16, **options), root, lambda line: None)
    assert isinstance(found, TokenStore)
    return found


@pytest.mark.parametrize(
    ("splits", "counts"),
    [(("train",), (90, 5, 5)), (("train", "test"), (95, 5, 100)), (("train", "validation", "test"), (100, 100, 100))],
)
def test_splits_are_those_there_are_or_cut_from_train(tmp_path, splits, counts):
    for split in splits:
        write_table(tmp_path / "set" / f"{split}.parquet", said=LINES)
    store = opened(tmp_path / "stores", tmp_path / "set", column="said")
    lines = [store.split(split).tobytes().decode().splitlines() for split in ("train", "valid", "test")]
    assert tuple(map(len, lines)) == counts and store.facts["train"]["documents"] == counts[0]
    assert lines[0] == LINES[: counts[0]] and lines[0][-1] != lines[1][0]


def test_the_commit_that_was_taken_stands_in_the_record_and_stays_through_a_preparation(tmp_path, monkeypatch):
    import datasets
    import huggingface_hub

    asked: list[str | None] = []
    real = datasets.load_dataset

    def load(path: str, subset: str | None, revision: str | None, cache_dir: str) -> object:
        asked.append(revision)
        assert (path, subset) == ("some/set", "small")
        return real(str(tmp_path / "set"), cache_dir=cache_dir)

    write_table(tmp_path / "set" / "train.parquet", text=LINES)
    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub, "dataset_info", lambda name, revision: SimpleNamespace(sha="c" * 40))
    monkeypatch.setattr(files, "unreachable", lambda address: None)
    store = opened(tmp_path / "stores", "some/set", subset="small")
    assert asked == ["c" * 40] * 3, "every split is of one commit"
    assert store.describe()["source"]["revision"] == "c" * 40
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: pytest.fail("it was fetched again"))
    assert opened(tmp_path / "stores", "some/set", subset="small").fingerprint == store.fingerprint


@pytest.mark.parametrize(
    ("path", "column", "message"),
    [
        ("nothing", "text", "expected a folder, or owner/name of a data set of the hub, found neither"),
        ("a/b/c", "text", "expected a folder, or owner/name of a data set of the hub, found neither"),
        ("set", "txt", r"data\.column=txt: expected a column of text, found number \(int64\), text \(string\)"),
        ("set", "number", r"data\.column=number: expected a column of text, found number"),
        ("lacking", "text", "expected a split train, found test"),
        ("script", "text", r"data\.path=script: cannot be loaded: "),
    ],
)
def test_what_is_no_text_of_the_hub_is_refused(tmp_path, monkeypatch, path, column, message):
    monkeypatch.chdir(tmp_path)
    for place in ("set/train", "lacking/test"):
        write_table(tmp_path / f"{place}.parquet", number=list(range(50)), text=LINES[:50])
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "script.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(UserError, match=message):
        opened(tmp_path / "stores", path, column=column)


def test_without_a_network_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "unreachable", lambda address: "huggingface.co: no answer")
    with pytest.raises(
        RunFailed, match=r"hf://datasets/some/set: cannot be fetched: huggingface\.co: no answer; fetch"
    ):
        opened(tmp_path / "stores", "some/set")
