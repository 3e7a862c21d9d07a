"""`rtx train`: what a run leaves, that it repeats, and what it says when it cannot go on."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from small_runs import Workshop, difference, largest_file, read_metrics

from rtx.compose import load_run_config
from rtx.data.catalog import open_data
from rtx.evaluation.baselines import baselines
from rtx.training.checkpoint import read_checkpoint
from rtx.training.run_folder import read_status


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Path:
    return workshop.train("run")


def test_what_a_run_leaves_and_says(workshop: Workshop, tmp_path: Path) -> None:
    run = tmp_path / "cell"
    said = workshop.command("train", workshop.text, *SHORT, run=run)
    assert {path.name for path in run.iterdir()} == {
        *("checkpoints", "config.yaml", "environment.json", "lock", "metrics.jsonl", "samples", "status.json"),
    }
    (sample,) = (run / "samples").iterdir()
    assert len(sample.read_bytes()) == 8 and str(sample) in said
    config = load_run_config(run)
    assert config.routing.clusters == 4  # ceil(32 / 8), frozen
    environment = json.loads((run / "environment.json").read_text())
    assert environment["threads"] == 1
    assert environment["hardware"]["accelerator"] == "cpu"
    assert {"torch", "lightning", "rtx"} <= environment["versions"].keys()
    status = read_status(run) or {}
    store = open_data(config.data, workshop.folder / "data")
    assert environment["data"]["fingerprint"] == store.fingerprint
    assert (status["state"], status["step"], status["final"]["units"]) == ("done", 4, len(store.split("valid")))
    final = read_metrics(run / "metrics.jsonl")[-1]
    assert final["kind"] == "final" and final["val_bits"] == status["final"]["bits"]
    assert f"{final['val_bits']:.4f} bits/byte on the validation split" in said
    assert f"bits/byte on valid, {final['val_units']:,} bytes each scored once, windows of 32" in said
    assert "selection=causal: sees no future" in said
    for name, bits in baselines(store.split("train"), store.split("valid")).items():
        assert re.search(rf"{name} +{bits:.4f}", said)
    assert "a sample (temperature 0.8):" in said


def test_the_score_is_the_one_that_the_protocol_line_tells_of(workshop: Workshop, tmp_path: Path) -> None:
    run = tmp_path / "cell"
    said = workshop.command("train", workshop.text, *SHORT, "trainer.val_stride=5", run=run)
    assert "windows of 32, stride 5, teacher-forced" in " ".join(said.split())
    workshop.command("eval", str(run), "split=valid", "checkpoint=last")
    (kept,) = (run / "eval").iterdir()
    score = json.loads(kept.read_text())
    assert score["stride"] == 5
    final = (read_status(run) or {})["final"]
    assert (final["units"], final["bits"]) == (score["units"], pytest.approx(score["bits_per_byte"], abs=1e-9))


SHORT = (
    *("data=text", "data.length=32", "model=tiny", "model.layers=2", "model.hidden=16", "model.heads=2"),
    *("model.ffn_hidden=16", "model.window=8", "routing.heads=1", "routing.layers=1", "routing.window=8"),
    *("trainer.steps=4", "trainer.batch_size=2", "trainer.val_windows=5", "logger=jsonl", "hardware.threads=1"),
)


def test_the_same_seed_gives_the_same_bits(workshop: Workshop, run: Path) -> None:
    again = workshop.train("again", "hardware.workers=1")
    assert difference(again, run) == ""
    other = workshop.train("other", "seed=1")
    assert not torch.equal(*(weight(path) for path in (run, other)))


def weight(run: Path) -> torch.Tensor:
    """Return some weights of a run."""
    return read_checkpoint(run / "checkpoints" / "last.ckpt")["model"]["embedding.table_VS"]


def test_numbers_of_the_routing_heads_are_logged(run: Path) -> None:
    row = next(row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train")
    assert {"routing/empty_share", "routing/member_most", "routing/self_weight"} <= row.keys()


def test_centroids_may_start_from_the_data(workshop: Workshop, run: Path) -> None:
    name = "blocks.1.attention.groups.routed.centroids.centroid_HCD"
    seeded = workshop.train("seeded", "routing.init=data", "routing.decay=1.0", "trainer.steps=1")
    centroid = read_checkpoint(seeded / "checkpoints" / "last.ckpt")["model"][name]
    assert not torch.equal(centroid, read_checkpoint(run / "checkpoints" / "last.ckpt")["model"][name])


def test_a_nan_ends_the_run_in_one_line(workshop: Workshop) -> None:
    run = workshop.folder / "nan"
    wild = ("optimizer.lr=1e30", "optimizer.warmup=0", "optimizer.schedule=constant", "trainer.clip=0")
    said = workshop.command("train", workshop.text, *SHORT, *wild, run=run, code=1)
    line = said.splitlines()[-1]
    assert re.fullmatch(
        r"rtx: step \d: the loss is (nan|inf) at learning rate 1e\+30; no checkpoint had been written yet", line
    )
    assert (read_status(run) or {})["state"] == "failed"


def test_bf16_and_fp64(workshop: Workshop) -> None:
    scores = {}
    for precision in ("fp32", "bf16", "fp64"):
        path = workshop.train(precision, f"hardware.precision={precision}", "trainer.steps=2")
        scores[precision] = (read_status(path) or {})["final"]["bits"]
        assert weight(path).dtype == (torch.float64 if precision == "fp64" else torch.float32)
    assert scores["fp32"] == pytest.approx(scores["fp64"], abs=1e-4)
    assert scores["fp32"] == pytest.approx(scores["bf16"], abs=0.05)
    assert len(set(scores.values())) == 3


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("hardware=gpu",), "hardware=gpu, but torch finds no GPU"),
        (("data.length=4000",), "expected at least one sequence of data.length=4000"),
        (("hardware=ddp", "hardware.devices=2", "trainer.batch_size=3"), "trainer.batch_size=3"),
    ],
)
def test_mistakes_are_told_in_a_line(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], line: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert line in workshop.command("train", workshop.text, *SHORT, *overrides, run=tmp_path / "cell", code=2)


def test_an_empty_text_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    said = workshop.command("train", f"data.path={tmp_path / 'empty.txt'}", *SHORT, run=tmp_path / "cell", code=2)
    assert "empty.txt" in said and len(said.splitlines()) == 1
    assert not (tmp_path / "cell").exists()


def test_outputs_that_cannot_be_written(workshop: Workshop, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cell = tmp_path / "file" / "cell"
    said = workshop.command("train", workshop.text, *SHORT, run=cell, code=2)
    line = f"rtx: cannot write to {cell}: Not a directory; set RTX_RUN to a folder that you can write"
    assert said.splitlines()[-1] == line  # perhaps behind one on data that are prepared


def test_the_full_disk_of_a_first_checkpoint(workshop: Workshop) -> None:
    process = workshop.start("full", "trainer.val_every=1000", inside=largest_file(50_000))
    assert process.wait() == 1
    line = process.log.read_text().splitlines()[-1]
    last = process.run / "checkpoints" / "last.ckpt"
    assert line == f"rtx: cannot write {last}: File too large; no checkpoint had been written yet"
    assert list((process.run / "checkpoints").iterdir()) == []
    assert math.isfinite(read_metrics(process.run / "metrics.jsonl")[-1]["bits"])
