"""A Slurm cluster of this machine alone, with all that it writes in one folder: set up, and torn down again.

It takes Debian's packages slurm-wlm (22.05 was tried) and munge, and root; it keeps no accounts.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "squeue", "scontrol", "scancel")

# A job that is put back into the queue waits until its credential has run out: 5 seconds here, else two minutes.
CONFIGURATION = """
ClusterName=rtx
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=1,sched_interval=2
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=10
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=4000
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Return why this machine cannot be a cluster, or nothing."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    if missing:
        return f"no {', '.join(missing)} on the PATH (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "its daemons must be started by root"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start a cluster of one node with two processors; yields the variables by which commands find it."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        ports = [one.getsockname()[1] for one in (first, second)]
    text = CONFIGURATION.format(host=socket.gethostname(), folder=folder, ports=ports)
    (folder / "slurm.conf").write_text(text)
    variables = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    environment = {**os.environ, **variables}
    files = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid"}
    files |= {"log-file": "munged.log", "seed-file": "munged.seed"}
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    try:
        for command in (["munged", "--force", *options], ["slurmctld"], ["slurmd"]):
            subprocess.run(command, env=environment, check=True, capture_output=True)
        asked, end = ["sinfo", "--noheader", "--format=%T"], time.monotonic() + 30
        while subprocess.run(asked, env=environment, capture_output=True, text=True).stdout.strip() != "idle":
            assert time.monotonic() < end, "the node of the cluster is not idle after 30 seconds"
            time.sleep(0.2)
        yield variables
    finally:
        subprocess.run(["scancel", "--me", "--signal=KILL", "--full"], env=environment, capture_output=True)
        for name in ("slurmd", "slurmctld", "munged"):
            stop(folder / f"{name}.pid")


def stop(pid_file: Path) -> None:
    """End a daemon and wait until it is gone."""
    with contextlib.suppress(OSError, ValueError):
        number = int(pid_file.read_text())
        os.kill(number, signal.SIGTERM)
        for _ in range(100):
            os.kill(number, 0)
            time.sleep(0.1)
        os.kill(number, signal.SIGKILL)
