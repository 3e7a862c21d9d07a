"""metrics.jsonl: whole rows only, and what JSON knows. Whatever W&B does, a run goes on."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import wandb

from rtx.config import LoggerConfig
from rtx.errors import UserError
from rtx.training.loggers import FINISH_SECONDS, JsonlLogger, wandb_logger


def test_rows_survive_a_kill_in_the_middle_of_one_and_hold_what_json_knows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1, "bits": 8.0}\n{"kind": "train", "st')
    logger = JsonlLogger(path)
    logger.log_metrics({"kind": "train", "a": math.nan, "b": -math.inf, "c": 1.5}, 2)
    logger.close()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {"kind": "train", "step": 1, "bits": 8.0}
    assert (second["step"], second["a"], second["b"], second["c"]) == (2, None, None, 1.5)
    assert second["time"].endswith("Z") and len(second["time"]) == len("2026-11-21T06:07:00.123Z")


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_what_is_no_file_of_the_run_is_not_appended_to(tmp_path: Path, kind: str) -> None:
    path, foreign = tmp_path / "metrics.jsonl", tmp_path / "foreign"
    foreign.write_bytes(b"a line of somebody else, without its end")
    path.symlink_to(foreign) if kind == "link" else path.mkdir()
    with pytest.raises(UserError, match="rows cannot be appended to it"):
        JsonlLogger(path)
    assert foreign.read_bytes() == b"a line of somebody else, without its end"


ONLINE, AUTO = LoggerConfig(name="online", project="p", entity="e", group="g"), LoggerConfig(name="auto")
ON, ALONE = "W&B: https://wandb.example/run", "going on with metrics.jsonl alone"


class FakeWandb:
    """A W&B that may fail at one of its doors."""

    def __init__(self, patch: pytest.MonkeyPatch, fault: str = "", key: bool = False) -> None:
        self.fault, self.key, self.exit_code = fault, key, -1
        self.rows: list[dict[str, Any]] = []
        self.begun: list[dict[str, Any]] = []
        for name in ("init", "login", "teardown"):
            patch.setattr(wandb, name, getattr(self, name))

    def fail_at(self, door: str) -> None:
        if self.fault == door:
            raise ConnectionError(f"no {door}\nand more")

    def init(self, **asked: Any) -> Any:
        self.begun.append(asked)
        self.fail_at("server")
        return SimpleNamespace(url="https://wandb.example/run", log=self.log, finish=self.finish)

    def log(self, row: dict[str, Any]) -> None:
        self.fail_at("network")
        self.rows.append(row)

    def finish(self, exit_code: int) -> None:
        self.fail_at("upload")
        self.exit_code = exit_code

    def login(self, *, prompt: bool, verify: bool) -> bool:
        assert not prompt and not verify
        self.fail_at("service")
        return self.key

    def teardown(self, exit_code: int) -> None:
        pass


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without a key."""
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")  # restored afterwards: the logger sets it
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def begun(
    monkeypatch: pytest.MonkeyPatch, folder: Path, config: LoggerConfig = ONLINE, **faults: Any
) -> tuple[FakeWandb, list[str], Any]:
    """Return W&B, the lines said, and a logger that uses it (None: it could not begin)."""
    fake, lines = FakeWandb(monkeypatch, **faults), []
    return fake, lines, wandb_logger(config, folder, {"seed": 0}, "rtx-1", lines.append)


def test_rows_reach_wandb_and_a_resumed_run_continues_the_same_one(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    fake, lines, logger = begun(monkeypatch, bare)
    logger.log_metrics({"kind": "train", "bits": 2.0}, 3)
    logger.finish(exit_code=0)
    assert fake.rows == [{"bits": 2.0, "trainer/global_step": 3}] and fake.exit_code == 0 and lines == [ON]
    (asked,) = fake.begun
    assert (asked["project"], asked["entity"], asked["group"], asked["dir"]) == ("p", "e", "g", str(bare))
    assert asked["settings"].finish_timeout == FINISH_SECONDS, "an end that hangs is not waited for"
    again, *_ = begun(monkeypatch, bare)
    assert asked["id"] == again.begun[0]["id"] and again.begun[0]["resume"] == "allow"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("service", [f"W&B: no service; {ALONE}"]),
        ("server", [f"W&B: no server; {ALONE}"]),
        ("network", [ON, f"W&B: no network; {ALONE}"]),
        ("upload", [ON, f"W&B: no upload; {ALONE}"]),
    ],
)
def test_an_error_at_the_beginning_in_the_middle_or_at_the_end_is_said_once(
    monkeypatch: pytest.MonkeyPatch, bare: Path, fault: str, said: list[str]
) -> None:
    _, lines, logger = begun(monkeypatch, bare, AUTO, fault=fault, key=True)
    if logger:
        for step in range(3):
            logger.log_metrics({"bits": 1.0}, step)
        logger.finish(exit_code=1)
    assert lines == said


def test_auto_is_online_with_a_key_and_offline_without(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    for faults, mode in (({}, "offline"), ({"key": True}, "online")):
        fake, lines, _ = begun(monkeypatch, bare, AUTO, **faults)
        assert [asked["mode"] for asked in fake.begun] == [mode]
        assert ("no key found" in lines[0]) == (mode == "offline")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert begun(monkeypatch, bare, AUTO, key=True)[2] is None
    assert begun(monkeypatch, bare)[2] is not None  # asked for


def test_the_real_package_offline(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("sys.excepthook", sys.excepthook)
    logger = wandb_logger(AUTO, bare, {"seed": 0}, "rtx-1", lines.append)
    assert logger is not None
    logger.log_metrics({"kind": "train", "bits": 8.0}, 1)
    logger.finish(exit_code=0)
    assert len(lines) == 1 and "no key found" in lines[0]
    assert list((bare / "wandb").glob("offline-run-*/*.wandb"))
