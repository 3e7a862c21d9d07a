"""metrics.jsonl: whole rows only, and what JSON knows. What W&B, TensorBoard and CSV get; whatever
W&B does, a run
goes on.
"""

import csv
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import wandb

from rtx.settings.schema import Config, LoggerConfig
from rtx.training.loggers import JsonlLogger, wandb_logger
from rtx.training.uploads import add_to_wandb
from tests.helpers.small_runs import SMALL_RUN, Workshop, after, read_metrics


def test_rows_survive_a_kill_in_the_middle_of_one_and_hold_what_json_knows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "train/bits": 8.0}\n{"step": 2, "tr')
    logger = JsonlLogger(tmp_path)
    logger.log_metrics({"train/a": math.nan, "train/b/c": -math.inf, "train/c": 1.5}, 2)
    logger.close()
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {"step": 1, "train/bits": 8.0} and second["step"] == 2
    assert (second["train/a"], second["train/b/c"], second["train/c"]) == (None, None, 1.5)
    assert second["time"].endswith("Z") and len(second["time"]) == len("2026-11-21T06:07:00.123Z")


ONLINE = LoggerConfig(wandb=True, mode="online", project="p", entity="e", group="g")
AUTO = LoggerConfig(wandb=True)
ON = "W&B: https://wandb.example/run"


DOORS = {
    "service": "login",
    "server": "init",
    "network": "init.return_value.log",
    "upload": "init.return_value.finish",
}


def fake_wandb(patch: pytest.MonkeyPatch, fault: str = "", key: bool = True) -> Mock:
    """Return a W&B that has a key or none, and fails at one of its doors if named."""
    found = {"login.return_value": key, "init.return_value.url": "https://wandb.example/run"}
    fake = Mock(**found, **{"init.return_value.id": "fake"})
    if fault:
        fake.configure_mock(
            **{f"{DOORS[fault]}.side_effect": ConnectionError(f"no {fault}\nand more")}
        )
    for name in ("init", "login", "teardown"):
        patch.setattr(wandb, name, getattr(fake, name))
    return fake


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")  # restored afterwards: the logger sets it
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def begun(
    patch: pytest.MonkeyPatch, folder: Path, config: LoggerConfig = ONLINE, *words: Any
) -> Any:
    """Return W&B, the lines said, and a logger that uses it (None: it could not begin)."""
    fake = fake_wandb(patch, *words)
    lines: list[str] = []
    return fake, lines, wandb_logger(Config(logger=config), folder, {"seed": 0}, lines.append)


@pytest.mark.parametrize(
    ("fault", "said"), [("service", []), ("server", []), ("network", [ON]), ("upload", [ON])]
)
def test_an_error_at_the_beginning_in_the_middle_or_at_the_end_is_said_once(
    monkeypatch: pytest.MonkeyPatch, bare: Path, fault: str, said: list[str]
) -> None:
    _, lines, logger = begun(monkeypatch, bare, AUTO, fault)
    if logger:
        for step in range(3):
            logger.log_metrics({"bits": 1.0}, step)
        logger.finish(exit_code=1)
    assert lines == [*said, f"W&B: no {fault}; going on with metrics.jsonl alone"]


def test_auto_is_online_with_a_key_and_offline_without(
    monkeypatch: pytest.MonkeyPatch, bare: Path
) -> None:
    for key, mode in ((False, "offline"), (True, "online")):
        fake, lines, _ = begun(monkeypatch, bare, AUTO, "", key)
        assert [asked.kwargs["mode"] for asked in fake.init.call_args_list] == [mode]
        assert ("no key found" in lines[0]) == (mode == "offline")
        assert fake.login.call_args_list == [call(prompt=False, verify=False)] * (1 + key)
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert begun(monkeypatch, bare, AUTO)[1][0].startswith(
        "W&B: WANDB_MODE=offline; to upload the curves"
    )
    monkeypatch.setenv("WANDB_MODE", "dryrun")  # an older word of W&B's
    assert begun(monkeypatch, bare, AUTO)[0].init.call_args.kwargs["mode"] == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert begun(monkeypatch, bare, AUTO)[2] is None
    assert begun(monkeypatch, bare)[2] is not None  # asked for


@pytest.mark.parametrize("fault", ["server", "network", "upload"])
def test_what_comes_after_training_fails_nothing(
    monkeypatch: pytest.MonkeyPatch, bare: Path, fault: str
) -> None:
    said: list[str] = []
    page = bare / "page.json"
    monkeypatch.setattr("rtx.training.loggers.say_line", said.append)
    page.write_text("{}")
    add = partial(add_to_wandb, bare, "eval", {"eval/x": 1.0}, [page], 3)
    add()
    assert not said, "a run that W&B has nothing of"
    begun(monkeypatch, bare)
    broken = fake_wandb(monkeypatch, fault)
    add()
    assert said[-1] == f"W&B: no {fault}; nothing is added there"
    fake = fake_wandb(monkeypatch)
    add()
    run = fake.init.return_value
    run.log.assert_called_once_with({"eval/x": 1.0, "trainer/global_step": 3})
    run.finish.assert_called_once_with(exit_code=0)
    assert run.log_artifact.call_args.args[0].type == "eval"
    assert fake.init.call_args.kwargs["id"] == broken.init.call_args.kwargs["id"]
    monkeypatch.setenv("WANDB_MODE", "disabled")
    add()
    (bare / "wandb.json").write_text('{"id": ["no name"]}')
    monkeypatch.delenv("WANDB_MODE")
    add()
    assert fake.init.call_count == 1 and said[-1].endswith("nothing is added there")


def test_what_comes_after_training_fails_nothing_if_the_logger_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, bare: Path
) -> None:
    said: list[str] = []
    begun(monkeypatch, bare)
    monkeypatch.setattr("rtx.training.uploads.say", said.append)
    monkeypatch.setitem(sys.modules, "rtx.training.loggers", None)
    add_to_wandb(bare, "eval", {"eval/x": 1.0}, [])
    (line,) = said
    assert line.startswith("W&B: import of rtx.training.loggers halted")
    assert line.endswith("; nothing is added there")


def read_back(folder: Path) -> list[dict[str, Any]]:
    """Return the records of all segments of an offline run, in the order of their files, by W&B's
    own reader.
    """
    found = []
    for path in sorted(
        folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime_ns
    ):
        command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
        found += [json.loads(line) for line in answer.stdout.splitlines()]
    return found


def by_type(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of an offline run by their types."""
    records: dict[str, list[dict[str, Any]]] = {}
    for record in read_back(folder):
        records.setdefault(record["type"], []).append(record[record["type"]])
    return records


def name_of_run(record: dict[str, Any]) -> tuple[str, ...]:
    return (record["run_id"], record["run_group"], record["job_type"], *record["tags"])


def check_configuration(update: dict[str, Any], run: Path) -> None:
    """Check what W&B has as the configuration of a run."""
    environment = json.loads((run / "environment.json").read_text())
    assert update["routing"]["selection"] == "causal"
    facts = update["facts"]
    assert facts["parameters"] == environment["parameters"]
    assert facts["teraflop_per_step"] > 0
    assert facts["data_fingerprint"] == environment["data"]["fingerprint"]


def check_summary(records: dict[str, list[dict[str, Any]]]) -> None:
    """Check the protocol of the score, and by which steps metrics are drawn."""
    updates = [summary["update"] for summary in records["summary"]]
    protocols = [update["protocol"] for update in updates if "protocol" in update]
    assert protocols
    for line in protocols:
        assert "each scored once" in line
    steps = {}
    for metric in records["metric"]:
        steps[metric.get("glob_name", metric.get("name"))] = metric.get("step_metric")
    by_step = dict.fromkeys(("*", "valid/bits"), "trainer/global_step")
    assert steps == {**by_step, "trainer/global_step": None}


def check_curves(items: list[dict[str, Any]], run: Path) -> None:
    """Check that the curves of W&B are the rows of metrics.jsonl."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("train/bits", "valid/bits", "valid/final_bits"):
        expected = [(row["step"], row[name]) for row in rows if name in row]
        drawn = [(item["trainer/global_step"], item[name]) for item in items if item.get(name)]
        assert drawn == expected
        assert expected


def check_artifacts(records: list[dict[str, Any]], run: Path) -> None:
    """Check which files of the run W&B keeps, and that it staged them in the run's folder."""
    kept = {}
    for artifact in records:
        kept[artifact["name"].rpartition("-")[0]] = artifact["manifest"]["contents"]
    assert kept.keys() == {"sample", "eval", "audit", "patterns", "report"}
    assert {"report.html", "report.md"} <= {file["path"] for file in kept["report"]}
    for file in itertools.chain.from_iterable(kept.values()):
        assert file["local_path"].startswith(str(run / "wandb"))


def test_a_real_run_offline_read_back(
    bare: Path, workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.excepthook", sys.excepthook)
    sweep = workshop.folder / "sweep"
    sweep.mkdir()
    (sweep / "sweeps.jsonl").touch()
    run = workshop.train(
        "sweep/cell", "logger=wandb", "logger.project=p", "routing=causal", "trainer.steps=10"
    )
    workshop.command("resume", str(run), "trainer.steps=12")
    workshop.command("eval", str(run))
    workshop.command("audit", str(run), "sequences=1", "prefixes=3", "windows=2", "positions=2")
    workshop.command("analyze", "patterns", str(run))
    for folder in (run, sweep):
        workshop.command("report", str(folder))
    records = by_type(run)
    run_id = json.loads((run / "wandb.json").read_text())["id"]
    names = {name_of_run(record) for record in records["run"]}
    assert names == {(run_id, "rtx", "train", "text", "tiny", "causal")}
    check_configuration(records["run"][0]["config"]["update"], run)
    check_summary(records)
    items = [history["item"] for history in records["history"]]
    check_curves(items, run)
    (score,) = (json.loads(path.read_text()) for path in (run / "eval").iterdir())
    assert score["bits"] in [item.get("valid/eval_bits") for item in items]
    assert False in [item.get("audit/sees_future/streaming") for item in items]
    assert any("audit/bits/prefix_rerun" in item for item in items)
    audited = {key for item in items for key in item if key.startswith("audit/")}
    assert [name for name in audited if " " in name] == []
    assert "png" in [item.get("patterns/pictures.format") for item in items]
    check_artifacts(records["artifact"], run)
    (of_sweep,) = by_type(sweep)["run"]
    assert (of_sweep["run_group"], of_sweep["job_type"]) == ("rtx", "report")
    assert of_sweep["run_id"] != run_id


def curve(run: Path, logger: str, key: str) -> list[tuple[int, float]]:
    """Return the points of a curve, by TensorBoard's own reader, or of the newest of Lightning's
    tables.
    """
    if logger == "csv":
        newest = max((run / "csv").iterdir(), key=lambda path: path.name)
        assert (newest / "hparams.yaml").exists()
        with open(newest / "metrics.csv", newline="") as file:
            return [(int(row["step"]), float(row[key])) for row in csv.DictReader(file) if row[key]]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(run / "tensorboard")).Reload()
    return [(event.step, event.value) for event in reader.Scalars(key)]


@pytest.mark.parametrize("logger", ["csv", "tensorboard"])
def test_a_curve_has_each_point_once_after_a_kill_and_a_resume(
    workshop: Workshop, logger: str
) -> None:
    process = workshop.start(logger, f"logger={logger}")
    process.until(after(8))  # a checkpoint is of step 6, a validation of step 8
    assert process.wait(signal.SIGKILL) == -signal.SIGKILL
    for more in ([], ["trainer.steps=16"]):
        time.sleep(
            1
        )  # TensorBoard reads the files of a second in the order of their process numbers
        workshop.command("resume", str(process.run), *more)
    rows = {(row["kind"], row["step"]): row for row in read_metrics(process.run / "metrics.jsonl")}
    for kind, key in (("train", "train/bits"), ("valid", "valid/bits")):
        kept = {step: row[key] for (of, step), row in sorted(rows.items()) if of == kind}
        points = curve(process.run, logger, key)
        assert [step for step, _ in points] == list(kept) and dict(points) == pytest.approx(kept), (
            key
        )


def test_a_logger_that_is_not_installed_names_its_extra(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)  # as one that cannot be found
    for words in ([], ["-m", "seed=0,1"]):
        said = workshop.command(
            "train", *words, workshop.text, *SMALL_RUN, "logger=tensorboard", code=2
        )
        assert said.endswith(
            "rtx: logger=tensorboard needs TensorBoard: pip install 'rtx[tensorboard]'\n"
        )
    assert not (workshop.folder / "out").exists()
