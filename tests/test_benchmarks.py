"""`benchmarks/`: what is ended from outside ends whole, and what was not measured is neither lost nor printed."""

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"

PARENT = """
import subprocess, sys
sys.path.insert(0, {benchmarks!r})
from ending import end_with_children
end_with_children()
with subprocess.Popen([sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(600)"]) as child:
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
        known = {"what": "forward", "group": group, "pattern": pattern, "backend": "torch", "memory": "kept", "ms": ms}
        return {**known, **sizes, "ratio": {}, "peak_bytes": 0, "rate_share": 0.5}

    path = tmp_path / "results" / "attention-cpu.json"
    path.parent.mkdir()
    old = [row("short", "local", 1.0), row("short", "full", 2.0), row("main", "local", 3.0)]
    path.write_text(json.dumps(old))
    monkeypatch.setattr(attention, "__file__", str(tmp_path / "attention.py"))
    monkeypatch.setattr(attention, "check", lambda args: [])
    monkeypatch.setattr(attention, "end_with_children", lambda: None)
    monkeypatch.setattr(attention, "table", lambda memory, groups, args: [row("short", "local", 7.0)])
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
