"""Runs with data.documents=true: training, scores of both modes, audits and analyses."""

import itertools
import math
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from rtx import load
from rtx.data.catalog import open_data
from rtx.data.windows import windows
from tests.helpers.small_runs import Workshop, after, difference, draw_nothing

LENGTH = 32
MODERN = (
    *("model.norm_kind=rmsnorm", "model.ffn=swiglu", "model.qk_norm=true", "model.sinks=true"),
    *("model.heads=4", "model.kv_heads=2", "routing=causal", "routing.heads=2"),
)
"""The parts of model=modern, with two routing heads that share keys."""


@pytest.fixture(scope="module")
def texts(workshop: Workshop) -> str:
    """Return data.path of many short documents, some of which are longer than a window."""
    folder = workshop.folder / "texts"
    folder.mkdir()
    generator = np.random.default_rng(1)
    for number in range(120):
        letters = generator.choice(list(b"abcd \n"), int(generator.integers(1, 70)))
        (folder / f"{number:03d}.txt").write_bytes(letters.astype(np.uint8).tobytes())
    return f"data.path={folder}"


@pytest.fixture(scope="module")
def run(workshop: Workshop, texts: str) -> Path:
    words = ("data.documents=true", texts, "routing=causal", "routing.heads=1", "trainer.steps=2")
    return workshop.train("documents", *words)


def test_a_score_is_that_of_documents_read_apart(workshop: Workshop, run: Path, texts: str) -> None:
    loaded = load(run, device="cpu")
    data = loaded.config.data
    store = open_data(data, workshop.data)
    units = store.split("valid")
    starts = store.document_starts("valid", data)
    assert starts is not None and len(starts) > 3
    nats = 0.0
    for window in windows(len(units), LENGTH):
        inside = starts[(starts > window.start) & (starts < window.stop)]
        bounds = [window.start, *inside.tolist(), window.stop]
        for first, stop in itertools.pairwise(bounds):
            tokens_1N = torch.from_numpy(units[first:stop].astype(np.int64))[None]
            with torch.no_grad():
                nats_1N, _ = loaded.model.loss(tokens_1N)
            nats += float(nats_1N[0, max(0, window.first - first) :].double().sum())
    bits = nats / len(units) / math.log(2)
    parallel, said = workshop.score(run, "split=valid")
    assert parallel["bits"] == pytest.approx(bits, rel=1e-5)
    assert "nothing read across documents" in said.replace("\n", " ")
    streaming, _ = workshop.score(run, "split=valid", "mode=streaming")
    assert streaming["bits"] == pytest.approx(bits, rel=1e-5)
    assert loaded.score("valid", report=lambda line: None).bits == pytest.approx(bits, rel=1e-5)


def test_a_killed_modern_run_resumes_to_the_same_bits(workshop: Workshop, texts: str) -> None:
    words = ("data.documents=true", texts, *MODERN)
    whole = workshop.train("modern", *words)
    process = workshop.start("modern-killed", *words)
    assert process.kill_when(after(6)) == -signal.SIGKILL, process.log.read_text()
    workshop.command("resume", str(process.run), "hardware.workers=2")
    assert difference(process.run, whole) == ""
    parallel, _ = workshop.score(process.run, "split=valid")
    streaming, _ = workshop.score(process.run, "split=valid", "mode=streaming")
    assert streaming["bits"] == pytest.approx(parallel["bits"], rel=1e-5)


def test_audits_and_analyses_keep_to_documents(
    workshop: Workshop, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_nothing(monkeypatch)
    assert "sees no future" in workshop.command("audit", str(run), "windows=2", "prefixes=3")
    assert "by position" in workshop.command("analyze", "context", str(run), "windows=4")
    assert "reading, %" in workshop.command("analyze", "patterns", str(run), "split=train")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("eval {run} protocol=released", "protocol=released is not for data.documents=true"),
        ("analyze coverage {run}", "data.documents=true: coverage fits selections to sequences"),
    ],
)
def test_what_cannot_keep_to_documents_is_refused(
    workshop: Workshop, run: Path, words: str, said: str
) -> None:
    _, err = workshop.answer(*words.format(run=run).split(), code=2)
    assert said in err.replace("\n", " ")
