"""Where the metrics of a run go: metrics.jsonl, TensorBoard, CSV, Weights & Biases.

All get the same rows, whose names begin with `train/`, `valid/` or `valid/final_`. metrics.jsonl
has an object on each line; after a resume the last row of a step counts. An error of W&B ends no
run. Its files are in the run's folder, as is wandb.json, by which resumes and later commands find
the run there.
"""

import configparser
import contextlib
import json
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from rtx.disk import (
    is_file_inside,
    make_folder,
    names_inside,
    open_inside,
    read_inside,
    read_named,
    read_open,
    status_inside,
    write_json,
)
from rtx.errors import UserError
from rtx.progress import say as say_line
from rtx.runs.folder import METRICS, WANDB_RECORD, shown
from rtx.runs.records import LARGEST_ROWS, MetricsRow, each_row, finite
from rtx.runs.status import utc_now
from rtx.settings.requirements import wandb_mode
from rtx.settings.schema import Config
from rtx.training.wandb_errors import GOES_ON, NOTHING_ADDED, trouble

INIT_SECONDS = 15.0
"""Timeout of the W&B server at the start."""
FINISH_SECONDS = 60.0
"""Timeout of uploads to it at the end."""
QUIET = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"}
"""Variables that wandb reads when it is first imported."""
LARGEST_SETTINGS = 1 << 20
"""The most bytes of wandb.json, and of a file with settings."""
WANDB_LINKS = ("latest-run", "debug.log", "debug-internal.log")
"""Links that W&B itself makes in its folder in a run."""
OF_RUN = ("project", "entity", "group", "name", "job_type", "tags")
"""Keys of wandb.json that are arguments of `wandb.init`."""
Say = Callable[[str], object]


def csv_logger(folder: Path) -> Logger:
    """Return a logger that writes a new version of metrics.csv for each resume."""
    return CSVLogger(folder, name="csv", flush_logs_every_n_steps=1)


def tensorboard_logger(folder: Path) -> Logger:
    """Return a logger for TensorBoard, which then hides the events in earlier files of the run."""
    return TensorBoardLogger(
        folder, name="", version="tensorboard", default_hp_metric=False, purge_step=0
    )


LOCAL: dict[str, Callable[[Path], Logger]] = {"csv": csv_logger, "tensorboard": tensorboard_logger}
"""Loggers that begin new files with each resume, into which earlier rows are written again."""


@contextlib.contextmanager
def logging_to(
    folder: Path | None, config: Config, facts: dict[str, Any], say: Say, step: int = 0
) -> Iterator[list[Logger]]:
    """Yield the loggers of a run that begins or resumes at `step`; finish them after the block.

    `folder` is None on all ranks but the first: they get no loggers.
    """
    if folder is None:
        yield []
        return
    with (
        contextlib.closing(JsonlLogger(folder)) as metrics,
        contextlib.ExitStack() as stack,
    ):
        loggers: list[Logger] = [metrics]
        for name, make in LOCAL.items():
            if not getattr(config.logger, name):
                continue
            make_plain_folder(folder, name)
            local = make(folder)
            local.log_hyperparams(facts)
            for values, at in rows_before(folder, step, config):
                local.log_metrics(values, at)
            stack.push(partial(finalize, local))
            loggers.append(local)
        wandb = wandb_logger(config, folder, facts, say) if config.logger.wandb else None
        if wandb:
            stack.push(lambda kind, *_: wandb.finish(exit_code=int(kind is not None)))
            loggers.append(wandb)
        yield loggers


def make_plain_folder(run: Path, name: str) -> None:
    """Make a folder in a run for a logger that opens files by their paths.

    `UserError` where a link, a FIFO or a device is in it; one that comes later is not seen.
    """
    make_folder(run, name)
    for entry in names_inside(run, name):
        status = status_inside(run, f"{name}/{entry}")
        is_plain = status and (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode))
        if not is_plain:
            path = run / name / entry
            raise UserError(f"{path}: is neither a file nor a folder; remove it, then again")


def make_wandb_folder(run: Path) -> Path:
    """Make the folder of W&B in a run; `UserError` where a link in it could be followed.

    W&B replaces `WANDB_LINKS` without following them, and writes below all other names.
    """
    folder = make_folder(run, "wandb")
    make_folder(run, "wandb/artifacts/staging")
    for entry in names_inside(run, "wandb"):
        if entry not in WANDB_LINKS:
            status_inside(run, f"wandb/{entry}")
    return folder


def finalize(logger: Logger, kind: type[BaseException] | None, *_: Any) -> None:
    """Finish one of Lightning's loggers; `kind` is the class of an exception, None without one."""
    logger.finalize("failed" if kind else "success")


def rows_before(folder: Path, step: int, config: Config) -> Iterator[tuple[dict[str, float], int]]:
    """Yield metrics and step of each earlier row that a resume at `step` does not write again."""
    is_over = step >= config.trainer.steps
    validates_again = is_over or step % config.trainer.val_every == 0
    repeated = {"valid": validates_again, "final": is_over}
    rows: dict[tuple[int, str], MetricsRow] = {}
    for row in each_row(MetricsRow, folder, METRICS, problems=[]):
        rows[row.step, row.kind] = row
    for (at, kind), row in sorted(rows.items(), key=lambda item: item[0][0]):
        if at < step or (at == step and not repeated.get(kind)):
            numbers = row.metrics.items()
            yield {name: value for name, value in numbers if value is not None}, at


class JsonlLogger(Logger):
    """Appends rows to metrics.jsonl, and flushes each."""

    name = version = "metrics"  # type: ignore[assignment]

    def __init__(self, folder: Path) -> None:
        super().__init__()
        try:
            self.file = open_inside(folder, METRICS, "a+")
            self.drop_incomplete_line()
        except OSError as error:
            path = folder / METRICS
            raise UserError(f"{path}: rows cannot be appended to it ({error.strerror})") from error

    def drop_incomplete_line(self) -> None:
        """Cut off the last line where a killed run has not written its end; close on an error."""
        try:
            self.file.seek(0)
            self.file.truncate(read_open(self.file, LARGEST_ROWS).rfind(b"\n") + 1)
        except OSError:
            self.file.close()
            raise

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a row; numbers that JSON does not have become null."""
        numbers = {name: finite(value) for name, value in metrics.items()}
        row = MetricsRow.model_validate({"step": step, "time": utc_now(), **numbers})
        self.file.write(row.model_dump_json().encode() + b"\n")
        self.file.flush()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml has them."""

    def close(self) -> None:
        """Close the file."""
        self.file.close()


@contextlib.contextmanager
def user_settings() -> Iterator[Any]:
    """Yield `wandb`, which in this block reads no settings from the current folder.

    W&B reads `wandb/settings` and `config-defaults.yaml` there. The folder may be a run of somebody
    else, whose file could name a server or proxy that would get the user's key. W&B reads settings
    once in a process, when it is first set up. Raises AttributeError where this version of W&B
    lacks the replaced methods: then it may read these files in another way.
    """
    import wandb
    from wandb.sdk.lib.settings_file import SettingsFiles
    from wandb.sdk.wandb_config import Config as RunConfig

    def read(settings: Any) -> SettingsFiles:
        of_user = Path(settings.settings_system) if settings.settings_system else None
        return SettingsFiles(global_settings=of_user, local_settings=Path(os.devnull))

    replaced = (
        (wandb.Settings, "read_system_settings", read),
        (RunConfig, "_load_defaults", lambda config: None),
    )
    with contextlib.ExitStack() as stack:
        for kind, name, method in replaced:
            stack.callback(setattr, kind, name, getattr(kind, name))
            setattr(kind, name, method)
        yield wandb


def quiet_mode() -> tuple[str, str]:
    """Return the mode that the user has set for W&B, and where it is set; "" and "" without one.

    It is in WANDB_MODE, or in the file of the current folder that `wandb offline` or
    `wandb disabled` writes. Such a file is trusted only to turn uploads off.
    """
    mode = wandb_mode()
    if mode:
        return mode, f"WANDB_MODE={os.environ['WANDB_MODE']}"
    for path in (Path(".wandb/settings"), Path("wandb/settings")):
        settings = configparser.ConfigParser(interpolation=None)
        with contextlib.suppress(OSError, ValueError, configparser.Error):
            settings.read_string(read_named(path, LARGEST_SETTINGS).decode())
        mode = settings.get("default", "mode", fallback="")
        if mode in ("offline", "disabled"):
            return mode, f"mode = {mode} in {path}"
    return "", ""


class GuardedWandbLogger(WandbLogger):
    """Lightning's logger for a run at W&B: the run in wandb.json, or a new one.

    The first error is printed in a line; after it the logger does nothing.

    Args:
        options: `mode` and the keys OF_RUN.
        consequence: the end of the line on an error.
    """

    def __init__(
        self,
        say: Say,
        folder: Path,
        options: Mapping[str, Any],
        consequence: str = GOES_ON,
        **more: Any,
    ) -> None:
        with user_settings() as wandb:
            # It reads WANDB_SILENT before anything is printed.
            wandb.setup()
            if options["mode"] == "online" and not wandb.login(prompt=False, verify=False):
                # W&B itself would ask the user for one.
                raise ValueError("no key found (wandb login)")
        named = {**options, "id": run_id(folder)}
        record = {key: value for key, value in named.items() if key != "mode"}
        write_json(folder, WANDB_RECORD, record)
        # W&B stages the files of artifacts there.
        os.environ["WANDB_DATA_DIR"] = str(make_wandb_folder(folder))
        settings = wandb.Settings(
            console="off",
            disable_git=True,
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
        )
        super().__init__(save_dir=str(folder), settings=settings, **named, **more)
        self.say = say
        self.consequence = consequence
        with user_settings():
            # This property begins the run.
            self.run = self.experiment
        self.run.define_metric("valid/bits", step_metric="trainer/global_step", summary="min")
        if options["mode"] == "online":
            say(f"W&B: {self.run.url}")

    def guarded(self, work: Callable[..., object], *arguments: Any, **options: Any) -> None:
        """Call `work`, unless W&B has failed before; print an error of it."""
        try:
            if self.run is not None:
                work(*arguments, **options)
        except Exception as error:
            self.run = None
            self.say(trouble(error, self.consequence))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.guarded(super().log_metrics, metrics, step)

    def add(
        self, kind: str, figures: Mapping[str, Any], files: Sequence[Path], step: int | None = None
    ) -> None:
        """Add figures by their names, the pictures among the files, and all files as one artifact.

        Raises what W&B raises.
        """
        import wandb

        pictures = [wandb.Image(str(path)) for path in files if path.suffix == ".png"]
        numbers = dict(figures)
        if pictures:
            numbers[f"{kind}/pictures"] = pictures
        if numbers:
            super().log_metrics(numbers, step)
        artifact = wandb.Artifact(f"{kind}-{self.version}", type=kind)
        for path in files:
            artifact.add_file(str(path))
        self.experiment.log_artifact(artifact)

    def summarize(self, **figures: Any) -> None:
        """Write figures, or texts such as a protocol, to the run's summary."""
        self.guarded(lambda: self.experiment.summary.update(figures))

    def finish(self, exit_code: int) -> None:
        """End the run at W&B; wait at most `FINISH_SECONDS` for uploads."""
        self.guarded(self.experiment.finish, exit_code=exit_code)


def run_id(folder: Path) -> str:
    """Return the id that W&B has for a run, or a new one."""
    if is_file_inside(folder, WANDB_RECORD):
        return json.loads(read_inside(folder, WANDB_RECORD, LARGEST_SETTINGS))["id"]
    return secrets.token_hex(4)


def wandb_logger(config: Config, folder: Path, facts: Any, say: Say) -> GuardedWandbLogger | None:
    """Begin a run at W&B with its configuration (`facts`), and never prompt.

    Returns None where W&B is disabled or fails.
    """
    os.environ |= QUIET
    try:
        mode = config.logger.mode
        if mode == "auto":
            mode = automatic_mode(folder, say)
        if mode not in ("online", "offline"):
            return None
        return GuardedWandbLogger(
            say, folder, {"mode": mode, **title(config, folder)}, config=facts
        )
    # W&B raises errors of many kinds, and none of them may end a run.
    except Exception as error:
        say(trouble(error))
        return None


def automatic_mode(folder: Path, say: Say) -> str:
    """Return the mode that the user has set, else online with a key and offline without one."""
    mode, reason = quiet_mode()
    if not mode:
        with user_settings() as wandb:
            has_key = wandb.login(prompt=False, verify=False)
        mode = "online" if has_key else "offline"
    if mode == "offline":
        uploads = f"wandb sync {shown(folder)}/wandb/offline-run-*"
        say(f"W&B: {reason or 'no key found'}; to upload the curves later:\n  {uploads}")
    return mode


def title(config: Config, folder: Path) -> dict[str, Any]:
    """Return the keys OF_RUN of a run."""
    tags = [config.data.name, config.model.name]
    tags += os.environ.get("WANDB_TAGS", "").split(",")
    if config.routing.heads and config.routing.layers:
        tags.append(config.routing.selection)
    is_cell = (folder.parent / "sweeps.jsonl").is_file()
    sweep = config.name if is_cell else None
    return {
        "project": config.logger.project,
        "entity": config.logger.entity,
        "group": config.logger.group or sweep,
        "name": f"{config.name}-{folder.name}",
        "job_type": "train",
        "tags": [tag for tag in tags if tag],
    }


def upload(
    folder: Path,
    logged: Path,
    kind: str,
    figures: Mapping[str, Any],
    files: Sequence[Path],
    step: int,
) -> None:
    """Add figures and files to the run at W&B that the folder `logged` names: see `add_to_wandb`.

    They are added to a new run at W&B where `logged` is a run in `folder`.
    """
    os.environ |= QUIET
    try:
        record = json.loads(read_inside(logged, WANDB_RECORD, LARGEST_SETTINGS))
        options = {key: record[key] for key in OF_RUN}
        if logged != folder:
            options |= {"name": f"{kind} on {folder.name}", "job_type": kind}
        mode, _ = quiet_mode()
        mode = mode or mode_of(logged)
        if mode != "disabled":
            options["mode"] = mode
            logger = GuardedWandbLogger(say_line, folder, options, NOTHING_ADDED)
            logger.guarded(logger.add, kind, figures, files, step)
            logger.finish(exit_code=0)
    # See `wandb_logger`.
    except Exception as error:
        say_line(trouble(error, NOTHING_ADDED))


def mode_of(folder: Path) -> str:
    """Return the mode in which a run was logged to W&B."""
    is_offline = bool(names_inside(folder, "wandb", "offline-run-*"))
    return "offline" if is_offline else "online"
