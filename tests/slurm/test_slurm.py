"""A miniature of Table 1 as jobs of a real Slurm: one is put back into the queue, one is killed, the table is right.

RTX_SLURM_ROWS=27 runs the whole table rather than four of its rows: 30 jobs, for two windows reach the baselines, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import why_not
from slurm_jobs import JOBS, PATIENCE, SMALL, environment, of_job, patiently, rtx, states

from rtx.training.checkpoint import read_checkpoint
from rtx.training.run_folder import read_status

__all__ = ["environment"]

WHOLE = os.environ.get("RTX_SLURM_ROWS") == "27"
ROWS = (
    ("experiment=cifar10_grid,cifar10_baselines", "model.layers=12", "model.heads=8", "routing.window=16,32")
    if WHOLE
    else (
        "experiment=cifar10_grid",
        "model.layers=2",
        "model.heads=2",
        "routing.heads=1,2",
        "routing.layers=1,2",
        "routing.window=16",
    )
)

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"no Slurm: {why_not()}")


def test_a_table_goes_through_a_queue(tmp_path: Path, environment: dict[str, str]) -> None:
    words = ["train", "-m", *ROWS, *SMALL, *JOBS]
    prepared = rtx(tmp_path, environment, "data", "prepare", *SMALL[1:4])
    assert prepared.returncode == 0, prepared.stderr
    root = tmp_path / "outputs" / "table"

    def stepping() -> list[Path]:
        """The runs under way, past a checkpoint and far from their end."""
        every = [
            (path.parent.parent, read_status(path.parent.parent) or {}) for path in root.glob("*/checkpoints/last.ckpt")
        ]
        return [run for run, status in every if status.get("state") == "running" and status.get("step", 0) < 150]

    command = [sys.executable, "-m", "rtx", *words]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as sweep:
        patiently(lambda: len(stepping()) > 1 or sweep.poll() is not None, "two jobs at work")
        assert sweep.poll() is None, sweep.communicate()[0]
        back, killed = stepping()[:2]
        jobs = of_job(environment, back), of_job(environment, killed)
        subprocess.run(["scontrol", "requeue", jobs[0]], env=environment, check=True)
        subprocess.run(["scancel", "--signal=KILL", "--full", jobs[1]], env=environment, check=True)
        said, _ = sweep.communicate(timeout=PATIENCE)
    assert sweep.returncode == 1, said
    assert "Traceback" not in said and "sacct" not in said
    ended = states(said)
    assert ended.pop("preempted", None) == [killed.name], said  # it noticed that its job had gone, and saved
    assert "its job ended: srun: error" in said and "Killed" in said
    assert list(ended) == ["done"] and back.name in ended["done"]
    assert len(ended["done"]) == (29 if WHOLE else 3)
    assert len((back / "resumes.jsonl").read_text().splitlines()) == 1

    again = rtx(tmp_path, environment, *words)
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count(": begins") == 1
    assert sorted(states(again.stdout)["done"]) == sorted([*ended["done"], killed.name])

    for run in (back, killed):
        same_weights_as_undisturbed(tmp_path, environment, run)
    report = rtx(tmp_path, environment, "report", str(root))
    assert report.returncode == 0, report.stderr
    rows = [
        row for table in json.loads((root / "report" / "report.json").read_text())["tables"] for row in table["rows"]
    ]
    finals = {(read_status(run.parent) or {})["final"]["bits"] for run in root.glob("*/status.json")}
    assert {row["ours"] for row in rows if isinstance(row.get("ours"), float)} == finals


def same_weights_as_undisturbed(tmp_path: Path, environment: dict[str, str], run: Path) -> None:
    """Compare a run's last weights, bit for bit, with those of the same configuration trained in one go."""
    alone = tmp_path / f"alone-{run.name}"
    sweep = json.loads((run.parent / "sweeps.jsonl").read_text().splitlines()[0])
    swept = sweep["cells"][run.name].split()
    fixed = [word for word in (*ROWS, *SMALL) if "," not in word]
    answer = rtx(tmp_path, {**environment, "RTX_RUN": str(alone)}, "train", *fixed, *swept)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    weights = [read_checkpoint(folder / "checkpoints" / "last.ckpt")["model"] for folder in (run, alone)]
    assert weights[0].keys() == weights[1].keys()
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[0])
