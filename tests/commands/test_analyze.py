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


def folder_of(run: Path, pattern: str) -> Path:
    """Return the one folder of a run's analyses that a pattern names."""
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


def test_patterns_are_a_page_maps_and_a_table(workshop: Workshop, run: Path) -> None:
    printed = workshop.command("analyze", "patterns", str(run), "layer=0+1", "start=5", "asked=9", "at=20")
    folder = folder_of(run, "patterns-best-step12-valid5-????????")
    assert f"{folder}/page.html: answers for positions 16 to 24" in printed
    maps = {path.name: size(path) for path in folder.glob("*.png")}
    assert maps == {f"map-layer{layer}-head{head}.png": (512, 512) for layer in (0, 1) for head in (0, 1)}
    assert all(len(line) <= 80 for line in printed.splitlines() if "/" not in line)
    page = (folder / "page.html").read_text()
    assert "layer 0" not in page and "split valid from unit 5 on, 32 bytes" in page
    names = [(one["layer"], one["name"]) for one in json.loads(page.split('id="data">')[1].split("<")[0])["sheets"]]
    assert names[3] == (1, "head 1: routing, causal") and names[0] == (0, "head 0: local")
    heads = json.loads((folder / "patterns.json").read_text())["heads"]
    assert [(row["layer"], row["head"], row["pattern"]) for row in heads[2:]] == [(1, 0, "local"), (1, 1, "routing")]
    assert heads[0]["keys"] == pytest.approx((sum(range(1, 9)) + 24 * 8) / 32), "a local head of 8 keys"
    assert heads[0]["farthest"] == 7 and 0 < heads[0]["self_weight"] < 1


def test_patterns_of_a_text_of_ones_own(workshop: Workshop, run: Path) -> None:
    printed = workshop.command("analyze", "patterns", str(run), "text=a b c ü", "head=1")
    assert "page.html: answers for positions 0 to 7" in printed
    (path,) = (run / "analysis").glob("patterns-best-step12-text-????????/page.html")
    page = path.read_text()
    assert '"units":["a"," ","b"," ","c"," ","·","ü"]' in page


@pytest.mark.parametrize(
    ("what", "options"),
    [
        (
            "samples samples=1 length=8",
            "seed=0 prompt=ab temperature=0 length=9 top_k=2 top_p=0.5 split=test samples=2 given=3",
        ),
        ("patterns start=3 head=0", "asked=512 layer=0 head=1 at=9 asked=5 start=4 split=test"),
        ("patterns head=1", "text=abab text=abba"),
    ],
)
def test_what_is_asked_otherwise_is_kept_beside_and_the_same_again_replaces_itself(
    workshop: Workshop, plain: Path, what: str, options: str
) -> None:
    """Compared byte for byte are pages and pictures; the records hold times."""

    def kept_files(suffixes: tuple[str, ...]) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in (plain / "analysis").rglob("*") if path.suffix in suffixes}

    def ask(option: str) -> int:
        """Ask, check that nothing kept before has changed, and return how many records are new."""
        word, *common = what.split()
        others = [one for one in common if one.partition("=")[0] != option.partition("=")[0]]
        before, records = kept_files((".md", ".html", ".png")), kept_files((".json",)).keys()
        workshop.command("analyze", word, str(plain), *others, option)
        after = kept_files((".md", ".html", ".png"))
        assert {path: after[path] for path in before} == before, option
        return len(kept_files((".json",)).keys() - records)

    each = options.split()
    assert [ask(option) for option in [*each, each[0]]] == [1] * len(each) + [0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("layer=2",), "layer=2: must be numbers from 0 to 1, joined by +"),
        (("head=0+x",), "head=0+x: must be numbers from 0 to 1, joined by +"),
        (("at=32",), "at=32: must be numbers from 0 to 31, joined by +"),
        (("start=150",), "start=150: the last unit that 32 units of split valid can begin with is 118"),
        (("text=a",), "text has 1 units: must have from 2 to data.length=32"),
        (("text=abc", "start=1"), "start chooses a place in the split, text a text of its own"),
        (("windows=3",), "unknown key 'windows'"),
        (
            ("pictures.windows=3",),
            "does not read pictures.windows; it is an option of rtx analyze context",
        ),
        (("lyer=1",), "unknown key 'lyer' (did you mean 'layer'?)"),
    ],
)
def test_wishes_for_patterns_that_have_no_place(
    workshop: Workshop, run: Path, options: tuple[str, ...], said: str
) -> None:
    assert said in workshop.command("analyze", "patterns", str(run), *options, code=2)


def test_patterns_of_images_are_drawn_on_them(workshop: Workshop, image_run: Path) -> None:
    printed = workshop.command("analyze", "patterns", str(image_run), "at=30+60", "start=2", "split=train")
    folder = folder_of(image_run, "patterns-best-step12-train2-????????")
    assert "columns for positions 30, 60; the framed pixel is predicted" in printed
    width, height = 224 // 6 * 6, 224 // 6 * 4
    assert size(folder / "image-layer1.png") == (2 * width + 6, 2 * height + 6), "two heads by two positions"
    assert not (folder / "page.html").exists() and (folder / "map-layer1-head1.png").exists()
    said = workshop.command("analyze", "patterns", str(image_run), "start=1", code=2)
    assert "start=1: the last image of split valid is 0" in said
    said = workshop.command("analyze", "patterns", str(image_run), "text=cat", code=2)
    assert "text has no place in a run on data=images" in said


def test_recall_shows_its_units_as_numbers_and_has_nothing_else_to_look_at(workshop: Workshop) -> None:
    recall = ("data=recall", "data.length=32", "data.pairs=3", "data.keys=5", "data.values=4", "data.sequences=9")
    run = workshop.folder / "recall"
    workshop.command("train", *IMAGES, *recall, "model.base=lsh", "routing=random", run=run)
    printed = workshop.command("analyze", "patterns", str(run), "start=32")
    assert "1    0  lsh" in printed and "1    1  routing" in printed
    page = (folder_of(run, "patterns-best-step12-valid32-????????") / "page.html").read_text()
    assert "32 units, one teacher-forced pass" in page and "head 1: routing, random" in page
    assert "there is no loss by position" in workshop.command("analyze", "context", str(run), code=2)
    assert "has no text to write" in workshop.command("analyze", "samples", str(run), code=2)


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
    chart = folder_of(run, "context-valid-parallel-N32-3windows-best-step12-????????.svg").read_text()
    assert chart.startswith("<svg xmlns=") and chart.count("<circle") == 4 + 2


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


def test_samples_stand_side_by_side_with_their_unknown_words(workshop: Workshop, run: Path, other: Path) -> None:
    options = ("samples=3", "length=30", "given=5", "seed=4")
    printed = workshop.command("analyze", "samples", str(run), str(other), *options)
    result = kept(run, "samples-best-step12-beside-*-seed4-????????.json")
    name, beside, held_out = result["shares"]
    assert name.endswith("/run") and beside.endswith("/other") and held_out == "valid text"
    assert len(result["samples"]) == 3 and "difference" in printed
    for sample in result["samples"]:
        assert len(sample["prompt"]) == 5 and set(sample["texts"]) == {name, beside}
    row = result["shares"][held_out]
    assert row["words"] > 0 and f"{row['share']:.2%} ± {row['error']:.2%}" in printed
    page = next((run / "analysis").glob("samples-*.md")).read_text()
    assert page.startswith("# Samples") and page.count("## Sample ") == 3 and page.count("Not in the training") == 6
    assert all(len(line) <= 80 for line in printed.splitlines() if "/" not in line)
    # The same seed writes the same texts again, and a run beside itself writes them twice.
    workshop.command("analyze", "samples", str(run), str(run), *options)
    twice = kept(run, "samples-best-step12-beside-*again*.json")["samples"]
    for sample, before in zip(twice, result["samples"], strict=True):
        assert list(sample["texts"].values()) == [before["texts"][name]] * 2


def test_one_run_alone_writes_from_a_prompt(workshop: Workshop, run: Path) -> None:
    printed = workshop.command("analyze", "samples", str(run), "samples=2", "length=20", "prompt=abc ", "seed=9")
    assert "given: abc" in printed and "difference" not in printed and " | " not in printed.splitlines()[3]
    result = kept(run, "samples-best-step12-seed9-????????.json")
    assert [sample["prompt"] for sample in result["samples"]] == ["abc "] * 2


def test_images_go_on_from_their_upper_half(workshop: Workshop, image_run: Path) -> None:
    printed = workshop.command("analyze", "samples", str(image_run), "windows=2", "samples=3", "split=train")
    assert "original, given, 3 by" in printed
    (path,) = (image_run / "analysis").glob("samples-*.png")
    with Image.open(path) as image:
        sheet = np.asarray(image)
    assert sheet.shape == (2 * 4 + 2, 5 * 6 + 4 * 2, 3)
    cells = [[sheet[y : y + 4, x : x + 6] for x in range(0, 38, 8)] for y in (0, 6)]
    for original, given, *drawn in cells:
        assert (original[:2] == given[:2]).all() and (given[2:] == 128).all()
        assert all((cell[:2] == original[:2]).all() and (cell[2:] != original[2:]).any() for cell in drawn)
        assert (drawn[0] != drawn[1]).any()
    said = workshop.command("analyze", "samples", str(image_run), "given=72", code=2)
    assert "given=72: an image has 72 units" in said
    assert "have no place here" in workshop.command("analyze", "samples", str(image_run), "length=9", code=2)


def test_what_is_not_there_to_analyze_is_said(workshop: Workshop, run: Path, image_run: Path) -> None:
    said = workshop.command("analyze", "diverge", str(run), code=2)
    assert "say divergence, patterns, context, samples (did you mean 'divergence'?)" in said
    assert "needs the run's folder" in workshop.command("analyze", "divergence", code=2)
    assert "needs the run's folder" in workshop.command("analyze", "patterns", "layer=1", code=2)
    assert "unknown key 'draw'" in workshop.command("analyze", "divergence", str(run), "draw=3", code=2)
    said = workshop.command("analyze", "samples", str(run), str(image_run), code=2)
    assert "was trained on other data than" in said
    assert "takes 2 runs, not also" in workshop.command("analyze", "samples", *[str(run)] * 3, code=2)
    said = workshop.command("analyze", "samples", str(run), "given=3", "prompt=a", code=2)
    assert "say one of them" in said


def test_a_split_that_is_too_short_is_said_before_anything_is_drawn(
    workshop: Workshop, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rtx.commands.analyze_samples.drawn_units", lambda *_: pytest.fail("has begun to draw"))
    said = workshop.command("analyze", "samples", str(run), "length=100", code=2)
    assert "split valid has 150 bytes: too few for 8 texts of 100" in said
