"""`rtx analyze` on real runs of a few steps: what it prints, keeps, and refuses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small_runs import SIZES, Workshop

IMAGES = tuple(size for size in SIZES if not size.startswith("data"))


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Path:
    return workshop.train("run", "routing=causal")


@pytest.fixture(scope="module")
def other(workshop: Workshop) -> Path:
    return workshop.train("other", "routing=topk", "routing.window=5")


@pytest.fixture(scope="module")
def plain(workshop: Workshop) -> Path:
    return workshop.train("plain", "routing.heads=0")


@pytest.fixture(scope="module")
def image_run(workshop: Workshop) -> Path:
    (workshop.folder / "pictures").mkdir()
    draw = np.random.default_rng(0)
    for number in range(23):
        image = draw.integers(0, 256, (4, 6, 3), dtype=np.uint8)
        Image.fromarray(image).save(workshop.folder / "pictures" / f"{number:02d}.png")
    data = ("data=images", f"data.path={workshop.folder / 'pictures'}", "data.length=72")
    workshop.command("train", *IMAGES, *data, run=workshop.folder / "images")
    return workshop.folder / "images"


def kept(run: Path, pattern: str) -> dict[str, Any]:
    """Return the one result in a run's analysis folder that a pattern names."""
    (path,) = (run / "analysis").glob(pattern)
    return json.loads(path.read_text())


def file_of(run: Path, pattern: str) -> Path:
    """Return the one file of a run's analyses that a pattern names."""
    (path,) = (run / "analysis").glob(pattern)
    return path


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def test_the_divergence_of_a_runs_heads_is_printed_and_kept(workshop: Workshop, run: Path) -> None:
    printed = workshop.command("analyze", "divergence", str(run), "draws=3", "sequences=2", "split=test")
    (path,) = (run / "analysis").glob("divergence-best-*.json")
    result = json.loads(path.read_text())
    assert str(path) in printed and "local routing" in printed
    assert result["analyze"]["draws"] == 3 and result["bound"] == math.log(2)
    for row in result["layers"]:
        assert len(row["nats_R"]) == 3
        assert 0 <= row["mean"] <= math.log(2)
        assert f"{row['mean']:.4f} ± {row['deviation']:.4f}" in printed


def test_heads_of_one_pattern_alone_diverge_from_each_other(workshop: Workshop, plain: Path) -> None:
    printed = workshop.command("analyze", "divergence", str(plain))
    assert "local local" in printed and "routing" not in printed.splitlines()[1:][0]


def test_patterns_are_a_table_and_one_picture(workshop: Workshop, run: Path) -> None:
    printed = workshop.command("analyze", "patterns", str(run), "layer=0+1", "start=5")
    picture = file_of(run, "patterns-best-step12-valid5-????????.png")
    assert f"{picture}: a row for each layer, a column for each head" in printed
    assert size(picture) == (2 * 512 + 6, 2 * 512 + 6)
    assert all(len(line) <= 80 for line in printed.splitlines() if "/" not in line)
    heads = kept(run, "patterns-best-step12-valid5-????????.json")["heads"]
    assert [(row["layer"], row["head"], row["pattern"]) for row in heads[2:]] == [(1, 0, "local"), (1, 1, "routing")]
    assert heads[0]["keys"] == pytest.approx((sum(range(1, 9)) + 24 * 8) / 32), "a local head of 8 keys"
    assert heads[0]["farthest"] == 7 and 0 < heads[0]["self_weight"] < 1


def test_what_is_asked_otherwise_is_kept_beside_and_the_same_again_replaces_itself(
    workshop: Workshop, plain: Path
) -> None:
    def records(option: str) -> set[Path]:
        workshop.command("analyze", "patterns", str(plain), option)
        return set((plain / "analysis").glob("patterns-*.json"))

    found = [len(records(option)) for option in ("start=3", "start=4", "head=0", "head=1", "split=test", "start=3")]
    assert found == [1, 2, 3, 4, 5, 5]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("layer=2",), "layer=2: must be numbers from 0 to 1, joined by +"),
        (("head=0+x",), "head=0+x: must be numbers from 0 to 1, joined by +"),
        (("start=150",), "start=150: in split valid the last unit that 32 units can begin with is 118"),
        (("windows=3",), "unknown key 'windows'"),
        (("lyer=1",), "unknown key 'lyer' (did you mean 'layer'?)"),
    ],
)
def test_wishes_for_patterns_that_have_no_place(
    workshop: Workshop, run: Path, options: tuple[str, ...], said: str
) -> None:
    assert said in workshop.command("analyze", "patterns", str(run), *options, code=2)


def test_patterns_of_images_and_of_recall(workshop: Workshop, image_run: Path) -> None:
    workshop.command("analyze", "patterns", str(image_run), "start=2", "split=train")
    assert size(file_of(image_run, "patterns-best-step12-train2-????????.png")) == (2 * 72 * 7 + 6, 72 * 7)
    said = workshop.command("analyze", "patterns", str(image_run), "start=1", code=2)
    assert "start=1: in split valid the last image is 0" in said
    recall = ("data=recall", "data.length=32", "data.pairs=3", "data.keys=5", "data.values=4", "data.sequences=9")
    run = workshop.folder / "recall"
    workshop.command("train", *IMAGES, *recall, "model.base=lsh", "routing=random", run=run)
    printed = workshop.command("analyze", "patterns", str(run), "start=32")
    assert "1    0  lsh" in printed and "1    1  routing" in printed
    assert "there is no loss by position" in workshop.command("analyze", "context", str(run), code=2)


def test_loss_by_position_and_by_context(workshop: Workshop, run: Path) -> None:
    printed = workshop.command("analyze", "context", str(run), "windows=3", "bins=4")
    result = kept(run, "context-valid-parallel-N32-3windows-best-step12-????????.json")
    assert [(row["first"], row["last"]) for row in result["positions"]] == [(0, 7), (8, 15), (16, 23), (24, 31)]
    first, second = result["gains"]
    assert first["context"] == [16, 31] and second["context"] == [8, 15] and first["gain"] == 0
    halves = [row["bits"] for row in result["positions"][2:]]
    assert first["bits"] == pytest.approx(sum(halves) / 2), "the same units as in the second half"
    assert second["gain"] == pytest.approx(second["bits"] - first["bits"]) and second["gain_error"] > 0
    assert f"{second['gain']:+.4f} ± {second['gain_error']:.4f}" in printed
    assert "96 bytes each scored once (a sample of the windows)" in " ".join(printed.split())


def test_selection_that_sees_the_future_is_given_whole_windows(workshop: Workshop, other: Path) -> None:
    workshop.command("analyze", "context", str(other), "windows=84", "split=train")
    result = kept(other, "context-train-parallel-*.json")
    assert result["selection_sees_future"] and result["windows"] == 84 and result["left_out"] == 12
    assert result["gains"][1]["windows"] == 83, "the last window has no room behind it"
    printed = workshop.command("analyze", "context", str(other), "windows=3", "mode=streaming")
    assert len(kept(other, "context-valid-streaming-*.json")["gains"]) == 2 and "streaming" in printed


def test_every_unit_of_the_whole_windows_is_scored_once(workshop: Workshop, plain: Path) -> None:
    """150 bytes hold four windows of 32; a fifth that ends with the split would score 10 of them again."""
    printed = workshop.command("analyze", "context", str(plain), "bins=2")
    result = kept(plain, "context-valid-*.json")
    assert (result["windows"], result["partial"], result["left_out"]) == (4, False, 22)
    assert "128 bytes each scored once, the split's last 22 left out, windows of 32" in " ".join(printed.split())


def test_images_have_a_loss_by_position_alone(workshop: Workshop, image_run: Path) -> None:
    printed = workshop.command("analyze", "context", str(image_run), "bins=3")
    assert "no gain from far context: a part of an image at another place is no image" in printed
    assert kept(image_run, "context-*.json")["gains"] == []


def test_what_is_not_there_to_analyze_is_said(workshop: Workshop, run: Path) -> None:
    said = workshop.command("analyze", "diverge", str(run), code=2)
    assert "say divergence, patterns, context (did you mean 'divergence'?)" in said
    assert "needs the run's folder" in workshop.command("analyze", "divergence", code=2)
    assert "needs the run's folder" in workshop.command("analyze", "patterns", "layer=1", code=2)
    assert "unknown key 'draw'" in workshop.command("analyze", "divergence", str(run), "draw=3", code=2)
