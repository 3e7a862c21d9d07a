"""`rtx data`, and runs on every data set: each unit is scored once, whether or not N divides the
split; images are
whole; words and subwords have their measures, the released protocol, and samples without a store.
"""

import gc
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from pyarrow import parquet

from rtx.data.sets import WORDS
from rtx.settings.data_sets import IMAGE_SETS, MADE
from rtx.settings.presets import options
from tests.helpers.made_sets import SETS, encoded, random_images
from tests.helpers.small_runs import SMALL_RUN, Workshop, draw_nothing, final

SMALL = [size for size in SMALL_RUN if not size.startswith("data")]
Train = Callable[[str], Path]


@pytest.fixture(scope="module")
def trained(workshop: Workshop) -> Iterator[Train]:
    """What trains on a set for two steps, once."""

    def train(name: str) -> Path:
        run = workshop.folder / name
        place = workshop.folder / f"{name}-files"
        if not run.exists():
            place.mkdir()
            quick = [
                "trainer.steps=2",
                "trainer.val_every=2",
                "trainer.log_every=1",
                "trainer.val_windows=1",
            ]
            quick += ["trainer.batch_size=1", "trainer.micro_batch_size=1"]
            workshop.command("train", *SETS[name](place, patch), *SMALL, *quick, run=run)
        return run

    with pytest.MonkeyPatch.context() as patch:
        yield train


def test_every_action_says_what_it_found(tmp_path: Path) -> None:
    place = Workshop(tmp_path)
    root = place.data
    options = ["data=text", place.text]

    def said(*words: str, code: int = 0) -> str:
        return place.command("data", *words, code=code)

    assert said("list") == f"{root}: no data yet\n"
    assert "not prepared; to prepare it: rtx data prepare data=text data.path=" in said(
        "verify", *options, code=2
    )
    page = said("prepare", *options)
    assert (
        page.startswith("preparing data=text")
        and "  train        2,700 bytes, 1 documents, 2,700 bytes, " in page
    )
    assert said("info", *options) in page
    assert "every byte as recorded" in said("verify", *options)
    (split,) = root.glob("text-*/valid.bin")
    split.write_bytes(b"")
    error = said("verify", *options, code=2)
    assert (
        error.startswith(f"rtx: {split}: damaged: expected 150 bytes, found 0; ")
        and error.count("\n") == 1
    )
    said("prepare", *options)
    assert f"  {split.parent.name}  data=text " in said("list")
    assert said("remove", split.parent.name).startswith(f"{split.parent}: removed, ") and not list(
        root.iterdir()
    )
    assert "on the fly" in said("info", "data=recall", "data.length=40", "data.pairs=2"), (
        "a model's window counts not"
    )
    place.data = tmp_path / "book.txt"
    assert said("prepare", code=2).startswith(
        f"rtx: RTX_DATA={place.data}: is not a folder; set RTX_DATA to"
    )


@pytest.mark.parametrize(
    "name", sorted({*options("data")} - {*MADE})
)  # they are in test_recall_runs.py
def test_every_unit_of_a_set_is_scored_once(workshop: Workshop, trained: Train, name: str) -> None:
    run = trained(name)
    store = json.loads(next((workshop.folder / "data").glob(f"{name}-*/store.json")).read_text())
    valid, test = (store["splits"][split]["units"] for split in ("valid", "test"))
    assert final(run)["units"] == valid
    dividing, other = (
        next(n for n in range(8, test + 1) if bool(test % n) == rest) for rest in (False, True)
    )
    for words in (
        [()] if name in IMAGE_SETS else [(f"data.length={dividing}",), (f"data.length={other}",)]
    ):
        result, _ = workshop.score(run, "split=test", *words)
        assert result["units"] == result["split_units"] == test > 0
        assert result["nats"] > 0 and not result["partial"] and result["own_data"]
        assert result["data"]["fingerprint"] == store["fingerprint"]


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Path:
    """A run on a folder with 23 images of 6 x 8, for which a wrong length is refused, and the right
    one named.
    """
    (folder := workshop.folder / "pictures").mkdir()
    for number, image in enumerate(random_images(23, 6, 8)):
        (folder / f"{number:02d}.png").write_bytes(encoded(image))
    run = workshop.folder / "run"
    words = ("train", *SMALL, "data=images", f"data.path={folder}")
    said = workshop.command(*words, run=run, code=2)
    assert "data.length=3072: expected 144, for one image is one sequence" in said
    workshop.command(*words, "data.length=144", "trainer.steps=2", run=run)
    return run


def pixels_of(path: Path) -> np.ndarray:
    """Return the pixels of a picture, which has the size of the images of the run."""
    pixels = np.asarray(Image.open(path))
    assert pixels.shape == (6, 8, 3)
    return pixels


def test_a_run_on_images_counts_sub_pixels(workshop: Workshop, run: Path) -> None:
    closing = final(run)
    assert (closing["unit"], closing["units"]) == ("dim", 144)
    scored, _ = workshop.score(run, "split=train")
    assert scored["units"] == 21 * 144
    assert 7.5 < scored["bits"] < 9.5


def test_a_run_on_images_samples_pictures(workshop: Workshop, run: Path) -> None:
    # The first is of the training.
    first, second = (run / "samples" / f"step2-seed0-{number}.png" for number in (1, 2))
    assert workshop.answer("sample", str(run), "checkpoint=last")[0] == f"{second}\n"
    for path in (first, second):
        pixels_of(path)
    printed = workshop.command("sample", str(run), "length=30", "seed=7", "checkpoint=last")
    assert "30 units; an image has 144: the rest is black" in printed
    pixels = pixels_of(run / "samples" / "step2-seed7-1.png")
    # 30 units are 10 pixels.
    assert pixels[0].any()
    assert (pixels[2:] == 0).all()
    for option, line in (
        ("length=145", "an image has 144 units"),
        ("prompt=cat", "no place in a run on images"),
    ):
        assert line in workshop.command("sample", str(run), option, code=2)


def test_analyses_of_a_run_on_images(
    workshop: Workshop, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_nothing(monkeypatch)
    workshop.command("analyze", "patterns", str(run), "split=train")
    path = Path(workshop.command("analyze", "context", str(run)).splitlines()[-1])
    result = json.loads(path.read_text())
    assert result["gains"] == [], "a part of an image elsewhere is no image"
    assert len(result["positions"]) == 16


def test_words_have_a_perplexity_over_the_published_count_and_no_bytes(
    workshop: Workshop, trained: Train
) -> None:
    result, said = workshop.score(trained("wikitext103"), "split=test")
    published = WORDS["wikitext103"]["test"]
    assert result["units"] == published == result["words"] and result["words_comparable"]
    assert result["perplexity_per_word"] == pytest.approx(math.exp(result["nats"] / published))
    assert "bits_per_byte" not in result and "bits/byte" not in said
    assert (
        f"perplexity per word: exp(nats / {published:,} words), the published count of the split\n"
        in said
    )
    part, said = workshop.score(trained("wikitext103"), "split=test", "limit=2")
    assert part["partial"] and "words" not in part and "per word" not in said


def test_subwords_have_bits_per_byte_and_a_perplexity(workshop: Workshop, trained: Train) -> None:
    result, said = workshop.score(pg19 := trained("pg19"), "split=test")
    rows = parquet.read_table(workshop.folder / "pg19-files" / "test-00000-of-00001.parquet")[
        "text"
    ].to_pylist()
    text = sum(len(row.encode()) for row in rows)
    assert result["bits_per_byte"] == pytest.approx(result["nats"] / text / math.log(2))
    assert result["words"] == WORDS["pg19"]["test"] and result["words_comparable"]
    assert " bits/subword" in said and " bits/byte of text\n" in said
    assert final(pg19)["unit"] == "subword" and final(pg19)["bits_per_byte"] < final(pg19)["bits"]


def test_the_released_protocol_has_a_name_and_a_file_of_its_own(
    workshop: Workshop, trained: Train
) -> None:
    habits = {
        "wikitext103": "blank lines and the last window that is not",
        "pg19": "nats / subwords",
    }
    result = {}
    for name, habit in habits.items():
        result, said = workshop.score(
            trained(name), "split=test", "data.length=24", "protocol=released"
        )
        assert (
            result["read_as"] == "released"
            and habit in result["protocol"].partition("protocol=released (")[2]
        )
        assert result["units"] == result["split_units"] and result["protocol"] in said
        assert not result["words_comparable"] and "not comparable" in said
    assert result["words"] == pytest.approx(result["units"] / 1.248)
    assert result["perplexity_per_word"] == pytest.approx(
        math.exp(1.248 * result["nats"] / result["units"])
    )


@pytest.mark.parametrize(
    ("name", "file"), [("wikitext103", "words.txt"), ("pg19", "sentencepiece.model")]
)
def test_a_run_samples_without_its_store(
    workshop: Workshop, trained: Train, name: str, file: str
) -> None:
    run = trained(name)
    (store,) = (workshop.folder / "data").glob(f"{name}-*")
    assert (run / file).read_bytes() == (store / file).read_bytes()
    said = workshop.command("resume", str(run), "trainer.steps=3")
    assert "done after 3 steps" in said and "perplexity per word" in said
    # As at the end of a process: Trainer and callbacks refer to each other, and one to the store.
    gc.collect()
    workshop.command("data", "remove", store.name)
    assert not store.exists()
    said = workshop.command("sample", str(run), "length=5", "prompt=of")
    assert said.lstrip().startswith("of") and not store.exists()
    kept = (run / file).read_bytes()
    (run / file).write_bytes(kept + b"more\n")
    said = workshop.command("sample", str(run), "length=5", code=1)
    assert f"{run / file}: expected the" in said
    (run / file).write_bytes(kept)
    workshop.command("eval", str(run), "limit=1")  # the store is made again, the same
    assert json.loads(next((run / "eval").glob("valid*.json")).read_text())["own_data"]


def test_another_tokenizer_than_the_runs_is_refused(workshop: Workshop, trained: Train) -> None:
    for word in ("eval", "audit"):
        said = workshop.command(word, str(trained("pg19")), "data.tokenizer_sample=5000", code=2)
        assert "pg19: the tokenizer of these data is not that of the run; name the data" in said


def test_a_plan_knows_the_vocabulary(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"the cat and the dog\n" * 4_000)
    text = ["data=text", f"data.path={tmp_path}", "data.tokenizer=words"]
    assert "not prepared; to prepare it: rtx data prepare data=text" in workshop.command(
        "plan", *text, code=2
    )
    workshop.command("data", "prepare", *text)
    asked = (
        text,
        ["data=wikitext103"],
        ["data=pg19"],
        ["data=cifar10"],
        ["data=images", f"data.path={tmp_path}"],
    )
    said = [workshop.command("plan", *words) for words in asked]
    assert all(
        f" units of {words[0].removeprefix('data=')}" in text
        for words, text in zip(asked, said, strict=True)
    )
    sizes = [int(text.partition("parameters")[2].split()[0].replace(",", "")) for text in said]
    assert sizes[0] < sizes[3] < 98_000 * 256 < sizes[2] and sizes[1] > 267_735 * 256
