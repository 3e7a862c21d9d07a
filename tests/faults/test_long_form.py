"""benchmarks/faults.py: whatever it finds wrong ends it with 1, and stays to be looked at."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from disturbances import Kill

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@dataclass
class StandIn:
    """A run that is killed and goes on in no time."""

    workshop: Any
    name: str
    begin: object
    steps: str
    has_begun = True
    left, damaged, ends = 3, 0, 0
    """Step of the checkpoint that a kill leaves, damaged bytes beside it, and the exit code."""

    def __post_init__(self) -> None:
        self.run = self.workshop.folder / self.name
        for folder in (self.run, self.workshop.data):
            folder.mkdir(exist_ok=True)

    def kill(self, *_: object) -> Kill:
        return Kill("anywhere", "a step", resumed=False, row=5, left=self.left, damaged=self.damaged)

    def finish(self) -> int:
        return self.ends if self.name != "alone" else 0


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, its runs stood in for, its folder and result in the test's own folder."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    specification = importlib.util.spec_from_file_location("long_form", BENCHMARKS / "faults.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    monkeypatch.setitem(sys.modules, "long_form", module)
    specification.loader.exec_module(module)
    (tmp_path / "all").mkdir()
    monkeypatch.setattr(module, "Ordeal", StandIn)
    monkeypatch.setattr(module, "difference", lambda *_: "")
    monkeypatch.setattr(module.tempfile, "mkdtemp", lambda prefix: str(tmp_path / "all"))
    monkeypatch.setattr(sys, "argv", ["faults.py", "--kills=1", f"--output={tmp_path / 'faults.json'}"])
    return module


@pytest.mark.parametrize(
    ("wrong", "kind", "said"),
    [
        ({"left": 0}, "runs_with_losses", "left=0"),
        ({"damaged": 7}, "runs_with_losses", "damaged=7"),
        ({"ends": 1}, "runs_not_resumed", "ended with 1"),
        ({"differ": "last: tensors differ"}, "runs_that_differ", "last: tensors differ"),
        ({}, "", ""),
    ],
)
def test_whatever_is_wrong_ends_with_1_and_is_kept(
    tmp_path: Path,
    faults: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: dict[str, Any],
    kind: str,
    said: str,
) -> None:
    for name, value in wrong.items():
        if name == "differ":
            monkeypatch.setattr(faults, "difference", lambda *_, value=value: value)
        else:
            monkeypatch.setattr(StandIn, name, value)
    run, data = tmp_path / "all" / "run1", tmp_path / "all" / "run1-data"
    if not kind:
        faults.main()
        assert not (tmp_path / "all").exists()
        return
    with pytest.raises(SystemExit, match=r"^1$"):
        faults.main()
    assert run.exists() and data.exists()
    (line,) = json.loads((tmp_path / "faults.json").read_text())[0][kind]
    assert line.startswith("run1: ") and said in line
    assert f"{line}; kept in {run} and {data}\n" in capsys.readouterr().out
