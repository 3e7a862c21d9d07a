"""A small sweep over pictures for a cluster, and what its tests ask and read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cluster import cluster
from PIL import Image

from rtx.training.run_folder import read_status

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    *("name=table", "data=images", "data.path=pictures", "data.size=4", "model.hidden=32"),
    *("model.ffn_hidden=32", "model.window=16", "trainer.steps=200", "trainer.batch_size=2", "trainer.val_every=100"),
    *("trainer.checkpoint_every=10", "trainer.log_every=10", "hardware.threads=1", "logger=jsonl"),
)
SHALLOW = ("model.layers=2", "model.heads=2", "routing.heads=1", "routing.layers=1", "routing.window=16")
JOBS = (
    *("hardware=slurm", "hydra.launcher.partition=test", "hydra.launcher.cpus_per_task=1"),
    *("hydra.launcher.gpus_per_node=0", "hydra.launcher.mem_gb=1", "hydra.launcher.timeout_min=30"),
)
PATIENCE = 900.0


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A cluster, and a folder with pictures."""
    (tmp_path / "pictures").mkdir()
    generator = np.random.default_rng(0)
    for number in range(40):
        pixels = generator.integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "pictures" / f"{number:02}.png")
    own = {"PYTHONPATH": str(ROOT), "RTX_DATA": str(tmp_path / "data"), "RTX_OUTPUTS": str(tmp_path / "outputs")}
    with cluster(tmp_path / "cluster") as variables:
        yield {**os.environ, **own, **variables}


def patiently(ready: Callable[[], object], what: str) -> None:
    """Wait until something is so."""
    end = time.monotonic() + PATIENCE
    while not ready():
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(0.1)


def rtx(tmp_path: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command of rtx to its end."""
    command = [sys.executable, "-m", "rtx", *words]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def of_job(environment: dict[str, str], run: Path) -> str:
    """Return the number of the job that works on a run: the one that has written its output."""
    answer = subprocess.run(
        ["squeue", "--me", "--noheader", "--states=RUNNING", "--format=%i"],
        env=environment,
        capture_output=True,
        text=True,
    )
    pid = (read_status(run) or {})["pid"]
    for number in answer.stdout.split():
        listed = subprocess.run(["scontrol", "listpids", number], env=environment, capture_output=True, text=True)
        if str(pid) in re.findall(r"^(\d+)", listed.stdout, re.MULTILINE):
            return number
    raise AssertionError(f"no job of {run.name}: {answer.stdout}")


def states(said: str) -> dict[str, list[str]]:
    """Return the run folders in each state of the closing table."""
    found: dict[str, list[str]] = {}
    for line in said.partition("\ncell  overrides")[2].splitlines()[1:]:
        if row := re.match(r"\d+ .* (done|failed|killed|preempted|not started)\b.* (\S+)$", line):
            found.setdefault(row[1], []).append(Path(row[2]).name)
    return found
