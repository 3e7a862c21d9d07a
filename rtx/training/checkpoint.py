"""Checkpoints: plain dicts in a zip file that torch.load reads, with a checksum, replaced only by a whole new one.

A run keeps `checkpoints/last.ckpt` (everything that a resume needs), `previous.ckpt` (the one before it, for the day
when `last.ckpt` is damaged), still older ones as `step_<step>.ckpt` where `trainer.keep_checkpoints` asks for them, and
`best.ckpt` (by validation bits; without optimizer and random streams). The SHA-256 of the file stands in the comment at
its end, so that any flipped bit or missing piece is known before it is trusted.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from lightning.fabric.plugins import CheckpointIO

from rtx.disk import sync_folder, write_beside
from rtx.errors import RunFailed, UserError
from rtx.training.config_diff import differences, makes_another

FORMAT = 2
"""Version of the layout below; only files of this one are read."""

Checkpoint = dict[str, Any]
"""Lightning's, with weights as `model` and with `format`, `step`, `config` and `data`."""

TAG = b"rtx sha256 "
COMMENT_BYTES = len(TAG) + 64
"""Length of the zip comment that holds the checksum."""

KEYS: dict[str, type] = {"step": int, "config": dict, "data": dict, "model": dict}
"""What every checkpoint has, and its type."""


class Damaged(Exception):
    """A checkpoint file that is not what was written."""


class Refused(Exception):
    """A file that is whole but no checkpoint of ours: other objects than plain data, or another format."""


class CheckpointFiles(CheckpointIO):
    """Writes a checkpoint beside its place, syncs it to the disk, and renames; `last.ckpt` moves older ones along.

    Lightning's own collects the file in memory, writes it by way of the system's temporary folder, and never syncs.

    Args:
        keep: checkpoints to go on from that remain, `last.ckpt` included. Above 2 the old `previous.ckpt` stays as
            `step_<step>.ckpt`, and the oldest of those is deleted.
    """

    def __init__(self, keep: int = 2) -> None:
        self.keep = keep
        self.steps: list[int | None] = [None, None]
        """Steps of last.ckpt and previous.ckpt, where this process has written them."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Replace a checkpoint. At every moment `last.ckpt` or `previous.ckpt` is whole, once there is one.

        Raises:
            RunFailed: the disk is full; all files are as they were.
        """
        path = Path(path)
        try:
            path.parent.mkdir(exist_ok=True)
            written = write_beside(path, lambda file: write_zip(file, checkpoint))
            if path.name == "last.ckpt":
                self.move_along(path, written)
            os.replace(written, path)
            sync_folder(path.parent)
            if path.name == "last.ckpt":
                self.steps = [checkpoint["step"], self.steps[0]]
                self.delete_oldest(path.parent)
        except OSError as error:
            raise RunFailed(f"cannot write {path}: {error.strerror}") from error

    def move_along(self, last: Path, written: Path) -> None:
        """Let `last.ckpt` become `previous.ckpt`, and that one `step_<step>.ckpt`, just before the new one comes."""
        previous = last.with_name("previous.ckpt")
        if self.keep > 2 and previous.exists():
            step = whole_step(previous) if self.steps[1] is None else self.steps[1]
            if step is not None:
                os.replace(previous, previous.with_name(f"step_{step:07d}.ckpt"))
        if self.keep == 1 or not last.exists():
            return
        second = written.with_name(written.name.replace("last", "previous", 1))
        try:
            os.link(last, second)
        except OSError:  # a file system without hard links: for a moment only previous.ckpt is there
            os.replace(last, previous)
        else:
            os.replace(second, previous)

    def delete_oldest(self, folder: Path) -> None:
        """Delete what is more than is to be kept."""
        extra = [folder / "previous.ckpt"] if self.keep == 1 else []
        for path in [*older(folder)[max(0, self.keep - 2) :], *extra]:
            path.unlink(missing_ok=True)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return a checkpoint for Lightning, its tensors in CPU memory; errors as `read_checkpoint`."""
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Delete a checkpoint."""
        Path(path).unlink(missing_ok=True)


def whole_step(path: Path) -> int | None:
    """Return the step of a checkpoint; None where there is none, or a damaged one."""
    try:
        return read_checkpoint(path, facts_only=True)["step"]
    except (OSError, Damaged, Refused):
        return None


def write_zip(file: BinaryIO, checkpoint: Checkpoint) -> None:
    """Write a checkpoint with its checksum as the zip comment.

    Raises:
        OSError: the write failed.
    """
    sink = FaultKeeper(file)
    try:
        torch.save(checkpoint, cast(IO[bytes], sink))
    except RuntimeError as error:  # torch reports a failed write as an internal error of its own
        raise sink.fault or error from error
    if sink.fault:
        raise sink.fault
    file.seek(-2, os.SEEK_END)
    file.write(struct.pack("<H", COMMENT_BYTES))
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
    file.write(TAG + digest.hexdigest().encode())


class FaultKeeper:
    """A file for torch.save that remembers the error of a failed write."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.fault: OSError | None = None

    def write(self, data: bytes) -> int:
        """Write all of `data`."""
        try:
            return self.file.write(data)
        except OSError as error:
            self.fault = error
            raise

    def flush(self) -> None:
        """Flush the file."""
        self.file.flush()


def verify(path: Path) -> None:
    """Check a file against its checksum.

    Raises:
        Damaged: it is cut short or altered.
        OSError: there is none, or the system cannot read it.
    """
    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size - COMMENT_BYTES
        digest = hashlib.sha256()
        while left > 0 and (piece := file.read(min(left, 1 << 22))):
            digest.update(piece)
            left -= len(piece)
        comment = file.read()
    if comment != TAG + digest.hexdigest().encode():
        raise Damaged(f"{path} is damaged (its checksum does not match)")


def is_whole(path: Path) -> bool:
    """Whether a checkpoint is there and as it was written."""
    try:
        verify(path)
    except (Damaged, OSError):
        return False
    return True


def resumable(folder: Path) -> list[Path]:
    """Return the files of a run's checkpoints folder that it may go on from, the newest first; some may be missing."""
    return [folder / "last.ckpt", folder / "previous.ckpt", *older(folder)]


def older(folder: Path) -> list[Path]:
    """Return the checkpoints before `previous.ckpt` that are kept, the newest first."""
    return sorted(folder.glob("step_[0-9]*.ckpt"), key=lambda path: (len(path.name), path.name), reverse=True)


def read_checkpoint(path: Path, *, facts_only: bool = False) -> Checkpoint:
    """Return the checkpoint in a file; nothing but plain data is ever unpickled.

    Args:
        path: the file.
        facts_only: read no tensors; they are there with their shapes alone.

    Raises:
        Damaged: it is cut short or altered.
        Refused: it holds more than plain data, or is of another version.
        OSError: there is none, or the system cannot read it.
    """
    verify(path)
    try:
        checkpoint = torch.load(path, map_location="meta" if facts_only else "cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, LookupError, TypeError) as error:
        raise Refused(f"{path} is refused: it holds more than plain tensors and numbers") from error
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("format"), int):
        raise Refused(f"{path} is no checkpoint of rtx")
    if checkpoint["format"] != FORMAT:
        raise Refused(f"{path} has format {checkpoint['format']}, which another version of rtx wrote and reads")
    check_layout(path, checkpoint)
    return checkpoint


def check_layout(path: Path, checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint whose parts are missing or of other types.

    Raises:
        Refused: names the part.
    """
    wrong = [name for name, kind in KEYS.items() if type(checkpoint.get(name)) is not kind]
    if not wrong:
        tensors = all(isinstance(value, torch.Tensor) for value in checkpoint["model"].values())
        facts = isinstance(checkpoint["data"].get("fingerprint"), str)
        wrong = [name for name, right in (("model", tensors), ("data", facts)) if not right]
    if wrong or checkpoint["step"] < 0:
        raise Refused(f"{path} is no checkpoint of rtx: its {', '.join(wrong) or 'step'} cannot be right")


def newest_checkpoint(folder: Path, *, set_aside: bool, report: Callable[[str], object] = print) -> Checkpoint | None:
    """Return the facts of the newest checkpoint of a run that is whole, or None where none was ever written.

    Its tensors have their shapes alone; the key `path` says where it is.

    Args:
        folder: the run's checkpoints folder.
        set_aside: rename a damaged file to `<name>.damaged`, so that it cannot displace a good one.
        report: called with a line for each file that is passed over.

    Raises:
        RunFailed: there are checkpoints, but none is whole; or one cannot be read.
        UserError: the newest whole one is refused.
    """
    if set_aside:
        put_back(folder, report)
    paths = resumable(folder)
    for path in paths:
        try:
            checkpoint = read_checkpoint(path, facts_only=True)
        except FileNotFoundError:
            continue
        except Damaged as error:
            report(f"{error}; {put_aside(path) if set_aside else 'passed over'}")
            continue
        except Refused as error:
            raise UserError(str(error)) from error
        except OSError as error:
            raise RunFailed(
                f"{path} cannot be read ({error.strerror}); nothing was changed: mend that first"
            ) from error
        if path != paths[0]:
            which = "the checkpoint" if path == paths[1] else "a checkpoint"
            report(f"going on from {path} (step {checkpoint['step']}), {which} before it")
        return {**checkpoint, "path": path}
    if not any(path.exists() for path in paths) and not list(folder.glob("*.damaged")):
        return None
    raise RunFailed(f"no checkpoint in {folder} is whole; the weights of best.ckpt may still be scored")


def put_back(folder: Path, report: Callable[[str], object]) -> None:
    """Give files their names back that were set aside though they are whole: a disk or a system that failed then."""
    for aside in folder.glob("*.ckpt.damaged"):
        path = aside.with_suffix("")
        if not path.exists() and is_whole(aside):
            aside.rename(path)
            report(f"{aside} is whole: it is {path.name} again")


def put_aside(path: Path) -> str:
    """Rename a damaged file to `<name>.damaged`, where the system lets us, and return what came of it."""
    damaged = path.with_name(path.name + ".damaged")
    try:
        path.rename(damaged)
    except OSError as error:
        return f"it cannot be set aside ({error.strerror})"
    return f"set aside as {damaged.name}"


def load_for_use(folder: Path, name: str, say: Callable[[str], object] = print) -> Checkpoint:
    """Return `best` or `last` of a run for scoring or sampling; a damaged or missing one is replaced by the other.

    The key `file` says which it is; `say` is called with a line about a replacement.

    Raises:
        UserError: the run has no checkpoint yet, or the file is refused.
        RunFailed: no checkpoint is whole.
    """
    others = [other for other in ("best", *(path.stem for path in resumable(folder))) if other != name]
    problems = []
    for candidate in (name, *others):
        path = folder / f"{candidate}.ckpt"
        try:
            checkpoint = read_checkpoint(path)
        except FileNotFoundError:
            problems.append(f"{path} does not exist")
            continue
        except Damaged as error:
            problems.append(str(error))
            continue
        except OSError as error:
            problems.append(f"{path} cannot be read ({error.strerror})")
            continue
        except Refused as error:
            raise UserError(str(error)) from error
        if problems:
            say(f"{problems[0]}; using {candidate}.ckpt (step {checkpoint['step']})")
        return {**checkpoint, "file": candidate}
    if all(problem.endswith("does not exist") for problem in problems):
        raise UserError(f"the run has no checkpoint yet: nothing in {folder}")
    raise RunFailed("\n".join(problems))


def check_config(checkpoint: Checkpoint, config: Mapping[str, Any], path: Path) -> None:
    """Check that a configuration file still has the model and the data that were trained; other fields may change.

    Args:
        checkpoint: from `load_for_use`, or an export.
        config: what the file says, as plain values, without overrides.
        path: the file.

    Raises:
        UserError: a line for each field that differs, with both values.
    """
    lines = [
        f"{path}: {key} is {new}, but {old} in {checkpoint['file']}.ckpt, which was trained so: put that back"
        for key, (old, new) in differences(checkpoint["config"], config, shared=True).items()
        if makes_another(key)
    ]
    if lines:
        raise UserError("\n".join(lines))


def load_weights(model: torch.nn.Module, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Load the weights and buffers of a checkpoint into `model`; arguments and errors as `check_shapes`."""
    check_shapes(model, checkpoint, config)
    model.load_state_dict(checkpoint["model"])


def check_shapes(model: torch.nn.Module, checkpoint: Checkpoint, config: Mapping[str, Any]) -> None:
    """Check that the weights of a checkpoint fit into a model.

    Args:
        model: built from `config`.
        checkpoint: from `read_checkpoint` or `load_for_use`.
        config: the configuration as plain values, to name what differs from the checkpoint's.

    Raises:
        UserError: the shapes differ; names the fields of the configuration that do, and a tensor.
    """
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    stored = {name: tuple(tensor.shape) for name, tensor in checkpoint["model"].items()}
    if own == stored:
        return
    name = next(n for n in sorted(own.keys() | stored.keys()) if own.get(n) != stored.get(n))
    changed = differences(checkpoint["config"], config)
    fields = [
        f"{key} is {old} in the checkpoint and {new} here"
        for key, (old, new) in changed.items()
        if key.startswith(("model.", "routing.", "data."))
    ]
    tensor = f"{name}: {stored.get(name, 'absent')} there, {own.get(name, 'absent')} here"
    raise UserError(f"the checkpoint has another shape: {'; '.join(fields) or 'another vocabulary'} ({tensor})")
