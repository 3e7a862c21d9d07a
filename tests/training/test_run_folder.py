"""A run folder: who works in it, and who only seems to; checkpoints that are whole, and nothing but
plain data.
"""

import json
import os
import pickle
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rtx.errors import RunFailed, UserError
from rtx.runs import status as run_status
from rtx.runs.folder import new_run_folder, run_folders
from rtx.runs.lock import working_in
from rtx.runs.status import Status, run_state, utc_now
from rtx.training import checkpoint as files
from rtx.training.checkpoint import load_weights, newest_checkpoint, read_checkpoint
from tests.helpers.small_runs import status_of


@pytest.mark.parametrize(
    ("year", "state"), [("2020", "killed"), ("2999", "killed"), (utc_now()[:4], "running")]
)
def test_on_another_machine_the_heartbeat_tells(tmp_path: Path, year: str, state: str) -> None:
    status = {
        "state": "running",
        "pid": 1,
        "host": "elsewhere",
        "step": 3,
        "heartbeat": year + utc_now()[4:],
    }
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert run_state(tmp_path) == state
    if state == "running":
        with (
            pytest.raises(UserError, match="in use by process 1 on elsewhere"),
            working_in(tmp_path),
        ):
            pass


def test_the_heartbeat_beats_and_a_fault_of_ours_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_status, "BEAT_SECONDS", 0.01)
    status = Status(tmp_path)
    status.update(step=12)  # reaches the disk with the next beat
    end = time.monotonic() + 600
    while status_of(tmp_path).step != 12:
        assert time.monotonic() < end
    status.end("done")
    assert status_of(tmp_path).state == "done"
    with pytest.raises(ValueError, match="why"), working_in(tmp_path):
        raise ValueError("why")
    status = status_of(tmp_path)
    assert (status.state, status.reason) == ("failed", "why")


def test_a_run_is_found_from_inside_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 0\n")
    monkeypatch.chdir(run)
    assert run_folders(Path(".")) == [Path(".")]
    monkeypatch.chdir(tmp_path)
    assert run_folders(Path(".")) == [Path("run")]


def test_run_folders_are_unique_and_obey_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RTX_RUN", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RTX_OUTPUTS", "~/runs")
    first = new_run_folder("mine")
    second = new_run_folder("mine")
    assert first != second and first.parent == second.parent == tmp_path / "runs" / "mine"
    monkeypatch.setenv("RTX_RUN", "~/cell")
    assert new_run_folder("mine") == tmp_path / "cell" == new_run_folder("mine")
    (tmp_path / "cell" / "checkpoints").mkdir(parents=True)
    (tmp_path / "cell" / "checkpoints" / "last.ckpt").touch()
    with pytest.raises(UserError, match="holds checkpoints"):
        new_run_folder("mine")


def checkpoint(step: int) -> dict[str, Any]:
    weights = {"weight": torch.full((4, 3), float(step))}
    described = {"config": {"model": {"hidden": 4}}, "data": {"fingerprint": "x"}}
    return {"format": files.FORMAT, "step": step, **described, "model": weights}


def save_last(folder: Path, *steps: int) -> Path:
    for step in steps:
        files.save_checkpoint(checkpoint(step), folder / "last.ckpt")
    return folder / "last.ckpt"


def test_a_checkpoint_is_an_ordinary_file_and_fits_models_of_its_shape_alone(
    tmp_path: Path,
) -> None:
    last = save_last(tmp_path, 1)
    assert torch.load(last, weights_only=True)["step"] == 1
    with zipfile.ZipFile(last) as archive:
        assert archive.testzip() is None and archive.comment.startswith(b"rtx sha256 ")
    with pytest.raises(UserError, match=r"does not fit the model: .*\n.*size mismatch for weight"):
        load_weights(nn.Linear(3, 5, bias=False), read_checkpoint(last))
    load_weights(nn.Linear(3, 4, bias=False), read_checkpoint(last))


def test_a_checkpoint_that_cannot_be_read_is_left_where_it_is(tmp_path: Path) -> None:
    last = save_last(tmp_path, 1, 2)
    last.unlink()
    last.mkdir()
    for read in (
        lambda: newest_checkpoint(tmp_path, set_aside=True),
        lambda: files.load_for_use(tmp_path, "last"),
    ):
        with pytest.raises(
            RunFailed, match=r"cannot be read \(Is a directory\); no file was changed"
        ):
            read()
    assert {path.name for path in tmp_path.iterdir()} == {"last.ckpt", "previous.ckpt"}


def test_a_kill_between_the_two_renames_leaves_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_last(tmp_path, 1)
    real = os.replace

    def killed(old: str, new: str, **folders: int) -> None:
        if new == "last.ckpt":
            raise KeyboardInterrupt
        real(old, new, **folders)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", killed)
        save_last(tmp_path, 2)
    assert (newest_checkpoint(tmp_path, set_aside=True) or {})["step"] == 1
    save_last(tmp_path, 3)
    assert [
        read_checkpoint(tmp_path / f"{name}.ckpt")["step"] for name in ("previous", "last")
    ] == [1, 3]


class Evil:
    """What a crafted pickle runs when it is loaded."""

    def __reduce__(self) -> Any:
        return (Path.touch, (Path("evil"),))


def test_a_crafted_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files.save_checkpoint({**checkpoint(1), "extra": Evil()}, path := tmp_path / "last.ckpt")
    with pytest.raises(UserError, match="refused: it holds more than plain tensors and numbers"):
        newest_checkpoint(tmp_path, set_aside=True)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    for pickled in (
        b"\x80\x02K\x01Q.",
        b"\x80\x02J\x01",
    ):  # one that torch asserts things of, one cut off
        with zipfile.ZipFile(path, "w") as archive:
            for name, part in parts.items():
                archive.writestr(name, pickled if name.endswith("data.pkl") else part)
        with pytest.raises(
            UserError, match="refused: it holds more than plain tensors and numbers"
        ):
            read_checkpoint(path)
    path.write_bytes(pickle.dumps(Evil()))
    assert not files.is_whole(path) and [*tmp_path.iterdir()] == [path]
