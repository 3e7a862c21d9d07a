"""Where the numbers of a run go: metrics.jsonl, and Weights & Biases kept at arm's length.

metrics.jsonl has one JSON object per line and is only ever appended to; after a resume the last row of a step counts.
Whatever W&B does, the run goes on. `wandb` is imported only when a run logs to it. Its files and the run's id
(`wandb.json`) stay in the run folder, so that a resumed run continues the same one. It is silenced: a run says in one
line where its curves are.
"""

from __future__ import annotations

import configparser
import contextlib
import json
import math
import netrc
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning.pytorch.loggers import Logger, WandbLogger

from rtx.config import Config, LoggerConfig
from rtx.disk import write_json
from rtx.errors import UserError
from rtx.training.run_folder import open_own, utc_now

TIME_FIELDS = frozenset({"time", "seconds", "tokens_per_second", "data_share", "memory_bytes"})
"""Fields of a row that are measured by clock or machine; all others repeat exactly after a resume."""

INIT_SECONDS = 15.0
"""Patience with the W&B server at the start of a run."""

FINISH_SECONDS = 60.0
"""Patience with uploads at the end of a run."""


@contextlib.contextmanager
def logging_to(
    folder: Path | None, config: Config, facts: dict[str, Any], say: Callable[[str], object]
) -> Iterator[list[Logger]]:
    """Yield the loggers of a run, and end them with it.

    Args:
        folder: of the run; None: on a rank that keeps no records, there are none.
        config: the resolved configuration.
        facts: the same as plain values, for W&B.
        say: prints a line.

    Raises:
        UserError: metrics.jsonl is not a file of the run's own.
    """
    if folder is None:
        yield []
        return
    metrics = JsonlLogger(folder / "metrics.jsonl")
    wandb = wandb_logger(config.logger, folder, facts, f"{config.name}-{folder.name}", say)
    failed = 1
    try:
        yield [metrics, *([wandb] if wandb else [])]
        failed = 0
    finally:
        try:
            metrics.close()
        finally:
            if wandb:
                wandb.finish(exit_code=failed)


class JsonlLogger(Logger):
    """Appends rows to a metrics.jsonl; each is on its way to the disk before `log_metrics` returns."""

    name = "metrics"  # type: ignore[assignment]
    version = ""  # type: ignore[assignment]

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            self.file = open_own(path, "a+b")
        except OSError as error:
            raise UserError(f"{path}: rows cannot be appended to it ({error.strerror})") from error
        self.drop_torn_row()

    def drop_torn_row(self) -> None:
        """Cut off a last line without its end, which a killed run may leave."""
        self.file.seek(0)
        content = self.file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            self.file.truncate(whole)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a row with its `kind` (train, valid, final); numbers that JSON does not know become null.

        Raises:
            OSError: the disk is full.
        """
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        row = {"kind": known.pop("kind", "other"), "step": step, "time": utc_now(), **known}
        self.file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self.file.flush()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml has them."""

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows that count, in the order of their steps: of each kind and step, the last one written.

    A last line cut short by a kill is no row. Rows have a `kind` (train, valid, final) and a `step`.
    """
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            row = json.loads(line)
            rows[row["step"], row["kind"]] = row
    order = {"train": 0, "valid": 1, "final": 2}
    return sorted(rows.values(), key=lambda row: (row["step"], order.get(row["kind"], 3)))


# Weights & Biases


class GuardedWandbLogger(WandbLogger):
    """Lightning's logger on a W&B run that has begun; after the first error it says so in one line and stays quiet."""

    def __init__(self, run: Any, say: Callable[[str], object]) -> None:
        super().__init__(experiment=run)
        self.say = say
        self.run: Any = run

    @property
    def experiment(self) -> Any:
        """The W&B run; None after an error."""
        return self.run

    def guarded(self, work: Callable[[], object], then: str) -> None:
        """Do something with the run that may fail; `then` says what the run does without it."""
        if self.run is None:
            return
        try:
            work()
        except Exception as error:
            self.run = None
            self.say(f"W&B: {first_line(error)}; {then}")

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Hand over a row of metrics; returns at once."""
        row = {key: value for key, value in metrics.items() if key != "kind"}
        self.guarded(lambda: self.run.log({**row, "step": step}), "going on with metrics.jsonl alone")

    def log_rows(self, key: str, columns: list[Any], rows: list[list[Any]]) -> None:
        """Hand over a table, None for a gap; a column of numbers and texts becomes one of texts: W&B wants one type."""
        kinds = [{isinstance(row[at], str) for row in rows if row[at] is not None} for at in range(len(columns))]
        even: list[Any] = [
            [str(v) if len(kind) > 1 and v is not None else v for v, kind in zip(row, kinds, strict=True)]
            for row in rows
        ]

        def hand_over() -> None:
            import wandb

            self.run.log({key: wandb.Table(columns=columns, data=even)})

        self.guarded(hand_over, "the table is in the folder alone")

    def finalize(self, status: str) -> None:
        """Do nothing: the run goes on with its closing score; see `finish`."""

    def finish(self, exit_code: int) -> None:
        """End the run at W&B, waiting for uploads for a minute at the most."""
        run: Any = self.run
        thread = threading.Thread(
            target=self.guarded, args=(lambda: run.finish(exit_code=exit_code), "it has not ended well"), daemon=True
        )
        thread.start()
        thread.join(FINISH_SECONDS + 5)
        if thread.is_alive():
            self.say("W&B: uploads have not finished in time; upload the rest with: wandb sync")
        self.run = None


def wandb_logger(
    config: LoggerConfig,
    folder: Path,
    facts: dict[str, Any],
    name: str,
    say: Callable[[str], object] = print,
    job_type: str | None = None,
) -> GuardedWandbLogger | None:
    """Begin a run at W&B, or none, and never ask anybody for anything.

    Args:
        config: the logger group.
        folder: the run folder.
        facts: the run's configuration, as plain values.
        name: the run's name at W&B.
        say: prints a line.
        job_type: what kind of run it is at W&B; unset: a training run.
    """
    mode = choose_mode(config)
    if mode == "disabled":
        return None
    if config.name == "auto" and mode == "offline":
        say(f"W&B: no key found, so curves go to {folder / 'wandb'} (upload them with: wandb sync)")
    asked = {"project": config.project, "entity": config.entity, "group": config.group, "name": name}
    asked |= {"job_type": job_type, "id": kept_id(folder), "config": facts, "dir": str(folder)}
    run = begin(asked, mode, say)
    if run is None and mode == "online":
        run = begin(asked, "offline", say)
    if run is None:
        return None
    if run.url:
        say(f"W&B: {run.url}")
    return GuardedWandbLogger(run, say)


def begin(asked: dict[str, Any], mode: str, say: Callable[[str], object]) -> Any:
    """Return the run that wandb has begun, or None after a line about why not."""
    os.environ["WANDB_SILENT"] = "true"
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import wandb

        settings = wandb.Settings(silent=True, console="off", init_timeout=INIT_SECONDS, disable_git=True)
        if "finish_timeout" in wandb.Settings.model_fields:  # not in all versions that we take
            settings.finish_timeout = FINISH_SECONDS
        run = wandb.init(**asked, mode=mode, resume="allow" if mode == "online" else None, settings=settings)  # type: ignore[arg-type]
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        return run
    except Exception as error:
        then = "going on offline" if mode == "online" else "going on with metrics.jsonl alone"
        say(f"W&B: {first_line(error)}; {then}")
        with contextlib.suppress(Exception):
            import wandb

            wandb.teardown(exit_code=1)
        return None


def choose_mode(config: LoggerConfig) -> str:
    """Return online, offline or disabled; auto obeys WANDB_MODE, then looks for a key, and never asks for one."""
    if config.name == "jsonl":
        return "disabled"
    if config.name != "auto":
        return config.name
    wish = os.environ.get("WANDB_MODE", "")
    if wish in ("online", "offline", "disabled"):
        return wish
    return "online" if has_key() else "offline"


def has_key() -> bool:
    """Tell whether W&B would find credentials: in the environment, in a netrc file, or in its settings file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    home = Path(os.environ.get("HOME") or "~").expanduser()
    settings = configparser.ConfigParser()
    with contextlib.suppress(OSError, configparser.Error):
        settings.read(Path(os.environ.get("WANDB_CONFIG_DIR") or home / ".config" / "wandb") / "settings")
    if settings.get("default", "api_key", fallback=""):
        return True
    saved_url = settings.get("default", "base_url", fallback="https://api.wandb.ai")
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or saved_url).netloc
    files = [Path(os.environ["NETRC"])] if os.environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for file in files:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(file).authenticators(host):
                return True
    return False


def kept_id(folder: Path) -> str:
    """Return the run's id at W&B, made and kept in the run folder when first asked for."""
    path = folder / "wandb.json"
    try:
        return json.loads(path.read_text())["id"]
    except (OSError, ValueError, KeyError, TypeError):
        new = secrets.token_hex(4)
        write_json(path, {"id": new})
        return new


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
