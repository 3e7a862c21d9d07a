"""Cells as jobs: submitit's for real, on a cluster of shell scripts; what is asked for, and when a
job is over.
"""

import importlib.util
import os
import pickle
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from rtx.cli import main as cli
from rtx.errors import UserError
from rtx.settings.compose import compose
from rtx.settings.identity import config_hash
from rtx.sweeps.slurm import Attempt, make_jobs_folder, returned_code
from tests.helpers.stand_ins import SMALL, Sweep, begin, patiently, stand_in, table, write_book

SCRIPTS = {
    "sbatch": """
number=$$; cp "$1" asked.sh; cp "$1" $number.sh; touch queue/$number  # submitit renames its file
export SLURM_JOB_ID=$number SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1
(setsid sh $number.sh; rm queue/$number) > /dev/null 2>&1 &
echo "Submitted batch job $number"
""",
    "srun": """
while [ "${1#-}" != "$1" ]; do case "$1" in --output|--error) shift;; esac; shift; done
echo $$ > "$SLURM_JOB_ID.pid"; exec "$@"
""",
    "squeue": "ls queue",
    "scancel": 'kill "$(cat "$1.pid")"',
}


@pytest.fixture
def cluster(sweep: Sweep) -> Sweep:
    """A folder with a text, and on the PATH the programs of a cluster that is this machine."""
    write_book()
    sweep.patch.setenv("RTX_DATA", "data")
    sweep.patch.setenv("PATH", f"{Path.cwd()}/bin:/usr/bin:/bin")
    sweep.patch.setattr("rtx.sweeps.slurm.QUEUE_SECONDS", 0.1)
    for folder in ("queue", "bin"):
        Path(folder).mkdir()
    for name, does in SCRIPTS.items():
        program(name, does)
    return sweep


def program(name: str, does: str) -> None:
    Path("bin", name).write_text(f"#!/bin/sh\ncd {Path.cwd()}\n{does}\n")
    Path("bin", name).chmod(0o755)


def test_one_job_is_done_and_one_fails(cluster: Sweep) -> None:
    Path("rtx.py").write_text("open('attacked', 'w')")  # none of ours
    words = [
        *SMALL,
        "hardware=slurm",
        "hydra.launcher.partition=long",
        "hydra.launcher.timeout_min=90",
        "name=queued",
    ]
    done, failed = table(cluster.asked("", *words, "optimizer.lr=1e-3,1e30", code=1))
    assert done[:2] == ["optimizer.lr=1e-3", "done"] and failed[:2] == [
        "optimizer.lr=1e30",
        "failed",
    ]
    assert "exit 1: " in " ".join(failed) and "exit" not in done
    assert "the loss is nan at learning rate" in " ".join(failed)
    same = config_hash(
        compose([*SMALL, "optimizer.lr=1e-3", "name=queued"])
    )  # as a process here would be
    assert "done after 2 steps" in (cluster.outputs / "queued" / same / "output.log").read_text()
    assert not Path("attacked").exists()
    for line in (
        *(
            "--partition=long",
            "--time=90",
            "--mem=32GB",
            "--gpus-per-node=1",
            "--cpus-per-task=8",
            "--nodes=1",
        ),
        *("--ntasks-per-node=1", "--signal=USR2@120", "--job-name=queued", "--open-mode=append"),
    ):
        assert f"#SBATCH {line}\n" in Path("asked.sh").read_text()


def test_ctrl_c_lets_a_job_save(cluster: Sweep) -> None:
    with begin(sys.executable, *SMALL, "trainer.steps=1000000", "hardware=slurm") as sweep:
        patiently(
            lambda: any(
                path.stat().st_size for path in cluster.outputs.glob("rtx/*/metrics.jsonl")
            ),
            sweep,
        )
        os.killpg(sweep.pid, signal.SIGINT)
        shown, _ = sweep.communicate(timeout=600)
    assert sweep.returncode == 130
    (row,) = table(shown)
    assert row[2] == "preempted" and row[-2:] == ["exit", "143"]
    assert (cluster.outputs / "rtx" / row[3] / "checkpoints" / "last.ckpt").exists()


def test_a_job_is_over_when_the_queue_no_longer_has_it(cluster: Sweep) -> None:
    """Here both are killed before they leave a word; `sacct` would know nothing of it."""
    cluster.patch.setattr("rtx.sweeps.slurm.RESULT_SECONDS", 0.5)
    program("sbatch", 'echo x >> jobs; echo "Submitted batch job $(wc -l < jobs)"')
    program("squeue", "echo x >> looks; [ $(wc -l < looks) -lt 3 ] && seq $(wc -l < jobs); exit 0")
    rows = table(cluster.asked("", *SMALL, "seed=1,2", "hardware=slurm", code=1))
    assert [row[1] for row in rows] == ["killed", "killed"]
    assert " ".join(rows[1]).endswith("its job ended: it left no word")
    assert not list(
        cluster.outputs.glob("rtx/*/status.json")
    )  # both go on when they are asked for again
    program("sbatch", 'echo "the queue is closed" >&2; exit 1')
    rows = table(cluster.asked("", *SMALL, "seed=1,2", "hardware=slurm", code=1))
    assert [" ".join(row).endswith("the queue is closed") for row in rows] == [True, True]


def test_a_machine_without_slurm(sweep: Sweep) -> None:
    sweep.patch.setenv("PATH", "")
    real = importlib.util.find_spec
    for lacking, line, said in (
        ("submitit", "train -m hardware=slurm", "needs submitit: pip install 'rtx[slurm]'"),
        ("submitit", "train hardware=slurm", "needs submitit"),
        ("srun", "train -m hardware=slurm seed=1,2", "there is no srun on this machine"),
        ("srun", "train hardware=slurm", "makes jobs of the cells of a sweep"),
    ):
        find = lambda name, gone=lacking: None if name.startswith(gone) else real(name)  # noqa: E731
        sweep.patch.setattr("importlib.util.find_spec", find)
        assert cli.main(line.split()) == 2
        assert f"hardware=slurm: {said}" in sweep.capsys.readouterr().err
    assert not sweep.outputs.exists()


def test_a_cell_saves_before_submitit_puts_its_job_back_into_the_queue(sweep: Sweep) -> None:
    """submitit calls `checkpoint` in the handler of a signal, which interrupts the call."""
    cell = """
seen = []
signal.signal(signal.SIGUSR2, lambda *_: seen.append(1))
while not pathlib.Path("begun").exists(): time.sleep(0.01)
os.kill(os.getppid(), signal.SIGUSR2)
while not seen: time.sleep(0.01)
time.sleep(0.3)
(folder / "saved").touch()
os._exit(143)
"""
    sweep.patch.setattr(sys, "executable", str(stand_in(cell)))
    attempt = Attempt(["seed=1"], Path.cwd())

    def checkpoint(*_: object) -> None:
        assert attempt.checkpoint().function.words == ["seed=1"] and Path("saved").exists()
        raise SystemExit(7)

    def tell_the_cell() -> None:
        while not hasattr(attempt, "process"):
            time.sleep(0.01)
        Path("begun").touch()

    handlers = {
        number: signal.signal(number, checkpoint) for number in (signal.SIGTERM, signal.SIGUSR2)
    }
    threading.Thread(target=tell_the_cell, daemon=True).start()
    try:
        with pytest.raises(SystemExit, match="7"):
            attempt()
    finally:
        attempt.process.wait()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_the_result_of_a_job_runs_no_code(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "attacked"),)

    assert returned_code(pickle.dumps(("success", 143))) == 143
    assert returned_code(pickle.dumps(("error", "Traceback ..."))) is None
    for content in (pickle.dumps(("success", Attack())), b"", b"junk", pickle.dumps(7)):
        assert returned_code(content) is None
    assert not (tmp_path / "attacked").exists()


def test_a_folder_of_jobs_in_which_others_may_write_is_refused(tmp_path: Path) -> None:
    folder = make_jobs_folder(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700 and make_jobs_folder(tmp_path) == folder
    folder.chmod(0o777)
    with pytest.raises(UserError, match="another user may write there"):
        make_jobs_folder(tmp_path)
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        make_jobs_folder(tmp_path)
    assert not (tmp_path / "elsewhere").exists()
