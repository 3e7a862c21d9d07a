"""`rtx runs`, the names by which commands take a run, and the data that a run finds from another
folder.
"""

import contextlib
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from rtx.runs.status import utc_now
from tests.helpers.small_runs import Workshop, draw_nothing

OLD = "20260101-000000-abcd1234"
NEW = "20260102-000000-9876fedc"


@pytest.fixture(scope="module")
def runs(workshop: Workshop) -> list[Path]:
    """Two runs of one name, the older first, in the folder of all runs."""
    return [
        workshop.train(f"out/small/{name}", f"seed={seed}", "trainer.steps=1")
        for seed, name in enumerate((OLD, NEW), 1)
    ]


@pytest.fixture
def elsewhere(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    """Further variables of all commands, which have another current folder, with no runs and no
    data.
    """
    here = workshop.environment
    more = {"RTX_DATA": str(tmp_path / "none")}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workshop, "environment", lambda run: here(run) | more)
    return more


def test_the_list_has_the_newest_first(
    workshop: Workshop, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for folder in ((), (str(runs[0].parent),)):
        rows = [line.split() for line in workshop.command("runs", *folder).splitlines()]
        assert rows[0] == ["run", "what", "differs", "step", "bits", "state"]
        assert [row[0] for row in rows[1:]] == [f"small/{NEW}", f"small/{OLD}"]
        assert all(
            row[-3] == "1/1" and float(row[-2]) > 0 and row[-1] == "done" for row in rows[1:]
        )
    assert "nowhere: no such folder" in workshop.command("runs", "nowhere", code=2)
    assert "holds no run" in workshop.command("runs", str(workshop.data), code=2)


LIST_AT_WIDTHS = """
import os
from rtx.cli.main import main
for columns in {widths}:
    os.environ["COLUMNS"] = str(columns)
    main(["runs", {folder!r}])
    print("next", flush=True)
"""
"""A program that prints the list of runs as if the terminal had several widths in turn."""


def test_on_a_terminal_of_any_width_the_name_of_a_run_is_whole(tmp_path: Path) -> None:
    command = (
        "rtx train -m routing.heads=8 routing.layers=12 routing.window=1024 optimizer.lr=0.0002 "
        "seed={}"
    )
    names = [f"rtx/20261127-01200{seed}-96beddb{seed}" for seed in range(3)]
    for seed, name in enumerate(names):
        (run := tmp_path / name).mkdir(parents=True)
        (run / "config.yaml").write_text("seed: 0\n")
        (run / "environment.json").write_text(json.dumps({"command": command.format(seed)}))
        if seed:
            (run / "environment.json").write_text(
                json.dumps({"command": f"rtx train routing.heads={seed}"})
            )
    whole = command.partition(" -m ")[2].format(0)
    short = whole.replace("routing.", "").replace("optimizer.", "")
    seen = {140: whole, 80: short[:20], 60: "unknown", 40: "unknown"}
    program = LIST_AT_WIDTHS.format(widths=[*seen], folder=str(tmp_path))
    environment = {**os.environ, "TERM": "xterm", "RTX_OUTPUTS": str(tmp_path)}
    printed = on_a_terminal([sys.executable, "-c", program], environment)
    for columns, part in seen.items():
        end = printed.index("next")
        lines = printed[:end]
        printed = printed[end + 1 :]
        assert lines[0].split()[0] == "run"
        assert sorted(line.split()[0] for line in lines[1:4]) == names
        # Names and figures are wider than 40.
        assert columns == 40 or all(len(line) <= columns for line in lines)
        (row,) = [line for line in lines if names[0] in line]
        assert part in row


@pytest.mark.parametrize(("refusal", "is_coloured"), [("", True), ("1", False)])
def test_a_terminal_shows_states_in_colour_unless_no_color_is_set(
    tmp_path: Path, refusal: str, is_coloured: bool
) -> None:
    for name, state in ((NEW, "failed"), (OLD, "done")):
        run = tmp_path / "done" / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("seed: 0\n")
        status = {"state": state, "step": 9, "steps": 9, "host": "here", "pid": 1}
        (run / "status.json").write_text(json.dumps({**status, "heartbeat": utc_now()}))
    program = f"from rtx.cli.main import main; main(['runs', {str(tmp_path)!r}])"
    environment = {**os.environ, "TERM": "xterm", "NO_COLOR": refusal}
    lines = on_a_terminal([sys.executable, "-c", program], environment)
    ends = {"\x1b[31mfailed\x1b[0m", "\x1b[32mdone\x1b[0m"} if is_coloured else {"failed", "done"}
    assert {line.split()[-1] for line in lines[1:3]} == ends
    assert "\x1b" not in lines[0] and "done/" in lines[1], "the name of a run has no colour"


def on_a_terminal(command: list[str], environment: dict[str, str]) -> list[str]:
    """Return the lines that a command prints on a terminal."""
    ours, theirs = pty.openpty()
    said = b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        with contextlib.suppress(OSError):  # its side of the terminal is closed
            while part := os.read(ours, 4096):
                said += part
    os.close(ours)
    return said.decode().splitlines()


@pytest.mark.usefixtures("elsewhere")
def test_a_run_has_names_and_its_data_wherever_one_stands(
    workshop: Workshop, runs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_nothing(monkeypatch)
    for name, run in (
        ("last", runs[1]),
        (NEW, runs[1]),
        ("98", runs[1]),
        ("small/20260101", runs[0]),
        (OLD, runs[0]),
    ):
        said = workshop.command("eval", name, "limit=1")
        assert f"{run}: best.ckpt" in said and "preparing" not in said
    for words in (
        "analyze patterns last",
        "sample last length=5",
        "export last",
        "resume last",
        "report last",
    ):
        assert str(runs[1]) in workshop.command(*words.split())
    assert not Path("none").exists()
    (only := workshop.folder / "only").mkdir()
    runs[0].rename(only / OLD)
    assert f"{only / OLD}: best.ckpt" in workshop.command("eval", str(only), "limit=1")
    (only / OLD).rename(runs[0])


def test_a_name_of_several_runs_or_none(workshop: Workshop, runs: list[Path]) -> None:
    both = f"{runs[1]}, {runs[0]}"
    for name, said in (
        ("2026", f"2026: 2 runs; name one: {both}"),
        ("small", f"small: 2 runs; name one: {both}"),
        ("abce1234", "no run of this name (did you mean 'abcd1234'?); the newest: "),
        ("lats", f"(did you mean 'last'?); the newest: {both}"),
        ("x" * 3000, "no such folder, and no run of this name; the newest: "),
    ):
        assert said in workshop.command("eval", name, code=2)


def test_without_runs(workshop: Workshop, elsewhere: dict[str, str], tmp_path: Path) -> None:
    elsewhere["RTX_OUTPUTS"] = str(tmp_path)
    said = workshop.command("eval", "last", code=2)
    assert "last: no such folder, and no run of this name; the newest: there is none" in said
    assert "holds no run; rtx train makes one" in workshop.command("runs", code=2)
