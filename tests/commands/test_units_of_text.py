"""Runs on words and subwords: their measures, the released protocol, sampling without a store, resuming, planning."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_sets import SETS
from small_runs import SIZES, Workshop

from rtx.data.sets import SETS as KNOWN

QUICK = [size for size in SIZES if not size.startswith("data")] + ["trainer.steps=2", "trainer.val_every=2"]


@pytest.fixture(scope="module")
def constants() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def trained(workshop: Workshop, constants: pytest.MonkeyPatch, name: str) -> Path:
    place = workshop.folder / f"{name}-files"
    place.mkdir()
    options = SETS[name](place, constants)
    workshop.command("train", *options, *QUICK, run=workshop.folder / name)
    return workshop.folder / name


@pytest.fixture(scope="module")
def wikitext(workshop: Workshop, constants: pytest.MonkeyPatch) -> Path:
    return trained(workshop, constants, "wikitext103")


@pytest.fixture(scope="module")
def pg19(workshop: Workshop, constants: pytest.MonkeyPatch) -> Path:
    return trained(workshop, constants, "pg19")


def scored(workshop: Workshop, run: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """Score a run on split test; return the result and what was printed."""
    before = set(run.glob("eval/*.json"))
    said = workshop.command("eval", str(run), "split=test", *overrides)
    (path,) = set(run.glob("eval/*.json")) - before
    return json.loads(path.read_text()), said


def test_words_have_a_perplexity_over_the_published_count_and_no_bytes(workshop: Workshop, wikitext: Path) -> None:
    result, said = scored(workshop, wikitext)
    published = KNOWN["wikitext103"].words["test"]
    assert result["units"] == published == result["words"] and result["words_comparable"]
    assert result["perplexity_per_word"] == pytest.approx(math.exp(result["nats"] / published))
    assert "bits_per_byte" not in result and "bits/byte" not in said
    assert f"perplexity per word: exp(nats / {published:,} words), the published count of the split\n" in said
    part, said = scored(workshop, wikitext, "limit=2")
    assert part["partial"] and "words" not in part and "per word" not in said


def test_subwords_have_bits_per_byte_and_a_perplexity_over_the_published_count(workshop: Workshop, pg19: Path) -> None:
    result, said = scored(workshop, pg19)
    text = sum(len(row) for row in rows_of(workshop.folder / "pg19-files" / "test-00000-of-00001.parquet"))
    assert result["bits_per_byte"] == pytest.approx(result["nats"] / text / math.log(2))
    assert result["words"] == KNOWN["pg19"].words["test"] and result["words_comparable"]
    assert " bits/subword" in said and " bits/byte of text\n" in said
    final = json.loads((pg19 / "status.json").read_text())["final"]
    assert final["unit"] == "subword" and final["bits_per_byte"] < final["bits"]


def rows_of(path: Path) -> list[bytes]:
    from pyarrow import parquet

    return [text.encode() for text in parquet.read_table(path)["text"].to_pylist()]


def test_the_released_protocol_has_a_name_and_a_file_of_its_own(workshop: Workshop, wikitext: Path, pg19: Path) -> None:
    for run, habit in ((wikitext, "blank lines and the last window that is not"), (pg19, "nats / subwords")):
        result, said = scored(workshop, run, "data.length=24", "protocol=released")
        assert result["read_as"] == "released" and habit in result["protocol"].partition("protocol=released (")[2]
        assert result["units"] == result["split_units"] and result["protocol"] in said
        assert not result["words_comparable"] and "not comparable" in said
    assert result["words"] == pytest.approx(result["units"] / 1.248)
    assert result["perplexity_per_word"] == pytest.approx(math.exp(1.248 * result["nats"] / result["units"]))


@pytest.mark.parametrize(("name", "file"), [("wikitext103", "words.txt"), ("pg19", "sentencepiece.model")])
def test_a_run_goes_on_and_samples_without_its_store(
    workshop: Workshop, wikitext: Path, pg19: Path, name: str, file: str
) -> None:
    run = {"wikitext103": wikitext, "pg19": pg19}[name]
    (store,) = (workshop.folder / "data").glob(f"{name}-*")
    assert (run / file).read_bytes() == (store / file).read_bytes()
    said = workshop.command("resume", str(run), "trainer.steps=3")
    assert "done after 3 steps" in said and "perplexity per word" in said
    gc.collect()  # as the end of a process: Trainer and callbacks refer to each other, and one of them to the store
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


def test_another_tokenizer_than_the_runs_is_refused(workshop: Workshop, pg19: Path) -> None:
    for command in (["eval", "limit=1"], ["audit", "windows=1"]):
        said = workshop.command(command[0], str(pg19), *command[1:], "data.tokenizer_sample=5000", code=2)
        assert "pg19: the tokenizer of these data is not that of the run; name the data" in said


def test_a_plan_knows_the_vocabulary(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"the cat and the dog\n" * 40)
    own = ["data=text", f"data.path={tmp_path}", "data.tokenizer=words", "data.length=16", "model.window=8"]
    own += ["routing.window=8", "model.hidden=64", "model.heads=4"]
    assert "not prepared; to prepare it: rtx data prepare data=text" in workshop.command("plan", *own, code=2)
    workshop.command("data", "prepare", *own[:3], "data.length=16")
    said = [workshop.command("plan", *own)]
    said += [
        workshop.command("plan", *options)
        for options in (["data=wikitext103"], ["data=pg19"], ["data=cifar10"], ["data=images", f"data.path={tmp_path}"])
    ]
    for text, name in zip(said, ("text", "wikitext103", "pg19", "cifar10", "images"), strict=True):
        assert f" units of {name}" in text
    sizes = [int(text.partition("parameters")[2].split()[0].replace(",", "")) for text in said]
    assert sizes[1] > 267_735 * 256 and sizes[2] > 98_000 * 256 > sizes[3]
    assert sizes[0] < 1_000_000
