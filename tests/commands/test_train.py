"""`rtx train`: what a run leaves, that it repeats, and what it says when it cannot go on."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from small_runs import SIZES, Workshop, difference, read_metrics

from rtx.compose import load_run_config
from rtx.data.catalog import open_data
from rtx.evaluation.protocols import baselines
from rtx.training.checkpoint import read_checkpoint
from rtx.training.run_folder import read_status


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Path:
    return workshop.train("run")


def weight(run: Path, name: str = "embedding.table_VS") -> torch.Tensor:
    """Return some weights of a run."""
    return read_checkpoint(run / "checkpoints" / "last.ckpt")["model"][name]


def test_what_a_run_leaves_and_says(workshop: Workshop, tmp_path: Path) -> None:
    run = tmp_path / "cell"
    said = workshop.command("train", workshop.text, *SIZES, "trainer.val_stride=5", run=run)
    assert {path.name for path in run.iterdir()} == {
        *("checkpoints", "config.yaml", "environment.json", "lock", "metrics.jsonl", "samples", "status.json"),
    }
    (sample,) = (run / "samples").iterdir()
    assert len(sample.read_bytes()) == 8 and str(sample) in said and "a sample (temperature 0.8):" in said
    config = load_run_config(run)
    assert config.routing.clusters == 4  # ceil(32 / 8), frozen
    environment = json.loads((run / "environment.json").read_text())
    assert environment["threads"] == 1
    assert environment["hardware"]["accelerator"] == "cpu"
    assert {"torch", "lightning", "rtx"} <= environment["versions"].keys()
    status = read_status(run) or {}
    store = open_data(config.data, workshop.folder / "data")
    assert environment["data"]["fingerprint"] == store.fingerprint
    assert (status["state"], status["step"], status["final"]["units"]) == ("done", 12, len(store.split("valid")))
    first, *_, final = read_metrics(run / "metrics.jsonl")
    assert first["kind"] == "train"
    assert {"routing/empty_share", "routing/member_most", "routing/self_weight"} <= first.keys()
    assert final["kind"] == "final" and final["val_bits"] == status["final"]["bits"]
    assert f"{final['val_bits']:.4f} bits/byte on the validation split" in said
    assert f"bits/byte on valid, {final['val_units']:,} bytes each scored once, windows of 32, stride 5" in said
    assert "selection=causal: sees no future" in said
    plain = baselines(store.split("valid"))
    assert status["final"]["baselines"] == plain
    for name, bits in plain.items():
        assert re.search(rf"{name} +{bits:.4f}", said)
    workshop.command("eval", str(run), "split=valid", "checkpoint=last")
    (kept,) = (run / "eval").iterdir()
    score = json.loads(kept.read_text())
    assert (score["stride"], score["units"]) == (5, status["final"]["units"])
    assert score["bits_per_byte"] == pytest.approx(status["final"]["bits"], abs=1e-9)


def test_the_same_seed_gives_the_same_bits_and_another_others(workshop: Workshop, run: Path) -> None:
    again = workshop.train("again", "hardware.workers=1")
    assert difference(again, run) == ""
    other = workshop.train("other", "seed=1")
    assert not torch.equal(weight(run), weight(other))


def test_centroids_may_start_from_the_data(workshop: Workshop) -> None:
    still = ("routing.decay=1.0", "trainer.steps=1")
    runs = [workshop.train(init, f"routing.init={init}", *still) for init in ("data", "random")]
    name = "blocks.1.attention.groups.routed.centroids.centroid_HCD"
    assert not torch.equal(*(weight(run, name) for run in runs))


def test_a_nan_ends_the_run_in_one_line(workshop: Workshop) -> None:
    run = workshop.folder / "nan"
    wild = ("optimizer.lr=1e30", "optimizer.warmup=0", "optimizer.schedule=constant", "trainer.clip=0")
    said = workshop.command("train", workshop.text, *SIZES, *wild, run=run, code=1)
    assert re.fullmatch(
        r"rtx: step \d: the loss is (nan|inf) at learning rate 1e\+30; no checkpoint had been written yet",
        said.splitlines()[-1],
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
        (("data.path={empty}",), "empty.txt"),
    ],
)
def test_mistakes_are_told_in_a_line_and_leave_no_folder(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], line: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (tmp_path / "empty.txt").touch()
    words = [word.format(empty=tmp_path / "empty.txt") for word in overrides]
    said = workshop.command("train", workshop.text, *SIZES, *words, run=tmp_path / "cell", code=2)
    assert line in said and not (tmp_path / "cell").exists()
