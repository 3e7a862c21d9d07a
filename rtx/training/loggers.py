"""Where the numbers of a run go: metrics.jsonl (an object per line; after a resume the last row of a step counts), and
TensorBoard, CSV, or Weights & Biases at arm's length: its files, and in `wandb.json` what tells it the run, which a
resume and what comes after training go on with, are in the run's folder. Rows have names `train/…`, `valid/…`.
"""

import configparser
import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from rtx.disk import open_no_link, read_file, write_json
from rtx.errors import UserError
from rtx.progress import say as say_line
from rtx.runs.folder import shown
from rtx.runs.records import MetricsRow, finite, read_rows
from rtx.runs.status import utc_now
from rtx.settings.logger import wandb_mode
from rtx.settings.schema import Config

INIT_SECONDS, FINISH_SECONDS = (
    15.0,
    60.0,
)  # patience with the W&B server at the start, and with uploads at the end
GOES_ON = "going on with metrics.jsonl alone"
QUIET = {
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
}  # read when wandb is first imported
LOCAL: dict[str, Callable[[Path], Logger]] = {
    "csv": partial(CSVLogger, name="csv", flush_logs_every_n_steps=1),  # a version for each resume
    "tensorboard": partial(
        TensorBoardLogger, name="", version="tensorboard", default_hp_metric=False, purge_step=0
    ),
}
"""Loggers that begin anew with each resume (TensorBoard hides what files of before it hold), and get all rows again."""
Say = Callable[[str], object]


@contextlib.contextmanager
def logging_to(
    folder: Path | None, config: Config, facts: dict[str, Any], say: Say, step: int = 0
) -> Iterator[list[Logger]]:
    """Yield the loggers of a run that goes on from `step`, and end them with it; a rank without a `folder` has none."""
    if folder is None:
        yield []
        return
    with (
        contextlib.closing(JsonlLogger(folder / "metrics.jsonl")) as metrics,
        contextlib.ExitStack() as stack,
    ):
        loggers: list[Logger] = [metrics]
        for name, make in LOCAL.items():
            if not getattr(config.logger, name):
                continue
            local = make(folder)
            local.log_hyperparams(facts)
            for values, at in rows_before(folder / "metrics.jsonl", step, config):
                local.log_metrics(values, at)
            stack.push(partial(finalize, local))
            loggers.append(local)
        wandb = wandb_logger(config, folder, facts, say) if config.logger.wandb else None
        if wandb:
            stack.push(lambda kind, *_: wandb.finish(exit_code=int(kind is not None)))
            loggers.append(wandb)
        yield loggers


def finalize(logger: Logger, kind: type[BaseException] | None, *_: Any) -> None:
    """End a logger of Lightning's, after an exception of some kind or none."""
    logger.finalize("failed" if kind else "success")


def rows_before(path: Path, step: int, config: Config) -> Iterator[tuple[dict[str, float], int]]:
    """Yield the last rows of each kind and step up to `step`, without what a run from there repeats."""
    is_over = step >= config.trainer.steps
    validates_again = is_over or step % config.trainer.val_every == 0
    repeated = {"valid": validates_again, "final": is_over}
    rows: dict[tuple[int, str], MetricsRow] = {}
    for row in read_rows(MetricsRow, path, problems=[]):
        rows[row.step, row.kind] = row
    for (at, kind), row in sorted(rows.items(), key=lambda item: item[0][0]):
        if at < step or (at == step and not repeated.get(kind)):
            numbers = row.metrics.items()
            yield {name: value for name, value in numbers if value is not None}, at


class JsonlLogger(Logger):
    """Appends rows to a metrics.jsonl; each is on its way to the disk before `log_metrics` returns."""

    name = version = "metrics"  # type: ignore[assignment]

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            self.file = open_no_link(path, "a+b")
            self.file.truncate(
                read_file(path).rfind(b"\n") + 1
            )  # a killed run may leave a last line without its end
        except OSError as error:
            raise UserError(f"{path}: rows cannot be appended to it ({error.strerror})") from error

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Append a row; numbers that JSON does not have become null."""
        numbers = {name: finite(value) for name, value in metrics.items()}
        row = MetricsRow.model_validate({"step": step, "time": utc_now(), **numbers})
        self.file.write(row.model_dump_json().encode() + b"\n")
        self.file.flush()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: config.yaml has them."""

    def close(self) -> None:
        self.file.close()


@contextlib.contextmanager
def own_settings() -> Iterator[Any]:
    """Yield `wandb`, which meanwhile reads settings of the user, and none of the current folder.

    By itself it takes `wandb/settings` and `config-defaults.yaml` from there. The current folder
    may be a stranger's run: such a file names the server, or the proxy, that gets the user's key.
    Settings are read once in a process, when W&B is first set up. Fails where W&B has no such
    methods: then it may read these files by others.
    """
    import wandb
    from wandb.sdk.lib.settings_file import SettingsFiles
    from wandb.sdk.wandb_config import Config as RunConfig

    def read(settings: Any) -> SettingsFiles:
        of_user = Path(settings.settings_system) if settings.settings_system else None
        return SettingsFiles(global_settings=of_user, local_settings=Path(os.devnull))

    with contextlib.ExitStack() as stack:
        for kind, name, method in (
            (wandb.Settings, "read_system_settings", read),
            (RunConfig, "_load_defaults", lambda config: None),
        ):
            stack.callback(setattr, kind, name, getattr(kind, name))
            setattr(kind, name, method)
        yield wandb


def quiet_mode() -> tuple[str, str]:
    """Return the mode that W&B is to have and where that is written, both "" where it is not.

    It is in WANDB_MODE, or where `wandb offline` or `wandb disabled` has put it in the current
    folder: that file may keep data here, but not send them.
    """
    if mode := wandb_mode():
        return mode, f"WANDB_MODE={os.environ['WANDB_MODE']}"
    for path in (Path(".wandb/settings"), Path("wandb/settings")):
        settings = configparser.ConfigParser(interpolation=None)
        with contextlib.suppress(OSError, ValueError, configparser.Error):
            settings.read_string(read_file(path).decode())
        mode = settings.get("default", "mode", fallback="")
        if mode in ("offline", "disabled"):
            return mode, f"mode = {mode} in {path}"
    return "", ""


class GuardedWandbLogger(WandbLogger):
    """Lightning's logger of the run that wandb.json names, else a new one; quiet after an error, told in a line."""

    def __init__(
        self, say: Say, folder: Path, asked: Mapping[str, Any], goes_on: str = GOES_ON, **more: Any
    ) -> None:
        with own_settings() as wandb:
            wandb.setup()  # by which it is quiet from the first
            if asked["mode"] == "online" and not wandb.login(prompt=False, verify=False):
                raise ValueError("no key found (wandb login)")  # W&B itself would ask for one
        path = folder / "wandb.json"
        kept = {
            **asked,
            "id": json.loads(read_file(path))["id"] if path.exists() else secrets.token_hex(4),
        }
        write_json(path, {key: kept[key] for key in kept if key != "mode"})
        (folder / "wandb").mkdir(exist_ok=True)
        os.environ["WANDB_DATA_DIR"] = str(
            folder / "wandb"
        )  # where files of artifacts wait for their upload
        patience = {"init_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS}
        settings = wandb.Settings(console="off", disable_git=True, **patience)  # type: ignore[arg-type]
        super().__init__(save_dir=str(folder), settings=settings, **kept, **more)
        self.say = say
        self.goes_on = goes_on
        with own_settings():
            self.run = self.experiment  # which begins the run
        self.run.define_metric("valid/bits", step_metric="trainer/global_step", summary="min")
        if asked["mode"] == "online":
            say(f"W&B: {self.run.url}")

    def guarded(self, work: Callable[..., object], *arguments: Any, **options: Any) -> None:
        try:
            if self.run is not None:
                work(*arguments, **options)
        except Exception as error:
            self.run = None
            self.say(trouble(error, self.goes_on))

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.guarded(super().log_metrics, metrics, step)

    def add(
        self, kind: str, figures: Mapping[str, Any], files: Sequence[Path], step: int | None = None
    ) -> None:
        """Add figures, pictures among the files, and all files as one artifact; raises what W&B raises."""
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
        """Write figures, or texts such as what a closing score is of, to the run's summary."""
        self.guarded(lambda: self.experiment.summary.update(figures))

    def finish(self, exit_code: int) -> None:
        """End the run at W&B, waiting for uploads for a minute at the most."""
        self.guarded(self.experiment.finish, exit_code=exit_code)


def wandb_logger(config: Config, folder: Path, facts: Any, say: Say) -> GuardedWandbLogger | None:
    """Begin a run at W&B with its configuration (`facts`), or none, and never ask anybody for anything."""
    os.environ |= QUIET
    wished = config.logger
    mode = wished.mode
    try:
        if mode == "auto":
            mode, why = quiet_mode()
            if not mode:
                with own_settings() as wandb:
                    has_key = wandb.login(prompt=False, verify=False)
                mode = "online" if has_key else "offline"
            if mode == "offline":
                uploads = f"wandb sync {shown(folder)}/wandb/offline-run-*"
                say(f"W&B: {why or 'no key found'}; to upload the curves later:\n  {uploads}")
        if mode in ("online", "offline"):
            tags = [
                config.data.name,
                config.model.name,
                *os.environ.get("WANDB_TAGS", "").split(","),
            ]
            if config.routing.heads and config.routing.layers:
                tags.append(config.routing.selection)
            sweep = config.name if (folder.parent / "sweeps.jsonl").is_file() else None
            place = {
                "project": wished.project,
                "entity": wished.entity,
                "group": wished.group or sweep,
            }
            title = {
                "name": f"{config.name}-{folder.name}",
                "job_type": "train",
                "tags": [*filter(None, tags)],
            }
            return GuardedWandbLogger(say, folder, {"mode": mode, **place, **title}, config=facts)
    except Exception as error:
        say(trouble(error))
    return None


def add_to_wandb(
    folder: Path, kind: str, figures: Mapping[str, Any], files: Sequence[Path], step: int = 0
) -> None:
    """Add to the run that W&B has of a run, or has for the reports of a sweep, where its runs have any.

    Offline where those are, in a segment of its own. An error is told in a line, and ends nothing.
    """
    records = [
        path
        for path in (folder / "wandb.json", *sorted(folder.glob("*/wandb.json")))
        if path.is_file()
    ]
    if not records:
        return
    os.environ |= QUIET
    try:
        mode = "offline" if any(records[0].parent.glob("wandb/offline-run-*")) else "online"
        known = json.loads(read_file(records[0]))
        asked = {
            key: known[key] for key in ("project", "entity", "group", "name", "job_type", "tags")
        }
        if records[0].parent != folder:
            asked |= {"name": f"{kind} on {folder.name}", "job_type": kind}
        mode = quiet_mode()[0] or mode
        if mode != "disabled":
            logger = GuardedWandbLogger(
                say_line, folder, {"mode": mode, **asked}, "nothing is added there"
            )
            logger.guarded(logger.add, kind, figures, files, step)
            logger.finish(exit_code=0)
    except Exception as error:
        say_line(trouble(error, "nothing is added there"))


def trouble(error: Exception, goes_on: str = GOES_ON) -> str:
    return f"W&B: {(str(error).strip() or type(error).__name__).splitlines()[0]}; {goes_on}"
