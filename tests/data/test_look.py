from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
from made_sources import Given

from rtx.config import DataConfig
from rtx.data.build import build_store
from rtx.data.catalog import prepare_files
from rtx.data.look import summary, uses
from rtx.data.recipe import Recipe
from rtx.data.source import Source
from rtx.data.store import open_store


def test_sizes_coverage_and_examples_of_text(tmp_path, said):
    path = tmp_path / "book.txt"
    path.write_bytes(b"To be, or not\x07 to be.\n" * 300)
    store = prepare_files(DataConfig(name="text", path=str(path), length=64), tmp_path / "stores", said.append)
    counts = uses(store, "train")
    assert counts.tolist() == np.bincount(store.split("train"), minlength=256).tolist()
    lines = summary(store, tmp_path / "stores")
    assert lines[0].startswith(f"{store.folder}: text, ")
    assert f"  source       place {path}, files 1, bytes 6,600" in lines
    assert "  tokenizer    name bytes, unit byte, vocabulary 256" in lines
    assert f"  fingerprint  {store.fingerprint}" in lines
    (train,) = (line.split() for line in lines if line.lstrip().startswith("train  "))
    assert train == ["train", "5,940", "1", "5,940", "1,620", "12", "of", "256"]
    assert sum(line.startswith("train, from byte ") for line in lines) == 3
    assert any("| To be, or not\N{REPLACEMENT CHARACTER} to be." in line for line in lines)
    assert summary(store, tmp_path / "stores") == lines


def test_images_get_a_sheet(tmp_path, monkeypatch):
    pixels = tuple(bytes([shade]) * 48 for shade in range(5))
    source = Source(
        name="images",
        options="data=images data.path=x",
        identity=[1],
        place={"place": "x"},
        parts=lambda: {"train": [Given(pixels)], "test": [Given(pixels[:1])]},
        stamps={"variant": "own"},
        image=(4, 4),
    )
    recipe = Recipe(source, DataConfig(name="images", path="x", length=48))
    build_store(tmp_path, recipe)
    store = open_store(recipe.folder(tmp_path), recipe.options)
    drawn: list[tuple[int, tuple[int, int], Path, int]] = []
    sheet = types.ModuleType("rtx.data.sheet")
    sheet.contact_sheet = lambda tokens, image, path, count: drawn.append((len(tokens), image, path, count))  # type: ignore
    monkeypatch.setitem(sys.modules, "rtx.data.sheet", sheet)
    lines = summary(store, tmp_path)
    assert drawn == [(240, (4, 4), tmp_path / f"{store.folder.name}-train.png", 64)]
    assert lines[-1] == f"{drawn[0][2]}: 5 images of split train"
    assert "  images       4 x 4 x 3, one a sequence" in lines and "  stamps       variant own" in lines
    (train,) = (line.split() for line in lines if line.lstrip().startswith("train  "))
    assert train == ["train", "240", "5", "240", "5", "of", "256"]
