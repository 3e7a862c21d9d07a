"""What somebody else has written or laid out: bombs, pipes, links, programs, markup, escapes, parts
of other types.

No command may hang, run or follow anything, end in a traceback, or pass markup and escapes on.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rtx import load
from rtx.data.store import open_store
from rtx.errors import RunFailed, UserError
from rtx.report.contents import build
from rtx.report.formats import comma_separated, html, markdown
from rtx.report.run_records import collect
from rtx.runs.checksum import COMMENT_BYTES, TAG
from rtx.runs.folder import shown
from rtx.runs.status import read_status, run_state
from rtx.settings.run_config import load_run_config
from rtx.sweeps.launcher import start
from rtx.tables import Column, Table
from rtx.training.checkpoint import FORMAT, read_checkpoint, save_checkpoint
from tests.helpers.disturbances import asked, deadline
from tests.helpers.small_runs import SMALL_RUN, Workshop, after, draw_nothing

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # what numpy and matplotlib say of impossible numbers
ESCAPE = "\x1b]0;owned\x07\x1b[31m"
BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}\n" for n in range(1, 40)
)
MERGED = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40)
)
YAML = {"aliases": BOMB, "merges": MERGED, "nested": "- " * 50_000, "flow": "seed: " + "[" * 50_000}
TWICE = {
    "value": "seed: 1\nseed: 2\n",
    "section": "model: {heads: 4}\nmodel: {layers: 2}\n",
}
DOCUMENTS = "seed: 1\n---\nname: a\n"


def test_yaml_beyond_two_levels_of_unique_keys_is_refused(
    workshop: Workshop, run: Path, tmp_path: Path
) -> None:
    reasons = dict.fromkeys(YAML, "must be a value") | dict.fromkeys(TWICE, "occurs twice")
    reasons["nested"] = "must be a section"
    reasons["documents"] = "has more than one document"
    for name, text in (YAML | TWICE | {"documents": DOCUMENTS}).items():
        shutil.copytree(run, tmp_path / name)
        (tmp_path / name / "config.yaml").write_text(text)
        code, said = asked(workshop, "eval", str(tmp_path / name))
        assert code == 2 and reasons[name] in said
    code, said = asked(workshop, "report", str(tmp_path))
    assert code == 0
    assert all(f"note: {tmp_path / name}/config.yaml: cannot be read" in said for name in reasons)


FILES = (
    "config.yaml",
    "status.json",
    "environment.json",
    "resumes.jsonl",
    "wandb.json",
    "lock",
    "metrics.jsonl",
)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_a_pipe_or_a_folder_in_place_of_a_file(
    workshop: Workshop,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[Path], None],
) -> None:
    draw_nothing(monkeypatch)
    for name in (*FILES, "checkpoints/last.ckpt", "checkpoints/best.ckpt"):
        # A folder called as a record would stand for it.
        copy = Path(shutil.copytree(run, tmp_path / f"no-{Path(name).name}"))
        (copy / name).unlink(missing_ok=True)
        make(copy / name)
        for words in (["resume", str(copy), "trainer.steps=13"], ["eval", str(copy), "limit=1"]):
            asked(workshop, *words)
    make(tmp_path / "sweeps.jsonl")
    for word in ("report", "sweep"):
        asked(workshop, word, str(tmp_path))


def test_values_of_a_run_are_no_questions_to_the_environment(
    workshop: Workshop, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    path = copy / "config.yaml"
    path.write_text(path.read_text().replace("\nname: rtx\n", "\nname: ${oc.env:SECRET}\n"))
    assert load_run_config(copy).name == "${oc.env:SECRET}"
    assert asked(workshop, "export", str(copy), f"output={tmp_path / 'out'}")[0] == 0
    assert asked(workshop, "resume", str(copy), "trainer.steps=13")[0] == 0
    for file in [*copy.rglob("*"), *(tmp_path / "out").rglob("*")]:
        assert file.is_dir() or b"hunter2" not in file.read_bytes(), file


SWEEP = {"command": f"rtx train -m {ESCAPE}", "cells": {"run": f"seed=1 {ESCAPE}"}}


def test_nothing_that_a_terminal_obeys_is_printed(
    workshop: Workshop, run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / f"sweep{ESCAPE}"
    for name, change in (("done", {}), ("run", {"state": "failed", "reason": ESCAPE})):
        copy = Path(shutil.copytree(run, folder / name))
        status = json.loads((copy / "status.json").read_text()) | change
        status["final"]["protocol"]["unit"] += ESCAPE
        (copy / "status.json").write_text(json.dumps(status))
    (folder / "sweeps.jsonl").write_text(json.dumps(SWEEP) + "\n")
    for word, place in (
        ("report", folder),
        ("sweep", folder),
        ("resume", folder / "done"),
        ("eval", folder / "done"),
    ):
        code, said = asked(workshop, word, str(place))
        assert code == 0 and "\x07" not in said and "\N{REPLACEMENT CHARACTER}" in said, (
            word,
            said,
        )


HOSTILE: tuple[Any, ...] = (None, -1, 10**400, float("nan"), "x", [], [[1]], {}, {"x": {}}, True)
RECORDS = ("status.json", "environment.json", "metrics.jsonl", "resumes.jsonl", "../sweeps.jsonl")


@pytest.mark.parametrize("name", RECORDS)
def test_records_with_parts_of_other_types_are_told_and_left_out(
    workshop: Workshop, copy: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name != "metrics.jsonl":
        # Plots are drawn from metrics.jsonl alone.
        draw_nothing(monkeypatch)
    (copy / "resumes.jsonl").write_text('{"changed": {}}')
    (copy.parent / "sweeps.jsonl").write_text(json.dumps(SWEEP))
    text = (copy / name).read_text()
    values = itertools.cycle(HOSTILE)
    *rows, record = map(json.loads, text.splitlines()[:3] if name.endswith("l") else [text])
    for key in [*record, *record, ""]:
        changed = {**record, key: next(values)} if key else next(values)
        (copy / name).write_text("".join(json.dumps(row) + "\n" for row in [*rows, changed]))
        assert run_state(copy) and (read_status(copy) or True)
        build(collect([copy.parent]), "")
    asked(workshop, "sweep", str(copy.parent))
    (copy / name).write_text("[" * 100_000)
    assert asked(workshop, "report", str(copy.parent))[0] == 0


@pytest.mark.parametrize("command", ["rtx train 'x", ["rtx", "train"], {"rtx": 1}, 5])
def test_a_command_that_is_none_is_no_obstacle_to_an_export(
    workshop: Workshop, copy: Path, tmp_path: Path, command: Any
) -> None:
    path = copy / "environment.json"
    record = json.loads(path.read_text())
    path.write_text(json.dumps({**record, "command": command}))
    assert asked(workshop, "export", str(copy), f"output={tmp_path / 'out'}")[0] == 0
    assert (tmp_path / "out" / "README.md").is_file()


MARKUP = (
    '<img src=x onerror=alert(1)> "onload="alert(1) ![x](http://evil/) ``` `$\\frac` </svg><script>'
)


def test_no_report_passes_markup_or_formulas_on(
    workshop: Workshop, run: Path, tmp_path: Path
) -> None:
    folder = tmp_path / 'a" onload="alert(1)<b>'
    copy = Path(shutil.copytree(run, folder))
    for name in ("status.json", "environment.json"):
        record = json.loads((copy / name).read_text())
        record.get("final", {})["unit"] = record.get("data", {})["unit"] = MARKUP
        (copy / name).write_text(
            json.dumps({**record, "command": f"rtx train 'name=a\n```\n<script>{MARKUP}'"})
        )
    workshop.command("analyze", "divergence", str(copy), "draws=2")
    report = build(collect([folder]), f"rtx report: {MARKUP}")
    report.tables.append(
        Table(
            MARKUP, [Column("a", MARKUP)], [{"a": value} for value in ("=1+1", "+x", "@x", MARKUP)]
        )
    )
    page = html(report)
    text = markdown(report)
    assert (
        report.plots
        and '" onload="' not in page
        and "<img" not in page
        and page.count("<script>") == 1
    )
    outside = "\n".join(
        line for line in text.splitlines() if not line.startswith("    ")
    )  # which is code
    assert (
        "<img" not in outside
        and "<script" not in outside
        and "![x](" not in outside
        and "\n```" not in text
    )
    rows = comma_separated(report)
    assert (
        "'=1+1" in rows
        and "'+x" in rows
        and "'@x" in rows
        and "\n=1" not in rows
        and ",=1" not in rows
    )
    workshop.command("export", str(copy), f"output={tmp_path / 'out'}")
    card = (tmp_path / "out" / "README.md").read_text()
    assert (
        "<img" not in card.replace("      rtx train", "")
        or "<img" not in card.partition("Command")[0]
    )


def test_a_report_and_a_configuration_of_somebody_else_are_not_written_over(
    workshop: Workshop, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_nothing(monkeypatch)
    (tmp_path / "report.md").write_text("mine")
    code, said = asked(workshop, "report", str(run), f"output={tmp_path}")
    assert code == 2 and "holds a report.md that rtx report did not write" in said
    config = tmp_path / "config.yaml"
    for content in ("", "services: [a, b]\n", "name: mine\nversion: 3\n"):
        config.write_text(content)
        code, said = asked(workshop, "train", workshop.text, *SMALL_RUN, run=tmp_path)
        assert code == 2 and f"{config}: " in said and config.read_text() == content
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", "config.yaml"}
    assert (tmp_path / "report.md").read_text() == "mine"
    for _ in range(2):  # a report of ours is
        assert asked(workshop, "report", str(run), f"output={tmp_path / 'ours'}")[0] == 0


def craft(path: Path, place: list[Any], value: Any = None) -> None:
    """Take a part of a checkpoint away or give it another value, and write it with a checksum that
    is right.
    """
    checkpoint = inner = read_checkpoint(path)
    *way, last = place
    for key in way:
        inner = inner[key]
    del inner[last]
    if value is not None:
        inner.insert(last, value) if isinstance(inner, list) else inner.update({last: value})
    path.with_name("previous.ckpt").unlink(missing_ok=True)
    save_checkpoint(checkpoint, path)


PARTS = [
    *(
        ["optimizer_states"],
        ["callbacks"],
        ["callbacks", "Timing"],
        ["callbacks", "Validations", "best"],
    ),
    *(["callbacks", "Timing", "clock"], ["callbacks", "Timing", "clock", "seconds"]),
    *(
        ["callbacks", "Timing", "seconds"],
        ["callbacks", "RankStates", "ranks"],
        ["lr_schedulers"],
        ["global_step"],
    ),
    *(
        ["optimizer_states", 0],
        ["optimizer_states", 0, "param_groups"],
        ["optimizer_states", 0, "state", 0],
    ),
    *(
        ["optimizer_states", 0, "state", 0, "exp_avg"],
        ["callbacks", "RankStates", "ranks", 0, "sums"],
        ["epoch"],
    ),
    *(
        ["callbacks", "RankStates", "ranks", 0, "rng", "torch"],
        ["config", "model"],
        ["config"],
        ["data"],
        ["model"],
    ),
    *(
        ["data", "tokenizer"],
        ["data", "vocabulary"],
        ["pytorch-lightning_version"],
        ["config", "seed"],
        ["step"],
    ),
    *(["format"], ["model", "embedding.table_VS"]),
]
MORE = [(["step"], -5), (["step"], "5"), (["format"], FORMAT + 1)]
"""Paths of parts and further values of them, besides none and a tensor."""
MUST_BE_REFUSED = ("step", "format")
REFUSED = "cannot be resumed from|no checkpoint of rtx|not of the format|was trained so|refused"


CRAFTED = [
    *((place, None) for place in PARTS),
    *((place, torch.ones(2, 3)) for place in PARTS),
    *MORE,
]
"""The path of a part and its new value; None removes the part."""


def name_of(argument: Any) -> str:
    """Return the name of a path or of a value in the name of a test."""
    if isinstance(argument, torch.Tensor):
        return "tensor"
    if isinstance(argument, list):
        return ".".join(map(str, argument))
    return str(argument)


@pytest.mark.parametrize(("place", "value"), CRAFTED, ids=name_of)
def test_a_crafted_checkpoint_is_refused_or_changes_nothing(
    workshop: Workshop, copy: Path, place: list[Any], value: Any
) -> None:
    craft(copy / "checkpoints" / "last.ckpt", place, value)
    before = (copy / "status.json").read_text()
    code, said = asked(workshop, "resume", str(copy), "trainer.steps=13")
    assert code or place[0] not in MUST_BE_REFUSED
    if code:
        assert code == 2 and (copy / "status.json").read_text() == before
        assert re.search(REFUSED, said)
    if place[0] in ("config", "data", "model", "step", "format"):
        asked(workshop, "sample", str(copy), "checkpoint=last", "length=2")


def test_a_packed_checkpoint_is_refused_before_it_is_unpacked(copy: Path) -> None:
    path = copy / "checkpoints" / "last.ckpt"
    with (
        zipfile.ZipFile(path) as old,
        zipfile.ZipFile(copy / "packed", "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry) + bytes(1 << 20))
    content = bytearray((copy / "packed").read_bytes())
    content[-2:] = struct.pack("<H", COMMENT_BYTES)
    path.write_bytes(content + TAG + hashlib.sha256(content).hexdigest().encode())
    with pytest.raises(UserError, match="is refused: it holds more than its size"):
        read_checkpoint(path)


def test_a_tokenizer_file_elsewhere_is_neither_read_nor_written(
    workshop: Workshop, copy: Path, tmp_path: Path
) -> None:
    secret = tmp_path / "id_rsa"
    secret.write_bytes(b"secret\n")
    described = {
        "name": "words",
        "unit": "word",
        "vocabulary": 256,
        "settings": {"eos": 0, "unk": 0},
    }
    described |= {"file": "../id_rsa", "sha256": hashlib.sha256(b"secret\n").hexdigest()}
    craft(copy / "checkpoints" / "best.ckpt", ["data", "tokenizer"], described)
    code, said = asked(workshop, "export", str(copy), f"output={tmp_path / 'a' / 'out'}")
    assert code == 1 and "its tokenizer cannot be read" in said
    assert not (tmp_path / "a").exists()


def test_a_lying_export_is_told(run: Path, workshop: Workshop, tmp_path: Path) -> None:
    lie = tmp_path / "lie"
    workshop.command("export", str(run), f"output={lie}")
    whole = (lie / "export.json").read_text()
    for key in (
        "step",
        "config",
        "data",
        "file",
        "sha256",
        "data.tokenizer",
        "data.vocabulary",
        "",
    ):
        for value in (None, -1, 10**30, "x", [], {"a": 1}, {"name": "words"}):
            facts = json.loads(whole)
            section, _, name = key.rpartition(".")
            (facts[section] if section else facts)[name] = value
            (lie / "export.json").write_text(json.dumps(facts if key else value))
            with contextlib.suppress(RunFailed, UserError), deadline():
                load(lie).tokenizer  # noqa: B018
            if value in (-1, "x"):
                asked(workshop, "eval", str(lie), "limit=1")


def test_a_system_that_will_not_read_is_no_damage(
    workshop: Workshop, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = next(workshop.data.glob("text-*"))

    def refused(path: Path, *_: object, **options: object) -> None:
        raise OSError(24, "Too many open files", str(path))

    monkeypatch.setattr(np, "memmap", refused)
    with pytest.raises(
        RunFailed, match=r"cannot be read \(Too many open files\); no file was changed"
    ):
        open_store(store, "data=text")
    code, said = asked(workshop, "data", "prepare", "data=text", workshop.text, "data.length=32")
    assert code == 1 and "rebuild" not in said and store.exists()


def test_a_cell_runs_no_code_of_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rtx", "torch", "json"):
        Path(f"{name}.py").write_text("open('attacked', 'w')")
    assert start(["nonsense"], tmp_path, {}).wait() == 2
    assert (tmp_path / "output.log").read_text() == "rtx: 'nonsense' is not of the form key=value\n"
    assert not Path("attacked").exists()


def test_no_link_in_the_folder_of_a_sweep_is_followed(workshop: Workshop, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text("mine")
    (tmp_path / "output.log").symlink_to(foreign)
    with pytest.raises(UserError, match=r"output.log: is a link"):
        start(["nonsense"], tmp_path, {})
    (workshop.folder / "out" / "linked").mkdir(parents=True)
    (workshop.folder / "out" / "linked" / "sweeps.jsonl").symlink_to(foreign)
    code, said = asked(
        workshop, "train", "-m", workshop.text, *SMALL_RUN, "seed=1,2", "name=linked"
    )
    assert code == 2 and "sweeps.jsonl: is a link, and rtx follows none below" in said
    assert foreign.read_text() == "mine"


@pytest.mark.parametrize("name", ["lock", "resumes.jsonl", "metrics.jsonl"])
def test_no_link_in_the_folder_of_a_run_is_followed(
    workshop: Workshop, copy: Path, tmp_path: Path, name: str
) -> None:
    (foreign := tmp_path / "foreign").write_bytes(b"a line of somebody else, without its end")
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(foreign)
    code, said = asked(workshop, "resume", str(copy), "trainer.steps=13")
    assert code == 2 and f"{copy / name}: is a link, and rtx follows none below {copy}; " in said
    assert foreign.read_bytes() == b"a line of somebody else, without its end"


def test_paths_are_printed_as_they_can_be_typed(
    workshop: Workshop, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_nothing(monkeypatch)
    shutil.copytree(run, tmp_path / "a=b")
    monkeypatch.chdir(tmp_path)
    assert [shown(Path(name)) for name in ("-o/-r", "a b", "a=b")] == ["./-o/-r", "'a b'", "a=b"]
    assert asked(workshop, "resume", "a=b")[0] == 0 == asked(workshop, "report", "a=b")[0]
    os.symlink("a=b", "-r")
    code, said = asked(workshop, "resume", "-r")
    assert code == 2 and said == "rtx: -r: is taken for a flag; write ./-r for the folder\n"
    assert asked(workshop, "resume", "./-r")[0] == 0


def test_checkpoints_that_are_taken_away_under_a_run_end_it_in_a_line(workshop: Workshop) -> None:
    process = workshop.start("bare", "trainer.steps=2000")
    process.until(after(4))
    shutil.rmtree(process.run / "checkpoints")
    assert process.wait() == 1
    line = process.log.read_text().splitlines()[-1]
    assert (
        line.startswith(f"rtx: cannot write {process.run}/checkpoints/")
        and "No such file or directory" in line
    )
    assert "Traceback" not in process.log.read_text() and run_state(process.run) == "failed"
    code, said = asked(workshop, "resume", str(process.run), "trainer.steps=5")
    assert code == 0 and "from the beginning: it has no checkpoint" in said
