"""Images through prepare, train, eval and sample: a folder of made ones, and the real CIFAR-10 where it is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rtx.cli import main

SIZES = [
    *("model=tiny", "model.layers=2", "model.hidden=16", "model.heads=2", "model.ffn_hidden=16", "model.window=16"),
    *("routing.heads=1", "routing.layers=1", "routing.window=16", "trainer.steps=3", "trainer.batch_size=2"),
    *("trainer.val_windows=2", "logger=jsonl", "hardware.threads=1"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 23 images of 6 x 8."""
    folder = tmp_path_factory.mktemp("images")
    (folder / "pictures").mkdir()
    draw = np.random.default_rng(0)
    for number in range(23):
        image = draw.integers(0, 256, (6, 8, 3), dtype=np.uint8)
        Image.fromarray(image).save(folder / "pictures" / f"{number:02d}.png")
    return folder


def rtx(folder: Path, *arguments: str, code: int = 0) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("RTX_OUTPUTS", str(folder / "outputs"))
        patch.setenv("RTX_DATA", str(folder / "data"))
        patch.delenv("RTX_RUN", raising=False)
        assert main(list(arguments)) == code


def pictures(run: Path) -> dict[str, tuple[int, int]]:
    """Width and height of the pictures that a run has kept."""
    sizes = {}
    for path in (run / "samples").glob("*.png"):
        with Image.open(path) as image:
            sizes[path.name] = image.size
    return sizes


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    rtx(folder, "train", "data=images", "data.path=pictures", "data.length=144", *SIZES)
    (run,) = (folder / "outputs").glob("*/*/config.yaml")
    return run.parent


def test_a_run_on_images_keeps_an_image_and_counts_sub_pixels(run: Path) -> None:
    assert pictures(run) == {"step3-seed0-1.png": (8, 6)}
    status = json.loads((run / "status.json").read_text())
    assert status["final"]["unit"] == "dim" and status["final"]["units"] == 144

    rtx(run.parents[2], "eval", str(run), "split=train")
    (result,) = (run / "eval").glob("train*.json")
    scored = json.loads(result.read_text())
    assert scored["units"] == 21 * 144 and 7.5 < scored["bits_per_dim"] < 9.5


def test_samples_are_pictures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rtx(run.parents[2], "sample", str(run))
    said = capsys.readouterr()
    assert said.out == f"{run / 'samples' / 'step3-seed0-2.png'}\n"
    assert pictures(run)["step3-seed0-2.png"] == (8, 6)
    rtx(run.parents[2], "sample", str(run), "length=30", "seed=7")
    said = capsys.readouterr()
    assert "30 units; an image has 144: the rest is black" in said.err
    pixels = np.asarray(Image.open(run / "samples" / "step3-seed7-1.png"))
    assert pixels.shape == (6, 8, 3) and pixels[0].any() and (pixels[2:] == 0).all()  # 30 units are 10 pixels
    for option, line in (("length=145", "an image has 144 units"), ("prompt=cat", "no place in a run on images")):
        rtx(run.parents[2], "sample", str(run), option, code=2)
        assert line in capsys.readouterr().err


def test_a_wrong_length_names_the_right_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rtx(folder, "train", "data=images", "data.path=pictures", *SIZES, code=2)
    assert "data.length=3072: expected 144, for one image is one sequence" in capsys.readouterr().err
