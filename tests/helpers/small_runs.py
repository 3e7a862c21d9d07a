"""Small real runs for tests: in this process, or in processes of their own that a test may kill.

Importing torch and Lightning takes seconds, so one process (tests/helpers/forking.py) imports them
once and forks each run.
"""

import contextlib
import importlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rtx.cli.main import main
from rtx.runs.records import EvaluationRecord, MetricsRow, StatusRecord
from rtx.runs.status import read_status
from rtx.settings.compose import chosen, composed
from rtx.settings.overrides import check_overrides
from rtx.training.checkpoint import read_checkpoint
from tests.helpers.forking import PREPARATION, WORKER_KEY, Forker, forking_server
from tests.helpers.triton_interpreter import prepare_triton

ROOT = Path(__file__).resolve().parents[2]

TIME_FIELDS = frozenset(
    {"time", "seconds", "train_seconds", "tokens_per_second", "mfu", "data_share", "memory_bytes"}
)
"""Fields of a row that depend on clock or machine; all others are exact after a resume."""

SMALL_RUN: tuple[str, ...] = (
    "data=text",
    "data.length=32",
    "model=tiny",
    "routing=nearest",
    "model.layers=2",
    "model.hidden=16",
    "model.heads=2",
    "model.ffn_hidden=16",
    "model.window=8",
    "routing.heads=1",
    "routing.layers=1",
    "routing.window=8",
    "model.dropout=0.1",
    "model.attention_dropout=0",
    "model.ffn_dropout=0.1",
    "trainer.steps=12",
    "trainer.batch_size=4",
    "trainer.micro_batch_size=2",
    "trainer.val_windows=5",
    "trainer.log_every=2",
    "trainer.checkpoint_every=3",
    "trainer.val_every=4",
    "optimizer.warmup=3",
    "logger=jsonl",
    "hardware=cpu",
    "hardware.threads=1",
)
"""The options of a small run: a model with dropout, two micro-batches a step, and different
intervals of rows, validations and checkpoints.

Attention dropout is off, because it nearly doubles the time of a run on a CPU. The kind `causal` in
test_kinds_of_models.py has it.
"""

SAMPLE_LENGTH = 2
"""How many bytes a run draws at its end, instead of a page of text."""


def import_runs() -> None:
    """Import what `rtx train` and `rtx resume` import, and shorten the samples of runs."""
    prepare_triton()
    importlib.import_module("rtx.commands.resume")
    from rtx.commands import train

    train.SAMPLE_LENGTH = SAMPLE_LENGTH


def import_and_compose() -> None:
    """Import what `import_runs` does, and two packages that small runs load; compose `SMALL_RUN`.

    `composed` keeps the result for the runs.
    """
    import_runs()
    for name in ("datasets", "wandb.apis.public"):
        importlib.import_module(name)
    composed(chosen(check_overrides(SMALL_RUN)))


class Process:
    """A run in a process of its own."""

    def __init__(self, number: int, run: Path, log: Path, exit_code: Callable[[], int]) -> None:
        self.number = number
        self.run = run
        self.log = log
        self.exit_code = exit_code
        """Waits for the end, and returns the exit code; negative for a signal."""

    def send(self, signal_number: int) -> None:
        """Send a signal, if the process is still there."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.number, signal_number)

    @property
    def alive(self) -> bool:
        """Whether it still runs; nobody must have waited for its end yet."""
        return Path(f"/proc/{self.number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    def wait(self, send: int | None = None) -> int:
        """Wait for the end, and return the exit code; negative for a signal.

        Args:
            send: a signal that is sent again and again until then.
        """
        pause = 0.05 if send else 0.002
        for _ in patiently(lambda: self.kill_and_report("does not end"), pause):
            if not self.alive:
                break
            if send is not None:
                self.send(send)
        return self.exit_code()

    def until(self, ready: Callable[[Path], bool]) -> None:
        """Wait until `ready` holds in the run folder; fail where the process ends before that."""
        assert self.shows(ready), self.kill_and_report("ended without what was waited for")

    def shows(self, ready: Callable[[Path], bool], pause: float = 0.0005) -> bool:
        """Wait until `ready` holds in the run folder; False where the process ends before that."""
        for _ in patiently(
            lambda: self.kill_and_report("has not shown what was waited for"), pause
        ):
            # Looked at first: a process may show it and end.
            alive = self.alive
            if ready(self.run):
                return True
            if not alive:
                break
        return False

    def kill_when(self, ready: Callable[[Path], bool], signal_number: int = signal.SIGKILL) -> int:
        """Send a signal as soon as `ready` holds in the run folder; return the exit code."""
        self.until(ready)
        self.send(signal_number)
        return self.wait()

    def kill_and_report(self, what: str) -> str:
        """Kill this process, which failed a test, and return `what` with all its output."""
        self.send(signal.SIGKILL)
        output = self.log.read_text() if self.log.exists() else "it printed nothing"
        return f"process {self.number} {what}: {output}"


def patiently(problem: Callable[[], str], pause: float = 0.0005) -> Iterator[None]:
    """Yield repeatedly with pauses until the loop ends; fail with `problem()` after ten minutes."""
    end = time.monotonic() + 600
    while time.monotonic() < end:
        yield
        time.sleep(pause)
    pytest.fail(problem())


@pytest.fixture(scope="session")
def forker(request: pytest.FixtureRequest) -> Iterator[Forker]:
    """The process that forks runs, which the workers of pytest-xdist share."""
    address = getattr(request.config, "workerinput", {}).get(WORKER_KEY)
    if address:
        yield Forker(address)
        return
    with forking_server(PREPARATION) as forker:
        yield forker


class Workshop:
    """A folder with a text, and commands that run in it."""

    def __init__(self, folder: Path, forker: Forker | None = None) -> None:
        self.folder = folder
        self.forker = forker
        self.data = folder / "data"
        text = np.random.default_rng(0).choice(list(b"abc \n\xff"), 3_001).astype(np.uint8)
        (folder / "book.txt").write_bytes(text.tobytes())
        self.text = f"data.path={folder / 'book.txt'}"

    def environment(self, run: Path | str) -> dict[str, str]:
        """Return the variables of a command.

        Args:
            run: the folder of the run, or "" where the command is to choose it.
        """
        return {
            "RTX_DATA": str(self.data),
            "RTX_OUTPUTS": str(self.folder / "out"),
            "RTX_RUN": str(run),
        }

    def command(self, *arguments: str, code: int = 0, run: Path | str = "") -> str:
        """As `answer`, with the text of stderr after that of stdout."""
        return "".join(self.answer(*arguments, code=code, run=run))

    def answer(self, *arguments: str, code: int = 0, run: Path | str = "") -> tuple[str, str]:
        """As `called`, with a check of the exit code; return stdout and stderr."""
        returned, out, err = self.called(*arguments, run=run)
        assert returned == code, err
        assert "Traceback" not in err
        return out, err

    def called(self, *arguments: str, run: Path | str = "") -> tuple[int, str, str]:
        """Run a command in this process, and return its exit code, stdout and stderr."""
        out = io.StringIO()
        err = io.StringIO()
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            for name, value in self.environment(run).items():
                patch.setenv(name, value)
            patch.setattr("rtx.commands.train.SAMPLE_LENGTH", SAMPLE_LENGTH)
            code = main(list(arguments))
        return code, out.getvalue(), err.getvalue()

    def score(self, run: Path, *overrides: str) -> tuple[dict[str, Any], str]:
        """Score a run; return the result, whose numbers must be valid JSON, and the output."""
        said = self.command("eval", str(run), *overrides)
        newest = max(run.glob("eval/*.json"), key=lambda path: path.stat().st_mtime_ns)
        result = json.loads(newest.read_text(), parse_constant=pytest.fail)
        record = EvaluationRecord.model_validate(result)
        assert record.line() in said and f"{record.bits:.5f} bits/{record.unit}" in said
        more = {"protocol": record.line(), "partial": record.sample is not None}
        return {**result["protocol"], **result, **more}, said

    def train(self, name: str, *overrides: str) -> Path:
        """Train in this process, and return the run folder."""
        run = self.folder / name
        self.command("train", self.text, *SMALL_RUN, *overrides, run=run)
        return run

    def start(self, name: str, *overrides: str, inside: str = "") -> Process:
        """Train in a forked process; see `fork`."""
        return self.fork(
            self.folder / name, "train", self.text, *SMALL_RUN, *overrides, inside=inside
        )

    def fork(self, run: Path, *arguments: str, inside: str = "", **variables: str) -> Process:
        """Run a command in a forked process, which has its imports and first executes `inside`."""
        assert self.forker is not None
        forker = self.forker
        log = self.folder / f"{run.name}.log"
        number = forker.fork(arguments, log, inside, self.environment(run) | variables)
        return Process(number, run, log, lambda: forker.exit_code_of(number))

    def spawn(
        self, run: Path, *arguments: str, starter: Sequence[str] = (), **variables: str
    ) -> Process:
        """Run the command as a user does, which takes seconds of imports.

        Args:
            starter: arguments of Python before `-m rtx`, such as those of torchrun.
        """
        log = self.folder / f"{run.name}.log"
        environment = {**os.environ, **self.environment(run), "PYTHONPATH": str(ROOT), **variables}
        command = [sys.executable, *starter, "-m", "rtx", *arguments]
        with open(log, "ab") as stream:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                # Signals of a test to the whole process group must not reach pytest.
                start_new_session=True,
            )
        return Process(process.pid, run, log, process.wait)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Workshop:
    """A workshop for the tests of a file."""
    return Workshop(tmp_path_factory.mktemp("workshop"), forker)


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Path:
    """A run for the tests of a file."""
    return workshop.train("run")


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    """A copy of the run, which a test may damage."""
    return Path(shutil.copytree(run, tmp_path / "run"))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the last row written of each step and kind, with its kind, in the order of steps."""
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):  # one cut short by a kill is no row
            row = MetricsRow.model_validate_json(line)
            rows[row.step, row.kind] = {"kind": row.kind, **row.model_dump()}
    order = ("train", "valid", "final")
    return sorted(rows.values(), key=lambda row: (row["step"], order.index(row["kind"])))


def status_of(run: Path) -> StatusRecord:
    """Return the status of a run, which must have one."""
    status = read_status(run)
    assert status is not None
    return status


def final(run: Path) -> dict[str, Any]:
    """Return the closing score of a run with its unit."""
    score = json.loads((run / "status.json").read_text())["final"]
    return {**score, "unit": score["protocol"]["unit"]}


def children(process: int) -> list[int]:
    """Return the numbers of the processes that a process has started and that are still there."""
    return [
        int(number)
        for number in Path(f"/proc/{process}/task/{process}/children").read_text().split()
    ]


def steps_logged(run: Path) -> int:
    """Return the last step with a row."""
    path = run / "metrics.jsonl"
    return max((row["step"] for row in read_metrics(path)), default=0) if path.exists() else 0


def difference(one: Path, other: Path, ignoring: Sequence[str] = ()) -> str:
    """Return the first difference of two runs except times, workers and folders, or ""."""
    found = [checkpoint_difference(one, other, name, ignoring) for name in ("last", "best")]
    return "".join(found) or first_difference(counted_rows(one), counted_rows(other), "metrics")


def checkpoint_difference(one: Path, other: Path, name: str, ignoring: Sequence[str] = ()) -> str:
    """Return the first difference of two checkpoints, or ""; groups `ignoring` may differ."""
    a, b = (read_checkpoint(run / "checkpoints" / f"{name}.ckpt") for run in (one, other))
    for content in (a, b):
        for measured in ("seconds", "clock"):
            content.get("callbacks", {}).get("Timing", {}).pop(measured, None)
        del content["config"]["hardware"]["workers"]
        content["data"].pop("folder", None)
        for group in ignoring:
            del content["config"][group]
    return first_difference(a, b, name)


def counted_rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of a run without the fields that a clock or the machine measures."""
    rows = read_metrics(run / "metrics.jsonl")
    counted = []
    for row in rows:
        names = [name for name in row if measure_of(name) not in TIME_FIELDS]
        counted.append({name: row[name] for name in names})
    return counted


def measure_of(name: str) -> str:
    """Return a field's name without its split, and without `final_`."""
    return name.rpartition("/")[2].removeprefix("final_")


def first_difference(a: Any, b: Any, where: str) -> str:
    """Compare nested values bit for bit."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        return next(
            (found for key in a if (found := first_difference(a[key], b[key], f"{where}.{key}"))),
            "",
        )
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        pairs = enumerate(zip(a, b, strict=True))
        return next(
            (found for i, (x, y) in pairs if (found := first_difference(x, y, f"{where}.{i}"))), ""
        )
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        bytes_of_each = (
            tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (a, b)
        )  # 0 and -0 differ
        alike = (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bytes_of_each)
        return "" if alike else f"{where}: tensors differ"
    return "" if a == b else f"{where}: {a} and {b}"


def after(step: int) -> Callable[[Path], bool]:
    """Return what waits for the row of a step."""
    return lambda run: steps_logged(run) >= step


def draw_nothing(patch: pytest.MonkeyPatch) -> None:
    """Leave pictures out of reports and of analyses of patterns: each takes a third of a second."""
    for name in ("plots_of", "pretrained_plots"):
        patch.setattr(f"rtx.report.contents.{name}", lambda *records: [])
    patch.setattr("rtx.report.contents.bits_and_time", lambda *records: None)
    patch.setattr("rtx.commands.analyses.patterns.draw_maps", lambda rows, maps: b"")
