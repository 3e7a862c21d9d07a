"""Folders of runs and of data that may not be read."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from rtx.data.catalog import data_root
from rtx.errors import UserError
from rtx.runs.folder import runs_below


def test_a_folder_that_may_not_be_read_does_not_seem_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system_open = os.open

    def refuse(path: Any, *others: Any, **options: Any) -> int:
        """Refuse one folder, which root could read whatever its mode."""
        if path == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return system_open(path, *others, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(UserError, match=r"cannot be read \(Permission denied\)"):
        runs_below(tmp_path)
    monkeypatch.setenv("RTX_DATA", str(tmp_path))
    with pytest.raises(UserError, match="Permission denied; set RTX_DATA to a folder that you may"):
        data_root()
