"""Generated files from outside: whatever they hold, they are read or refused in words, in time.

The examples are the same in every run of the tests. RTX_FUZZ=2000 draws as many of each, others
every time.
"""

import contextlib
import copy
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import DataObject

from rtx import load
from rtx.commands.sweep import board
from rtx.data.files import column_of, tables_of
from rtx.data.images import Pixels
from rtx.data.store import RECORD, open_store, record_sha256
from rtx.data.tokenizers import Tokenizer, learn_subwords, learn_words, load_tokenizer
from rtx.errors import DAMAGED, RunFailed, UserError
from rtx.report.contents import build
from rtx.report.formats import markdown
from rtx.report.run_records import collect
from rtx.runs.resumption import already_done
from rtx.runs.status import read_status, run_state
from rtx.settings.run_config import load_run_config
from rtx.training.checkpoint import newest_checkpoint, read_checkpoint, save_checkpoint
from rtx.training.inference import run_config
from tests.helpers.disturbances import asked, deadline
from tests.helpers.made_sets import encoded, opened, write_table
from tests.helpers.small_runs import Workshop, draw_nothing

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # what numpy and matplotlib say of impossible numbers
MANY = int(os.environ.get("RTX_FUZZ", "0"))


def examples(number: int) -> Any:
    """Return the settings of a test that draws so many examples, or RTX_FUZZ."""
    known: dict[str, Any] = {
        "deadline": None,
        "database": None,
        "suppress_health_check": list(HealthCheck),
    }
    return settings(max_examples=MANY or number, derandomize=not MANY, **known)


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Path:
    run = workshop.train("run")
    workshop.command("eval", str(run), "limit=1")
    return run


@contextlib.contextmanager
def refused_in_words(*more: type[Exception]) -> Iterator[None]:
    """Let through what users are told in a line, and fail where nothing comes to an end."""
    with deadline(), contextlib.suppress(UserError, RunFailed, *more):
        yield


VALUES = st.one_of(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    st.sampled_from(
        [
            "",
            "\x1b[31m",
            "../../x",
            "$\\frac",
            "9" * 400,
            "done",
            "running",
            -1,
            10**30,
            10**400,
            2**63,
        ]
    ),
    st.sampled_from([[], {}, [[]], [1, 2], {"a": None}, [{}], {"0": {"1": {}}}]),
)


def mutated(data: DataObject, record: Any, values: Any = VALUES) -> Any:
    """Return a copy of nested values in which one to three are gone, doubled or others."""
    changed = {"": copy.deepcopy(record)}
    for _ in range(data.draw(st.integers(1, 3))):
        inner: Any = changed
        key: Any = ""
        while isinstance(inner[key], dict | list) and inner[key] and data.draw(st.integers(0, 9)):
            inner = inner[key]
            key = data.draw(
                st.sampled_from(list(inner) if isinstance(inner, dict) else range(len(inner)))
            )
        match data.draw(st.integers(0, 3)):
            case 0 if inner is not changed:
                del inner[key]
            case 1 if isinstance(inner, dict):
                inner[data.draw(st.text(max_size=9))] = copy.deepcopy(inner[key])
            case _:
                inner[key] = copy.deepcopy(data.draw(values))
    return changed.get("")


def spoilt(data: DataObject, content: bytes) -> bytes:
    """Return bytes of which some are cut off, others, doubled or new."""
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        end = min(len(content), at + data.draw(st.integers(0, 40)))
        put = data.draw(
            st.binary(max_size=12)
            | st.sampled_from([b"", content[at:end] * 2, b"\xff" * 4, b"\0" * 8])
        )
        content = content[:at] + put + content[end:]
    return content


YAML = (
    "&a ",
    "*a",
    "<<: *a",
    "[",
    "]",
    "{",
    "}",
    "- ",
    "? ",
    ": ",
    "!!python/name:os.system ",
    "|\n",
    "'",
    "\t",
    "#",
)
WORDS = st.sampled_from(
    (
        *YAML,
        "null",
        "${oc.env:HOME}",
        "nan",
        "1e400",
        "-1",
        "\n",
        "  ",
        "---\n",
        "...\n",
        "\0",
        "\x85",
    )
)


@given(data=st.data())
@examples(15)
def test_a_configuration(run: Path, tmp_path: Path, data: DataObject) -> None:
    lines = (run / "config.yaml").read_text().splitlines(keepends=True)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        place = data.draw(st.integers(0, len(lines[at])))
        word = data.draw(WORDS | st.text(max_size=5))
        new = (lines[at][:place] + word + lines[at][place:], lines[at] * 2, "", word, f"{word}\n")
        lines[at] = data.draw(st.sampled_from(new))
    (tmp_path / "config.yaml").write_bytes("".join(lines).encode(errors="surrogatepass"))
    with deadline():
        found = collect([tmp_path]).cells[0]
    with refused_in_words():
        config = load_run_config(tmp_path)
        assert found.config.get("seed", config.seed) == config.seed


RECORDS = (
    "status.json",
    "environment.json",
    "metrics.jsonl",
    "resumes.jsonl",
    "eval/*step*",
    "../sweeps.jsonl",
)
SWEPT = {"command": "rtx train -m", "cells": {"run": "seed=1"}}


@pytest.mark.parametrize("name", RECORDS)
@given(data=st.data())
@examples(3)
def test_records(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: DataObject, name: str
) -> None:
    if name != "metrics.jsonl":
        # Plots are drawn from metrics.jsonl alone.
        draw_nothing(monkeypatch)
    folder = tmp_path / "run"
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoints"), dirs_exist_ok=True)
    (folder / "resumes.jsonl").write_text(json.dumps({"changed": {}, "overrides": []}))
    (tmp_path / "sweeps.jsonl").write_text(json.dumps(SWEPT))
    (path,) = folder.glob(name)
    text = path.read_text()
    rows = [json.loads(row) for row in (text.splitlines() if name.endswith("l") else [text])]
    at = data.draw(st.integers(0, len(rows) - 1))
    rows[at] = mutated(data, rows[at])
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(content if data.draw(st.integers(0, 4)) else spoilt(data, content))
    with refused_in_words():
        assert run_state(folder) and (read_status(folder) or True)
        assert "\x1b" not in markdown(build(collect([tmp_path]), ""))
        board(tmp_path, width=100)
        already_done(folder, load_run_config(run))


TENSORS = st.sampled_from(
    [torch.ones(2, 3), torch.tensor(0.5), torch.tensor([]), torch.full((3,), float("nan"))]
)


@given(data=st.data())
@examples(4)
def test_a_checkpoint(workshop: Workshop, run: Path, tmp_path: Path, data: DataObject) -> None:
    shutil.rmtree(folder := tmp_path / "crafted", ignore_errors=True)
    shutil.copytree(run, folder)
    crafted = mutated(data, read_checkpoint(run / "checkpoints" / "last.ckpt"), VALUES | TENSORS)
    for name in ("best", "last"):
        (folder / "checkpoints" / "previous.ckpt").unlink(missing_ok=True)
        save_checkpoint(crafted, folder / "checkpoints" / f"{name}.ckpt")
    with refused_in_words():
        newest_checkpoint(folder / "checkpoints", set_aside=False, report=str)
    with refused_in_words():
        load(folder).tokenizer  # noqa: B018
    step = crafted.get("step") if isinstance(crafted, dict) else 0
    if not isinstance(step, int) or step <= 12:  # beyond, it would train on and on
        asked(workshop, "resume", str(folder), "trainer.steps=13")


@given(data=st.data())
@examples(20)
def test_an_export(workshop: Workshop, run: Path, tmp_path: Path, data: DataObject) -> None:
    whole = tmp_path / "whole"
    lie = tmp_path / "lie"
    if not whole.exists():
        workshop.command("export", str(run), f"output={whole}")
    shutil.copytree(whole, lie, dirs_exist_ok=True)
    record = json.loads((whole / "export.json").read_text())
    weights = (whole / "model.safetensors").read_bytes()
    if data.draw(st.booleans()):  # weights that only their checksum takes for some
        changed = (
            spoilt(data, weights[: 8 + int.from_bytes(weights[:8], "little")])
            + weights[len(weights) // 2 :]
        )
        (lie / "model.safetensors").write_bytes(changed)
        record["sha256"] = hashlib.sha256(changed).hexdigest()
    else:
        record = mutated(data, record)
    (lie / "export.json").write_text(json.dumps(record))
    with refused_in_words():
        assert run_config(lie)
        load(lie).tokenizer  # noqa: B018


@given(data=st.data())
@examples(30)
def test_a_store(workshop: Workshop, run: Path, tmp_path: Path, data: DataObject) -> None:
    folder = Path(
        shutil.copytree(next(workshop.data.glob("text-*")), tmp_path / "store", dirs_exist_ok=True)
    )
    record = mutated(data, json.loads((folder / RECORD).read_text()))
    if isinstance(record, dict):
        record["sha256"] = record_sha256(record)
    (folder / RECORD).write_text(json.dumps(record))
    with refused_in_words():
        open_store(folder, "data=text").describe()


CARD = {
    "configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "*.txt"}]}],
    "dataset_info": {"features": [{"name": "text", "dtype": "string"}], "splits": []},
    "license": "mit",
}


@given(data=st.data(), name=st.sampled_from(["README.md", ".huggingface.yaml"]))
@examples(8)
def test_a_card_of_a_data_set(tmp_path: Path, data: DataObject, name: str) -> None:
    folder = tmp_path / "set"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / "train.txt").write_text("a line\n" * 50)
    content = yaml.safe_dump(mutated(data, CARD)).encode()
    if not data.draw(st.integers(0, 3)):
        content = spoilt(data, content)
    marks = b"---\n" if name.endswith(".md") else b""
    (folder / name).write_bytes(marks + content + marks)
    with refused_in_words():
        opened(tmp_path / "root", "hub", folder)


@given(data=st.data())
@examples(3)
def test_a_card_of_an_export(
    workshop: Workshop, run: Path, tmp_path: Path, data: DataObject
) -> None:
    """It is filled with values of the run's records."""
    folder = tmp_path / "run"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, folder)
    path = folder / data.draw(st.sampled_from(["environment.json", "status.json"]))
    path.write_text(json.dumps(mutated(data, json.loads(path.read_text()))))
    asked(workshop, "export", str(folder), f"output={tmp_path / 'export'}")


@given(data=st.data())
@examples(15)
def test_a_file_of_a_tokenizer(tmp_path: Path, data: DataObject) -> None:
    tokenizer = data.draw(st.sampled_from(learned_ones()))
    content = spoilt(data, tokenizer.content)
    (tmp_path / tokenizer.file).write_bytes(content)
    described = {**tokenizer.describe(), "sha256": hashlib.sha256(content).hexdigest()}
    described["settings"] = (
        mutated(data, described["settings"]) if data.draw(st.booleans()) else described["settings"]
    )
    with refused_in_words(RuntimeError, *DAMAGED):
        found = load_tokenizer(described, tmp_path)
        found.decode(found.encode(b"a word  \xff\n of text").tolist())


@functools.cache
def learned_ones() -> list[Tokenizer]:
    """Return a tokenizer of words and one of subwords."""
    text = b"the cat sat on the mat and the dog ate the hat of the cat\n" * 60
    return [learn_words([text], "", str), learn_subwords([text], 300, 10_000, "", str)]


@given(data=st.data(), kind=st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM"]))
@examples(40)
def test_a_picture(data: DataObject, kind: str) -> None:
    content = spoilt(data, encoded(np.arange(48, dtype=np.uint8).reshape(4, 4, 3), kind))
    with refused_in_words():
        assert len(Pixels(4, 4, scaled=True, lossy=True).decode(content, "a picture")) == 48


@given(data=st.data())
@examples(30)
def test_a_table(tmp_path: Path, data: DataObject) -> None:
    for name in ("train", "validation", "test"):
        write_table(tmp_path / f"{name}.parquet", text=["a", "b"] * 9)
    (tmp_path / "test.parquet").write_bytes(spoilt(data, (tmp_path / "test.parquet").read_bytes()))
    with refused_in_words():
        column_of(tables_of(str(tmp_path), [tmp_path])["test"], ["text"])
