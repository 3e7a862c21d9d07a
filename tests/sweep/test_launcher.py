"""`rtx train -m`: checked whole, a process a cell, every end of a cell told; asked again, it goes
on.
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from rtx.cli import main as cli
from rtx.runs.lock import working_in
from rtx.runs.status import run_state
from rtx.settings.compose import compose
from rtx.settings.identity import config_hash
from rtx.settings.run_config import to_yaml
from tests.helpers.small_runs import status_of
from tests.helpers.stand_ins import SMALL, Sweep, begin, patiently, stand_in, table, write_book


def test_every_cell_is_a_process_with_its_own_overrides_and_folder(sweep: Sweep) -> None:
    words = ("routing.heads=2,4", "seed=7", "routing.attend_self=true,false", "name=a b")
    shown = sweep.asked('print("its own words"); done()', *words)
    calls = sweep.started
    assert [arguments[:4] for arguments, _ in calls] == [["-P", "-m", "rtx", "train"]] * 4
    assert calls[1][0][4:] == ["routing.heads=2", "seed=7", "routing.attend_self=false", "name=a b"]
    folders = [folder for _, folder in calls]
    assert folders == [
        sweep.outputs / "a b" / config_hash(compose(arguments[4:])) for arguments, _ in calls
    ]
    assert len(set(folders)) == 4
    assert "4 cells, each a run of its own" in shown
    assert "cell 3 of 4: routing.heads=4 routing.attend_self=true: begins\nits own words\n" in shown
    assert (
        f"\nrouting.heads=2 routing.attend_self=false  done   1.5000  {folders[1].name}\n" in shown
    )
    assert shown.count("/a b'/<run>") == 1, "where the runs are"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["routing.heads=2,9", "routing.window=64,600", "model.window=64"],
            "cell 2 (routing.heads=2 routing.window=600): routing.window=600 must be at most "
            "data.length=256",
        ),
        (
            ["routing.heads=9"],
            "cell 1 (nothing swept): routing.heads=9 must be at most model.heads=4",
        ),
        (
            ["seed=1,1"],
            "two cells are the same run (seed=1, and again seed=1); list values that change the "
            "result",
        ),
        (["data=text", "data.path=none.txt,no.txt", "seed=1,2"], "data.path=none.txt: "),
        (["sweep.parallel=1,2"], "sweep.parallel=1,2: must be"),
        (
            ["hardware=slurm,cpu"],
            "hardware=slurm,cpu: jobs are made of all cells or of none; give one value",
        ),
        (["hydra.launcher.n_jobs=2", "seed=1,2"], "hydra.launcher.n_jobs"),
    ],
)
def test_nothing_starts_unless_every_cell_is_right(
    sweep: Sweep, words: list[str], said: str
) -> None:
    (line,) = sweep.asked("done()", *words, code=2).splitlines()
    assert said in line and sweep.started == [] and not sweep.outputs.exists()


def test_what_a_cell_writes_in_pieces_is_shown_in_whole_lines(sweep: Sweep) -> None:
    behaviour = """
for byte in "one line\\n\\u00e9 has two bytes".encode():
    os.write(1, bytes([byte]))
    time.sleep(0.06)
done()
"""
    shown = sweep.asked(behaviour, "seed=1").splitlines()
    first = shown.index("cell 1 of 1: nothing swept: begins")
    assert shown[first + 1 : first + 3] == ["one line", "\u00e9 has two bytes"]


def test_the_sample_of_a_cell_is_whole_on_what_reads_the_sweep(sweep: Sweep) -> None:
    write_book()
    sweep.patch.setenv("RTX_DATA", "data")
    with begin(sys.executable, *SMALL, "seed=1") as process:
        shown, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    (log,) = sweep.outputs.glob("rtx/*/output.log")
    printed = log.read_text()
    sample = printed.partition("a sample (temperature 0.8):\n")[2]
    assert len(sample) > 30 and printed in shown


SHORT = "out of memory: the system killed it"
ENDS = {
    'end(1, "failed", reason="the loss is NaN at step 3")': (
        "failed",
        1,
        "the loss is NaN at step 3",
    ),
    "os.kill(os.getpid(), signal.SIGKILL)": ("killed", 137, ""),
    'pathlib.Path("short of memory").touch(); os.kill(os.getpid(), signal.SIGKILL)': (
        "failed",
        137,
        SHORT,
    ),
    "os.kill(os.getpid(), signal.SIGSEGV)": (
        "failed",
        139,
        "it ended with exit code 139, without a score",
    ),
    'print("rtx: no GPU"); sys.stdout.flush(); os._exit(2)': ("failed", 2, "no GPU"),
    'raise ValueError("of ours")': ("failed", 1, "ValueError: of ours"),
    'end(0, "done")': ("failed", 0, "it ended with exit code 0, without a score"),
    'end(143, "failed", reason="the disk is full")': ("failed", 143, "the disk is full"),
    "os.kill(os.getpid(), signal.SIGUSR1)": ("preempted", 138, ""),
    "done()": ("done", 0, ""),
}
"""What a cell does, and what is told of it."""


def test_every_end_of_a_cell_is_told_and_kept(sweep: Sweep) -> None:
    sweep.patch.setattr(
        "rtx.sweeps.launcher.system_kills", lambda: Path("short of memory").exists()
    )
    behaviour = f'exec({list(ENDS)!r}[int(sys.argv[-1].removeprefix("seed="))])'
    rows = table(sweep.asked(behaviour, "seed=" + ",".join(map(str, range(len(ENDS)))), code=1))
    for row, (_, folder), (word, code, reason) in zip(
        rows, sweep.started, ENDS.values(), strict=True
    ):
        assert row[1] == word and " ".join(row).endswith(reason)
        assert (f"exit {code}" in " ".join(row)) == (code != 0)
        if word == "failed":
            status = status_of(folder)
            assert (status.state, status.reason) == ("failed", reason)


def test_the_closing_table_fits_a_terminal_has_the_best_first_and_names_the_folder_once(
    sweep: Sweep,
) -> None:
    sweep.patch.setenv("COLUMNS", "80")
    behaviour = """
heads, layers, window = (word.partition("=")[2] for word in sys.argv if word.startswith("routing."))
if window == "32": end(1, "failed", reason="the loss is NaN at step 3 " * 8)
end(0, "done", final=dict(bits=4 - int(heads), windows=8 if layers == "1" else None))
"""
    words = ("routing.heads=1,2", "routing.layers=1,2", "routing.window=16,32")
    said = sweep.asked(behaviour, *words, code=1).rpartition("\ncell ")[2].splitlines()
    assert max(map(len, said)) <= 80
    rows = [line.split() for line in said if line.startswith("heads=")]
    assert [" ".join(row[:4]) for row in rows[:3]] == [
        "heads=2 layers=1 window=16 done",
        "heads=2 layers=2 window=16 done",
        "heads=1 layers=1 window=16 done",
    ]
    assert [row[4] for row in rows[:4]] == ["~2.0000", "2.0000", "~3.0000", "3.0000"]
    assert {row[3] for row in rows[4:]} == {"failed"} and len(rows) == 8
    assert "  exit 1: the loss is NaN at step 3 the loss" in "\n".join(said)
    assert said[-1] == "~ before bits: of a sample of the validation windows"
    assert said[-2].startswith("runs: ") and said[-2].endswith("/<run>")


def test_a_sweep_skips_what_is_done_resumes_what_has_begun_and_leaves_alone_what_failed(
    sweep,
) -> None:
    behaviour = """
if (folder / "begun").exists() or "seed=1" in sys.argv: done()
(folder / "begun").touch()
if "seed=2" in sys.argv:
    end(143, "preempted")
end(1, "failed", reason="the loss is NaN at step 3")
"""
    for words, ends in (
        ([], [["done", "1.5000"], ["preempted"], ["failed"]]),
        ([], [["done", "before", "1.5000"], ["done", "1.5000"], ["failed", "before"]]),
        (["sweep.retry=true"], [["done", "before"], ["done", "before"], ["done", "1.5000"]]),
    ):
        shown = sweep.asked(behaviour, "seed=1,2,3", *words, code=0 if words else 1)
        assert [row[1:][: len(end)] for row, end in zip(table(shown), ends, strict=True)] == ends
        assert ("the loss is NaN at step 3; sweep.retry=true runs it again" in shown) == (
            ["failed", "before"] in ends
        )
    assert [words[-1] for words, _ in sweep.started] == [
        "seed=1",
        "seed=2",
        "seed=3",
        "seed=2",
        "seed=3",
    ]


def test_a_cell_whose_configuration_was_changed_or_that_is_in_use_is_told_and_left_alone(
    sweep: Sweep,
) -> None:
    folder = sweep.cell("seed=1")
    with working_in(folder):
        rows = table(sweep.asked("done()", "seed=1,2", code=1))
        assert rows[0][1:3] == [
            "in",
            "use",
        ] and f"is in use by process {os.getpid()} on" in " ".join(rows[0])
        assert rows[1][1] == "done" and run_state(folder) == "running"
    for text, said in (
        (
            to_yaml(compose(["seed=1", "trainer.steps=7"])),
            f"changed: {folder}/config.yaml has other values",
        ),
        ("trainer: {", f"failed: {folder}/config.yaml: not valid YAML"),
    ):
        (folder / "config.yaml").write_text(text)
        assert f"seed=1: {said}" in sweep.asked("done()", "seed=1,2", code=1)
    assert [arguments[-1] for arguments, _ in sweep.started] == ["seed=2"]


def test_several_run_side_by_side_with_their_share_of_the_machine(sweep: Sweep) -> None:
    behaviour = """
print("said by", os.environ["OMP_NUM_THREADS"], os.environ.get("CUDA_VISIBLE_DEVICES"))
print("to stderr", file=sys.stderr)
(folder / "here").touch()
until = time.time() + 600
while len(list(folder.parent.glob("*/here"))) < 2 and time.time() < until: time.sleep(0.01)
sys.stdout.flush()
if time.time() < until: done()
"""
    sweep.patch.delenv("OMP_NUM_THREADS", raising=False)
    sweep.patch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    sweep.patch.setenv("RTX_OUTPUTS", "runs")
    sweep.patch.setattr("rtx.sweeps.launcher.cores", lambda: 4)
    shown = sweep.asked(behaviour, "seed=1,2,3", "sweep.parallel=2")
    assert "to watch: rtx sweep runs/rtx\n" in shown and "cell 3 of 3: seed=3: done\n" in shown
    assert "said by" not in shown
    logs = [(folder / "output.log").read_text() for _, folder in sweep.started]
    assert {line for log in logs for line in log.splitlines()} == {
        "said by 2 3",
        "said by 2 5",
        "to stderr",
    }
    assert cli.main(["sweep", "runs/rtx"]) == 0


def test_what_cannot_be_written(sweep: Sweep) -> None:
    (sweep.cell("seed=1") / "output.log").mkdir()
    said = sweep.asked("done()", "seed=1,2,3", code=1)
    assert "Is a directory" in said and [row[1] for row in table(said)] == [
        "failed",
        "done",
        "done",
    ]
    Path("file").touch()
    sweep.patch.setenv("RTX_OUTPUTS", "file")
    assert "set RTX_OUTPUTS to a folder that you can write" in sweep.asked(
        "done()", "seed=1,2", code=2
    )


def test_nobody_who_reads_any_more_is_no_reason_to_end_a_cell(sweep: Sweep) -> None:
    script = stand_in(
        'print("\\u2026" * 9, flush=True); time.sleep(0.3); print("more", flush=True); done()'
    )
    with begin(script, "seed=1,2") as process:
        assert process.stdout is not None and any("begins" in line for line in process.stdout)
        process.stdout.close()
        process.wait(timeout=600)
    assert [run_state(folder) for _, folder in sweep.started] == ["done", "done"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)]
)
def test_a_signal_reaches_the_cells_that_run_once_and_ends_the_sweep_after_them(
    sweep: Sweep, number: int, code: int
) -> None:
    behaviour = f"""
seen = []
signal.signal({int(number)}, lambda *_: seen.append(1))
(folder / "ready").touch()
while not seen: time.sleep(0.01)
time.sleep(0.2)
end({code}, "interrupted", seen=len(seen))
"""
    with begin(stand_in(behaviour), "seed=1,2,3", "sweep.parallel=2") as process:
        patiently(lambda: len(list(sweep.outputs.glob("rtx/*/ready"))) == 2, process)
        os.killpg(process.pid, number)
        shown, _ = process.communicate(timeout=600)
    assert process.returncode == code
    assert [row[1] for row in table(shown)] == ["interrupted", "interrupted", "not"]
    assert shown.count(f"\n  exit {code}\n") == 2
    assert [
        json.loads(path.read_text())["seen"] for path in sweep.outputs.glob("rtx/*/status.json")
    ] == [1, 1]


def test_a_second_interrupt_is_passed_on_and_a_cell_that_aborts_then_is_run_again(
    sweep: Sweep,
) -> None:
    behaviour = """
if (folder / "seen").exists(): done()
seen = folder / "seen"
signal.signal(signal.SIGINT, lambda *_: os.abort() if seen.exists() else seen.touch())
(folder / "ready").touch()
while True: time.sleep(0.01)
"""
    with begin(stand_in(behaviour), "seed=1") as process:
        for name in ("ready", "seen"):
            patiently(lambda name=name: list(sweep.outputs.glob(f"rtx/*/{name}")), process)
            process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=600)
    assert process.returncode == 130 and table(shown)[0][2] == "interrupted" and "exit 134" in shown
    assert table(sweep.asked(behaviour, "seed=1"))[0][2] == "done"
