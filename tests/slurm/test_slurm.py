"""A real Slurm: jobs that are put back, killed, cancelled or out of time, one that fails, and a run
on two tasks.

The cluster is of this machine alone, with all that it writes in one folder; it takes Debian's
packages slurm-wlm (22.05 was tried) and munge, and root; it keeps no accounts.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rtx.runs.status import read_status
from rtx.training.checkpoint import read_checkpoint
from tests.helpers.small_runs import counted_rows, status_of

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
MISSING = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
WHY_NOT = (
    "needs root and Debian's slurm-wlm and munge; not on the PATH: "
    f"{', '.join(MISSING) or 'nothing'}"
)
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING) or os.geteuid() != 0, reason=WHY_NOT),
]

# A job that is put back into the queue waits until its credential has run out: 5 seconds here, else
# two minutes.
CONFIGURATION = """
ClusterName=rtx
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1,sched_interval=2
ReturnToService=2
KillWait=10
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=4000
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start a cluster of one node with two processors; yields the variables by which commands find
    it.
    """
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    with (
        socket.create_server(("127.0.0.1", 0)) as first,
        socket.create_server(("127.0.0.1", 0)) as second,
    ):
        ports = [one.getsockname()[1] for one in (first, second)]
    (folder / "slurm.conf").write_text(
        CONFIGURATION.format(host=socket.gethostname(), folder=folder, ports=ports)
    )
    variables = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": PATH}
    environment = {**os.environ, **variables}
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
    files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    try:
        for command in (["munged", "--force", *options], ["slurmctld"], ["slurmd"]):
            subprocess.run(command, env=environment, check=True, capture_output=True)
        asked = ["sinfo", "--noheader", "--format=%T"]
        end = time.monotonic() + 300
        while (
            subprocess.run(asked, env=environment, capture_output=True, text=True).stdout.strip()
            != "idle"
        ):
            assert time.monotonic() < end, "the node of the cluster is not idle after 300 seconds"
            time.sleep(0.2)
        yield variables
    finally:
        subprocess.run(
            ["scancel", "--me", "--signal=KILL", "--full"], env=environment, capture_output=True
        )
        for name in ("slurmd", "slurmctld", "munged"):
            stop(folder / f"{name}.pid")


def stop(pid_file: Path) -> None:
    with contextlib.suppress(OSError, ValueError):
        number = int(pid_file.read_text())
        os.kill(number, signal.SIGTERM)
        for _ in range(100):
            os.kill(number, 0)
            time.sleep(0.1)
        os.kill(number, signal.SIGKILL)


SMALL = (
    *("name=table", "data=images", "data.path=pictures", "data.size=4", "model.hidden=32"),
    *(
        "model.ffn_hidden=32",
        "model.window=16",
        "trainer.steps=200",
        "trainer.batch_size=2",
        "trainer.val_every=100",
    ),
    *("trainer.checkpoint_every=10", "trainer.log_every=10", "hardware.threads=1", "logger=jsonl"),
)
SHALLOW = (
    "model.layers=2",
    "model.heads=2",
    "routing.heads=1",
    "routing.layers=1",
    "routing.window=16",
)
JOBS = (
    *("hardware=slurm", "hydra.launcher.partition=test", "hydra.launcher.cpus_per_task=1"),
    *("hydra.launcher.gpus_per_node=0", "hydra.launcher.mem_gb=1", "hydra.launcher.timeout_min=30"),
)
RTX = (sys.executable, "-m", "rtx")
PATIENCE = 900.0


class Room:
    """A folder with pictures, and a cluster."""

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.folder = folder
        self.root = folder / "outputs" / "table"
        own = {"RTX_DATA": str(folder / "data"), "RTX_OUTPUTS": str(folder / "outputs")}
        self.environment = {**os.environ, **own, **variables}

    def ask(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, **variables}
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    def disturbed(
        self, *command: str, disturb: Callable[[list[Path]], object], runs: int = 1
    ) -> tuple[int, str]:
        """Run a command, and disturb it when so many runs are past a checkpoint; returns its code
        and what it said.
        """
        end = time.monotonic() + PATIENCE
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            while len(stepping := self.stepping()) < runs:
                assert time.monotonic() < end and process.poll() is None
                time.sleep(0.1)
            disturb(stepping)
            said, _ = process.communicate(timeout=PATIENCE)
        assert "Traceback" not in said and "sacct" not in said, said
        return process.returncode, said

    def stepping(self) -> list[Path]:
        """Return the runs under way, past a checkpoint and far from their end."""
        runs = [path.parent.parent for path in self.root.glob("*/checkpoints/last.ckpt")]
        statuses = [(run, read_status(run)) for run in runs]
        return [run for run, now in statuses if now and now.state == "running" and now.step < 150]

    def job_of(self, run: Path) -> str:
        """Return the number of the job that works on a run."""
        numbers = self.ask(
            "squeue", "--me", "--noheader", "--states=RUNNING", "--format=%i"
        ).stdout.split()
        pid = status_of(run).pid
        listed = {number: self.ask("scontrol", "listpids", number).stdout for number in numbers}
        return next(n for n, text in listed.items() if re.search(rf"^{pid}\b", text, re.MULTILINE))

    def assert_as_undisturbed(self, run: Path, *words: str) -> None:
        """Compare a run's last weights, bit for bit, with those of the same configuration trained
        in one go.
        """
        alone = self.folder / f"alone-{run.name}"
        answer = self.ask(*RTX, "train", *SMALL, *SHALLOW, *words, RTX_RUN=str(alone))
        assert answer.returncode == 0, answer.stdout + answer.stderr
        weights = [
            read_checkpoint(folder / "checkpoints" / "last.ckpt")["model"]
            for folder in (run, alone)
        ]
        assert all(
            bool((weights[0][name] == weights[1][name]).all()) for name in weights[0] | weights[1]
        )
        assert len(counted_rows(run)) == len(counted_rows(alone))


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    (tmp_path / "pictures").mkdir()
    generator = np.random.default_rng(0)
    for number in range(40):
        pixels = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number:02}.png")
    with cluster(tmp_path / "cluster") as variables:
        yield Room(tmp_path, variables)


def states(said: str) -> dict[str, list[str]]:
    """Return the run folders in each state of the closing table."""
    found: dict[str, list[str]] = {}
    for line in re.split(r"\ncell +state +bits +run\n", said)[-1].splitlines():
        if row := re.match(
            r"\S.*? (done|failed|killed|preempted|not started)\b.* ([0-9a-f]{12})$", line
        ):
            found.setdefault(row[1], []).append(row[2])
    return found


def test_a_table_goes_through_a_queue(room: Room) -> None:
    """One job is put back into the queue, one is killed."""
    words = (
        *RTX,
        "train",
        "-m",
        *SMALL,
        *SHALLOW,
        *JOBS,
        "routing.heads=1,2",
        "routing.layers=1,2",
    )
    assert room.ask(*RTX, "data", "prepare", *SMALL[1:4]).returncode == 0

    def disturb(runs: list[Path]) -> None:
        room.ask("scontrol", "requeue", room.job_of(runs[0]))
        room.ask("scancel", "--signal=KILL", "--full", room.job_of(runs[1]))
        disturbed.extend(runs)

    disturbed: list[Path] = []
    code, said = room.disturbed(*words, disturb=disturb, runs=2)
    back, killed = disturbed
    ended = states(said)
    assert code == 1 and ended["preempted"] == [killed.name], (
        said
    )  # it noticed that its job had gone, and saved
    assert len(ended["done"]) == 3 and back.name in ended["done"]
    assert len((back / "resumes.jsonl").read_text().splitlines()) == 1
    again = room.ask(*words)
    assert again.returncode == 0 and again.stdout.count(": begins") == 1, (
        again.stdout + again.stderr
    )
    cells = json.loads((room.root / "sweeps.jsonl").read_text().splitlines()[0])["cells"]
    for run in (back, killed):
        room.assert_as_undisturbed(run, *cells[run.name].split())


def test_a_job_whose_time_is_up_comes_back_by_itself_and_one_that_fails_stays_away(
    room: Room,
) -> None:
    # Of ten minutes submitit takes any moment for the end, so that this counts as one of the job's
    # timeouts.
    words = (
        "train",
        "-m",
        *SMALL,
        *SHALLOW,
        *JOBS,
        "hydra.launcher.timeout_min=10",
        "optimizer.lr=1e-3,1e30",
    )
    jobs: list[str] = []

    def disturb(runs: list[Path]) -> None:
        jobs.append(room.job_of(runs[0]))
        # To the job's steps and not to its script, as Slurm does by itself for --signal=USR2@120.
        room.ask("scancel", "--signal=USR2", jobs[0])

    code, said = room.disturbed(*RTX, *words, disturb=disturb)
    ended = states(said)
    assert code == 1 and len(ended["done"]) == len(ended["failed"]) == 1, said
    assert said.count("the loss is nan at learning rate") == 2, said  # as it ends, and in the table
    (log,) = (path.read_text() for path in room.root.glob(f".submitit/{jobs[0]}/*_log.out"))
    assert "this job is timed-out" in log and "(19 remaining timeouts)" in log
    run = room.root / ended["done"][0]
    assert (run / "output.log").read_text().count("stopped by SIGUSR2 at step") == 1
    room.assert_as_undisturbed(run, "optimizer.lr=1e-3")


def test_a_job_that_is_cancelled_saves_and_the_others_go_on(room: Room) -> None:
    words = (*RTX, "train", "-m", *SMALL, *SHALLOW, *JOBS, "seed=1,2")
    code, said = room.disturbed(
        *words, disturb=lambda runs: room.ask("scancel", room.job_of(runs[0]))
    )
    ended = states(said)
    assert code == 1 and len(ended["preempted"]) == len(ended["done"]) == 1, said
    run = room.root / ended["preempted"][0]
    assert read_checkpoint(run / "checkpoints" / "last.ckpt")["step"] == status_of(run).step
    again = room.ask(*words)
    assert again.returncode == 0 and len(states(again.stdout)["done"]) == 2, (
        again.stdout + again.stderr
    )


def test_a_run_on_two_tasks_is_stopped_and_goes_on(room: Room) -> None:
    two = ("hardware=ddp", "hardware.devices=2", "trainer.micro_batch_size=1", "trainer.steps=100")
    srun = ("srun", "--ntasks=2", "--cpus-per-task=1", *RTX)

    def disturb(runs: list[Path]) -> None:
        room.ask(
            "scancel",
            "--signal=TERM",
            room.ask("squeue", "--me", "--noheader", "--format=%i").stdout.strip(),
        )

    code, said = room.disturbed(*srun, "train", *SMALL, *SHALLOW, *two, disturb=disturb)
    assert code == 143 and said.count("stopped by SIGTERM at step") == 1, said
    (run,) = (path.parent for path in room.root.glob("*/status.json"))
    status = status_of(run)
    assert status.state == "preempted" and 10 <= status.step < 100
    again = room.ask(*srun, "resume", str(run))
    assert again.returncode == 0, again.stdout + again.stderr
    shown = run.relative_to(room.folder)
    assert again.stdout.count(f"resuming {shown} (preempted) from step {status.step}") == 1
    room.assert_as_undisturbed(run, *two)
