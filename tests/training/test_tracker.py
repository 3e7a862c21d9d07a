"""W&B at arm's length: whatever it does, the run goes on, and says so in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from rtx.config import LoggerConfig
from rtx.training import tracker as room
from rtx.training.tracker import Tracker, choose_mode, has_key, kept_id

CONFIG = LoggerConfig(name="online", project="p", entity="e", group="g")


class FakeRun:
    """A run of a W&B that may fail, or hang."""

    url = "https://wandb.example/run"

    def __init__(self, wandb: FakeWandb) -> None:
        self.wandb = wandb

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def log(self, row: dict[str, Any]) -> None:
        if self.wandb.fault == "log":
            raise ConnectionError("the network is gone\nand more")
        self.wandb.rows.append(row)

    def finish(self, exit_code: int) -> None:
        if self.wandb.fault == "hang":
            threading.Event().wait()
        if self.wandb.fault == "finish":
            raise ConnectionError("no upload")
        self.wandb.exit_code = exit_code


class FakeWandb(types.ModuleType):
    """Stands in for the package."""

    class Settings(types.SimpleNamespace):
        model_fields = ("finish_timeout",)

    def __init__(self, fault: str = "") -> None:
        super().__init__("wandb")
        self.fault = fault
        self.rows: list[dict[str, Any]] = []
        self.begun: list[dict[str, Any]] = []
        self.exit_code: int | None = None

    def init(self, **asked: Any) -> FakeRun:
        self.begun.append(asked)
        if self.fault == "init" or (self.fault == "online" and asked["mode"] == "online"):
            raise TimeoutError("no answer")
        return FakeRun(self)

    def teardown(self, exit_code: int) -> None:
        pass


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without a key."""
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")  # restored afterwards: the tracker sets it
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def tracked(monkeypatch: pytest.MonkeyPatch, folder: Path, fault: str = "") -> tuple[FakeWandb, list[str], Tracker]:
    """Return a package, the lines said, and a tracker that uses it."""
    wandb, lines = FakeWandb(fault), []
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return wandb, lines, Tracker(CONFIG, folder, {"seed": 0}, "rtx-1", lines.append)


def test_rows_reach_wandb_with_their_step(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    wandb, lines, tracker = tracked(monkeypatch, bare)
    tracker.log({"kind": "train", "step": 3, "time": "now", "bits": 2.0})
    tracker.finish(exit_code=0)
    assert wandb.rows == [{"step": 3, "bits": 2.0}]
    assert wandb.exit_code == 0
    assert lines == ["W&B: https://wandb.example/run"]
    (asked,) = wandb.begun
    assert (asked["project"], asked["entity"], asked["group"], asked["dir"]) == ("p", "e", "g", str(bare))


def test_a_resumed_run_continues_the_same_one(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    first, *_ = tracked(monkeypatch, bare)
    second, *_ = tracked(monkeypatch, bare)
    assert first.begun[0]["id"] == second.begun[0]["id"] == kept_id(bare)
    assert second.begun[0]["resume"] == "allow"


@pytest.mark.parametrize(
    ("fault", "modes", "said"),
    [
        ("online", ["online", "offline"], ["W&B: no answer; going on offline", "W&B: https://wandb.example/run"]),
        (
            "init",
            ["online", "offline"],
            ["W&B: no answer; going on offline", "W&B: no answer; going on with metrics.jsonl alone"],
        ),
    ],
)
def test_a_server_that_is_down(
    monkeypatch: pytest.MonkeyPatch, bare: Path, fault: str, modes: list[str], said: list[str]
) -> None:
    wandb, lines, tracker = tracked(monkeypatch, bare, fault)
    tracker.log({"step": 1})
    tracker.finish(exit_code=0)
    assert [asked["mode"] for asked in wandb.begun] == modes
    assert lines == said


def test_an_error_in_the_middle_is_said_once(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    _, lines, tracker = tracked(monkeypatch, bare, "log")
    for step in range(3):
        tracker.log({"step": step})
    tracker.finish(exit_code=1)
    assert lines[1:] == ["W&B: the network is gone; going on with metrics.jsonl alone"]


@pytest.mark.parametrize(("fault", "said"), [("finish", "W&B: no upload"), ("hang", "W&B: uploads have not finished")])
def test_an_end_that_fails_or_hangs(monkeypatch: pytest.MonkeyPatch, bare: Path, fault: str, said: str) -> None:
    monkeypatch.setattr(room, "FINISH_SECONDS", -4.9)
    _, lines, tracker = tracked(monkeypatch, bare, fault)
    tracker.finish(exit_code=0)
    assert lines[1].startswith(said)


def test_auto_is_online_with_a_key_and_offline_without(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    auto = LoggerConfig(name="auto")
    assert choose_mode(auto) == "offline"
    assert choose_mode(LoggerConfig(name="jsonl")) == "disabled"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert choose_mode(auto) == "disabled"
    assert choose_mode(CONFIG) == "online"
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    assert choose_mode(auto) == "online"


def test_keys_are_found_where_wandb_keeps_them(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    assert not has_key()
    (bare / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password secret\n")
    assert has_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example:8080")
    assert not has_key()
    (bare / ".netrc").write_text("machine wandb.example:8080\n  login user\n  password secret\n")
    assert has_key()
    (bare / ".netrc").write_text("this is not a netrc file {")
    assert not has_key()


def test_wandb_is_not_imported_unless_it_is_used(bare: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from rtx.config import LoggerConfig\n"
        "from rtx.training.tracker import Tracker\n"
        "Tracker(LoggerConfig(name='jsonl'), Path('.'), {}, 'a').finish(0); assert 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=bare, env={**os.environ, "PYTHONPATH": os.getcwd()})


def test_the_real_package_offline(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("sys.excepthook", sys.excepthook)
    tracker = Tracker(LoggerConfig(name="auto"), bare, {"seed": 0}, "rtx-1", lines.append)
    tracker.log({"kind": "train", "step": 1, "bits": 8.0})
    tracker.finish(exit_code=0)
    assert len(lines) == 1 and "no key found" in lines[0]
    assert list((bare / "wandb").glob("offline-run-*/*.wandb"))
