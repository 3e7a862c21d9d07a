"""`rtx export`: what it writes scores and writes text as the run does, and damage is told."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from test_eval_sample import rtx, score, train

from rtx import load
from rtx.disk import replace_file
from rtx.errors import RunFailed, UserError
from rtx.training import inference
from rtx.training.checkpoint import load_for_use


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("exported"))


@pytest.fixture
def exported(run: Path, tmp_path: Path) -> Path:
    rtx(run.parents[2], "export", str(run), f"output={tmp_path / 'model'}")
    return tmp_path / "model"


def test_the_weights_are_those_of_the_run_bit_for_bit(run: Path, exported: Path) -> None:
    names = {path.name for path in exported.iterdir()}
    assert names == {"model.safetensors", "export.json", "config.yaml", "README.md"}
    ours, theirs = load(exported).model.state_dict(), load_for_use(run / "checkpoints", "best")["model"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    home = run.parents[2]
    scores = [score(folder, "split=test", home=home)["bits_per_byte"] for folder in (run, exported)]
    assert scores[0] == scores[1]
    texts = [rtx(home, "sample", str(folder), "length=40").stdout for folder in (run, exported)]
    assert texts[0] == texts[1]


def test_the_card_says_what_was_scored_how_and_of_which_weights(run: Path, exported: Path) -> None:
    page, parameters = (exported / "README.md").read_text(), load(run).model.count_parameters()
    assert page.startswith("---\nlibrary_name: rtx\n") and f"{parameters:,} parameters, and centroids and" in page
    final = json.loads((run / "status.json").read_text())["final"]
    assert f"**{final['bits']:.4f} bits/byte**" in page and "teacher-forced" in page and "sees no future" in page
    assert "`routing.selection=causal`" in page and "after 4 steps" not in page and "for 4 steps" in page


def test_an_export_that_was_cut_short_is_told_and_made_anew(run: Path, tmp_path: Path) -> None:
    home, output = run.parents[2], tmp_path / "half"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inference, "replace_file", full_disk)
        assert b"No space left on device" in rtx(home, "export", str(run), f"output={output}", code=1).stderr
    (output / ".model.safetensors.1.writing").write_bytes(b"x")
    said = rtx(home, "sample", str(output), code=1).stderr.decode()
    assert f"No such file or directory: '{output}/model.safetensors'): export the run anew" in said
    rtx(home, "export", str(run), f"output={output}")
    rtx(home, "sample", str(output), "length=4")
    assert not list(output.glob("*.writing"))


def full_disk(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace a file, but fail as a write to a full disk does where it is the weights."""
    if path.name == "model.safetensors":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    replace_file(path, write)


@pytest.mark.parametrize("name", ["model.safetensors", "export.json", "config.yaml"])
def test_any_flipped_bit_is_told_or_changes_nothing(exported: Path, name: str) -> None:
    path = exported / name
    whole = path.read_bytes()
    before = load(exported).model.state_dict()
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            after = load(exported).model.state_dict()
        except (RunFailed, UserError):
            continue
        assert name != "model.safetensors"
        assert all(torch.equal(after[key], before[key]) for key in before)


def test_what_cannot_be_is_refused(run: Path, exported: Path, tmp_path: Path) -> None:
    home = run.parents[2]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    assert b"holds other files" in rtx(home, "export", str(run), f"output={tmp_path / 'full'}", code=2).stderr
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["letter.txt"]
    assert b"is an exported model already" in rtx(home, "export", str(exported), code=2).stderr
    (exported / "model.safetensors").unlink()
    rtx(home, "export", str(run), f"output={exported}")  # an export is written over
    rtx(home, "sample", str(exported), "length=4")


@pytest.mark.parametrize(
    "lie",
    [
        *({"sha256": None}, {"data": None}, {"data": {"fingerprint": "x"}}, {"step": "4"}),
        {"data": {"fingerprint": "x", "vocabulary": 256, "tokenizer": {"name": "words"}}},
        {"weights": b"\xff" * 64},
    ],
)
def test_facts_and_weights_that_cannot_be_right_are_told(exported: Path, lie: dict[str, object]) -> None:
    facts = json.loads((exported / "export.json").read_text())
    if isinstance(content := lie.get("weights"), bytes):  # that only their checksum takes for weights
        (exported / "model.safetensors").write_bytes(content)
        lie = {"sha256": hashlib.sha256(content).hexdigest()}
    (exported / "export.json").write_text(json.dumps({**facts, **lie}))
    with pytest.raises((RunFailed, UserError)):
        load(exported).tokenizer  # noqa: B018
