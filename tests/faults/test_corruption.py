"""A hundred damaged checkpoints, each one found out; what the commands do then, and upon other damaged files."""

import contextlib
import json
import random
import shutil
from pathlib import Path

import pytest
from disturbances import damage, places
from small_runs import SIZES, Workshop, checkpoint_difference

from rtx.compose import load_run_config
from rtx.errors import RunFailed, UserError
from rtx.training.checkpoint import is_whole, newest_checkpoint, read_checkpoint
from rtx.training.run_folder import already_done, read_status, run_state


def spoilt(whole: Path, count: int, draw: random.Random) -> list[dict[str, int]]:
    """Return as many ways to damage a checkpoint: cuts and flips in every kind of place, then anywhere."""
    ways = [
        {what: (begin if what == "keep" else 8 * begin) + draw.randrange((end - begin) * (1 if what == "keep" else 8))}
        for begin, end in places(whole).values()
        for what in ("keep", "flip")
    ]
    size = whole.stat().st_size
    while len(ways) < count:
        ways.append({"keep": draw.randrange(size)} if len(ways) % 2 else {"flip": draw.randrange(8 * size)})
    return ways


def test_a_hundred_damaged_checkpoints_are_known(copy: Path) -> None:
    last = copy / "checkpoints" / "last.ckpt"
    content = last.read_bytes()
    before = read_checkpoint(copy / "checkpoints" / "previous.ckpt")["step"]
    ways = spoilt(last, 100, random.Random(1))
    assert len(ways) == 100
    for way in ways:
        last.write_bytes(content)
        damage(last, **way)
        assert not is_whole(last)
        said: list[str] = []
        found = newest_checkpoint(last.parent, set_aside=True, report=said.append)
        assert found is not None and found["step"] == before, way
        assert said[0].endswith("set aside as last.ckpt.damaged") and not last.exists()


@pytest.mark.parametrize("word", ["train", "resume", "eval"])
def test_a_flipped_bit_of_the_data_stops_every_command(
    workshop: Workshop, copy: Path, tmp_path: Path, word: str
) -> None:
    (folder,) = (path for path in workshop.data.iterdir() if path.is_dir())
    whole = (folder / "valid.bin").read_bytes()
    damage(folder / "valid.bin", flip=777)
    words = {"train": [workshop.text, *SIZES], "resume": [str(copy), "trainer.steps=13"], "eval": [str(copy)]}[word]
    before = (copy / "status.json").read_text()
    said = workshop.command(word, *words, run=tmp_path / "new" if word == "train" else "", code=2)
    assert "valid.bin: damaged: expected sha256" in said and "to rebuild the store: rtx data prepare" in said
    assert (copy / "status.json").read_text() == before and not (tmp_path / "new").exists()
    mended = workshop.command("data", "prepare", "data=text", workshop.text, "data.length=32")
    assert "; rebuilding the store" in mended
    assert (folder / "valid.bin").read_bytes() == whole


def test_a_run_goes_on_from_the_checkpoint_before(workshop: Workshop, run: Path, copy: Path) -> None:
    last = copy / "checkpoints" / "last.ckpt"
    damage(last, flip=44_444)
    said = workshop.command("resume", str(copy))
    assert f"{last} is damaged (its checksum does not match); set aside as last.ckpt.damaged" in said
    assert "going on from" in said and "previous.ckpt (step 9), the newest that is whole" in said
    assert checkpoint_difference(copy, run, "last") == "" == checkpoint_difference(copy, run, "best")


def test_a_damaged_best_gives_way_and_nothing_whole_is_an_error(workshop: Workshop, copy: Path) -> None:
    damage(copy / "checkpoints" / "best.ckpt", flip=44_444)
    said = workshop.command("eval", str(copy))
    assert "best.ckpt is damaged (its checksum does not match)\nno whole best.ckpt; using last.ckpt (step 12)" in said
    for name in ("last", "previous"):
        damage(copy / "checkpoints" / f"{name}.ckpt", keep=4_444)
    for word in ("eval", "sample", "export"):
        said = workshop.command(word, str(copy), code=1)
        assert len(said.splitlines()) == 4 and said.count("is damaged (its checksum does not match)") == 3
    assert "no whole checkpoint is left" in workshop.command("resume", str(copy), code=1)
    (copy / "status.json").unlink()
    for _ in range(2):  # what was set aside still counts
        assert "none of last.ckpt, previous.ckpt is whole" in workshop.command("resume", str(copy), code=1)
    shutil.rmtree(copy / "checkpoints")
    assert "the run has no checkpoint yet" in workshop.command("eval", str(copy), code=2)


def test_any_flipped_bit_of_a_status_is_told_or_passed_over(run: Path, copy: Path) -> None:
    path, config, draw = copy / "status.json", load_run_config(copy), random.Random(3)
    whole = path.read_bytes()
    passed_over = 0
    for state in (b"done", b"running", b"failed"):
        record = whole.replace(b'"done"', b'"' + state + b'"')
        for at in range(0, len(record), 1 if state == b"done" else 4):
            path.write_bytes(record[:at] + bytes([record[at] ^ 1 << draw.randrange(8)]) + record[at + 1 :])
            passed_over += read_status(copy) is None
            with contextlib.suppress(UserError, RunFailed):
                run_state(copy)
                already_done(copy, config)
    assert passed_over > 100


def test_a_run_with_a_damaged_status_resumes(workshop: Workshop, run: Path, copy: Path) -> None:
    for old, new in (('"state"', '"stale"'), ('"step"', '"stop"'), ('"final"', '"finbl"'), ('"bits"', '"cits"')):
        whole = (run / "status.json").read_text()
        (copy / "status.json").write_text(whole.replace(old, new))
        workshop.command("resume", str(copy))
        assert (read_status(copy) or {})["final"] == json.loads(whole)["final"]
    assert checkpoint_difference(copy, run, "last") == ""


@pytest.mark.parametrize("word", ["eval", "sample", "export", "analyze divergence"])
def test_a_model_or_data_other_than_was_trained_are_not_scored(workshop: Workshop, copy: Path, word: str) -> None:
    path = copy / "config.yaml"
    whole = path.read_text()
    command = [*word.split(), str(copy)]
    for group, old, new in (
        ("model", "window: 8", "window: 9"),
        ("routing", "logit_scale: sqrt_d", "logit_scale: none"),
        ("data", "length: 32", "length: 16"),
    ):
        begin = whole.index(f"{group}:\n")
        path.write_text(whole[:begin] + whole[begin:].replace(old, new, 1))
        (key, was), is_now = old.split(": "), new.split(": ")[1]
        said = workshop.command(*command, code=2)
        assert f"rtx: {path}: {group}.{key} is {is_now}, but {was} in best.ckpt, which was trained so" in said
    assert not any((copy / name).exists() for name in ("eval", "export", "analysis"))
    path.write_text(whole)
    workshop.command(*command, *(["length=9"] if word == "sample" else []))
