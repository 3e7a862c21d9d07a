"""Sweepers that draw values by the scores of earlier cells: one of this file, and Optuna's where it
is installed.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.helpers.stand_ins import SMALL, Sweep, begin, stand_in, table, write_book

SWEEPER = '''
from dataclasses import dataclass

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


class Halving(Sweeper):
    """Takes the better half of an interval, again and again."""

    def __init__(self, rounds, params=None):
        self.rounds = rounds

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context, task_function, config
        )

    def sweep(self, arguments):
        overrides = OverridesParser.create().parse_overrides(arguments)
        (axis,) = [override for override in overrides if override.is_interval_sweep()]
        fixed = [override.input_line for override in overrides if override is not axis]
        ends = [axis.value().start, axis.value().end]
        for number in range(self.rounds):
            jobs = [[*fixed, f"{axis.key_or_group}={end}"] for end in ends]
            returns = self.launcher.launch(jobs, initial_job_idx=2 * number)
            scores = [job.return_value for job in returns]
            middle = sum(ends) / 2
            ends = [ends[0], middle] if scores[0] < scores[1] else [middle, ends[1]]


@dataclass
class HalvingConfig:
    _target_: str = "hydra_plugins.halving.Halving"
    rounds: int = 3
    params: dict | None = None


ConfigStore.instance().store(group="hydra/sweeper", name="halving", node=HalvingConfig)
'''
BY_RATE = """
rate = next(float(word.partition("=")[2]) for word in sys.argv if "optimizer.lr=" in word)
if rate > float(os.environ["FAILS_ABOVE"]): end(1, "failed", reason="the loss is NaN")
end(0, "done", final=dict(bits=1 + abs(rate - 0.25)))
"""
"""A cell whose score is best at a learning rate of 0.25."""


@pytest.fixture
def halving(sweep: Sweep, tmp_path: Path) -> Sweep:
    """A place from which Hydra finds the sweeper above."""
    plugins = tmp_path / "plugins" / "hydra_plugins"
    plugins.mkdir(parents=True)
    (plugins / "halving.py").write_text(SWEEPER)
    checkout = os.environ["PYTHONPATH"]
    sweep.patch.setenv("PYTHONPATH", os.pathsep.join([str(plugins.parent), checkout]))
    sweep.patch.setenv("FAILS_ABOVE", "2")
    return sweep


def ask(*words: str) -> tuple[int, str]:
    """Sweep by halving in a process of its own, which finds the plug-in; returns exit code and
    output.
    """
    axis = "optimizer.lr=interval(0.0625,1.0625)"
    with begin(stand_in(BY_RATE), "hydra/sweeper=halving", axis, *words) as process:
        printed, _ = process.communicate(timeout=600)
    return process.returncode, printed


def test_a_sweeper_gets_the_score_of_each_cell_also_of_one_that_was_done_before(
    halving: Sweep,
) -> None:
    words = ("name=search", "hydra.sweeper.rounds=4")
    halving.patch.setenv("FAILS_ABOVE", "1")
    code, printed = ask(*words)
    assert code == 1, "a cell that fails is the sweeper's to judge"
    done, failed = table(printed)
    assert done[1] == "done" and failed[1] == "failed" and "the loss is NaN" in " ".join(failed)
    halving.patch.setenv("FAILS_ABOVE", "2")
    code, printed = ask(*words, "sweep.retry=true")
    assert code == 0
    # Both ends, the one that had failed, then a middle in each of three rounds.
    rates = [arguments[-1] for arguments, _ in halving.started]
    assert rates == [
        "optimizer.lr=0.0625",
        "optimizer.lr=1.0625",
        "optimizer.lr=1.0625",
        "optimizer.lr=0.5625",
        "optimizer.lr=0.3125",
        "optimizer.lr=0.1875",
    ]
    rows = table(printed)
    assert len(rows) == 5 and "cells as the sweeper draws them" in printed
    assert rows[0][:3] == ["optimizer.lr=0.0625", "done", "before"]
    best = printed.rpartition("\ncell ")[2].splitlines()[1]
    assert best.split()[0] in ("optimizer.lr=0.1875", "optimizer.lr=0.3125")
    again, printed = ask(*words)
    assert again == 0 and len(halving.started) == len(rates)
    assert [row[1:3] for row in table(printed)] == [["done", "before"]] * 5


@pytest.mark.skipif(
    importlib.util.find_spec("hydra_plugins.hydra_optuna_sweeper") is None,
    reason="needs hydra-optuna-sweeper",
)
def test_optuna(sweep: Sweep) -> None:
    write_book()
    words = (
        *SMALL,
        "name=optuna",
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.sampler.seed=1",
        "optimizer.lr=tag(log,interval(1e-4,1e-2))",
        "routing.selection=choice(causal,topk)",
    )
    # In a process of its own: Optuna 2 imports what warns.
    with begin(sys.executable, *words) as process:
        printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and len(table(printed)) == 2
    assert "best_value" in (sweep.outputs / "optuna" / "optimization_results.yaml").read_text()
    assert os.listdir(sweep.outputs) == ["optuna"]
