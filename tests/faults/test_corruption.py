"""Damaged checkpoints and other files: each is noticed, and what the commands do then."""

import contextlib
import json
import shutil
from pathlib import Path

import pytest

from rtx.errors import RunFailed, UserError
from rtx.runs.checksum import is_whole
from rtx.runs.resumption import already_done
from rtx.runs.status import read_status, run_state
from rtx.settings.run_config import load_run_config
from rtx.training.checkpoint import newest_checkpoint, read_checkpoint
from tests.helpers.disturbances import damage
from tests.helpers.small_runs import SMALL_RUN, Workshop, checkpoint_difference


def test_a_hundred_damaged_checkpoints_are_known(copy: Path) -> None:
    last = copy / "checkpoints" / "last.ckpt"
    content = last.read_bytes()
    before = read_checkpoint(copy / "checkpoints" / "previous.ckpt")["step"]
    places = [
        *range(0, len(content), len(content) // 40),
        *range(len(content) - 1, len(content) - 200, -13),
    ]
    ways = [way for at in places for way in ({"keep": at}, {"flip": 8 * at + at % 8})]
    assert len(ways) >= 100
    for way in ways:
        last.write_bytes(content)
        damage(last, **way)
        assert not is_whole(last)
    # A few of each kind.
    for way in ways[::7]:
        last.write_bytes(content)
        damage(last, **way)
        said: list[str] = []
        found = newest_checkpoint(last.parent, set_aside=True, report=said.append)
        assert found is not None and found["step"] == before, way
        assert said[0].endswith("set aside as last.ckpt.damaged") and not last.exists()


def test_a_flipped_bit_of_the_data_stops_every_command(
    workshop: Workshop, copy: Path, tmp_path: Path
) -> None:
    (path,) = workshop.data.glob("*/valid.bin")
    whole = path.read_bytes()
    before = (copy / "status.json").read_text()
    damage(path, flip=777)
    for words in (
        ["train", workshop.text, *SMALL_RUN],
        ["resume", str(copy), "trainer.steps=13"],
        ["eval", str(copy)],
    ):
        said = workshop.command(*words, run=tmp_path / "new" if words[0] == "train" else "", code=2)
        assert (
            "valid.bin: damaged: expected sha256" in said
            and "to rebuild the store: rtx data prepare" in said
        )
    assert (copy / "status.json").read_text() == before and not (tmp_path / "new").exists()
    mended = workshop.command("data", "prepare", "data=text", workshop.text, "data.length=32")
    assert "; rebuilding the store" in mended and path.read_bytes() == whole


def test_a_run_goes_on_from_the_checkpoint_before(
    workshop: Workshop, run: Path, copy: Path
) -> None:
    last = copy / "checkpoints" / "last.ckpt"
    damage(last, flip=44_444)
    said = workshop.command("resume", str(copy))
    assert (
        f"{last} is damaged (its checksum does not match); set aside as last.ckpt.damaged" in said
    )
    assert "going on from" in said and "previous.ckpt (step 9), the newest that is whole" in said
    assert (
        checkpoint_difference(copy, run, "last") == "" == checkpoint_difference(copy, run, "best")
    )


def test_a_damaged_best_gives_way_and_nothing_whole_is_an_error(
    workshop: Workshop, copy: Path
) -> None:
    damage(copy / "checkpoints" / "best.ckpt", flip=44_444)
    said = workshop.command("eval", str(copy))
    assert (
        "best.ckpt is damaged (its checksum does not match)\nno whole best.ckpt; using last.ckpt "
        "(step 12)" in said
    )
    for name in ("last", "previous"):
        damage(copy / "checkpoints" / f"{name}.ckpt", keep=4_444)
    for word in ("eval", "sample", "export"):
        said = workshop.command(word, str(copy), code=1)
        assert (
            len(said.splitlines()) == 4
            and said.count("is damaged (its checksum does not match)") == 3
        )
    assert "no whole checkpoint is left" in workshop.command("resume", str(copy), code=1)
    (copy / "status.json").unlink()
    for _ in range(2):  # what was set aside still counts
        assert "none of last.ckpt, previous.ckpt is whole" in workshop.command(
            "resume", str(copy), code=1
        )
    shutil.rmtree(copy / "checkpoints")
    assert "the run has no checkpoint yet" in workshop.command("eval", str(copy), code=2)


def test_flipped_bits_of_a_status_are_told_or_passed_over(copy: Path) -> None:
    path = copy / "status.json"
    config = load_run_config(copy)
    passed_over = 0
    whole = path.read_bytes()
    for state in (b"done", b"running", b"failed"):
        record = whole.replace(b'"done"', b'"' + state + b'"')
        for at in range(0, len(record), 3 if state == b"done" else 12):
            path.write_bytes(record)
            damage(path, flip=8 * at + at // 4 % 8)
            passed_over += read_status(copy) is None
            with contextlib.suppress(UserError, RunFailed):
                run_state(copy)
                already_done(copy, config)
    assert passed_over > 30


CHANGES = [
    {"state": "stale"},
    {"step": None},
    {"seconds": []},
    {"final": {}},
    {"final": {"bits": 1, "windows": "x"}},
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_with_a_damaged_status_is_unknown_and_resumes(
    workshop: Workshop, run: Path, copy: Path, change: dict[str, object]
) -> None:
    whole = json.loads((copy / "status.json").read_text())
    (copy / "status.json").write_text(json.dumps(whole | change))
    assert "unknown" in workshop.command("runs", str(copy.parent))
    workshop.command("resume", str(copy))
    assert json.loads((copy / "status.json").read_text())["final"] == whole["final"]
    assert checkpoint_difference(copy, run, "last") == ""


def test_a_model_or_data_other_than_was_trained_are_not_scored(
    workshop: Workshop, copy: Path
) -> None:
    path = copy / "config.yaml"
    whole = path.read_text()
    for group, old, new in (
        ("model", "window: 8", "window: 9"),
        ("routing", "logit_scale: sqrt_d", "logit_scale: none"),
        ("data", "length: 32", "length: 16"),
    ):
        begin = whole.index(f"{group}:\n")
        path.write_text(whole[:begin] + whole[begin:].replace(old, new, 1))
        key, was = old.split(": ")
        is_now = new.split(": ")[1]
        for word in ("eval", "sample", "export", "analyze divergence"):
            said = workshop.command(*word.split(), str(copy), code=2)
            assert (
                f"rtx: {path}: {group}.{key} is {is_now}, but {was} in best.ckpt, which was "
                "trained so" in said
            )
    assert not any((copy / name).exists() for name in ("eval", "export", "analysis"))
