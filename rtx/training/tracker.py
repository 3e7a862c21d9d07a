"""Weights & Biases, kept at arm's length: whatever it does, the run goes on with metrics.jsonl.

`wandb` is imported only when a run logs to it. Its files and the run's id (`wandb.json`) stay in the run folder, so
that a resumed run continues the same one. It is silenced: a run says in one line where its curves are.
"""

from __future__ import annotations

import configparser
import contextlib
import json
import netrc
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rtx.config import LoggerConfig
from rtx.training.files import write_json

INIT_SECONDS = 15.0
"""Patience with the server at the start of a run."""

FINISH_SECONDS = 60.0
"""Patience with uploads at the end of a run."""

Say = Callable[[str], None]


class Tracker:
    """A run at W&B, or none. After the first error it says so in one line and stays quiet.

    Args:
        config: the logger group.
        folder: the run folder.
        facts: the run's configuration, as plain values.
        name: the run's name at W&B.
        say: prints a line.
        job_type: what kind of run it is at W&B; unset: a training run.
    """

    def __init__(
        self,
        config: LoggerConfig,
        folder: Path,
        facts: dict[str, Any],
        name: str,
        say: Say = print,
        job_type: str | None = None,
    ) -> None:
        self.say, self.job_type = say, job_type
        self.run: Any = None
        mode = choose_mode(config)
        if mode == "disabled":
            return
        if config.name == "auto" and mode == "offline":
            say(f"W&B: no key found, so curves go to {folder / 'wandb'} (upload them with: wandb sync)")
        self.run = self._start(config, folder, facts, name, mode)
        if self.run is None and mode == "online":
            self.run = self._start(config, folder, facts, name, "offline")
        if self.run is not None and self.run.url:
            say(f"W&B: {self.run.url}")

    def _start(self, config: LoggerConfig, folder: Path, facts: dict[str, Any], name: str, mode: str) -> Any:
        """Return the run that wandb has begun, or None after a line about why not."""
        os.environ["WANDB_SILENT"] = "true"
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        try:
            import wandb

            settings = wandb.Settings(silent=True, console="off", init_timeout=INIT_SECONDS, disable_git=True)
            if "finish_timeout" in wandb.Settings.model_fields:  # not in all versions that we take
                settings.finish_timeout = FINISH_SECONDS
            run = wandb.init(
                project=config.project,
                entity=config.entity,
                group=config.group,
                name=name,
                job_type=self.job_type,
                id=kept_id(folder),
                config=facts,
                dir=str(folder),
                mode=mode,  # type: ignore[arg-type]
                resume="allow" if mode == "online" else None,
                settings=settings,
            )
            run.define_metric("step")
            run.define_metric("*", step_metric="step")
            return run
        except Exception as error:
            then = "going on offline" if mode == "online" else "going on with metrics.jsonl alone"
            self.say(f"W&B: {first_line(error)}; {then}")
            with contextlib.suppress(Exception):
                import wandb

                wandb.teardown(exit_code=1)
            return None

    def log(self, row: dict[str, Any]) -> None:
        """Hand over a row of metrics; returns at once."""
        if self.run is None:
            return
        try:
            self.run.log({key: value for key, value in row.items() if key not in ("kind", "time")})
        except Exception as error:
            self.run = None
            self.say(f"W&B: {first_line(error)}; going on with metrics.jsonl alone")

    def table(self, key: str, columns: list[Any], rows: list[list[Any]]) -> None:
        """Hand over a table, None for a gap; a column of numbers and texts becomes one of texts: W&B wants one type."""
        if self.run is None:
            return
        kinds = [{isinstance(row[at], str) for row in rows if row[at] is not None} for at in range(len(columns))]
        even: list[Any] = [
            [str(v) if len(kind) > 1 and v is not None else v for v, kind in zip(row, kinds, strict=True)]
            for row in rows
        ]
        try:
            import wandb

            self.run.log({key: wandb.Table(columns=columns, data=even)})
        except Exception as error:
            self.run = None
            self.say(f"W&B: {first_line(error)}; the table is in the folder alone")

    def finish(self, exit_code: int) -> None:
        """End the run at W&B, waiting for uploads for a minute at the most."""
        run, self.run = self.run, None
        if run is None:
            return
        faults: list[Exception] = []

        def work() -> None:
            try:
                run.finish(exit_code=exit_code)
            except Exception as error:
                faults.append(error)

        thread = threading.Thread(target=work, name="wandb-finish", daemon=True)
        thread.start()
        thread.join(FINISH_SECONDS + 5)
        if thread.is_alive():
            self.say("W&B: uploads have not finished in time; upload the rest with: wandb sync")
        elif faults:
            self.say(f"W&B: {first_line(faults[0])}")


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
    except (OSError, ValueError, KeyError):
        new = secrets.token_hex(4)
        write_json(path, {"id": new})
        return new


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
