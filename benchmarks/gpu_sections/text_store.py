"""A store of bytes without the packages by which `rtx data prepare` reads sets of any kind."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from rtx.data.catalog import check_source, options_of, store_folder
from rtx.data.preparation import write_record
from rtx.data.tokenizers import Tokenizer
from rtx.settings.compose import compose_data

CUTS = {"train": (0.0, 0.9), "valid": (0.9, 0.95), "test": (0.95, 1.0)}


def prepare(text: Path, root: Path) -> None:
    """Write the store of a file of text below a folder, where `rtx train` looks for it."""
    data = compose_data(["data=text", f"data.path={text}"])
    source = check_source(data, root)
    assert source is not None
    folder = store_folder(data, root, source)
    if folder.exists():
        return
    work = folder.with_name(f".{folder.name}.gpu")
    work.mkdir(parents=True, exist_ok=True)
    whole = text.read_bytes()
    splits = {}
    for name, (start, stop) in CUTS.items():
        part = whole[int(start * len(whole)) : int(stop * len(whole))]
        splits[name] = write_split(work / name, part)
    write_record(work, source, Tokenizer("byte"), options_of(data), splits)
    work.rename(folder)


def write_split(path: Path, part: bytes) -> dict[str, Any]:
    """Write the bytes of a split, one document; return sizes and checksums."""
    path.with_suffix(".bin").write_bytes(part)
    table = path.with_suffix(".starts.npy")
    np.save(table, np.array([0, len(part)]), allow_pickle=False)
    written = {"bin": part, "starts.npy": table.read_bytes()}
    checksums = {name: hashlib.sha256(content).hexdigest() for name, content in written.items()}
    sizes = {"units": len(part), "bytes": len(part), "words": len(part.split()), "documents": 1}
    return {**sizes, "sha256": checksums}
