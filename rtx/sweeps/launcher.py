"""`rtx train -m`: every cell of a sweep in a process of its own, so that a crash or a kill of one touches no other.

With hardware=slurm a cell is a job, by submitit; hydra-submitit-launcher would lose all to the first that fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rtx.cli.help import terminal_width
from rtx.cli.options import read_words
from rtx.data.catalog import check_source, data_root
from rtx.disk import open_no_link
from rtx.errors import UserError, plural, printable, refuse, shorten
from rtx.machine import cores, system_kills
from rtx.progress import WholeLines, say
from rtx.report.tables import GAP, aligned, shortened
from rtx.runs.folder import shown, unwritable
from rtx.runs.records import SweepRow
from rtx.runs.signals import EXIT_CODES
from rtx.runs.status import SAMPLED, bits_of, read_status, utc_now
from rtx.settings.compose import composed, user_errors
from rtx.settings.logger import check_logger
from rtx.settings.overrides import LAUNCHED, check_overrides
from rtx.settings.run_config import to_yaml
from rtx.sweeps.cells import (
    NO_CODE,
    Cell,
    Outcome,
    ended_before,
    ending,
    has_score,
    lay_out,
    merged_lines,
)
from rtx.variables import SWEEP_VARIABLE

OUTPUT = "output.log"  # what a cell prints; in its folder
QUEUE_SECONDS = 5.0  # between two looks at the queue of a cluster
RESULT_SECONDS = 15.0  # for what a job returns to appear on a disk that machines share


def sweep(arguments: Sequence[str], preview: bool = False) -> int:
    """Run `rtx train` for every combination of the listed values, when all have been checked; `preview`: print them.

    Returns 0 if every cell is done, 1 if not, 130 or 143 after a signal (which the cells that run get, and obey first).
    """
    words = read_words("train -m", arguments)
    checked = check_overrides(words.overrides, sweep=True)
    cells = lay_out(checked)
    if preview:
        for cell in cells:
            print(
                f"---\n# cell {cell.number}: {shorten(cell.title)}\n{to_yaml(cell.config)}", end=""
            )
        return 0
    jobs = job_words(checked)
    at_once = min(words.options.parallel or (len(cells) if jobs else 1), len(cells))
    for cell in cells:
        check_logger(cell.config)
    launcher = Launcher(
        cells, words.options.retry, at_once, submitter(cells, jobs) if jobs else None
    )
    needed = {
        str(cell.config.data): cell.config.data
        for cell in cells
        if not has_score(read_status(cell.folder))
    }
    for data in needed.values():
        check_source(data, data_root(), lambda line: None)
    roots = record_sweep(cells, arguments)
    for line in merged_lines(cells):
        say(line)
    say(
        f"{plural(len(cells), 'cell')}, each a run of its own; to watch: rtx sweep {' '.join(map(shown, roots))}"
    )
    outcomes = asyncio.run(launcher.launch())
    if not launcher.stopped_by:
        from rtx.report.contents import (
            save_plots,
        )  # takes a third of a second, and only a sweep that ends draws

        say(save_plots(roots))
    say(closing_table(cells, outcomes))
    if launcher.stopped_by:
        return EXIT_CODES[signal.Signals(launcher.stopped_by)]
    return 0 if all(outcome.word.startswith("done") for outcome in outcomes) else 1


def record_sweep(cells: Sequence[Cell], arguments: Sequence[str]) -> list[Path]:
    """Append to sweeps.jsonl, beside the cells, the command and what each cell is; returns the folders of the sweep."""
    command = shlex.join(["rtx", "train", "-m", *arguments])
    roots = list(dict.fromkeys(cell.folder.parent for cell in cells))
    for root in roots:
        mine = {cell.folder.name: cell.title for cell in cells if cell.folder.parent == root}
        try:
            root.mkdir(parents=True, exist_ok=True)
            with open_no_link(root / "sweeps.jsonl", "a") as file:
                row = SweepRow(time=utc_now(), command=command, cells=mine)
                file.write(f"{row.model_dump_json()}\n")
        except OSError as error:
            raise UserError(unwritable(root, error)) from error
    return roots


def closing_table(cells: Sequence[Cell], outcomes: Sequence[Outcome]) -> str:
    """Return the lines that close a sweep: each cell, how it ended, its bits, its run; those with bits first.

    Below a cell that did not end well stands the reason. Nothing is broken in a terminal of 80 columns but reasons.
    """
    width, rows = terminal_width(), []
    for cell, outcome in zip(cells, outcomes, strict=True):
        status = read_status(cell.folder) if outcome.word.startswith("done") else None
        rows.append((cell, outcome, bits_of(status)))
    rows.sort(key=lambda row: float(row[2].lstrip("~") or "inf"))
    beside = [[outcome.word, bits, cell.folder.name] for cell, outcome, bits in rows]
    heads = ["state", "bits", "run"]
    taken = sum(max(map(len, column)) + GAP for column in zip(heads, *beside, strict=True))
    titles = shortened([cell.title for cell, _, _ in rows], width - taken)
    lines = aligned(
        [["cell", *heads], *([title, *row] for title, row in zip(titles, beside, strict=True))],
        right={2},
    )
    said = [lines[0]]
    for line, (_, outcome, _) in zip(lines[1:], rows, strict=True):
        said += [line, *reason_lines(outcome, width)]
    folders = dict.fromkeys(shown(cell.folder.parent) for cell in cells)
    said.append(f"runs: {', '.join(f'{folder}/<run>' for folder in folders)}")
    if any("~" in bits for _, _, bits in rows):
        said.append(SAMPLED)
    return "\n" + "\n".join(said)


def reason_lines(outcome: Outcome, width: int) -> list[str]:
    """Return why a cell is not done, with the exit code of its process, below its line of the closing table."""
    code = "" if outcome.code in (0, NO_CODE) else f"exit {outcome.code}"
    text = ": ".join(part for part in (code, outcome.reason) if part)
    return textwrap.wrap(
        text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
    )


def share(cell: Cell, place: int, places: int) -> dict[str, str]:
    """Return the variables that give one of several cells its threads and a GPU, where nobody has set them."""
    hardware, variables = cell.config.hardware, {}
    if hardware.threads is None and "OMP_NUM_THREADS" not in os.environ:
        variables["OMP_NUM_THREADS"] = str(max(1, cores() // (places * (hardware.devices or 1))))
    here = ",".join(
        str(number) for number, _ in enumerate(Path("/proc/driver/nvidia/gpus").glob("*"))
    )
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", here).split(",")
    if len(gpus) > 1 and hardware.name in ("auto", "gpu"):
        variables["CUDA_VISIBLE_DEVICES"] = gpus[place % len(gpus)]
    return variables


def start(
    words: Sequence[str], folder: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the process of a cell, in a group of its own: what the keyboard sends is passed on to it, once."""
    # The current folder is the user's: an rtx.py there is not to be run for ours, by what a cell starts either.
    safe = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", SWEEP_VARIABLE: str(os.getpid())}
    with open_no_link(folder / OUTPUT, "ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "rtx", "train", *words],
            env={**os.environ, **safe, **variables, "RTX_RUN": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


@dataclass
class Launcher:
    """Runs the cells of a sweep, so many at once."""

    cells: Sequence[Cell]
    retry: bool
    at_once: int
    submit: Callable[[Cell], Any] | None = (
        None  # starts what is polled and signalled as a process of this machine
    )
    stopped_by: int = 0  # the first signal
    running: set[Any] = field(default_factory=set)

    async def launch(self) -> list[Outcome]:
        """Run the cells, and return how each ended, in their order.

        Signals are passed on to them, but those ignored from outside (nohup) stay ignored.
        """
        for number in EXIT_CODES:
            if signal.getsignal(number) != signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self.stop, number)
        places: asyncio.Queue[int] = asyncio.Queue()
        for place in range(self.at_once):
            places.put_nowait(place)
        return await asyncio.gather(*(self.run(cell, places) for cell in self.cells))

    def stop(self, number: int) -> None:
        """Begin no cell any more, and let those that run obey the signal; at a second Ctrl-C they leave at once."""
        self.stopped_by = self.stopped_by or number
        for process in self.running:
            process.send_signal(number)

    async def run(self, cell: Cell, places: asyncio.Queue[int]) -> Outcome:
        """Wait for a place, and run a cell to its end, where it has not come to one."""
        place, said = await places.get(), f"cell {cell.number} of {len(self.cells)}: {cell.title}: "
        try:
            outcome = (
                Outcome(NO_CODE, "not started")
                if self.stopped_by
                else ended_before(cell, self.retry)
            )
            if outcome is None:
                say(f"{said}begins")
                outcome = await self.attempt(cell, place)
        except (UserError, OSError) as error:  # a full disk must not end the other cells
            outcome = Outcome(2, "failed", str(error))
        say(f"{said}{outcome.word}: {outcome.reason}".removesuffix(": "))
        places.put_nowait(place)
        return outcome

    async def attempt(self, cell: Cell, place: int) -> Outcome:
        """Start a cell, and return how it ended."""
        before, kills, code, said = read_status(cell.folder), system_kills(), None, ""
        lines = WholeLines()
        cell.folder.mkdir(parents=True, exist_ok=True)
        with open_no_link(cell.folder / OUTPUT, "ab+") as output:  # at its end
            mine = share(cell, place, self.at_once) if self.at_once > 1 else {}
            process = self.submit(cell) if self.submit else start(cell.overrides, cell.folder, mine)
            self.running.add(process)
            while code is None:
                await asyncio.sleep(0.05)
                code = process.poll()
                new = lines.add(output.read())
                if code is not None:
                    new += lines.end()
                said = (said + printable(new))[-4096:]
                if new and self.at_once == 1:
                    say(new.removesuffix("\n"))
        self.running.discard(process)
        return ending(
            cell,
            code if code >= 0 else 128 - code,
            said,
            before,
            system_kills() > kills,
            self.stopped_by,
        )


def job_words(checked: Sequence[Any]) -> list[str]:
    """Return what says that cells are jobs, and what those ask for; an empty list where cells are processes here."""
    last = {entry.key: entry for entry in checked}
    jobs = [str(entry) for key, entry in last.items() if key.startswith("hydra.")]
    if "hardware" not in last or LAUNCHED[0] not in last["hardware"].values:
        refuse(f"{word}: has no effect without hardware={LAUNCHED[0]}" for word in jobs)
        return []
    if len(last["hardware"].values) > 1:
        raise UserError(
            f"{last['hardware']}: jobs are made of all cells or of none; give one value"
        )
    return [str(last["hardware"]), *jobs]


def submitter(cells: Sequence[Cell], words: Sequence[str]) -> Callable[[Cell], Job]:
    """Return what submits the job of a cell, by words on what the jobs ask for."""
    if shutil.which("srun") is None:
        raise UserError(
            "hardware=slurm: there is no srun on this machine; hardware=auto runs the cells here"
        )
    import submitit  # an extra
    from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf

    with user_errors():
        name = json.dumps(cells[0].config.name, ensure_ascii=False)
        asked: Any = OmegaConf.to_container(
            composed((*words, f"name={name}")).hydra.launcher, resolve=True
        )
    del asked["_target_"], asked["submitit_folder"]
    timeouts, shared = asked.pop("max_num_timeout"), {field.name for field in fields(BaseQueueConf)}
    asked = {key if key in shared else f"slurm_{key}": value for key, value in asked.items()}

    def submit(cell: Cell) -> Job:
        folder = cell.folder.parent / ".submitit" / "%j"
        try:
            with submitit.helpers.environment_variables(
                PYTHONSAFEPATH="1"
            ):  # an rtx.py here is not to be run for ours
                executor = submitit.AutoExecutor(
                    folder, cluster="slurm", slurm_max_num_timeout=timeouts
                )
                executor.update_parameters(**asked)
                return Job(executor.submit(Attempt(cell.overrides, cell.folder)), cell.folder)
        except Exception as error:  # by whatever name submitit calls it
            said = str(error).strip().splitlines() or [type(error).__name__]
            raise UserError(f"its job cannot be submitted: {said[-1]}") from error

    return submit


@functools.lru_cache(maxsize=1)
def queue(moment: int) -> set[str] | None:
    """Return the numbers of the user's jobs in the queue, None where it does not answer; asked once in a `moment`."""
    # submitit asks `sacct`, which on a cluster without accounts never tells of the end of a job that was killed.
    answer = subprocess.run(
        ["squeue", "--me", "--noheader", "--format=%i"], capture_output=True, text=True
    )
    return None if answer.returncode else set(answer.stdout.split())


class Job:
    """The job of a cell, polled and signalled as a process is."""

    def __init__(self, job: Any, folder: Path) -> None:
        self.job, self.folder, self.seen = job, folder, time.monotonic()

    def poll(self) -> int | None:
        """Return what the job has returned, or `NO_CODE` where it is gone without; its last line is the cell's then."""
        if (
            queued := queue(int(time.monotonic() / QUEUE_SECONDS))
        ) is None or self.job.job_id in queued:
            self.seen = time.monotonic()
            return None
        if self.job.paths.result_pickle.exists():
            with contextlib.suppress(Exception):  # of the job, by whatever name submitit calls it
                return self.job.result()
        elif time.monotonic() - self.seen < RESULT_SECONDS:
            return None
        log = f"{self.job.stdout() or ''}\n{self.job.stderr() or ''}".strip().splitlines()
        with open_no_link(self.folder / OUTPUT, "a") as output:
            output.write(f"rtx: its job ended: {log[-1] if log else 'it left no word'}\n")
        return NO_CODE

    def send_signal(self, number: int) -> None:
        """Take the job from the queue; one that runs saves, and is killed only where that takes too long."""
        self.job.cancel(check=False)


class Attempt:
    """What a job runs: the process of a cell."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self.given = words, folder

    def __call__(self) -> int:
        """Run the process to its end; returns its exit code."""
        self.process = start(*self.given, {})
        # A scheduler may have told the cell, too: a second SIGUSR2 changes nothing.
        signal.signal(signal.SIGTERM, lambda *_: self.process.send_signal(signal.SIGUSR2))
        while (code := self.process.poll()) is None:
            time.sleep(0.5)
        return code

    def checkpoint(self) -> Any:
        """Let the cell save, and return what is to be run when the job comes back; it has interrupted `__call__`."""
        from submitit.helpers import DelayedSubmission

        self.process.send_signal(signal.SIGUSR2)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(Attempt(*self.given))
