"""The command line: what it answers, on which stream, with which exit code, and what it imports for that."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rtx import cli
from rtx.compose import compose, to_yaml
from rtx.errors import RunFailed

ROOT = Path(__file__).resolve().parents[1]


def rtx(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run rtx as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-m", "rtx", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=120)


def modules_after(*arguments: str) -> set[str]:
    """Return the top-level modules that a process has imported when rtx has answered."""
    code = f"import sys, json, rtx.cli; rtx.cli.main({list(arguments)!r}); print('\\n' + json.dumps(list(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120)
    return {name.partition(".")[0] for name in json.loads(answer.stdout.splitlines()[-1])}


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run rtx in this process; returns exit code, stdout and stderr."""
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_imports_neither_hydra_nor_torch() -> None:
    assert not modules_after("--help") & {"hydra", "omegaconf", "yaml", "torch", "numpy", "lightning"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "trainer.steps=abc"),
        ("train", "routing.heads=99"),
        ("train", "-m", "routing.heads=2,9"),
        ("train", "data=text", "data.path=nowhere.txt"),
    ],
)
def test_a_configuration_error_does_not_import_torch(arguments: tuple[str, ...]) -> None:
    assert not modules_after(*arguments) & {"torch", "lightning", "wandb"}


def test_a_mistake_about_a_run_does_not_import_torch_either(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(compose([])))
    for word in ("eval", "sample", "resume"):
        mistakes = (["split=test"], [str(tmp_path / "none")], [str(tmp_path), "splt=test"], [str(tmp_path), "name=x"])
        if word == "resume":
            mistakes = (*mistakes, [str(tmp_path), "seed=1"], [str(tmp_path), "model.layers=3"])
            mistakes = (*mistakes, [str(tmp_path), "force=maybe"], [str(tmp_path), "data=text", "data.path=none.txt"])
        for arguments in mistakes if word == "resume" else ([], *mistakes):
            assert not modules_after(word, *arguments) & {"torch", "lightning", "wandb"}


def test_an_export_is_not_resumed_and_torch_not_imported_for_that(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(compose([])))
    (tmp_path / "export.json").write_text("{}")
    said = f"rtx: {tmp_path} is an exported model; resume the run it came from\n"
    assert answer(capsys, "resume", str(tmp_path)) == (2, "", said)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "export.json"]
    assert not modules_after("resume", str(tmp_path)) & {"torch", "lightning", "wandb"}


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, front, error = answer(capsys, "--help")
    assert (code, error) == (0, "")
    for word in cli.COMMANDS:
        assert f"\n  {word} " in front
        code, page, error = answer(capsys, word, "--help")
        assert (code, error) == (0, "")
        assert page.startswith(f"usage: rtx {word} ")
        assert answer(capsys, "help", word)[1] == page


def test_no_command_shows_the_help_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    code, page, _ = answer(capsys)
    assert code == 2
    assert page == answer(capsys, "--help")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "unknown command 'trian' (did you mean 'train'?)"),
        (["--hlep"], "unknown command '--hlep' (did you mean '--help'?)"),
        (["train", "--multrun"], "--multrun: unknown flag of rtx train (did you mean '--multirun'?)"),
        (["train", "--cfg", "jbo"], "--cfg=jbo: unknown flag of rtx train (did you mean '--cfg=job'?)"),
        (["train", "--cfg"], "--cfg: unknown flag of rtx train (did you mean '--cfg=job'?)"),
        (["train", "bench.turns=9"], "rtx train does not read bench.turns; it is an option of rtx bench"),
        (["train", "sweep.parallel=2"], "it is an option of rtx train -m"),
        (["eval", "outputs/rtx/run", "--cfg", "job"], "--cfg=job: unknown flag of rtx eval"),
        (["help", "trian"], "unknown command 'trian' (did you mean 'train'?)"),
        (["--help", "bogus"], "unknown command 'bogus'; the commands are train, "),
        (["plan", "hardware=slurm"], "hardware=slurm: makes jobs of the cells of a sweep (rtx train -m;"),
    ],
)
def test_a_mistake_on_the_command_line(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    code, out, error = answer(capsys, *arguments)
    assert (code, out) == (2, "")
    assert error.startswith("rtx: ")
    assert said in error
    assert "Traceback" not in error


def test_errors_go_to_stderr_and_each_line_says_who_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = answer(capsys, "train", "trainer.steps=abc", "+lrr=3", "data=enwik9")
    assert (code, out) == (2, "")
    assert error.splitlines() == [
        "rtx: trainer.steps=abc: must be an integer, at least 1 (Optimizer steps to train; unset: optimizer.steps)",
        "rtx: unknown key 'lrr' (did you mean 'optimizer.lr'?)",
        "rtx: data=enwik9: no such option (did you mean 'enwik8'?); data takes cifar10, enwik8, hub, imagenet64, "
        "images, pg19, recall, stdlib, text, wikitext103",
    ]


def test_cfg_job_prints_the_configuration_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, text, _ = answer(capsys, "train", "--cfg", "job", "model=rt24", "trainer.steps=1e3")
    assert code == 0
    assert "  steps: 1000\n" in text
    assert "  clusters: 32\n" in text
    assert "${" not in text
    assert answer(capsys, "train", "model=rt24", "--cfg=job", "trainer.steps=1000")[1] == text


def test_a_fault_of_ours_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "dispatch", lambda _: 1 / 0)
    code, _, error = answer(capsys, "train")
    assert code == 1
    assert "Traceback" in error
    assert "ZeroDivisionError" in error


def test_a_failed_run_is_told_in_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: list[str]) -> int:
        raise RunFailed("the loss is NaN at step 3")

    monkeypatch.setattr(cli, "dispatch", fail)
    assert answer(capsys, "train") == (1, "", "rtx: the loss is NaN at step 3\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m rtx train --help | head -n 1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=120)
    assert shown.stdout.startswith("usage: rtx train")
    assert shown.stderr == ""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_exit_codes_of_signals(number: int, code: int) -> None:
    script = (
        "import time; from rtx import cli\n"
        "def wait(_): print('ready', flush=True); time.sleep(60)\n"
        "cli.dispatch = wait; cli.entry()"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None and process.stderr is not None
    with process, process.stdout, process.stderr:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(timeout=60) == code
        assert process.stderr.read() == f"rtx: stopped by {signal.Signals(number).name}\n"


def test_arguments_are_left_whole_for_the_ranks_that_repeat_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["rtx", "train", "--cfg", "job", "seed=1"])
    assert cli.main() == 0
    assert sys.argv == ["rtx", "train", "--cfg", "job", "seed=1"]


def test_an_error_does_not_reach_the_terminal_raw(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = answer(capsys, "eval", "outputs/\x1b[31mred")
    assert code == 2 and "\x1b" not in error and "no such folder" in error


def test_a_terminal_that_lacks_a_letter_is_no_error() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}
    words = [sys.executable, "-m", "rtx", "train", "--cfg", "job", "name=\u2603"]
    shown = subprocess.run(words, capture_output=True, env=environment, timeout=120)
    assert (shown.returncode, shown.stdout[-8:], shown.stderr) == (0, b"name: ?\n", b"")
