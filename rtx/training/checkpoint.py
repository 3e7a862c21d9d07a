"""Checkpoints: plain dicts in a zip file that torch.load reads, with a checksum.

A file is only replaced by renaming a complete new one. A run has `last.ckpt` (all that a resume
needs), the one before it as `previous.ckpt`, and `best.ckpt` (weights alone).
"""

import contextlib
import hashlib
import json
import os
import re
import struct
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch

from rtx.disk import names_inside, open_inside, rename_inside, replace_inside
from rtx.errors import DAMAGED, RunFailed, UserError, refuse, shorten
from rtx.machine import out_of_memory
from rtx.runs.checksum import COMMENT_BYTES, TAG, in_run, is_whole, resumable
from rtx.runs.resumption import differences
from rtx.settings.identity import may_change

FORMAT = 3
"""Version of the layout; files of other versions are refused."""
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
PLAIN = (bool, int, float, str, bytes, type(None))
FACTS = ("format", "step", "config", "data")
"""Keys of a checkpoint that describe it, without its tensors."""

RENAMED = (
    (r"(\.attention\.groups\.\w+)\.", r"\1.pattern."),
    (r"\.attention\.shaw\.(\w+)\.", r".attention.groups.\1.tables."),
    (r"\.attention\.mix\.(\w+)\.", r".attention.groups.\1.key_mix."),
    (r"\.attention\.xl\.", ".attention.groups.recurrent.tables."),
    (r"\bwiden\.", "project_in."),
    (r"^narrow\.", "project_out."),
    (r"^softmax\.clusters\.", "softmax.other_bands."),
)
"""Names of tensors in older checkpoints, and what replaces them."""

Say = Callable[[str], object]
Checkpoint = dict[str, Any]
"""Lightning's dict, with the weights as `model`, and `format`, `step`, `config` and `data`."""


def save_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Replace a checkpoint; `RunFailed` where the disk is full: all files stay as they were.

    The new one is written beside its file, synced and renamed.
    """
    folder, name = in_run(path)
    former = "previous.ckpt" if path.name == "last.ckpt" else None
    try:
        replace_inside(folder, name, lambda file: write_zip(file, checkpoint), former=former)
    except OSError as error:
        raise RunFailed(f"cannot write {path}: {error.strerror}") from error


def write_zip(file: BinaryIO, checkpoint: Checkpoint) -> None:
    """Write a checkpoint with its checksum as the zip comment; OSError where the write failed."""
    try:
        torch.save(checkpoint, cast(IO[bytes], file))
    # torch reports a failed write as an internal error, whose context is the OSError.
    except RuntimeError as error:
        raise error.__context__ or error from None
    file.seek(-2, os.SEEK_END)
    file.write(struct.pack("<H", COMMENT_BYTES))
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256")  # type: ignore[arg-type]
    file.write(TAG + digest.hexdigest().encode())


def read_checkpoint(path: Path, *, facts_only: bool = False) -> Checkpoint:
    """Return the checkpoint in a file, on the CPU; the checksum has been compared before.

    With `facts_only` all of it is checked, but only FACTS are returned. Raises `UserError` for
    content that this version of rtx does not write.
    """
    try:
        with open_inside(*in_run(path)) as file:
            size = file.seek(0, os.SEEK_END)
            pickled = pickled_bytes(path, file, size)
            file.seek(0)
            # by path: an open file
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    # torch's reader has asserts, and raises errors of many kinds.
    except Exception as error:
        if isinstance(error, UserError | OSError) or out_of_memory(error):
            raise
        holds = "it holds more than plain tensors and numbers"
        raise UserError(f"{path} is refused: {holds}") from error
    version = checkpoint.get("format") if isinstance(checkpoint, dict) else None
    # A crafted file may have a tensor as its version, whose comparison is no bool.
    if not isinstance(version, int) or version != FORMAT:
        raise UserError(f"{path} is not of the format that this version of rtx reads ({FORMAT})")
    check_values(path, checkpoint, pickled, size)
    check_layout(path, checkpoint)
    if facts_only:
        return {key: checkpoint[key] for key in FACTS}
    return checkpoint


def pickled_bytes(path: Path, file: BinaryIO, size: int) -> int:
    """Return the bytes of the pickled part of a zip file; `UserError` for a compressed file.

    torch.save compresses nothing. A compressed file could be a thousand times as large in memory.
    """
    # by path: an open file
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    if sum(entry.file_size for entry in entries) > size:
        raise UserError(f"{path} is refused: it holds more than its size")
    return sum(entry.file_size for entry in entries if entry.filename.endswith("/data.pkl"))


def check_values(path: Path, checkpoint: Checkpoint, most: int, room: int) -> None:
    """Raise `UserError` for values other than plain ones and dense tensors.

    A few references to references in a pickle can make more values than could ever be counted, so
    their number is limited, as are the bytes of moments: to the size of the file.

    Args:
        most: the number of values that the file may have; a pickle needs a byte for each.
        room: the size of the file.
    """
    for part, content in checkpoint.items():
        for value in leaves(content):
            most -= 1
            problem = value_problem(value)
            if most < 0:
                problem = "more values than its size allows"
            is_moment = part == "optimizer_states" and isinstance(value, torch.Tensor)
            if is_moment and not problem:
                room -= value.nbytes
                problem = moment_problem(value, room)
            if problem:
                raise UserError(f"{path} is refused: its {shorten(str(part))} holds {problem}")


def value_problem(value: Any) -> str:
    """Return why a value in a file is refused, or ""."""
    if isinstance(value, torch.Tensor):
        return tensor_problem(value)
    if not isinstance(value, PLAIN):
        return f"a value of type {type(value).__name__}"
    return ""


def leaves(content: Any) -> Iterator[Any]:
    """Yield all that is nested in mappings and lists, and None for each of these, in any order."""
    waiting = [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.keys()
            waiting += value.values()
            yield None
        elif isinstance(value, list | tuple):
            waiting += value
            yield None
        else:
            yield value


def tensor_problem(tensor: torch.Tensor) -> str:
    """Return why a tensor in a file is refused, or "".

    Fused optimizers ignore the strides of a moment: with others than the weight's they would read
    and write outside it.
    """
    if type(tensor) is not torch.Tensor or vars(tensor):
        return "a tensor of another class, or with attributes"
    if tensor.is_nested or tensor.layout != torch.strided:
        return "a tensor that is sparse or nested"
    if tensor.device.type != "cpu":
        return f"a tensor on the device {tensor.device.type}"
    if tensor.dtype not in FLOATS + INTEGERS or tensor.is_neg():
        return f"a tensor of {tensor.dtype} whose elements are not plain numbers"
    if not is_dense(tensor):
        return "a tensor whose elements share their places, or leave gaps"
    return ""


def moment_problem(moment: torch.Tensor, room: int) -> str:
    """Return why a moment of an optimizer is refused, or "".

    `room`: bytes of the file that earlier moments have left.
    """
    if room < 0:
        return "tensors that share their places"
    if not bool(moment.isfinite().all()):
        return "a number that is not finite"
    return ""


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a strided tensor has no overlapping elements and no gaps.

    All elements must be within the tensor's storage.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and tensor.numel() and stride != expected:
            return False
        expected *= size
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return end <= tensor.untyped_storage().nbytes()


def check_layout(path: Path, checkpoint: Any) -> None:
    """Raise `UserError` for a checkpoint whose parts are missing or of other types."""
    match checkpoint:
        case {
            "step": int(step),
            "config": {} as config,
            "data": {"fingerprint": str(), **more} as data,
            "model": dict(model),
        }:
            are_tensors = all(isinstance(tensor, torch.Tensor) for tensor in model.values())
            has_tokenizer = isinstance(more.get("tokenizer"), dict | None)
            if step >= 0 and are_tensors and has_tokenizer and is_json([config, data]):
                return
    raise UserError(f"{path} is no checkpoint of rtx: its parts cannot be right")


def is_json(content: Any) -> bool:
    """Return whether content can be written as JSON."""
    try:
        json.dumps(content)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def first_whole(
    paths: list[Path], say: Say, instead: str, *, facts_only: bool = False, set_aside: bool = False
) -> Checkpoint | None:
    """Return the first of several files whose checksum matches, with its `path` and `file`.

    None where no file exists. Raises `RunFailed` where files exist but none matches.

    Args:
        instead: the line for a checkpoint other than the first, with its keys in braces.
        set_aside: whether to rename a damaged file to `<name>.damaged`.
    """
    for path in paths:
        if is_whole(path):
            checkpoint = read_checkpoint(path, facts_only=facts_only)
            checkpoint |= {"path": path, "file": path.stem}
            if path != paths[0]:
                say(instead.format_map(checkpoint))
            return checkpoint
        if path.exists():
            tell_damaged(path, say, set_aside)
    folder = paths[0].parent
    set_aside_before = names_inside(folder.parent, folder.name, "*.damaged")
    if set_aside_before or any(path.exists() for path in paths):
        names = ", ".join(path.name for path in paths)
        raise RunFailed(f"{folder}: none of {names} is whole")
    return None


def tell_damaged(path: Path, say: Say, set_aside: bool) -> None:
    """Print that a checkpoint is damaged, and rename it if `set_aside`."""
    line = f"{path} is damaged (its checksum does not match)"
    if set_aside:
        aside = f"{path.name}.damaged"
        rename_inside(*in_run(path), aside)
        line += f"; set aside as {aside}"
    say(line)


def newest_checkpoint(folder: Path, *, set_aside: bool, report: Say = print) -> Checkpoint | None:
    """Return FACTS, `path` and `file` of the newest whole checkpoint of a run.

    None where none was ever written. Raises `RunFailed` where all are damaged. With `set_aside` a
    damaged file becomes `<name>.damaged`, so that it does not replace a good previous.ckpt later.
    """
    instead = "going on from {path} (step {step}), the newest that is whole"
    return first_whole(resumable(folder), report, instead, facts_only=True, set_aside=set_aside)


def load_for_use(folder: Path, name: str, say: Say = print) -> Checkpoint:
    """Return the checkpoint `best` or `last` of a run.

    If it is damaged, a line is printed and another one returned; its key `file` says which.
    """
    paths = dict.fromkeys([folder / f"{name}.ckpt", folder / "best.ckpt", *resumable(folder)])
    instead = f"no whole {name}.ckpt; using {{file}}.ckpt (step {{step}})"
    checkpoint = first_whole(list(paths), say, instead)
    if checkpoint is None:
        raise UserError(f"the run has no checkpoint yet: nothing in {folder}")
    return checkpoint


def check_config(checkpoint: Checkpoint, config: Mapping[str, Any], path: Path) -> None:
    """Raise `UserError` if config.yaml of a run describes another model than its checkpoint."""
    problems = []
    trained = f"in {checkpoint['file']}.ckpt, which was trained so: put that back"
    for key, (old, new) in differences(checkpoint["config"], config, shared=True).items():
        is_of_model = key.startswith(("model.", "routing.", "data."))
        if is_of_model and not may_change(key):
            problems.append(f"{path}: {key} is {new}, but {old} {trained}")
    refuse(problems)


def with_current_names(tensors: Mapping[str, Any], expected: Collection[str]) -> dict[str, Any]:
    """Return the tensors of a checkpoint by the names that a model has for them, in their order."""
    return {current_name(name, expected): tensor for name, tensor in tensors.items()}


def current_name(name: str, expected: Collection[str]) -> str:
    """Return the name that a model has for a tensor of a checkpoint, which may be an older one."""
    if name in expected:
        return name
    for pattern, replacement in RENAMED:
        renamed = re.sub(pattern, replacement, name, count=1)
        if renamed in expected:
            return renamed
    return name


def renumbered(
    state: Mapping[int, Any],
    saved: Iterable[str],
    groups: Sequence[Iterable[str]],
) -> Mapping[int, Any]:
    """Return the state of an optimizer by the numbers of its parameters in this version.

    torch numbers parameters group by group, and within a group in the order of the model, which
    versions of rtx may change.

    Args:
        state: what the optimizer has saved for each number.
        saved: the tensors of the model that was saved with it, by their current names, in order.
        groups: the names of the parameters in each group.
    """
    places = {name: place for place, name in enumerate(saved)}
    before: list[str] = []
    after: list[str] = []
    for names in groups:
        before += sorted(names, key=lambda name: places.get(name, len(places)))
        after += names
    if before == after:
        return state
    number_before = {name: number for number, name in enumerate(before)}
    moved = {}
    for number, name in enumerate(after):
        if number_before[name] in state:
            moved[number] = state[number_before[name]]
    return moved


def with_current_callbacks(states: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the states of callbacks by the class names of this version."""
    if "Watch" not in states:
        return states
    state = states["Watch"]
    timing = {"seconds": state["seconds"]}
    if "clock" in state:
        timing["clock"] = state["clock"]
    return {
        "Timing": timing,
        "Validations": {"best": state["best"]},
        "RankStates": {"ranks": state["ranks"]},
    }


@contextlib.contextmanager
def resuming_from(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn errors of restoring a checkpoint in this block into `UserError`."""
    try:
        yield
    except (RuntimeError, *DAMAGED) as error:
        if isinstance(error, UserError | RunFailed) or out_of_memory(error):
            raise
        raise UserError(f"{checkpoint['path']} cannot be resumed from: {error!r}") from error


def load_weights(model: torch.nn.Module, checkpoint: Checkpoint) -> None:
    """Load weights and buffers into a model; `UserError` names tensors whose shapes differ."""
    tensors = with_current_names(checkpoint["model"], model.state_dict())
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(f"the checkpoint does not fit the model: {error}") from error
