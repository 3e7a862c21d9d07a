"""Figures of an analysis as a command prints them, and as it keeps them beside a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rtx.disk import replace_file
from rtx.errors import RunFailed, printable


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of figures, their keys as the heads of the columns."""
    import pandas

    print(pandas.DataFrame(rows).to_string(index=False, na_rep="-", float_format="{:.4g}".format))


def save(path: Path, content: bytes | Mapping[str, Any]) -> Path:
    """Write a file whole, a mapping as JSON, say where, and return that; `RunFailed` where it cannot be written."""
    data = content if isinstance(content, bytes) else json.dumps(content, indent=2, ensure_ascii=False).encode() + b"\n"
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, lambda file: file.write(data))
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}") from error
    print(printable(str(path)))
    return path
