"""`rtx eval` and `rtx sample` on real runs of a few steps."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import rtx as rtx_package
from rtx.cli import main
from rtx.data.tokenizers import encode_text
from rtx.errors import UserError
from rtx.training.checkpoint import load_for_use
from rtx.training.inference import write_export

SIZES = [
    *("data=text", "data.length=32", "model=tiny", "model.layers=2", "model.hidden=16", "model.heads=2"),
    *("model.ffn_hidden=16", "model.window=8", "routing.heads=1", "routing.layers=1", "routing.window=8"),
    *("trainer.steps=4", "trainer.batch_size=2", "trainer.val_windows=2", "logger=jsonl", "hardware.threads=1"),
]
UNITS = 4_001
"""An awkward number: the splits are no multiples of N."""


def rtx(folder: Path, *arguments: str, code: int = 0) -> SimpleNamespace:
    """Run a command as in `folder`, in this process, check its exit code, and return its `stdout` and `stderr`."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.chdir(folder)
        patch.setenv("RTX_OUTPUTS", str(folder / "outputs"))
        patch.setenv("RTX_DATA", str(folder / "data"))
        patch.delenv("RTX_RUN", raising=False)
        returned = main(arguments)
    assert returned == code, err.getvalue()
    assert "Traceback" not in err.getvalue()
    return SimpleNamespace(stdout=out.getvalue().encode(), stderr=err.getvalue().encode())


def train(folder: Path, *overrides: str) -> Path:
    """Train for a few steps on text of our own, and return the run folder."""
    text = np.random.default_rng(0).choice(list(b"abc \n\xff"), UNITS).astype(np.uint8)
    (folder / "book.txt").write_bytes(text.tobytes())
    rtx(folder, "train", "data.path=book.txt", *SIZES, *overrides)
    return next((folder / "outputs").glob("*/*/config.yaml")).parent


@pytest.fixture(scope="module")
def causal_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="module")
def topk_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("topk"), "routing=topk", "model.positions=learned")


def score(run: Path, *overrides: str, home: Path | None = None) -> dict[str, Any]:
    """Score a run and return the JSON that it leaves."""
    printed = rtx(home or run.parents[2], "eval", str(run), *overrides).stdout.decode()
    (path,) = run.glob("eval/*.json")
    result = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert f"{result['bits_per_byte']:.5f} bits/byte" in printed
    assert result["protocol"] in printed
    path.unlink()
    return result


def test_every_byte_of_a_split_is_scored_once_or_the_result_is_marked(causal_run: Path) -> None:
    for split, units in (("train", 3_600), ("valid", 200), ("test", 201)):
        result = score(causal_run, f"split={split}")
        assert abs(result["units"] - units) <= 1
        assert result["units"] == result["split_units"]
        assert result["bits_per_byte"] == pytest.approx(result["nats"] / result["units"] / math.log(2))
        assert not result["partial"]
        assert not result["selection_sees_future"] and ("baselines" in result) == (split != "train")
    result = score(causal_run, "stride=5")
    assert result["units"] == result["split_units"] and "stride 5" in result["protocol"]
    result = score(causal_run, "limit=3")
    assert result["partial"] and result["windows"] == 3 and result["standard_error"] > 0
    assert "sample of the windows" in result["protocol"]


def test_causal_selection_scores_the_same_in_both_modes_and_topk_is_marked(causal_run: Path, topk_run: Path) -> None:
    parallel, streaming = (score(causal_run, f"mode={mode}")["bits_per_byte"] for mode in ("parallel", "streaming"))
    assert abs(parallel - streaming) < 1e-4
    parallel, streaming = (score(topk_run, f"mode={mode}") for mode in ("parallel", "streaming"))
    assert parallel["selection_sees_future"] and "selection sees the future" in parallel["protocol"]
    assert not streaming["selection_sees_future"]
    assert parallel["bits_per_byte"] != streaming["bits_per_byte"]


def test_results_of_other_protocols_do_not_replace_each_other(causal_run: Path) -> None:
    folder, other = causal_run.parents[2], causal_run.parents[2] / "second.txt"
    other.write_bytes(b"a" * 1_500)
    protocols = (
        *((), ("stride=7",), ("data.length=16",), ("limit=2",), ("limit=2", "seed=1"), ("checkpoint=last",)),
        *(("hardware.precision=fp64",), (f"data.path={other}",)),
    )
    for overrides in protocols:
        printed = rtx(folder, "eval", str(causal_run), *overrides).stdout.decode()
        assert ("these are not the data of the run" in printed) == any("txt" in word for word in overrides)
    results = [json.loads(path.read_text()) for path in sorted(causal_run.glob("eval/*.json"))]
    shutil.rmtree(causal_run / "eval")
    assert len(results) == len(protocols) and [result["own_data"] for result in results].count(False) == 1
    assert all(("of other data than the run's" in one["protocol"]) == (not one["own_data"]) for one in results)


def test_mistakes_are_told_in_a_line(causal_run: Path, tmp_path: Path) -> None:
    folder = causal_run.parents[2]
    for arguments, said in (
        (["eval", "split=test"], "needs the run's folder"),
        (["eval", str(tmp_path)], "has no config.yaml"),
        (["eval", str(causal_run), "splt=test"], "'split'"),
    ):
        assert said in rtx(folder, *arguments, code=2).stderr.decode()


def test_weights_that_are_no_numbers_are_told_and_nothing_is_written(causal_run: Path, tmp_path: Path) -> None:
    """A checkpoint that is whole, of a run that has diverged; or one whose products leave the range of its numbers."""
    for value, said in ((math.nan, "best.ckpt (step 4) holds NaN, first in"), (1e30, "scores nan nats")):
        exported = tmp_path / f"export-{value}"
        broken = load_for_use(causal_run / "checkpoints", "best")
        for name, tensor in broken["model"].items():
            if "qkv" in name:
                tensor.fill_(value)
        write_export(exported, broken, {"config.yaml": (causal_run / "config.yaml").read_bytes()})
        answer = rtx(causal_run.parents[2], "eval", str(exported), code=1)
        assert said in answer.stderr.decode() and "bits/byte" not in answer.stdout.decode()
        assert not list(exported.glob("eval/*"))
    assert b"holds NaN" in rtx(causal_run.parents[2], "sample", str(tmp_path / "export-nan"), code=1).stderr


def test_a_run_is_loaded_for_python_without_a_change_of_its_process(causal_run: Path) -> None:
    def state() -> tuple[Any, ...]:
        settings = (torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_default_dtype())
        streams = (torch.are_deterministic_algorithms_enabled(), torch.get_rng_state().tolist())
        return (*settings, *streams, dict(os.environ))

    before = state()
    run = rtx_package.load(causal_run)
    ids_1N = torch.from_numpy(encode_text(run.tokenizer, "abc abc"))[None]
    nats_1N, _ = run.model.loss(ids_1N)
    assert state() == before
    assert nats_1N.shape == ids_1N.shape and run.config.data.length == 32 and not run.model.training
    assert str(rtx_package.load(causal_run, "last", device="cpu").device) == "cpu"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(causal_run.parents[2])
        for options, words in (({}, []), ({"split": "test", "limit": 3, "streaming": True}, ["limit=3", "split=test"])):
            mode = ["mode=streaming"] * bool(options)
            assert run.score(**options).bits == pytest.approx(score(causal_run, *words, *mode)["bits_per_byte"])
    rtx(causal_run.parents[2], "sample", str(causal_run), "length=40", "prompt=ab", "top_k=9", "seed=3")
    (kept,) = causal_run.glob("samples/*-seed3-1.txt")
    assert run.sample(40, "ab", seed=3, top_k=9) == kept.read_bytes().decode(errors="replace")
    with pytest.raises(UserError, match="no such folder"):
        rtx_package.load(causal_run / "nowhere")


def test_a_sample_is_reproducible_and_kept_byte_for_byte(causal_run: Path) -> None:
    folder, wish = causal_run.parents[2], ("sample", str(causal_run), "length=60", "prompt=ab c")
    first, second = (rtx(folder, *wish) for _ in range(2))
    assert first.stdout == second.stdout
    assert first.stdout.startswith(b"ab c")
    kept = sorted((causal_run / "samples").glob("*-seed0-*.txt"))[-2:]
    assert kept[0].read_bytes() == kept[1].read_bytes()
    assert len(kept[0].read_bytes()) == 64
    assert rtx(folder, *wish, "seed=1").stdout != first.stdout


def test_a_stream_may_outrun_the_window_but_not_learned_positions(causal_run: Path, topk_run: Path) -> None:
    assert len(rtx(causal_run.parents[2], "sample", str(causal_run), "length=100").stdout) >= 100
    refused = rtx(topk_run.parents[2], "sample", str(topk_run), "length=33", code=2).stderr.decode()
    assert "at most 32" in refused
    rtx(topk_run.parents[2], "sample", str(topk_run), "length=32", "temperature=0", "top_k=3", "top_p=0.9")
