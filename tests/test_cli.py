"""The command line: what it answers, on which stream, with which exit code, what it imports, and
the bars it shows.
"""

import fcntl
import hashlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from rtx import progress
from rtx.cli import main as cli
from rtx.errors import RunFailed
from rtx.runs.checksum import TAG
from rtx.runs.status import utc_now
from rtx.settings.compose import compose
from rtx.settings.run_config import to_yaml

Captured = pytest.CaptureFixture[str]


def modules_after(*lines: list[str]) -> set[str]:
    """Return the top-level modules that a process has imported when rtx has answered some lines."""
    code = f"import sys, json, rtx.cli.main; [rtx.cli.main.main(line) for line in {lines!r}]"
    code += "; print('\\n' + json.dumps(list(sys.modules)))"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600
    )
    return {name.partition(".")[0] for name in json.loads(answer.stdout.splitlines()[-1])}


def answer(capsys: Captured, *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_commands_that_do_not_train_import_neither_lightning_nor_the_compiler() -> None:
    commands = ("analyze", "audit", "eval", "export", "plan", "sample")
    program = "".join(f"import rtx.commands.{name}\n" for name in commands)
    program += "import sys; print(*sys.modules)"
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    modules = printed.stdout.decode().split()
    assert "torch" in modules
    assert not {"lightning", "torch._dynamo", "wandb", "transformers"}.intersection(modules)


def test_help_imports_no_hydra_and_a_mistake_no_torch(tmp_path: Path, capsys: Captured) -> None:
    assert not modules_after(["--help"]) & {
        "hydra",
        "omegaconf",
        "yaml",
        "torch",
        "numpy",
        "lightning",
    }
    (export := tmp_path / "export").mkdir()
    for folder in (tmp_path, export):
        (folder / "config.yaml").write_text(to_yaml(compose([])))
    (export / "export.json").write_text("{}")
    said = f"rtx: {export} is an exported model; resume the run it came from\n"
    assert answer(capsys, "resume", str(export)) == (2, "", said)
    assert sorted(path.name for path in export.iterdir()) == ["config.yaml", "export.json"]
    lines = (
        "train trainer.steps=abc; train routing.heads=99; train -m routing.heads=2,9; eval; "
        "sample; resume"
    )
    lines += f"; train data=text data.path=nowhere.txt; resume {export}"
    mistakes = [line.split() for line in lines.split(";")]
    for word in ("eval", "sample", "resume"):
        run = [word, str(tmp_path)]
        mistakes += [
            [word, "split=test"],
            [word, str(tmp_path / "none")],
            [*run, "splt=test"],
            [*run, "model=x"],
        ]
    mistakes += [
        ["resume", str(tmp_path), word] for word in ("seed=1", "model.layers=3", "force=maybe")
    ]
    assert not modules_after(*mistakes) & {"torch", "lightning", "wandb"}


def run_folder(folder: Path, *overrides: str, **status: object) -> str:
    """Write the records of a run, and return its folder as a word of a command line."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(compose(overrides)))
    here = {"pid": os.getpid(), "host": socket.gethostname(), "heartbeat": utc_now()}
    (folder / "status.json").write_text(json.dumps({"step": 9, "steps": 9, **here, **status}))
    return str(folder)


TYPED = """
import os, sys, rtx.cli.main, rtx.settings.requirements as needs
needs.lacks_gpu_driver = lambda: True
for line in sys.stdin:
    words = line.split()
    if words[0].startswith("RTX_RUN="):
        os.environ["RTX_RUN"] = words.pop(0).removeprefix("RTX_RUN=")
    print("->", rtx.cli.main.main(words), flush=True)
print("torch" in sys.modules)
"""
"""Reads commands from stdin and prints each exit code. The last may begin with `RTX_RUN=`."""


def test_what_needs_no_torch_to_be_refused_loads_none(tmp_path: Path) -> None:
    """Of runs by their records; nothing computes here, and answers come before torch does."""
    known = {"state": "done", "final": {"bits": 1.5, "unit": "byte"}}
    local, full, recall, one, finished = (
        run_folder(tmp_path / name, *words, **known)
        for name, words in (
            ("local", ()),
            ("full", ("model.base=full", "routing.heads=0", "model.window=256")),
            ("recall", ("data=recall", "model=recall")),
            ("one", ("model.heads=1", "routing.heads=1")),
            ("finished", ("trainer.steps=9",)),
        )
    )
    for name in ("last", "previous"):
        (tmp_path / "finished" / "checkpoints").mkdir(exist_ok=True)
        content = b"weights"
        tag = TAG + hashlib.sha256(content).hexdigest().encode()
        (tmp_path / "finished" / "checkpoints" / f"{name}.ckpt").write_bytes(content + tag)
    running = run_folder(tmp_path / "running", state="running")
    way_out = "; train one with experiment=far_text heads=full, or model.base=local+full"
    no_full = (
        f"model.base=local: no layer has full heads, whose attention could be covered{way_out}"
    )
    too_large = "must be less than data.length=256; give window=<less>, or window=0"
    gpu = "hardware=gpu, but torch finds no GPU"
    busy = (
        f"{running} is in use by process {os.getpid()} on {socket.gethostname()}; wait for it, or "
        "stop it first"
    )
    answers = (
        (
            f"resume {finished}",
            0,
            f"{finished} is done: 9 steps, 1.5000 bits/byte on the validation split",
        ),
        (f"resume {running}", 2, busy),
        ("train hardware=gpu", 2, gpu),
        (f"resume {local} trainer.steps=10 hardware=gpu", 2, gpu),
        (f"eval {local} hardware=gpu", 2, gpu),
        (
            f"eval {full} ablate=routing",
            2,
            "ablate=routing: the model has no routing heads to take away",
        ),
        (f"analyze coverage {local}", 2, no_full),
        (f"analyze coverage {full} window=256", 2, f"window=256: {too_large}"),
        (f"analyze coverage {full}", 2, f"window=256 (unset: the run's model.window): {too_large}"),
        (f"analyze context {recall}", 2, "a run on data=recall scores its answers alone"),
        (
            f"analyze divergence {one}",
            2,
            "model.heads=1: a divergence is between two heads of a layer",
        ),
        (f"analyze patterns {local} layer=99", 2, "layer=99: the topmost layer is layer="),
        (f"RTX_RUN={running} train", 2, busy),
    )
    with (tmp_path / "running" / "lock").open("a+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        shown = subprocess.run(
            [sys.executable, "-c", TYPED],
            input="".join(f"{line}\n" for line, _, _ in answers),
            env={**os.environ, "RTX_OUTPUTS": str(tmp_path / "outputs")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
        ).stdout
    lines = [one for one in shown.splitlines() if not one.startswith("->")]
    assert lines[-1] == "False" and "loading PyTorch" not in shown, shown
    codes = [int(one.split()[1]) for one in shown.splitlines() if one.startswith("->")]
    assert codes == [code for _, code, _ in answers], shown
    for line, (_, _, said) in zip(lines, answers, strict=False):
        assert said in line


def test_a_notebook_without_ipywidgets_gets_no_advice(tmp_path: Path) -> None:
    """tqdm takes a process with this module for a notebook."""
    (tmp_path / "ipykernel").mkdir()
    for name in ("__init__.py", "zmqshell.py"):
        (tmp_path / "ipykernel" / name).touch()
    (tmp_path / "ipywidgets.py").write_text("raise ImportError\n")
    (tmp_path / "IPython.py").write_text("def get_ipython(): return None\n")
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    program = f"{path}; import ipykernel.zmqshell, IPython, rtx.progress as p"
    words = [sys.executable, "-c", f"{program}; print(p.tqdm.__module__)"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert (shown.stderr, shown.returncode) == ("", 0) and shown.stdout.startswith("tqdm.")


def test_cfg_job_prints_the_configuration_and_keeps_argv(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "argv", words := ["rtx", "train", "--cfg", "job", "model=rt24", "trainer.steps=1e3"]
    )
    assert (
        cli.main() == 0 and sys.argv == words and len(words) == 6
    )  # ranks repeat the command by it
    text = capsys.readouterr().out
    assert "  steps: 1000\n" in text and "  clusters: 32\n" in text and "${" not in text
    assert answer(capsys, "train", "model=rt24", "trainer.steps=1000", "--cfg", "job") == (
        0,
        text,
        "",
    )
    code, cells, _ = answer(
        capsys, "train", "-m", "model=rt24", "trainer.steps=9,1000", "--cfg", "job"
    )
    assert code == 0 and cells.startswith("---\n# cell 1: trainer.steps=9\n")
    assert cells.endswith(f"---\n# cell 2: trainer.steps=1000\n{text}")


def test_a_failed_run_is_told_in_a_line_and_a_fault_of_ours_keeps_its_traceback(
    capsys: Captured,
) -> None:
    with patch.object(cli, "dispatch", side_effect=RunFailed("the loss is NaN at step 3")):
        assert answer(capsys, "train") == (1, "", "rtx: the loss is NaN at step 3\n")
    with patch.object(cli, "dispatch", side_effect=ZeroDivisionError):
        code, _, error = answer(capsys, "train")
    assert code == 1 and "Traceback" in error and "ZeroDivisionError" in error


@pytest.mark.parametrize(
    ("words", "first"),
    [("train --help", "usage: rtx train"), ("train -m seed=1,2,3 --cfg job", "---\n")],
)
def test_a_reader_that_goes_away_is_no_error(words: str, first: str) -> None:
    command = f"{sys.executable} -W error -m rtx {words} | head -n 1; exit ${{PIPESTATUS[0]}}"
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=600)
    assert shown.stdout.startswith(first)
    assert (shown.returncode, shown.stderr) == (0, "")


def test_a_letter_that_the_terminal_lacks_is_no_error() -> None:
    words = [sys.executable, "-m", "rtx", "train", "--cfg", "job", "name=\u2603"]
    narrow = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    shown = subprocess.run(words, capture_output=True, env=narrow, timeout=600)
    assert (shown.returncode, shown.stdout[-8:], shown.stderr) == (0, b"name: ?\n", b"")


TAKEN_APART = """
import os, sys, threading, time
from rtx.cli import main as cli
from rtx.errors import UserError

class Last:
    def __init__(self): self.write, self.sleep = os.write, time.sleep
    def __del__(self):  # called when Python has let go of its handlers
        self.write(1, b"ready\\n"), self.sleep(1)

def fail(_):
    {way}
    raise UserError("no")

cli.dispatch = fail
cli.entry()
"""
BUSY = """(
    [time.sleep(0.01) for _ in iter(threading.main_thread().is_alive, False)],
    os.write(1, b'ready\\n'),
    time.sleep(600),
)"""
"""A thread's work: it is ready when all else has ended, and Python waits for it alone."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    "way", ["sys.last = Last()", f"threading.Thread(target=lambda: {BUSY}).start()"]
)
def test_a_signal_after_the_work_changes_no_exit_code(number: int, way: str) -> None:
    words = [sys.executable, "-c", TAKEN_APART.format(way=way)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(timeout=600) == 2
        assert process.stderr.read() == "rtx: no\n"


def test_lines_where_there_is_no_terminal(capsys: Captured) -> None:
    for patience, told in ((60.0, 0), (0.0, 3)):
        with (
            patch.object(progress, "PLAIN_SECONDS", patience),
            progress.progress_bar("windows") as show,
        ):
            for done in (1, 2, 3):
                show(done, 3)
        assert len(lines := capsys.readouterr().err.splitlines()) == told
    assert all(
        len(line) < 80 and f"{done}/3" in line and "windows" in line
        for done, line in enumerate(lines, 1)
    )


def test_a_bar_on_a_terminal_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt), progress.progress_bar("layers") as show:
        show(1, 2)
        raise KeyboardInterrupt
    assert "layers" in terminal.getvalue() and terminal.getvalue().endswith("\r")
