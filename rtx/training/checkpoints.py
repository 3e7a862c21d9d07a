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

from rtx.disk import sync_folder
from rtx.errors import RunFailed, UserError
from rtx.training.changes import differences, makes_another
from rtx.training.checksums import COMMENT_BYTES, PIECE, TAG, Damaged, older, resumable, verify
from rtx.training.files import write_beside

FORMAT = 1
"""Version of the layout below; a file of a later one is refused."""

Checkpoint = dict[str, Any]
"""Keys: format, step, config, data, model, optimizer, progress and ranks (random streams and running sums of each)."""


class Refused(Exception):
    """A file that is whole but no checkpoint of ours: other objects than plain data, or a later format."""


def save_last(folder: Path, checkpoint: Checkpoint, keep: int = 2) -> None:
    """Replace `last.ckpt`; the old one becomes `previous.ckpt`. At every moment one of them is whole.

    Args:
        folder: the run's checkpoints folder.
        checkpoint: what to write.
        keep: checkpoints to go on from that remain, this one included. Above 2 the old `previous.ckpt` stays as
            `step_<step>.ckpt`, and the oldest of those is deleted.

    Raises:
        RunFailed: the disk is full; all files are as they were.
    """
    last, previous = folder / "last.ckpt", folder / "previous.ckpt"
    written = write_checkpoint(last, checkpoint)
    if keep > 2:
        name_by_step(previous)
    if keep > 1 and last.exists():
        second = written.with_name(written.name.replace("last", "previous", 1))
        try:
            os.link(last, second)
        except OSError:  # a file system without hard links: for a moment only previous.ckpt is there
            os.replace(last, previous)
        else:
            os.replace(second, previous)
    os.replace(written, last)
    sync_folder(folder)
    for path in [*older(folder)[max(0, keep - 2) :], *([previous] if keep == 1 else [])]:
        path.unlink(missing_ok=True)


def name_by_step(path: Path) -> None:
    """Rename a checkpoint to `step_<step>.ckpt`; a damaged one, or none, is left as it is."""
    try:
        verify(path)
        step = torch.load(path, map_location="meta", weights_only=True)["step"]
    except (OSError, Damaged):
        return
    os.replace(path, path.with_name(f"step_{step:07d}.ckpt"))


def save_best(folder: Path, checkpoint: Checkpoint) -> None:
    """Replace `best.ckpt` with the parts that scoring and sampling need.

    Raises:
        RunFailed: the disk is full; the file is as it was.
    """
    best = folder / "best.ckpt"
    slim = {k: v for k, v in checkpoint.items() if k not in ("optimizer", "ranks")}
    os.replace(write_checkpoint(best, slim), best)
    sync_folder(folder)


def write_checkpoint(path: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint beside `path` and return the temporary file, whole and on the disk."""
    try:
        return write_beside(path, lambda file: write_zip(file, checkpoint))
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}") from error


def write_zip(file: BinaryIO, checkpoint: Checkpoint) -> None:
    """Write a checkpoint with its checksum as the zip comment.

    Raises:
        OSError: the write failed.
    """
    sink = FaultKeeper(file)
    try:
        torch.save({"format": FORMAT, **checkpoint}, cast(IO[bytes], sink))
    except RuntimeError as error:  # torch reports a failed write as an internal error of its own
        raise sink.fault or error from error
    if sink.fault:
        raise sink.fault
    file.seek(-2, os.SEEK_END)
    file.write(struct.pack("<H", COMMENT_BYTES))
    file.seek(0)
    digest = hashlib.sha256()
    while piece := file.read(PIECE):
        digest.update(piece)
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


def read_checkpoint(path: Path) -> Checkpoint:
    """Return the checkpoint in a file, its tensors in CPU memory; nothing but plain data is ever unpickled.

    Raises:
        Damaged: it is cut short or altered, or the system cannot read it.
        Refused: it holds more than plain data, or comes from a later version.
        FileNotFoundError: there is none.
    """
    try:
        verify(path)
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror})") from error
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise Refused(f"{path} is refused: it holds more than plain tensors and numbers") from error
    if not isinstance(checkpoint, dict) or "format" not in checkpoint:
        raise Refused(f"{path} is no checkpoint of rtx")
    if checkpoint["format"] > FORMAT:
        raise Refused(f"{path} has format {checkpoint['format']}; this rtx reads up to {FORMAT}: update rtx")
    return checkpoint


def newest_checkpoint(folder: Path, *, set_aside: bool, report: Any = print) -> Checkpoint | None:
    """Return the newest checkpoint of a run that is whole, or None where none was ever written.

    Args:
        folder: the run's checkpoints folder.
        set_aside: rename a damaged file to `<name>.damaged`, so that it cannot displace a good one.
        report: called with a line for each file that is passed over.

    Raises:
        RunFailed: there are checkpoints, but none is whole.
        UserError: the newest whole one is refused.
    """
    paths = resumable(folder)
    missing = []
    for path in paths:
        try:
            checkpoint = read_checkpoint(path)
        except FileNotFoundError:
            missing.append(path)
            continue
        except Damaged as error:
            report(f"{error}; {put_aside(path) if set_aside else 'passed over'}")
            continue
        except Refused as error:
            raise UserError(str(error)) from error
        if path != paths[0]:
            which = "the checkpoint" if path == paths[1] else "a checkpoint"
            report(f"going on from {path} (step {checkpoint['step']}), {which} before it")
        return checkpoint
    if missing == paths and not list(folder.glob("*.damaged")):
        return None
    raise RunFailed(f"no checkpoint in {folder} is whole; the weights of best.ckpt may still be scored")


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
        checkpoint: from `newest_checkpoint` or `load_for_use`.
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
