"""metrics.jsonl: whole rows only, and the last of a step counts. Whatever W&B does, a run goes on."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from rtx.config import LoggerConfig
from rtx.errors import UserError
from rtx.training import loggers as room
from rtx.training.loggers import JsonlLogger, choose_mode, has_key, kept_id, read_metrics, wandb_logger
from rtx.training.run_folder import utc_now


def test_rows_survive_a_kill_in_the_middle_of_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "train", "step": 1, "bits": 8.0}\n{"kind": "train", "st')
    assert read_metrics(path) == [{"kind": "train", "step": 1, "bits": 8.0}]
    file = JsonlLogger(path)
    file.log_metrics({"kind": "train", "bits": 7.0}, 2)
    file.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_the_last_row_of_a_step_and_kind_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = JsonlLogger(path)
    for kind, step, bits in [
        ("train", 2, 1.0),
        ("valid", 2, 2.0),
        ("train", 4, 3.0),
        ("train", 2, 4.0),
        ("train", 4, 5.0),
    ]:
        file.log_metrics({"kind": kind, "bits": bits}, step)
    file.close()
    assert [row["bits"] for row in read_metrics(path)] == [4.0, 2.0, 5.0]


def test_what_json_does_not_know_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = JsonlLogger(path)
    file.log_metrics({"kind": "train", "a": math.nan, "b": -math.inf, "c": 1.5}, 1)
    file.close()
    (row,) = read_metrics(path)
    assert (row["a"], row["b"], row["c"]) == (None, None, 1.5)


def test_times_are_utc() -> None:
    assert utc_now().endswith("Z")
    assert len(utc_now()) == len("2026-11-21T06:07:00.123Z")


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_what_is_no_file_of_the_run_is_not_appended_to(tmp_path: Path, kind: str) -> None:
    path, foreign = tmp_path / "metrics.jsonl", tmp_path / "foreign"
    foreign.write_bytes(b"a line of somebody else, without its end")
    path.symlink_to(foreign) if kind == "link" else path.mkdir()
    with pytest.raises(UserError, match="rows cannot be appended to it"):
        JsonlLogger(path)
    assert foreign.read_bytes() == b"a line of somebody else, without its end"


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
    monkeypatch.setenv("WANDB_SILENT", "true")  # restored afterwards: the logger sets it
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def logging_run(monkeypatch: pytest.MonkeyPatch, folder: Path, fault: str = "") -> tuple[FakeWandb, list[str], Any]:
    """Return a package, the lines said, and a logger that uses it (None: it could not begin)."""
    wandb, lines = FakeWandb(fault), []
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return wandb, lines, wandb_logger(CONFIG, folder, {"seed": 0}, "rtx-1", lines.append)


def test_rows_reach_wandb_with_their_step(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    wandb, lines, logger = logging_run(monkeypatch, bare)
    logger.log_metrics({"kind": "train", "bits": 2.0}, 3)
    logger.finish(exit_code=0)
    assert wandb.rows == [{"bits": 2.0, "step": 3}]
    assert wandb.exit_code == 0
    assert lines == ["W&B: https://wandb.example/run"]
    (asked,) = wandb.begun
    assert (asked["project"], asked["entity"], asked["group"], asked["dir"]) == ("p", "e", "g", str(bare))


def test_a_resumed_run_continues_the_same_one(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    first, *_ = logging_run(monkeypatch, bare)
    second, *_ = logging_run(monkeypatch, bare)
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
    wandb, lines, logger = logging_run(monkeypatch, bare, fault)
    if logger:
        logger.log_metrics({"bits": 1.0}, 1)
        logger.finish(exit_code=0)
    assert [asked["mode"] for asked in wandb.begun] == modes
    assert lines == said


def test_an_error_in_the_middle_is_said_once(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    _, lines, logger = logging_run(monkeypatch, bare, "log")
    for step in range(3):
        logger.log_metrics({"bits": 1.0}, step)
    logger.finish(exit_code=1)
    assert lines[1:] == ["W&B: the network is gone; going on with metrics.jsonl alone"]


@pytest.mark.parametrize(("fault", "said"), [("finish", "W&B: no upload"), ("hang", "W&B: uploads have not finished")])
def test_an_end_that_fails_or_hangs(monkeypatch: pytest.MonkeyPatch, bare: Path, fault: str, said: str) -> None:
    monkeypatch.setattr(room, "FINISH_SECONDS", -4.9)
    _, lines, logger = logging_run(monkeypatch, bare, fault)
    logger.finish(exit_code=0)
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
        "from rtx.training.loggers import wandb_logger\n"
        "wandb_logger(LoggerConfig(name='jsonl'), Path('.'), {}, 'a'); assert 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=bare, env={**os.environ, "PYTHONPATH": os.getcwd()})


def test_the_real_package_offline(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("sys.excepthook", sys.excepthook)
    logger = wandb_logger(LoggerConfig(name="auto"), bare, {"seed": 0}, "rtx-1", lines.append)
    assert logger is not None
    logger.log_metrics({"kind": "train", "bits": 8.0}, 1)
    logger.finish(exit_code=0)
    assert len(lines) == 1 and "no key found" in lines[0]
    assert list((bare / "wandb").glob("offline-run-*/*.wandb"))
