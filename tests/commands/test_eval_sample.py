"""`rtx eval`, `sample` and `export` on real runs of a few steps, and `rtx.load`; damage to an
export is told.
"""

import contextlib
import errno
import io
import json
import math
import os
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from rtx import load
from rtx.cli.main import main
from rtx.data.tokenizers import encode_text
from rtx.disk import write_inside
from rtx.errors import RunFailed, UserError
from rtx.runs.status import utc_now
from rtx.training import export
from rtx.training.checkpoint import load_for_use
from rtx.training.export import write_export
from tests.helpers.small_runs import Workshop, final


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Path:
    return workshop.train("causal", "routing=causal", "trainer.val_every=12")


@pytest.fixture(scope="module")
def topk_run(workshop: Workshop) -> Path:
    return workshop.train("topk", "routing=topk", "model.positions=learned", "trainer.steps=4")


@pytest.fixture
def exported(workshop: Workshop, run: Path, tmp_path: Path) -> Path:
    workshop.command("export", str(run), f"output={tmp_path / 'model'}")
    return tmp_path / "model"


def test_causal_scores_the_same_in_both_modes_and_topk_is_marked(
    workshop: Workshop, run: Path, topk_run: Path
) -> None:
    modes = ("mode=parallel", "mode=streaming")
    parallel, streaming = (workshop.score(run, mode)[0] for mode in modes)
    assert abs(parallel["bits"] - streaming["bits"]) < 1e-4
    parallel, streaming = (workshop.score(topk_run, mode)[0] for mode in modes)
    assert parallel["sees_future"] and "selection sees the future" in parallel["protocol"]
    assert not streaming["sees_future"] and parallel["bits"] != streaming["bits"]


def test_a_run_in_float64_is_loaded_and_scored_by_its_own_bits(workshop: Workshop) -> None:
    run = workshop.train("wide", "routing=causal", "hardware.precision=fp64", "trainer.steps=3")
    kept = load_for_use(run / "checkpoints", "last")["model"]
    loaded = load(run, "last").model.state_dict()
    assert any(tensor.dtype == torch.float64 for tensor in kept.values())
    assert all(torch.equal(loaded[name], tensor) for name, tensor in kept.items())
    score, _ = workshop.score(run, "checkpoint=last")
    assert score["bits"] == final(run)["bits"]


def test_results_of_other_protocols_do_not_replace_each_other(
    workshop: Workshop, run: Path
) -> None:
    shutil.rmtree(run / "eval", ignore_errors=True)
    (other := workshop.folder / "second.txt").write_bytes(b"a" * 1_500)
    protocols = [
        "",
        "stride=7",
        "data.length=16",
        "limit=2",
        "limit=2 seed=1",
        "checkpoint=last",
        "split=train",
    ]
    protocols += ["hardware.precision=fp64", f"data.path={other}"]
    for words in protocols:
        result, said = workshop.score(run, *words.split())
        elsewhere = "txt" in words
        assert elsewhere == ("these are not the data of the run" in said) != result["own_data"]
        assert elsewhere == ("of other data than the run's" in result["protocol"])
        assert (
            result["partial"]
            == ("limit=2" in words)
            == ("a sample of 2 windows" in result["protocol"])
        )
        assert not result["partial"] or (result["windows"] == 2 and result["standard_error"] > 0)
        assert ("baselines" in result) == (not result["partial"] and words != "split=train")
        assert result["bits"] == pytest.approx(result["nats"] / result["units"] / math.log(2))
    assert len([*run.glob("eval/*.json")]) == len(protocols)


def test_weights_that_are_no_numbers_are_told_and_not_scored(
    workshop: Workshop, run: Path, tmp_path: Path
) -> None:
    """A checkpoint that is whole, of a run that has diverged; or one whose products leave the range
    of its numbers.
    """
    for value, said in (
        (math.nan, " holds NaN or infinities, first in"),
        (1e30, "scores nan nats"),
    ):
        exported = tmp_path / f"export-{value}"
        broken = load_for_use(run / "checkpoints", "best")
        for name, tensor in broken["model"].items():
            if "qkv" in name:
                tensor.fill_(value)
        write_export(exported, broken, {"config.yaml": (run / "config.yaml").read_bytes()})
        if value == 1e30:
            with pytest.raises(RunFailed, match=said):
                load(exported).score()
        out, err = workshop.answer("eval", str(exported), code=1)
        assert said in err and "bits/byte" not in out
        assert not list(exported.glob("eval/*"))
    assert "holds NaN" in workshop.command("sample", str(tmp_path / "export-nan"), code=1)


def test_load_changes_nothing_of_its_process(
    workshop: Workshop, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> tuple[Any, ...]:
        settings = (
            torch.get_num_threads(),
            torch.get_float32_matmul_precision(),
            torch.get_default_dtype(),
        )
        streams = (torch.are_deterministic_algorithms_enabled(), torch.get_rng_state().tolist())
        return (*settings, *streams, dict(os.environ))

    monkeypatch.setenv("RTX_DATA", str(workshop.data))
    before = state()
    loaded = load(run)
    ids_1N = torch.from_numpy(encode_text(loaded.tokenizer, "abc abc"))[None]
    nats_1N, _ = loaded.model.loss(ids_1N)
    assert state() == before
    assert (
        nats_1N.shape == ids_1N.shape
        and loaded.config.data.length == 32
        and not loaded.model.training
    )
    assert str(load(run, "last", device="cpu").device) == "cpu"
    said: list[str] = []
    for options, words in (
        ({}, []),
        ({"split": "test", "limit": 3, "streaming": True}, ["limit=3", "split=test"]),
    ):
        result, _ = workshop.score(run, *words, *["mode=streaming"] * bool(options))
        assert loaded.score(**options, report=said.append).bits == pytest.approx(result["bits"])
    assert said == ["5 of 5 windows of split valid", "3 of 5 windows of split test"]
    workshop.command("sample", str(run), "length=40", "prompt=ab", "top_k=9", "seed=3")
    (kept,) = run.glob("samples/*-seed3-1.txt")
    assert loaded.sample(40, "ab", seed=3, top_k=9) == kept.read_bytes().decode(errors="replace")
    with pytest.raises(UserError, match="no such folder"):
        load(run / "nowhere")


def test_a_sample_is_reproducible_kept_and_longer_than_n(
    workshop: Workshop, run: Path, topk_run: Path
) -> None:
    wish = (
        "sample",
        str(run),
        "length=60",
        "prompt=ab c",
    )  # N is 32; only learned positions end there
    before = set((run / "samples").iterdir())
    first, second = (workshop.answer(*wish)[0] for _ in range(2))
    assert first == second and first.startswith("ab c")
    one, other = (path.read_bytes() for path in set((run / "samples").iterdir()) - before)
    assert one == other and len(one) == 64
    assert workshop.answer(*wish, "seed=1")[0] != first
    assert "at most 32" in workshop.command("sample", str(topk_run), "length=33", code=2)
    workshop.command("sample", str(topk_run), "length=32", "temperature=0", "top_k=3", "top_p=0.9")


class Pieces(io.StringIO):
    """A stream, a terminal or none, that keeps each piece that is written to it."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal
        self.pieces: list[str] = []

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def test_a_sample_comes_unit_by_unit_to_a_terminal_alone(workshop: Workshop, run: Path) -> None:
    wish = ["sample", str(run), "length=40", "prompt=ab"]
    texts: list[str] = []
    for is_terminal, pieces in ((True, 41), (False, 1)):  # the prompt and each unit; all at once
        stream = Pieces(is_terminal)
        with contextlib.redirect_stdout(stream):
            assert main(wish) == 0
        texts.append(stream.getvalue())
        written = [piece for piece in stream.pieces if piece not in ("", "\n")]
        assert len(written) == 1 if pieces == 1 else len(written) > 20
    assert texts[0] == texts[1] and texts[0].startswith("ab")


def test_the_score_of_a_run_that_is_not_done_says_so(
    workshop: Workshop, run: Path, tmp_path: Path
) -> None:
    assert "note: the run" not in workshop.command("eval", str(run), "limit=1")
    copied = Path(shutil.copytree(run, tmp_path / "run"))
    path = copied / "status.json"
    status = {**json.loads(path.read_text()), "step": 7}
    for state, line in (
        ("running", "note: the run is still running, at step 7 of 12\n"),
        (
            "interrupted",
            f"note: the run is not done: interrupted at step 7 of 12; rtx resume {copied} goes "
            "on\n",
        ),
    ):
        here = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "heartbeat": utc_now(),
            "state": state,
        }
        path.write_text(json.dumps(status | here))
        assert workshop.answer("eval", str(copied), "limit=1")[0].startswith(line)


def test_an_export_has_the_weights_and_the_score_of_the_run(
    workshop: Workshop, run: Path, exported: Path
) -> None:
    names = {path.name for path in exported.iterdir()}
    assert names == {"model.safetensors", "export.json", "config.yaml", "README.md"}
    ours = load(exported).model.state_dict()
    theirs = load_for_use(run / "checkpoints", "best")["model"]
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )
    scores = [workshop.score(folder, "split=test")[0]["bits"] for folder in (run, exported)]
    texts = [workshop.answer("sample", str(folder), "length=40")[0] for folder in (run, exported)]
    assert scores[0] == scores[1] and texts[0] == texts[1]
    page = (exported / "README.md").read_text()
    parameters = load(run).model.count_parameters()
    assert page.startswith("---\nlibrary_name: rtx\n") and "after 12 steps" not in page
    scored = (
        f"**{final(run)['bits']:.4f} bits/byte**",
        "sees no future",
        "`routing.selection=causal`",
    )
    for said in (
        *scored,
        f"; {parameters:,} parameters,\nand ",
        " centroids and thresholds",
        "for 12 steps",
    ):
        assert said in page


def test_an_export_is_whole_or_told_and_alone(
    workshop: Workshop, run: Path, tmp_path: Path
) -> None:
    output = tmp_path / "half"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export, "write_inside", full_disk)
        assert "No space left on device" in workshop.command(
            "export", str(run), f"output={output}", code=1
        )
    (output / ".model.safetensors.1.writing").write_bytes(b"x")
    said = workshop.command("sample", str(output), code=1)
    assert f"No such file or directory: '{output}/model.safetensors'): export the run anew" in said
    workshop.command("export", str(run), f"output={output}")
    workshop.command("sample", str(output), "length=4")
    assert not list(output.glob("*.writing"))
    assert "is an exported model already" in workshop.command("export", str(output), code=2)
    (tmp_path / "letter.txt").write_text("mine")
    assert "holds other files" in workshop.command("export", str(run), f"output={tmp_path}", code=2)
    assert {path.name for path in tmp_path.iterdir()} == {"half", "letter.txt"}


def full_disk(folder: Path, name: str, content: bytes) -> None:
    """Replace a file, but fail as a write to a full disk does where it is the weights."""
    if name.endswith("/model.safetensors"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write_inside(folder, name, content)


@pytest.mark.parametrize("name", ["model.safetensors", "export.json", "config.yaml"])
def test_any_flipped_bit_is_told_or_changes_nothing(exported: Path, name: str) -> None:
    path = exported / name
    whole = path.read_bytes()
    before = load(exported).model.state_dict()
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            after = load(exported).model.state_dict()
        except (RunFailed, UserError):
            continue
        assert name != "model.safetensors"
        assert all(torch.equal(after[key], before[key]) for key in before)
