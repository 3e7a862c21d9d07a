"""Memory that runs out in a step: where a key is `auto`, the run goes on with less."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from rtx.model.transformer import Transformer
from rtx.settings.run_config import load_run_config
from tests.helpers.small_runs import SMALL_RUN, Workshop, counted_rows, difference, status_of

AUTO = (
    *(word for word in SMALL_RUN if "micro_batch" not in word),
    *(
        "trainer.checkpoint_every=100",
        "trainer.val_every=100",
        "trainer.steps=4",
        "hardware.precision=auto",
    ),
)
"""Four sequences to a step, and no checkpoint before the last."""


def starve(
    patch: pytest.MonkeyPatch, most: int, passes: int = 0, error: Exception | None = None
) -> list[int]:
    """Let training run out of memory where a micro-batch has more than `most` sequences; returns
    the sizes of all.
    """
    whole = Transformer.loss
    seen: list[int] = []

    def loss(self: Transformer, tokens_BN: torch.Tensor, **options: Any) -> Any:
        if self.training:
            seen.append(len(tokens_BN))
            if len(tokens_BN) > most and len(seen) > passes:
                raise error or torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.00 GiB"
                )
        return whole(self, tokens_BN, **options)

    patch.setattr(Transformer, "loss", loss)
    return seen


def check_halved(run: Path, printed: str) -> None:
    """Check that the micro-batch went from 4 over 2 to 1, and that the records of a run say so."""
    config = load_run_config(run)
    assert (config.trainer.micro_batch_size, config.model.recompute) == (1, False)
    hardware = json.loads((run / "environment.json").read_text())["hardware"]
    assert (hardware["micro_batch_size"], hardware["accumulate"]) == (1, 4)
    assert hardware["precision"] == "fp32"
    lines = (run / "resumes.jsonl").read_text().splitlines()
    rows = [json.loads(line)["changed"] for line in lines]
    assert rows == [{"trainer.micro_batch_size": [before, before // 2]} for before in (4, 2)]
    for before in (4, 2):
        assert f"  trainer.micro_batch_size: {before} -> {before // 2}\n" in printed


@pytest.mark.parametrize("passes", [0, 1])
def test_the_micro_batch_is_halved_and_the_run_says_and_keeps_it(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    refused = None
    if passes:
        reason = "DefaultCPUAllocator: can't allocate memory: you tried 9 bytes"
        refused = RuntimeError(f"[enforce fail] {reason}")
    seen = starve(monkeypatch, 1, passes, refused)
    run = tmp_path / "run"
    plain = tmp_path / "plain"
    printed = workshop.command("train", workshop.text, *AUTO, run=run)
    assert seen[passes:][:3] == [4, 2, 1]
    assert set(seen[passes + 2 :]) == {1}
    choice = "hardware.precision=fp32 trainer.micro_batch_size=4 model.recompute=false"
    assert f"auto: {choice}: about " in printed
    assert "out of memory: " in printed
    check_halved(run, printed)
    workshop.command("train", workshop.text, *AUTO, "trainer.micro_batch_size=1", run=plain)
    assert difference(run, plain) == ""
    printed = workshop.command("resume", str(run), "trainer.steps=6")
    assert "auto:" not in printed
    assert set(seen[-8:]) == {1}


def test_it_goes_on_from_the_newest_checkpoint(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    starve(monkeypatch, 2, passes=2)
    run = workshop.folder / "newest"
    said = workshop.command("train", workshop.text, *AUTO, "trainer.checkpoint_every=1", run=run)
    assert f"resuming {run} (out of memory) from step 2" in said
    assert [row["step"] for row in counted_rows(run) if row["kind"] == "train"] == [2, 4]


def test_what_is_asked_for_is_not_changed(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starve(monkeypatch, 1)
    for words, left in (([], []), (["model.recompute=auto"], ["  model.recompute: False -> True"])):
        run = tmp_path / str(len(left))
        asked = ("trainer.micro_batch_size=2", "model.recompute=false", *words)
        said = workshop.command("train", workshop.text, *AUTO, *asked, run=run, code=1)
        assert [line for line in said.splitlines() if " -> " in line] == left
        assert said.splitlines()[-1].startswith(
            "rtx: a smaller trainer.micro_batch_size, or model.recompute=true"
        )
        assert status_of(run).state == "failed"


def test_a_sample_without_enough_memory_leaves_the_run_done(
    workshop: Workshop, tmp_path: Path
) -> None:
    refused = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    with patch("rtx.commands.sample.generate", side_effect=refused):
        said = workshop.command("train", workshop.text, *AUTO, run=tmp_path / "run")
    assert "no sample: out of memory: CUDA" in said and " -> " not in said
    assert status_of(tmp_path / "run").state == "done"
