"""The first million bytes of the real enwik-8 through train, eval and sample, where a copy of them is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rtx.cli import main

ENWIK6 = Path(__file__).parents[3] / "shared" / "data" / "enwik8" / "enwik6"
SIZES = [
    *("data=text", "data.length=128", "model=tiny", "model.layers=2", "model.hidden=32", "model.heads=2"),
    *("model.ffn_hidden=64", "model.window=32", "routing.heads=1", "routing.layers=1", "routing.window=32"),
    *("trainer.steps=30", "trainer.batch_size=4", "optimizer.warmup=5", "trainer.val_windows=8", "trainer.log_every=5"),
    *("logger=jsonl", "hardware.threads=1"),
]


@pytest.mark.skipif(not ENWIK6.exists(), reason="no copy of the first 1,000,000 bytes of enwik-8 beside the project")
def test_real_bytes_train_score_and_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("RTX_OUTPUTS", "RTX_DATA", "RTX_RUN"):
        monkeypatch.delenv(name, raising=False)
    assert main(["train", f"data.path={ENWIK6}", *SIZES]) == 0
    (run,) = (tmp_path / "outputs").glob("*/*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    bits = [row["bits"] for row in rows if "bits" in row]
    assert bits[-1] < bits[0] - 1.0, "it learns"
    assert main(["eval", str(run), "split=test", "limit=20"]) == 0
    (result,) = (run / "eval").glob("*.json")
    assert 3.0 < json.loads(result.read_text())["bits_per_byte"] < 8.0
    capsys.readouterr()
    assert main(["sample", str(run), "length=40", "prompt=The "]) == 0
    assert capsys.readouterr().out.startswith("The ")
    assert main(["train", "data=enwik8", f"data.path={ENWIK6}"]) == 2
    assert "expected enwik8.zip or enwik8" in capsys.readouterr().err
