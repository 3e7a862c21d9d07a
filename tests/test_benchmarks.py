"""`benchmarks/`: what is ended from outside ends whole, and what was not measured is neither lost
nor printed.
"""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"

PARENT = """
import subprocess, sys
sys.path.insert(0, {benchmarks!r})
from ending import end_with_children
end_with_children()
program = "print('begun', flush=True); import time; time.sleep(600)"
with subprocess.Popen([sys.executable, "-c", program]) as child:
    child.wait()
"""


def test_sigterm_ends_a_benchmark_and_what_it_has_started() -> None:
    command = [sys.executable, "-c", PARENT.format(benchmarks=str(BENCHMARKS))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "", "it ends when both processes have"
        assert process.wait(timeout=600) == 143


def test_attention_prints_what_it_measured_and_keeps_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    attention = importlib.import_module("attention")

    def row(group: str, pattern: str, ms: float) -> dict[str, object]:
        sizes = {"N": 256, "W": 64, "C": 4, "B": 1, "H": 8, "D": 64}
        known = {
            "what": "forward",
            "group": group,
            "pattern": pattern,
            "backend": "torch",
            "memory": "kept",
            "ms": ms,
        }
        return {**known, **sizes, "ratio": {}, "peak_bytes": 0, "rate_share": 0.5}

    path = tmp_path / "results" / "attention-cpu.json"
    path.parent.mkdir()
    old = [row("short", "local", 1.0), row("short", "full", 2.0), row("main", "local", 3.0)]
    path.write_text(json.dumps(old))
    monkeypatch.setattr(attention, "__file__", str(tmp_path / "attention.py"))
    monkeypatch.setattr(attention, "check", lambda args: [])
    monkeypatch.setattr(attention, "end_with_children", lambda: None)
    monkeypatch.setattr(
        attention, "table", lambda memory, groups, args: [row("short", "local", 7.0)]
    )
    for patterns, kept in ((["--patterns", "local"], [2.0, 3.0]), ([], [3.0])):
        path.write_text(json.dumps(old))
        words = ["attention.py", "--device", "cpu", "--groups", "short", *patterns]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            attention.main()
        assert ended.value.code == 0
        assert [each["ms"] for each in json.loads(path.read_text())] == [7.0, *kept]
        said = capfd.readouterr().out
        assert " 7.0 ms" in said and " 2.0 ms" not in said and " 3.0 ms" not in said


def test_gpu_dry_measures_a_row_of_each_section(tmp_path: Path) -> None:
    keys = (
        "correct/local/triton/float32",
        "alone/sdpa/64",
        "steps/6x512/causal/8192/eager",
        "runs/fsdp",
    )
    command = [
        sys.executable,
        str(BENCHMARKS / "gpu.py"),
        "--dry",
        f"--out={tmp_path}",
        f"--work={tmp_path}",
        "--only",
    ]
    done = subprocess.run([*command, *keys], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    rows = {row["key"]: row for row in found["rows"]}
    assert set(rows) == set(keys) and not any("error" in row for row in rows.values()), rows
    checked, sdpa, step, spread = (rows[key] for key in keys)
    assert (
        checked["pass"]
        and checked["same_bits"]
        and 0 < checked["error_norm"] <= checked["tolerance"]
    )
    assert sdpa["python_ms"] > 0 and step["ms"] > 0 and spread["skipped"] == "needs CUDA"
    assert {goal["measured"] for goal in found["goals"]} == {None}, "no goal is of a dry run"
    assert done.stdout.endswith("4 rows, 0 failed, 0 errors, 1 skipped, as they need CUDA\n")


FAULTY = """
import os, sys, time
sys.path.insert(0, {benchmarks!r})
from pathlib import Path
from gpu_sections.journal import Journal
journal = Journal(Path({folder!r}), dry=False)
for key in ("right", "kills", "hangs", "last"):
    if key in journal.rows():
        continue
    journal.begin(key)
    if key == "kills":
        os._exit(9)
    if key == "hangs":
        time.sleep(600)
    journal.add(key, {{"value": 1}})
    journal.end()
"""


def test_gpu_goes_on_behind_rows_that_kill_or_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    gpu = importlib.import_module("gpu")
    journal = importlib.import_module("gpu_sections.journal")
    (tmp_path / "gpu.py").write_text(
        FAULTY.format(benchmarks=str(BENCHMARKS), folder=str(tmp_path))
    )
    monkeypatch.setattr(gpu, "HERE", tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu.py", f"--out={tmp_path}", "--row-seconds=1"])
    (tmp_path / "current").write_text("of a command that was killed long ago")
    os.utime(tmp_path / "current", (0, 0))
    end = time.time() + 600
    gpu.supervise("alone", gpu.arguments(), end, end)
    rows = journal.Journal(tmp_path, dry=False).rows()
    assert list(rows) == ["right", "kills", "hangs", "last"]
    assert (
        rows["kills"]["error"] == "the process ended with 9"
        and rows["hangs"]["error"] == "no end within 1 s"
    )
    assert rows["right"]["value"] == rows["last"]["value"] == 1


def test_gpu_predicts_goals_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    goals = importlib.import_module("gpu_sections.goals").goals()
    found = importlib.import_module("gpu_sections.predictions").predicted()
    assert [row["goal"] for row in found] == [goal.name for goal in goals]
    steps = {
        row["goal"]: row["predicted"] for row in found if row["goal"].startswith("step of 6x512")
    }
    near, far = (
        next(value for name, value in steps.items() if N in name) for N in ("N=8,192", "N=65,536")
    )
    assert 1 < near < far < 65_536 / 256


def test_gpu_keeps_rows_behind_half_a_line_and_repeats_errors_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    journal = importlib.import_module("gpu_sections.journal")
    rows = [
        journal.Row("right", lambda: {"value": 1}),
        journal.Row("wrong", lambda: {"value": 1 / 0}),
    ]
    first = journal.Journal(tmp_path, dry=False)
    for row in rows:
        first.add(row.key, journal.measured(row, dry=False))
    with (tmp_path / "gpu.jsonl").open("a") as file:
        file.write('{"key": "cut sho')
    first.add("behind", {"value": 2})
    known = first.rows()
    assert set(known) == {"right", "wrong", "behind"}
    assert (
        known["wrong"]["error"] == "ZeroDivisionError: division by zero" and known["wrong"]["where"]
    )
    assert first.missing(rows) == [] and journal.Journal(tmp_path, dry=True).missing(rows) == rows
    assert (
        journal.Journal(tmp_path, dry=False, retry_before=time.time() + 1).missing(rows) == rows[1:]
    )


def test_a_campaign_goes_on_with_the_run_that_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    campaign = importlib.import_module("campaign")
    planned = campaign.campaign(dry=True)[:1]
    run = tmp_path / "work" / planned[0].name
    started: list[str] = []
    start = campaign.start

    def start_and_wait(place: object, name: str, *words: str) -> subprocess.Popen[str]:
        """Start a run, and where it is new return when it has made a step."""
        started.append(words[0])
        process = start(place, name, *words)
        if words[0] == "train":
            while process.poll() is None and not campaign.rows_of(run / "metrics.jsonl"):
                time.sleep(0.02)
        return process

    monkeypatch.setattr(campaign, "campaign", lambda dry: planned)
    monkeypatch.setattr(campaign, "start", start_and_wait)
    monkeypatch.setattr(campaign, "end_with_children", lambda: None)
    monkeypatch.setattr(campaign, "DRY_STEPS", 200)
    folders = [f"--out={tmp_path}", f"--work={tmp_path / 'work'}", f"--records={tmp_path / 'none'}"]

    def call(seconds: float) -> list[str]:
        minutes = (campaign.STOP_SECONDS + seconds) / 60
        monkeypatch.setattr(sys, "argv", ["campaign.py", "--dry", f"--minutes={minutes}", *folders])
        assert campaign.main() == 0
        return capfd.readouterr().out.splitlines()

    *_, cut, left = call(seconds=1.0)
    assert "preempted" in cut and left == f"not done: {planned[0].name}"
    text = tmp_path / "work" / "words.txt"
    assert f"  path: {text}\n" in (run / "config.yaml").read_text(), "not the folder of the runs"
    *_, ended, left = call(seconds=600.0)
    assert " done " in ended and " 200 " in ended and left == "not done: nothing"
    name = planned[0].name
    records = tmp_path / "records"
    assert campaign.recorded_state(records, name) == "done"
    assert call(seconds=600.0) == ["not done: nothing"]
    shutil.rmtree(records)
    assert call(seconds=600.0)[-1] == "not done: nothing"
    assert campaign.recorded_state(records, name) == "done"
    assert started == ["train", "resume"]


def test_a_campaign_reads_the_rows_before_half_a_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    campaign = importlib.import_module("campaign")
    path = tmp_path / "metrics.jsonl"
    assert campaign.rows_of(path) == []
    path.write_text('{"step": 3, "valid/bits": 2.5}\n{"step": 4, "va')
    assert campaign.rows_of(path) == [{"step": 3, "valid/bits": 2.5}]
