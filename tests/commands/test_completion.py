"""Completion in bash: the script is read by a bash, and its function called as bash would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rtx.commands.completion import SCRIPT, candidates

ROOT = Path(__file__).resolve().parents[2]


def test_bash_completes_by_the_script() -> None:
    asked = 'COMP_LINE="rtx train data=en"; COMP_POINT=${#COMP_LINE}; _rtx; printf "<%s>" "${COMPREPLY[@]}"'
    script = f'rtx() {{ "{sys.executable}" -m rtx "$@"; }}\n{SCRIPT}\n{asked}'
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert (answer.stdout, answer.stderr) == ("<enwik8 >", "")


@pytest.mark.parametrize(
    ("line", "some"),
    [
        ("rtx tr", ["train "]),
        ("rtx train rou", ["routing=", "routing.selection="]),
        ("rtx train -m seed=1 model.recompute=", ["auto ", "true ", "false "]),
        ("rtx train -m routing=topk,ca", ["topk,causal "]),
        ("rtx train -m sweep.p", ["sweep.parallel="]),
        ("rtx train --multirun sweep.p", ["sweep.parallel="]),
        ("rtx train --cfg job data=enwik8 data.le", ["data.length="]),
        ("rtx plan --cfg job dat", ["data=", "data.name="]),
        ("rtx audit rou", ["routing=", "routing.selection="]),
        ("rtx audit outputs/rtx/run len", ["length="]),
        ("rtx resume outputs/rtx/run trainer.st", ["trainer.steps="]),
        ("rtx eval outputs/rtx/run sp", ["split="]),
        ("rtx eval outputs/rtx/run split=t", ["test ", "train "]),
        ("rtx analyze pat", ["patterns "]),
        ("rtx analyze patterns outputs/rtx/run la", ["layer="]),
        ("rtx schema mo", []),
    ],
)
def test_what_may_stand_at_the_end_of_a_line(line: str, some: list[str]) -> None:
    found = candidates(line)
    assert found[: len(some)] == some if len(some) != 1 else some[0] in found
