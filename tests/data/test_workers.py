from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rtx.data.workers import run_jobs
from rtx.errors import RunFailed, UserError


def double(number, pause, advance):
    time.sleep(pause)
    advance(number)
    return 2 * number, os.getpid()


def fail(how, advance):
    match how:
        case "user":
            raise UserError("no such book")
        case "run":
            raise RunFailed("no network")
        case "full":
            raise OSError(28, "No space left on device", "a.bin")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "fault":
            raise ZeroDivisionError


def test_results_come_with_their_number_and_from_several_processes():
    done = []
    results = dict(run_jobs([(double, (number, 0.05)) for number in range(6)], 3, done.append))
    assert {index: result[0] for index, result in results.items()} == {number: 2 * number for number in range(6)}
    workers = {result[1] for result in results.values()}
    assert os.getpid() not in workers and 2 <= len(workers) <= 3
    assert sum(done) == sum(range(6))
    assert [result[1] for _, result in run_jobs([(double, (1, 0)), (double, (2, 0))], 1)] == [os.getpid()] * 2
    assert list(run_jobs([], 4)) == []


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("user", UserError, "^no such book$"),
        ("run", RunFailed, "^no network$"),
        ("full", OSError, "No space left on device"),
        (
            "die",
            RunFailed,
            r"^a process that prepares data was killed by signal 9; if memory ran out, data.processes=1",
        ),
        ("fault", RuntimeError, "ZeroDivisionError"),
    ],
)
def test_what_goes_wrong_in_a_process_is_raised_here_and_ends_the_others(how, kind, message):
    begin = time.monotonic()
    with pytest.raises(kind, match=message):
        list(run_jobs([(fail, (how,)), (double, (1, 60))], 2))
    assert time.monotonic() - begin < 30


def test_processes_import_what_the_job_needs_and_nothing_else():
    code = (
        "import sys; sys.path.insert(0, 'tests/data')\n"
        "from rtx.data.workers import run_jobs; import rtx.data.parts as parts\n"
        "import jobs_of_this_test as jobs\n"
        "print(dict(run_jobs([(jobs.modules, ())] * 2, 2))[0])"
    )
    folder = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=folder, env=environment)
    assert shown.stdout, shown.stderr
    assert "rtx.data.parts" in shown.stdout
    for heavy in ("'torch'", "'lightning'", "'hydra'", "'datasets'"):
        assert heavy not in shown.stdout
