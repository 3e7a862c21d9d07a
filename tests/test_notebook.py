"""docs/notebook.ipynb, run as it stands there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"


def test_the_notebook_trains_and_shows_what_heads_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    for name in ("RTX_DATA", "RTX_OUTPUTS", "RTX_RUN"):
        monkeypatch.delenv(name, raising=False)
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
    assert [name for name, _ in names["heads"]] == ["local 0", "local 1", "routed 0", "routed 1"]
    reads = {name: weight_NN.sum(-1) for name, weight_NN in names["heads"]}
    assert all(bool((sum_N[1:] - 1).abs().max() < 1e-5) for name, sum_N in reads.items() if "local" in name)
    assert "sees the future: False" in capsys.readouterr().out
