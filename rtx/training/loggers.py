"""Where the numbers of a run go: metrics.jsonl (an object per line; after a resume the last row of a step counts), and
Weights & Biases at arm's length: its files and its id of the run (`wandb.json`), kept by a resume, are in its folder.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from rtx.config import Config, LoggerConfig
from rtx.disk import read_file, write_json
from rtx.errors import UserError
from rtx.training.run_folder import open_own, utc_now

INIT_SECONDS, FINISH_SECONDS = 15.0, 60.0  # patience with the W&B server at the start, and with uploads at the end
Say = Callable[[str], object]


@contextlib.contextmanager
def logging_to(folder: Path | None, config: Config, facts: dict[str, Any], say: Say) -> Iterator[list[Logger]]:
    """Yield the loggers of a run, and end them with it; a rank that keeps no records (`folder` None) has none."""
    if folder is None:
        yield []
        return
    with contextlib.closing(JsonlLogger(folder / "metrics.jsonl")) as metrics, contextlib.ExitStack() as stack:
        if wandb := wandb_logger(config.logger, folder, facts, f"{config.name}-{folder.name}", say):
            stack.push(lambda kind, *_: wandb.finish(exit_code=int(kind is not None)))
        yield [metrics, *([wandb] if wandb else [])]


class JsonlLogger(Logger):
    """Appends rows to a metrics.jsonl; each is on its way to the disk before `log_metrics` returns."""

    name = version = "metrics"  # type: ignore[assignment]

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            self.file = open_own(path, "a+b")
            self.file.truncate(read_file(path).rfind(b"\n") + 1)  # a killed run may leave a last line without its end
        except OSError as error:
            raise UserError(f"{path}: rows cannot be appended to it ({error.strerror})") from error

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
    """Lightning's logger; after the first error (`run` is None) it says so in one line and stays quiet."""

    def __init__(self, say: Say, folder: Path, mode: str, **asked: Any) -> None:
        import wandb

        if not (path := folder / "wandb.json").exists():
            write_json(path, {"id": secrets.token_hex(4)})
        patience = {"init_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS}
        settings = wandb.Settings(console="off", disable_git=True, **patience)  # type: ignore[arg-type]
        asked |= {"id": json.loads(read_file(path))["id"], "save_dir": str(folder)}
        super().__init__(mode=mode, settings=settings, **asked)
        self.say, self.run = say, self.experiment  # which begins the run
        if mode == "online":
            say(f"W&B: {self.run.url}")

    def guarded(self, work: Callable[..., object], *arguments: Any, **options: Any) -> None:
        try:
            if self.run is not None:
                work(*arguments, **options)
        except Exception as error:
            self.run = None
            self.say(trouble(error))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.guarded(super().log_metrics, {key: metrics[key] for key in metrics if key != "kind"}, step)

    def finish(self, exit_code: int) -> None:
        """End the run at W&B, waiting for uploads for a minute at the most."""
        self.guarded(self.experiment.finish, exit_code=exit_code)


def wandb_logger(config: LoggerConfig, folder: Path, facts: Any, name: str, say: Say) -> GuardedWandbLogger | None:
    """Begin a run at W&B with its configuration (`facts`), or none, and never ask anybody for anything."""
    os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}  # read when wandb is first imported
    mode, place = config.name, {"project": config.project, "entity": config.entity, "group": config.group}
    try:
        if mode == "auto":
            import wandb

            mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False, verify=False) else "offline")
            if mode == "offline":
                say(f"W&B: no key found, so curves go to {folder / 'wandb'} (upload them with: wandb sync)")
        if mode in ("online", "offline"):
            return GuardedWandbLogger(say, folder, mode, name=name, config=facts, **place)
    except Exception as error:
        say(trouble(error))
    return None


def trouble(error: Exception) -> str:
    return f"W&B: {(str(error).strip() or type(error).__name__).splitlines()[0]}; going on with metrics.jsonl alone"
