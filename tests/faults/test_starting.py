"""What a command may find as it starts: closed streams, no home or current folder, names that are
not UTF-8, variables that are left over, a system that refuses.

Each is told in a line, and no status of a run is changed.
"""

import errno
import inspect
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rtx.attention.engine import compiler
from rtx.data.store import note_place
from rtx.machine import NO_SOURCE
from rtx.paths import cache_folder
from rtx.runs import status as run_status
from rtx.runs.status import run_state
from tests.helpers.small_runs import SMALL_RUN, Workshop, difference

NO_SUCH = "~nosuchuser/there"
CLOSE = """
import os, sys
for number in (0, 1, 2):
    os.close(number)
sys.stdout = sys.stderr = None
from rtx.cli.main import open_streams
open_streams()
"""
"""Close the standard streams, as a daemon may, and begin as the script does."""
WITHOUT_RIGHTS = """
import ctypes
library = ctypes.CDLL(None)
if hasattr(library, "capset"):
    library.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())
"""
"""Give up what lets root read every folder (Linux)."""


def script(words: str, streams: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run a command by a shell with other streams, such as `>&-`."""
    line = f"exec {sys.executable} -m rtx {words} {streams}"
    variables = {**os.environ, "RTX_OUTPUTS": str(tmp_path)}
    return subprocess.run(
        ["sh", "-c", line], env=variables, capture_output=True, text=True, timeout=600
    )


@pytest.mark.parametrize(
    ("words", "streams", "code", "said"),
    [
        ("runs", "<&- >&-", 2, "rtx: "),
        ("train seed=x", ">&-", 2, "rtx: seed=x: must be an integer"),
        ("train seed=x", "<&- >&- 2>&-", 2, ""),
        ("train seed=x", "2>/dev/full", 2, ""),
        ("--version", ">/dev/full", 1, "rtx: the system reports: No space left on device\n"),
    ],
)
def test_a_closed_or_full_stream_changes_no_exit_code(
    tmp_path: Path, words: str, streams: str, code: int, said: str
) -> None:
    done = script(words, streams, tmp_path)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert done.stderr.startswith(said)
    assert said or not done.stderr
    assert done.stderr.count("\n") <= 1


def test_a_run_with_closed_streams_goes_on(workshop: Workshop, run: Path) -> None:
    process = workshop.start("daemon", inside=CLOSE)
    assert process.wait() == 0, process.log.read_text()
    assert run_state(process.run) == "done"
    assert difference(process.run, run) == ""


@pytest.mark.parametrize(
    ("words", "variables", "option"),
    [
        (f"train data=text data.path={NO_SUCH}", {}, "data.path"),
        (f"data prepare data=hub data.path={NO_SUCH}", {}, "data.path"),
        (f"train data=images data.path={NO_SUCH}", {}, "data.path"),
        (f"train data=kernel data.path={NO_SUCH}", {}, "data.path"),
        (f"train data=enwik8 data.path={NO_SUCH}", {}, "data.path"),
        (f"train model.start={NO_SUCH}", {}, "model.start"),
        (f"train extensions={NO_SUCH}.py", {}, "extensions"),
        (f"train --config-dir {NO_SUCH}", {}, "--config-dir"),
        ("data list", {"RTX_DATA": NO_SUCH}, "RTX_DATA"),
        ("runs", {"RTX_OUTPUTS": NO_SUCH}, "RTX_OUTPUTS"),
        ("eval last", {"RTX_OUTPUTS": NO_SUCH}, "RTX_OUTPUTS"),
        ("train", {"RTX_RUN": NO_SUCH}, "RTX_RUN"),
        (f"report RUN output={NO_SUCH}", {}, "output"),
        (f"export RUN output={NO_SUCH}", {}, "output"),
        (f"analyze pretrained model={NO_SUCH}", {}, "model"),
        (f"analyze pretrained model=. fit={NO_SUCH}", {}, "fit"),
    ],
)
def test_an_unknown_home_folder_is_told(
    workshop: Workshop,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    variables: dict[str, str],
    option: str,
) -> None:
    environment = {"RTX_RUN": "", "RTX_DATA": str(workshop.data), **variables}
    monkeypatch.setattr(workshop, "environment", lambda run: environment)
    said = workshop.command(*words.replace("RUN", str(run)).split(), code=2)
    assert "rtx: " in said
    line = said.splitlines()[-1]
    assert line.startswith(f"rtx: {option}={NO_SUCH}"), line
    assert "this machine knows no home folder ~nosuchuser; write the whole path" in line


def test_a_cache_folder_that_is_not_absolute_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (NO_SUCH, "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", name)
        assert cache_folder() == tmp_path / ".cache"
        assert compiler.cache_folder() == tmp_path / ".cache" / "rtx" / "kernels"


@pytest.mark.parametrize(
    ("words", "variable"),
    [
        ("runs", "RTX_OUTPUTS"),
        ("eval last", "RTX_OUTPUTS"),
        ("eval FOLDER/run", ""),
        ("report FOLDER", ""),
        ("report FOLDER/run", ""),
        ("train TEXT", "RTX_OUTPUTS"),
        ("train TEXT", "RTX_RUN"),
        ("data list", "RTX_DATA"),
        ("data remove text-0123456789ab", "RTX_DATA"),
        ("train TEXT", "RTX_DATA"),
    ],
)
def test_a_folder_that_may_not_be_read_is_told(
    workshop: Workshop, tmp_path: Path, words: str, variable: str
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0)
    text = f"data=text {workshop.text}"
    line = words.replace("FOLDER", str(folder)).replace("TEXT", text)
    variables = {"RTX_RUN": ""}
    if variable:
        variables[variable] = str(folder)
    process = workshop.fork(tmp_path / "run", *line.split(), inside=WITHOUT_RIGHTS, **variables)
    code = process.wait()
    said = process.log.read_text()
    process.log.unlink()
    assert code == 2 and "Traceback" not in said, said
    last = said.splitlines()[-1]
    assert last.startswith("rtx: ") and str(folder) in last and "Permission denied" in last


def no_entry(number: int) -> Any:
    raise KeyError(number)


def test_a_user_without_a_home_folder_trains(
    workshop: Workshop, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    # As of data that another user has prepared.
    monkeypatch.setattr("rtx.data.store.os.access", lambda *arguments: False)
    assert note_place(workshop.data) == (workshop.data, ".verified")
    assert difference(workshop.train("homeless"), run) == ""


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        ("train data=text data.path=OTHER", {}),
        ("data prepare data=text data.path=OTHER", {}),
        ("train name=OTHER", {}),
        ("resume RUN data.path=OTHER", {}),
        ("train", {"RTX_DATA": "OTHER"}),
    ],
)
def test_a_name_that_is_not_utf_8_is_told(
    workshop: Workshop,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    variables: dict[str, str],
) -> None:
    other = os.fsdecode(os.fsencode(tmp_path) + b"/book\xff.txt")
    shutil.copy(workshop.folder / "book.txt", other)
    environment = {"RTX_RUN": "", "RTX_OUTPUTS": str(tmp_path / "out")}
    environment |= dict.fromkeys(variables, other)
    monkeypatch.setattr(workshop, "environment", lambda run: environment)
    line = [word.replace("OTHER", other).replace("RUN", str(run)) for word in words.split()]
    said = workshop.command(*line, code=2)
    assert "is not UTF-8, in which options are recorded" in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_current_folder_that_was_deleted_is_told(
    workshop: Workshop, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    for words in ("report RUN", "export RUN", "eval last", "sweep .", "runs", "plan", "data list"):
        said = workshop.command(*words.replace("RUN", str(run)).split(), code=2)
        assert said.startswith("rtx: the current folder cannot be found (No such file or")
    assert workshop.command("--version").startswith("rtx ")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RTX_SWEEP": "abc"}, "RTX_SWEEP=abc: no process of this number has started this one"),
        ({"RTX_SWEEP": "999999999"}, "RTX_SWEEP=999999999: no process of this number"),
        ({"TORCHELASTIC_RUN_ID": "1"}, "WORLD_SIZE=: is no number, as torchrun and srun set it"),
        (
            {"SLURM_STEP_ID": "1", "SLURM_PROCID": "x", "SLURM_NTASKS": "2"},
            "SLURM_PROCID=x: is no number, as torchrun and srun set it",
        ),
    ],
)
def test_variables_that_are_left_over_are_told(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], said: str
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run = workshop.folder / "stray"
    assert f"rtx: {said}" in workshop.command("train", workshop.text, *SMALL_RUN, run=run, code=2)
    assert not run.exists()


def test_a_resume_that_is_refused_writes_no_status(workshop: Workshop, copy: Path) -> None:
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("\nseed: 0\n", "\nseed: 1\n"))
    path = copy / "status.json"
    before = (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
    said = workshop.command("resume", str(copy), "trainer.steps=14", code=2)
    assert "seed: 0 -> 1 is refused" in said
    assert (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes()) == before


def refusing(code: int) -> Callable[..., Any]:
    """Return a function that fails as a system call does."""

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


def test_no_step_is_taken_whose_status_cannot_be_written(
    workshop: Workshop, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As of a file that is immutable (chattr +i), also for root.
    monkeypatch.setattr(run_status, "write_json", refusing(errno.EPERM))
    monkeypatch.setattr(run_status, "open_inside", refusing(errno.EPERM))
    rows = (copy / "metrics.jsonl").read_bytes()
    said = workshop.command("resume", str(copy), "trainer.steps=14", code=1)
    assert said.splitlines()[-1].endswith("cannot be worked in: [Errno 1] Operation not permitted")
    assert run_state(copy) == "done"
    assert (copy / "metrics.jsonl").read_bytes() == rows


def test_what_the_system_refuses_is_told_in_a_line(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ("train", workshop.text, *SMALL_RUN)
    with monkeypatch.context() as patch:
        patch.setattr("socket.socketpair", refusing(errno.EMFILE))
        said = workshop.command(*train, run=tmp_path / "run", code=1)
        assert said.splitlines()[-1] == "rtx: the system reports: Too many open files"
        assert not (tmp_path / "run").exists()
    with monkeypatch.context() as patch:
        patch.setattr("os.fork", refusing(errno.EAGAIN))
        said = workshop.command(*train, "hardware.workers=1", run=tmp_path / "run", code=1)
        reason = "another process cannot be started (see ulimit -u): Resource temporarily"
        assert said.splitlines()[-1].startswith(f"rtx: {reason}")
        assert run_state(tmp_path / "run") == "failed"
    with monkeypatch.context() as patch:
        patch.setattr("rtx.disk.os.fsync", refusing(errno.EIO))
        patch.setattr(workshop, "data", tmp_path / "data")
        said = workshop.command("data", "prepare", "data=text", workshop.text, code=1)
        assert said.splitlines()[-1].endswith("Input/output error")


def test_a_module_whose_source_cannot_be_read_is_told_in_a_line(
    workshop: Workshop, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, Any] = {}
    exec("def unreadable(): pass", names)

    def load(*arguments: Any, **options: Any) -> Any:
        # Torch asks for the source of a module of its own as it is imported.
        return inspect.getsource(names["unreadable"])

    monkeypatch.setattr("rtx.training.checkpoint.torch.load", load)
    said = workshop.command("sample", str(copy), "length=8", code=1)
    last = said.splitlines()[-1]
    assert last == f"rtx: the source of an imported module cannot be read ({NO_SOURCE})"
    assert "Traceback" not in said
