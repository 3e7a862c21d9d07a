"""Checkpoints: whole or known to be damaged, the one before kept, nothing but plain data read."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from disturbances import damage
from torch import nn

from rtx.errors import RunFailed, UserError
from rtx.training import checkpoint as room
from rtx.training.checkpoint import (
    FORMAT,
    CheckpointFiles,
    is_whole,
    load_for_use,
    load_weights,
    newest_checkpoint,
    read_checkpoint,
    resumable,
)


def checkpoint(step: int) -> dict[str, Any]:
    """Return the parts of a checkpoint that matter here."""
    return {
        "format": FORMAT,
        "step": step,
        "config": {"model": {"hidden": 4}},
        "data": {"fingerprint": "x"},
        "model": {"weight": torch.full((4, 3), float(step))},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(1.0)}}, "param_groups": [{"betas": (0.9, 0.98)}]}],
    }


def save_last(folder: Path, *steps: int) -> None:
    """Save checkpoints of these steps as a run does."""
    for step in steps:
        CheckpointFiles().save_checkpoint(checkpoint(step), folder / "last.ckpt")


def newest_step(folder: Path, report: Callable[[str], object] = print) -> int:
    found = newest_checkpoint(folder, set_aside=True, report=report)
    assert found is not None
    return found["step"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_is_read_and_an_ordinary_file_for_torch_and_zip(tmp_path: Path) -> None:
    save_last(tmp_path, 1)
    read = read_checkpoint(tmp_path / "last.ckpt")
    assert torch.equal(read["model"]["weight"], torch.ones(4, 3))
    assert read["optimizer_states"][0]["param_groups"] == [{"betas": (0.9, 0.98)}]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["step"] == 1
    with zipfile.ZipFile(tmp_path / "last.ckpt") as archive:
        assert archive.testzip() is None and archive.comment.startswith(b"rtx sha256 ")


def test_a_damaged_last_gives_way_to_the_one_before_and_without_a_whole_one_nothing_is_made_up(tmp_path: Path) -> None:
    save_last(tmp_path, 1, 2, 3)
    assert names(tmp_path) == ["last.ckpt", "previous.ckpt"]
    damage(tmp_path / "last.ckpt", keep=500)
    lines: list[str] = []
    assert newest_step(tmp_path, lines.append) == 2
    assert "last.ckpt is damaged" in lines[0] and "step 2" in lines[1]
    save_last(tmp_path, 4)  # the damaged file must not have taken the place of the good one
    assert names(tmp_path) == ["last.ckpt", "last.ckpt.damaged", "previous.ckpt"]
    assert read_checkpoint(tmp_path / "previous.ckpt")["step"] == 2
    for path in resumable(tmp_path):
        damage(path, flip=4000)
    assert not any(is_whole(path) for path in resumable(tmp_path))
    for _ in range(2):
        with pytest.raises(RunFailed, match="is whole"):
            newest_checkpoint(tmp_path, set_aside=True)
    assert names(tmp_path) == ["last.ckpt.damaged", "previous.ckpt.damaged"]


def test_a_checkpoint_that_cannot_be_read_is_left_where_it_is(tmp_path: Path) -> None:
    save_last(tmp_path, 1, 2)
    last = tmp_path / "last.ckpt"
    last.unlink()
    last.mkdir()
    for read in (lambda: newest_checkpoint(tmp_path, set_aside=True), lambda: load_for_use(tmp_path, "last")):
        with pytest.raises(RunFailed, match=r"cannot be read \(Is a directory\); nothing was changed"):
            read()
    assert names(tmp_path) == ["last.ckpt", "previous.ckpt"]


def test_a_kill_between_the_two_renames_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_last(tmp_path, 1)
    real = os.replace

    def killed(old: Path, new: Path) -> None:
        if Path(new).name == "last.ckpt":
            raise KeyboardInterrupt
        real(old, new)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        save_last(tmp_path, 2)
    assert newest_step(tmp_path) == 1
    save_last(tmp_path, 3)
    assert [read_checkpoint(tmp_path / f"{name}.ckpt")["step"] for name in ("previous", "last")] == [1, 3]


@pytest.mark.parametrize("room_left", [0, 700, 2_000])
def test_a_full_disk_leaves_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room_left: int
) -> None:
    save_last(tmp_path, 1)

    class Disk(io.BytesIO):
        def write(self, data: Any) -> int:
            if self.tell() + len(data) > room_left:
                raise OSError(28, "No space left on device")
            return super().write(data)

    real = room.write_zip
    monkeypatch.setattr(room, "write_zip", lambda file, content: real(Disk(), content))
    with pytest.raises(RunFailed, match=r"last\.ckpt: No space left on device"):
        save_last(tmp_path, 2)
    assert names(tmp_path) == ["last.ckpt"] and newest_step(tmp_path) == 1


class Evil:
    """What a crafted pickle runs when it is loaded."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil"),))


def test_a_crafted_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    CheckpointFiles().save_checkpoint({**checkpoint(1), "extra": Evil()}, tmp_path / "last.ckpt")
    with pytest.raises(UserError, match="refused: it holds more than plain tensors and numbers"):
        newest_checkpoint(tmp_path, set_aside=True)
    assert names(tmp_path) == ["last.ckpt"]
    (tmp_path / "last.ckpt").write_bytes(pickle.dumps(Evil()))
    assert not is_whole(tmp_path / "last.ckpt")


def test_best_is_for_use_and_the_others_stand_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert newest_checkpoint(tmp_path, set_aside=True) is None
    with pytest.raises(UserError, match="no checkpoint yet"):
        load_for_use(tmp_path, "best")
    save_last(tmp_path, 3)
    assert load_for_use(tmp_path, "best")["step"] == 3
    assert capsys.readouterr().out == "no whole best.ckpt; using last.ckpt (step 3)\n"
    CheckpointFiles().save_checkpoint(checkpoint(2), tmp_path / "best.ckpt")
    assert load_for_use(tmp_path, "best")["step"] == 2 and not (tmp_path / "previous.ckpt").exists()
    damage(tmp_path / "best.ckpt", flip=999)
    damage(tmp_path / "last.ckpt", flip=999)
    with pytest.raises(RunFailed, match="is whole"):
        load_for_use(tmp_path, "best")
    assert capsys.readouterr().out.count("is damaged (its checksum does not match)") == 2


def test_a_model_of_another_shape_is_refused() -> None:
    with pytest.raises(UserError, match=r"does not fit the model: .*\n.*size mismatch for weight"):
        load_weights(nn.Linear(3, 5, bias=False), checkpoint(1))
    load_weights(nn.Linear(3, 4, bias=False), checkpoint(1))


@pytest.mark.parametrize(
    "wrong",
    [{"step": -5}, {"step": "5"}, {"data": {}}, {"model": {"weight": 1.0}}, {"config": None}, {"format": FORMAT + 1}],
    ids=str,
)
def test_parts_of_other_types_or_another_format_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    CheckpointFiles().save_checkpoint(checkpoint(5) | wrong, tmp_path / "last.ckpt")
    why = "not of the format that this version of rtx reads" if "format" in wrong else "is no checkpoint of rtx"
    for read in (lambda: newest_checkpoint(tmp_path, set_aside=True), lambda: load_for_use(tmp_path, "last")):
        with pytest.raises(UserError, match=why):
            read()
