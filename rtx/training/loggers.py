"""Where the numbers of a run go: metrics.jsonl, and Weights & Biases kept at arm's length.

metrics.jsonl has one JSON object per line and is only ever appended to; after a resume the last row of a step counts.
Whatever W&B does, the run goes on. `wandb` is imported only when a run logs to it. Its files and the run's id
(`wandb.json`) stay in the run folder, so that a resumed run continues the same one. It is silenced: a run says in one
line where its curves are.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from rtx.config import Config, LoggerConfig
from rtx.disk import write_json
from rtx.errors import UserError
from rtx.training.run_folder import open_own, utc_now

INIT_SECONDS = 15.0
"""Patience with the W&B server at the start of a run."""
FINISH_SECONDS = 60.0
"""Patience with uploads at the end of a run."""

Say = Callable[[str], object]


@contextlib.contextmanager
def logging_to(folder: Path | None, config: Config, facts: dict[str, Any], say: Say) -> Iterator[list[Logger]]:
    """Yield the loggers of a run, and end them with it; on a rank that keeps no records (`folder` None) there are none.

    `facts`: the configuration as plain values. `UserError` where metrics.jsonl is not a file of the run's own.
    """
    if folder is None:
        yield []
        return
    with contextlib.closing(JsonlLogger(folder / "metrics.jsonl")) as metrics:
        wandb = wandb_logger(config.logger, folder, facts, f"{config.name}-{folder.name}", say)
        failed = 1
        try:
            yield [metrics, *([wandb] if wandb else [])]
            failed = 0
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
        self.file.seek(0)
        content = self.file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):  # a last line without its end, which a killed run may leave
            self.file.truncate(whole)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a row with its `kind` (train, valid, final); numbers that JSON does not know become null."""
        known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}
        row = {"kind": known.pop("kind", "other"), "step": step, "time": utc_now(), **known}
        self.file.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self.file.flush()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml has them."""

    def close(self) -> None:
        self.file.close()


class GuardedWandbLogger(WandbLogger):
    """Lightning's logger on a W&B run that has begun; after the first error it says so in one line and stays quiet."""

    def __init__(self, run: Any, say: Say) -> None:
        super().__init__(experiment=run)
        self.say, self.run = say, run

    @property
    def experiment(self) -> Any:
        return self.run

    def guarded(self, work: Callable[[Any], object], then: str) -> None:
        """Do something with the run that may fail; `then` says what the run does without it."""
        if self.run is None:
            return
        try:
            work(self.run)
        except Exception as error:
            self.run = None
            self.say(f"W&B: {first_line(error)}; {then}")

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Hand over a row of metrics; returns at once."""
        row = {key: value for key, value in metrics.items() if key != "kind"}
        self.guarded(lambda run: run.log({**row, "step": step}), "going on with metrics.jsonl alone")

    def log_rows(self, key: str, columns: list[Any], rows: list[Any]) -> None:
        """Hand over a table, None for a gap."""

        def hand_over(run: Any) -> None:
            import wandb

            run.log({key: wandb.Table(columns=columns, data=rows, allow_mixed_types=True)})

        self.guarded(hand_over, "the table is in the folder alone")

    def finalize(self, status: str) -> None:
        """Do nothing: the run goes on with its closing score; see `finish`."""

    def finish(self, exit_code: int) -> None:
        """End the run at W&B, waiting for uploads for a minute at the most."""
        ending = (lambda run: run.finish(exit_code=exit_code), "it has not ended well")
        thread = threading.Thread(target=self.guarded, args=ending, daemon=True)
        thread.start()
        thread.join(FINISH_SECONDS + 5)
        if thread.is_alive():
            self.say("W&B: uploads have not finished in time; upload the rest with: wandb sync")
        self.run = None


def wandb_logger(
    config: LoggerConfig, folder: Path, facts: dict[str, Any], name: str, say: Say = print, job_type: str | None = None
) -> GuardedWandbLogger | None:
    """Begin a run at W&B by this name and kind (`job_type`), or none, and never ask anybody for anything.

    `facts`: the run's configuration, as plain values.
    """
    os.environ["WANDB_SILENT"] = "true"
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    mode = {"jsonl": "disabled"}.get(config.name, config.name)
    if mode == "auto":
        wish = os.environ.get("WANDB_MODE", "")
        mode = wish if wish in ("online", "offline", "disabled") else "online" if has_key() else "offline"
        if mode == "offline":
            say(f"W&B: no key found, so curves go to {folder / 'wandb'} (upload them with: wandb sync)")
    if mode == "disabled":
        return None
    asked = {"project": config.project, "entity": config.entity, "group": config.group, "name": name}
    asked |= {"job_type": job_type, "id": kept_id(folder), "config": facts, "dir": str(folder)}
    run = begin(asked, mode, say) or (begin(asked, "offline", say) if mode == "online" else None)
    if run is not None and run.url:
        say(f"W&B: {run.url}")
    return None if run is None else GuardedWandbLogger(run, say)


def begin(asked: dict[str, Any], mode: str, say: Say) -> Any:
    """Return the run that wandb has begun, or None after a line about why not."""
    try:
        import wandb

        settings = wandb.Settings(silent=True, console="off", init_timeout=INIT_SECONDS, disable_git=True)
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


def has_key() -> bool:
    try:
        import wandb

        return wandb.login(prompt=False, verify=False)
    except Exception:  # whatever it is, the run goes on offline
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
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
