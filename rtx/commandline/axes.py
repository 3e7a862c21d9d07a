"""The cells of a sweep: every combination of listed values, and what an experiment's file lays out by itself.

A file of `conf/experiment/` carries axes as Hydra users write them (`hydra.sweeper.params`), or cells that are no grid
(`sweep.cells`). The command line reaches all cells: an axis given there replaces the file's, and any other key goes to
each cell; what a listed cell sets is what makes it that cell, so there its own value stands.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

import hydra

from rtx.commandline.overrides import MOST_CELLS, Checked, cells, check_overrides
from rtx.compose import CONFIG_NAME, for_hydra, hydra_session
from rtx.errors import UserError
from rtx.options import LAUNCHED
from rtx.training.signals import SWEEP_VARIABLE

CELLS = "sweep.cells"


def lay_out_cells(checked: Sequence[Checked]) -> tuple[list[list[str]], list[str]]:
    """Return the overrides of every cell, and the keys by which cells may differ.

    Args:
        checked: what the user wrote. Several experiments are laid out one after the other.

    Raises:
        UserError: an experiment's own axes are wrong, or there are too many cells.
    """
    laid_out: list[list[str]] = []
    swept: list[str] = []
    for option in experiments(checked):
        given = [Checked("experiment", (option,)) if entry.key == "experiment" else entry for entry in checked]
        axes, listed = own_axes(given)
        for own in listed or [[]]:
            every = [*axes, *given, *own]
            laid_out += cells(every)
            swept += [entry.key for entry in last_of_each(every) if len(entry.values) > 1 or entry in own]
    if len(laid_out) > MOST_CELLS:
        raise UserError(f"the sweep has {len(laid_out):,} cells; at most {MOST_CELLS:,} are taken at once")
    several = ["experiment"] if len(experiments(checked)) > 1 else []
    return laid_out, [key for key in dict.fromkeys([*several, *swept]) if key != CELLS]


def experiments(checked: Sequence[Checked]) -> tuple[str, ...]:
    """Return the experiments that are chosen, or one that stands for none."""
    chosen = [entry.values for entry in checked if entry.key == "experiment"]
    return chosen[-1] if chosen else ("null",)


def last_of_each(checked: Sequence[Checked]) -> list[Checked]:
    """Return the override that counts for each key: the last one."""
    return list({entry.key: entry for entry in checked}.values())


def own_axes(checked: Sequence[Checked]) -> tuple[list[Checked], list[list[Checked]]]:
    """Return the axes of the experiment among these overrides, and the cells listed there or on the command line.

    Raises:
        UserError: a key or value in them is wrong.
    """
    relevant = [str(entry) for entry in checked if entry.key in ("experiment", CELLS)]
    if not relevant:
        return [], []
    with hydra_session():
        node = hydra.compose(CONFIG_NAME, for_hydra(relevant), return_hydra_config=True)
        axes = dict(node.hydra.sweeper.params or {})
        listed = node.sweep.cells
    return (
        told([f"{key}={values}" for key, values in axes.items()], "hydra.sweeper.params"),
        [listed_cell(text) for text in (listed or "").split(";") if text.strip()],
    )


def listed_cell(text: str) -> list[Checked]:
    """Return the overrides of a listed cell; its process is not to read the list again."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{CELLS}: {text.strip()!r}: {error}") from None
    return [*told(words, CELLS, sweep=False), Checked(CELLS, ("null",))]


def told(words: list[str], where: str, sweep: bool = True) -> list[Checked]:
    """Return checked overrides; an error says where they stand."""
    try:
        return check_overrides(words, sweep=sweep)
    except UserError as error:
        raise UserError("\n".join(f"{where}: {line}" for line in str(error).splitlines())) from None


def refuse_half_a_sweep(arguments: Sequence[str]) -> None:
    """Refuse to train one cell of an experiment that is a sweep, unless the words say which, and jobs without a sweep.

    Raises:
        UserError: names the axes that have no value, or the hardware that is for sweeps.
    """
    checked = check_overrides(arguments)
    for entry in checked:
        if entry.key == "hardware" and entry.values[0] in LAUNCHED and SWEEP_VARIABLE not in os.environ:
            raise UserError(f"{entry}: makes jobs of the cells of a sweep; add -m (one cell is a sweep, too)")
    if not any(entry.key == "experiment" for entry in checked):
        return
    axes, listed = own_axes(checked)
    given = {entry.key for entry in checked}
    missing = [str(axis) for axis in axes if len(axis.values) > 1 and axis.key not in given]
    if missing or listed:
        what = " ".join(missing) or f"{len(listed)} cells"
        one = "give each key one value" if missing else f"give {CELLS}=null and the keys of one"
        raise UserError(
            f"experiment={experiments(checked)[0]} is a sweep ({what}): add -m to run it; for a single cell, {one}"
        )
