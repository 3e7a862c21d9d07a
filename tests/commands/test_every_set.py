"""Every data set trains a tiny model and is scored, each unit once, whether or not N divides the split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_sets import SETS
from small_runs import SIZES, Workshop

from rtx.data.sets import IMAGE_SETS

QUICK = [size for size in SIZES if not size.startswith("data")]
QUICK += ["trainer.steps=2", "trainer.val_every=2", "trainer.log_every=1"]


def scored(workshop: Workshop, run: Path, *overrides: str) -> dict[str, Any]:
    before = set(run.glob("eval/*.json"))
    workshop.command("eval", str(run), *overrides)
    (path,) = set(run.glob("eval/*.json")) - before
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", SETS)
def test_a_set_trains_and_every_unit_is_scored_once(
    workshop: Workshop, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SETS[name](tmp_path, monkeypatch)
    run = workshop.folder / name
    workshop.command("train", *options, *QUICK, run=run)
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"]) == ("done", 2)
    store = json.loads(next((workshop.folder / "data").glob(f"{name}-*/store.json")).read_text())
    units = {split: facts["units"] for split, facts in store["splits"].items()}
    assert status["final"]["units"] == units["valid"]
    dividing = [] if name in IMAGE_SETS else [next(n for n in range(8, units["test"] + 1) if units["test"] % n == 0)]
    others = [] if name in IMAGE_SETS else [next(n for n in range(9, units["test"]) if units["test"] % n)]
    for length in [*dividing, *others] or [None]:
        result = scored(workshop, run, "split=test", *([] if length is None else [f"data.length={length}"]))
        assert result["units"] == result["split_units"] == units["test"] > 0
        assert result["nats"] > 0 and not result["partial"] and result["own_data"]
        assert result["data"]["fingerprint"] == store["fingerprint"]
