"""`rtx train -m`: Hydra's sweeper chooses the runs, our launcher runs each as a cell.

Hydra gets a `Sweep` as its task function. A sweeper that optimizes, such as hydra/sweeper=optuna,
gets the objective of each run, to be minimized: the final score on the validation split in bits.
"""

from __future__ import annotations

import asyncio
import copy
import signal
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, flag_override

from rtx.data.catalog import check_source, data_root
from rtx.disk import append, make_folder
from rtx.errors import RunFailed, UserError, nearest, plural, refuse, shorten
from rtx.progress import say
from rtx.runs.folder import SWEEPS, outputs_root, shown, unwritable
from rtx.runs.records import SweepRow
from rtx.runs.signals import EXIT_CODES
from rtx.runs.status import SAMPLED, bits_of, read_status, utc_now
from rtx.settings.compose import (
    chosen,
    composed,
    user_errors,
)
from rtx.settings.hydra_words import SWEEPERS, is_hydra_key
from rtx.settings.overrides import LAUNCHED, Override
from rtx.settings.presets import conf_dir, preset
from rtx.settings.requirements import check_logger
from rtx.settings.run_config import to_yaml
from rtx.sweeps.cells import (
    Cell,
    cells_of,
    grid_jobs,
    jobs_of,
    merged_lines,
    refuse_idle,
    replaced_lines,
)
from rtx.sweeps.launcher import Launcher
from rtx.sweeps.outcomes import NO_CODE, Outcome, has_score
from rtx.sweeps.slurm import submitter
from rtx.tables import aligned, room_for, shortened
from rtx.terminal import terminal_width

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

# Hydra names its default sweeper so in its configuration.
BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
GRID = "hydra_plugins.rtx_sweeps.GridSweeper"
"""The sweeper that takes every combination; any other draws values by the scores of earlier cells.
"""


class SweepStopped(Exception):
    """A signal has stopped the sweep; this exception ends the loop of Hydra's sweeper."""


def sweep(
    checked: Sequence[Override],
    command: str,
    *,
    parallel: int | None = None,
    retry: bool = False,
    preview: bool = False,
) -> int:
    """Train every run of a sweep.

    Args:
        checked: the overrides of the sweep.
        command: the command line, for the record.
        parallel: cells side by side; None: one, or all where they are jobs of Slurm.
        retry: run cells that failed before again.
        preview: print the configurations of the runs instead.

    Returns:
        0 if every cell is done, 1 if not, 130 or 143 after a signal, which the cells get and obey
        first.
    """
    task = Sweep(checked, command, parallel=parallel, retry=retry, preview=preview)
    refuse_for_launcher(checked)
    config = sweep_config(checked)
    task.is_grid = config.hydra.sweeper._target_ == GRID
    refuse_for_sweeper(checked, task)
    failure = None
    try:
        run_sweeper(config, task)
    except SweepStopped:
        pass
    except RunFailed as error:
        # The sweeper gives up after too many failed cells.
        failure = error
    if preview:
        return 0
    task.close()
    if task.stopped_by:
        return EXIT_CODES[signal.Signals(task.stopped_by)]
    all_done = all(outcome.is_done for outcome in task.outcomes.values())
    return 0 if all_done and failure is None else 1


def sweep_config(checked: Sequence[Override]) -> DictConfig:
    """Return what the files of `conf/` give for a sweep: its sweeper and its launcher, with their
    parameters.

    Hydra's own sweeper, which combines lists, is replaced by `rtx_grid`.
    """
    single = {entry.key: entry for entry in checked if not entry.sweeps}
    groups = chosen(entry for key, entry in single.items() if not is_hydra_key(key))
    words = [str(entry) for key, entry in single.items() if is_hydra_key(key)]
    if "name" in single:
        words.append(single["name"].in_hydra_words())
    if "hydra/launcher" not in single:
        launcher = "rtx_slurm" if runs_as_jobs(checked) else "rtx_processes"
        words.append(f"hydra/launcher={launcher}")
    if "hydra/sweeper" in single:
        refuse_unknown_sweeper(single["hydra/sweeper"].values[0])
    config = composed((*groups, *words))
    if config.hydra.sweeper._target_ == BASIC:
        words = [word for word in words if not word.startswith("hydra/sweeper=")]
        config = composed((*groups, *words, "hydra/sweeper=rtx_grid"))
    return copy.deepcopy(config)


def refuse_unknown_sweeper(name: str) -> None:
    """Raise `UserError` for a sweeper that no installed plug-in and no preset has."""
    from hydra.core.plugins import Plugins

    # Plug-ins store their options when they are first discovered.
    Plugins.instance()
    files = ConfigStore.instance().list("hydra/sweeper")
    names = [file.removesuffix(".yaml") for file in files if file.endswith(".yaml")]
    if name in names or preset("hydra/sweeper", name):
        return
    near = nearest(name, [*names, *SWEEPERS])
    word = f"hydra/sweeper={shorten(name)}"
    raise UserError(f"{word}: there is no such sweeper{near}; here are {', '.join(sorted(names))}")


def runs_as_jobs(checked: Sequence[Override]) -> bool:
    """Whether cells are jobs of Slurm; `UserError` where some would be and some not."""
    last = {entry.key: entry for entry in checked}
    hardware = last.get("hardware")
    launcher = last.get("hydra/launcher")
    if launcher and launcher.values == ("rtx_slurm",):
        return True
    if hardware is None or not {*hardware.values} & {*LAUNCHED}:
        return False
    if hardware.sweeps:
        raise UserError(f"{hardware}: jobs are made of all cells or of none; give one value")
    return True


def refuse_for_launcher(checked: Sequence[Override]) -> None:
    """Raise `UserError` for parameters of jobs where cells are processes."""
    if not runs_as_jobs(checked):
        words = [str(entry) for entry in checked if entry.key.startswith("hydra.launcher.")]
        refuse(f"{word}: has no effect without hardware={LAUNCHED[0]}" for word in words)


def refuse_for_sweeper(checked: Sequence[Override], task: Sweep) -> None:
    """Raise `UserError` for overrides that do not fit the sweeper."""
    last = {entry.key: entry for entry in checked}
    intervals = [entry for entry in last.values() if not entry.values]
    if intervals and task.is_grid:
        entry = intervals[0]
        instead = f"hydra/sweeper=optuna draws from it; for a grid list values, {entry.key}=a,b"
        raise UserError(f"{entry}: an interval has no list of values; {instead}")
    if task.preview and not task.is_grid:
        raise UserError("--cfg job: the sweeper chooses the cells only while the sweep runs")


def run_sweeper(config: DictConfig, task: Sweep) -> None:
    """Let the sweeper of a configuration run the cells of a sweep."""
    # HydraContext needs it, and Hydra has no public name for it.
    from hydra._internal.callbacks import Callbacks
    from hydra.core.plugins import Plugins
    from hydra.types import HydraContext, RunMode

    with user_errors():
        folder = outputs_root() / str(config.name)
        with flag_override(config, ["readonly", "struct"], [False, False]):
            config.hydra.mode = RunMode.MULTIRUN
            config.hydra.sweep.dir = str(folder)
        if not task.is_grid and not task.preview:
            # Such sweepers write their results there.
            make_sweep_folder(folder)
        with hydra.initialize_config_dir(str(conf_dir()), job_name="rtx", version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
        context = HydraContext(config_loader=loader, callbacks=Callbacks())
        sweeper = Plugins.instance().instantiate_sweeper(
            hydra_context=context, task_function=task, config=config
        )
        arguments = [
            entry.in_hydra_words() for entry in task.checked if not is_hydra_key(entry.key)
        ]
        sweeper.sweep(arguments)


def make_sweep_folder(folder: Path) -> None:
    """Make a folder of runs; `UserError` where that cannot be."""
    try:
        make_folder(folder)
    except OSError as error:
        raise UserError(unwritable(folder, error)) from error


class Sweep:
    """The runs of one `rtx train -m`: the task that Hydra's sweeper and launcher get."""

    def __init__(
        self,
        checked: Sequence[Override],
        command: str,
        *,
        parallel: int | None,
        retry: bool,
        preview: bool,
    ) -> None:
        self.checked = checked
        self.command = command
        self.parallel = parallel
        self.retry = retry
        self.preview = preview
        self.is_grid = True
        self.cells: dict[Path, Cell] = {}
        self.outcomes: dict[Path, Outcome] = {}
        self.stopped_by = 0

    def __call__(self, config: Any) -> NoReturn:
        """Not called: Hydra's own launchers call the task, but ours start processes."""
        raise AssertionError("a cell is a process of its own")

    @property
    def folders(self) -> list[Path]:
        """The folders in which the runs are."""
        return list(dict.fromkeys(cell.folder.parent for cell in self.cells.values()))

    def grid(self) -> list[list[str]]:
        """Return the overrides of every combination of the listed values, in Hydra's grammar."""
        jobs = grid_jobs(self.checked)
        return [[entry.in_hydra_words() for entry in job] for job in jobs]

    def launch(
        self,
        words: Iterable[Sequence[str]],
        first: int,
        slurm: Mapping[str, Any] | None = None,
    ) -> list[JobReturn]:
        """Run jobs that a sweeper asks for, and return the objective of each.

        Args:
            words: the overrides of each job, `key=value` in Hydra's grammar.
            first: how many jobs the sweeper has asked for before.
            slurm: parameters of a job of Slurm; None: cells are processes here.

        Raises:
            UserError: a cell is impossible; then none of these has begun.
            SweepStopped: a signal came.
        """
        lists = [list(job) for job in words]
        jobs = jobs_of(lists)
        if self.preview:
            cells = cells_of(jobs, self.checked, report=print_configuration)
            refuse_idle(list(cells.values()), self.checked)
            return []
        cells = cells_of(jobs, self.checked, first=first + 1, merge=not self.is_grid)
        if self.is_grid:
            refuse_idle(list(cells.values()), self.checked)
        launcher = self.prepare(list(cells.values()), slurm)
        self.announce(list(cells.values()))
        outcomes = asyncio.run(launcher.launch())
        for folder, outcome in zip(cells, outcomes, strict=True):
            earlier = self.outcomes.get(folder)
            if earlier is None or not earlier.is_done:
                self.cells[folder] = cells[folder]
                self.outcomes[folder] = outcome
        self.stopped_by = launcher.stopped_by
        if self.stopped_by:
            raise SweepStopped
        if self.is_grid:
            return []
        return self.job_returns(lists, jobs)

    def prepare(self, cells: list[Cell], slurm: Mapping[str, Any] | None) -> Launcher:
        """Return what runs the cells, after all that can be refused before one begins."""
        for cell in cells:
            check_logger(cell.config)
        at_once = self.parallel or (len(cells) if slurm else 1)
        launcher = Launcher(
            cells,
            self.retry,
            min(at_once, len(cells)),
            total=len(cells) if self.is_grid else None,
            starter=submitter(slurm) if slurm else None,
        )
        open_cells = [cell for cell in cells if not has_score(read_status(cell.folder))]
        data = {str(cell.config.data): cell.config.data for cell in open_cells}
        for config in data.values():
            check_source(config, data_root(), lambda line: None)
        return launcher

    def announce(self, cells: Sequence[Cell]) -> None:
        """Record cells in the folders of their runs, and print what the sweep is."""
        folders = record_sweep(cells, self.command)
        if self.cells:
            # A later batch of a sweeper that draws values.
            return
        if self.is_grid:
            for line in [*replaced_lines(self.checked), *merged_lines(cells)]:
                say(line)
        number = plural(len(cells), "cell") if self.is_grid else "cells as the sweeper draws them"
        watched = " ".join(map(shown, folders))
        say(f"{number}, each a run of its own; to watch: rtx sweep {watched}")

    def job_returns(self, lists: Sequence[Sequence[str]], jobs: Sequence[Any]) -> list[JobReturn]:
        """Return to a sweeper the objective of each job: the final validation score in bits, or why
        there is none.
        """
        from hydra.core.utils import JobReturn, JobStatus

        returns = []
        for words, job in zip(lists, jobs, strict=True):
            (folder,) = cells_of([job], self.checked)
            outcome = self.outcomes[folder]
            status = read_status(folder)
            if outcome.is_done and status is not None and status.final is not None:
                result = JobReturn(overrides=words, status=JobStatus.COMPLETED)
                result.return_value = status.final.bits
            else:
                result = JobReturn(overrides=words, status=JobStatus.FAILED)
                reason = outcome.reason or f"exit code {outcome.code}"
                result.return_value = RunFailed(f"{shown(folder)}: {outcome.word}: {reason}")
            returns.append(result)
        return returns

    def close(self) -> None:
        """Print the closing table, and save a plot of the scores beside the cells of a sweep that
        came to its end.
        """
        if not self.cells:
            return
        if not self.stopped_by:
            # It imports matplotlib, which takes a third of a second.
            from rtx.report.formats import save_plots

            say(save_plots(self.folders))
        cells = list(self.cells.values())
        say(closing_table(cells, [self.outcomes[cell.folder] for cell in cells]))


def print_configuration(cell: Cell) -> None:
    """Print the configuration of a cell as YAML, at once: the next cells may take a while."""
    title = f"# cell {cell.number}: {shorten(cell.title)}"
    print(f"---\n{title}\n{to_yaml(cell.config)}", end="", flush=True)


def record_sweep(cells: Sequence[Cell], command: str) -> list[Path]:
    """Append the command, and the title of each cell, to sweeps.jsonl in the folders of the runs.

    Returns those.
    """
    folders = list(dict.fromkeys(cell.folder.parent for cell in cells))
    time = utc_now()
    for folder in folders:
        titles = {cell.folder.name: cell.title for cell in cells if cell.folder.parent == folder}
        row = SweepRow(time=time, command=command, cells=titles)
        make_sweep_folder(folder)
        try:
            append(folder, SWEEPS, f"{row.model_dump_json()}\n".encode())
        except OSError as error:
            raise UserError(unwritable(folder, error)) from error
    return folders


def closing_table(cells: Sequence[Cell], outcomes: Sequence[Outcome]) -> str:
    """Return the lines that close a sweep: each cell, how it ended, its bits, its run.

    The best first.

    The reason follows below a cell that did not end well. At 80 columns only reasons are wrapped.
    """
    width = terminal_width()
    rows = []
    for cell, outcome in zip(cells, outcomes, strict=True):
        status = read_status(cell.folder) if outcome.is_done else None
        rows.append((cell, outcome, bits_of(status)))
    rows.sort(key=lambda row: float(row[2].lstrip("~") or "inf"))
    heads = ["cell", "state", "bits", "run"]
    texts = [[cell.title, outcome.word, bits, cell.folder.name] for cell, outcome, bits in rows]
    room = room_for(0, [heads, *texts], width)
    titles = shortened([cell.title for cell, _, _ in rows], room)
    for text, title in zip(texts, titles, strict=True):
        text[0] = title
    head, *lines = aligned([heads, *texts], right={2})
    page = ["", head]
    for line, (_, outcome, _) in zip(lines, rows, strict=True):
        page.append(line)
        page += reason_lines(outcome, width)
    folders = dict.fromkeys(shown(cell.folder.parent) for cell in cells)
    page.append(f"runs: {', '.join(f'{folder}/<run>' for folder in folders)}")
    if any("~" in bits for _, _, bits in rows):
        page.append(SAMPLED)
    return "\n".join(page)


def reason_lines(outcome: Outcome, width: int) -> list[str]:
    """Return why a cell is not done, with the exit code of its process, below its line of the
    closing table.
    """
    code = "" if outcome.code in (0, NO_CODE) else f"exit {outcome.code}"
    text = ": ".join(part for part in (code, outcome.reason) if part)
    return textwrap.wrap(
        text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )
