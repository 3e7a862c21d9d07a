"""`rtx audit` on real runs of a few steps, on configurations, and on modules of other people."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from small_runs import Workshop

SMALL = ("sequences=1", "prefixes=6", "windows=3", "positions=5")
LONG = [f"audit.{key}" for key in SMALL]
MODEL = ("model=tiny", "data.length=32", "model.layers=2", "model.window=8", "routing.layers=1", "routing.window=8")

MODULES = """
import torch


class Ahead(torch.nn.Module):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.table = torch.nn.Embedding(50, 3)

    def forward(self, ids):
        return self.table(ids.roll(-self.steps, dims=1)), "loss"


class Short(Ahead):
    def forward(self, ids):
        return self.table(ids)[:, 1:]


class Single(Ahead):
    def forward(self, ids):
        return (self.table(ids) @ torch.eye(3),)


class Copying(torch.nn.Module):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps
        self.factor = torch.nn.Parameter(torch.tensor(3.0))

    def forward(self, ids):
        one_hot = torch.nn.functional.one_hot(ids.roll(-self.steps, dims=1), 256)
        return self.factor * one_hot


def peeking():
    return Copying(1)


def repeating():
    return Copying(0)


class models:
    class deep:
        @staticmethod
        def ahead():
            return Ahead(1)


def ahead():
    return Ahead(2)


def causal():
    return Ahead(0)


def short():
    return Short(0)


def single():
    return Single(0)


def broken():
    raise RuntimeError("no weights\\nhere")


def number():
    return 3


thing = 3
"""


def audited(workshop: Workshop, run: Path, *overrides: str) -> tuple[dict[str, Any], str]:
    """Audit a run and return the JSON it leaves, and what was printed."""
    printed = workshop.command("audit", str(run), *SMALL, *overrides)
    assert str(run / "audit.json") in printed
    return json.loads((run / "audit.json").read_text(), parse_constant=pytest.fail), printed


def test_random_membership_is_the_control(workshop: Workshop) -> None:
    result, printed = audited(workshop, workshop.train("random", "routing=random"))
    for reading in ("teacher_forced", "streaming"):
        changes = result["changes"][reading]
        assert not changes["sees_future"]
        assert max(group["largest"] for group in [changes["logits"], *changes["groups"]]) <= 1e-12
    for name in ("leak_gives", "competing_costs", "together"):
        assert abs(result["price"][name]["bits"]) < 1e-5
    assert "teacher-forced: sees no future" in printed
    assert [(one["layer"], one["norm"]) for one in result["choices"]] == [(2, None)]
    assert "layer 2 routed: the choice is trained by nothing" in printed
    assert result["changes"]["type"] == "float64" and result["seed"] == 0
    assert result["price"]["precision"] == "fp32"
    assert len(result["price"]["positions"]) == 5 and result["price"]["windows"] == 3


def test_top_w_is_found_and_priced(workshop: Workshop) -> None:
    result, printed = audited(workshop, workshop.train("topk", "routing=topk"), "tolerance=1e-10", "split=test")
    changes = result["changes"]
    assert changes["teacher_forced"]["sees_future"]
    assert changes["teacher_forced"]["arises_in"] == [{"layer": 2, "heads": "routed"}]
    assert changes["teacher_forced"]["tolerance"] == 1e-10
    assert [row["prefix"] for row in changes["teacher_forced"]["logits"]["prefixes"]] == changes["prefixes"]
    assert not changes["streaming"]["sees_future"]
    assert result["price"]["together"]["bits"] != 0
    assert "teacher-forced: sees the future; arises in layer 2 routed" in printed
    assert "streaming: sees no future" in printed
    assert result["choices"][0]["norm"] > 0 and not result["choices"][0]["missing"]
    assert "trained by its queries, by the attention; centroids by k-means" in printed
    lines = printed.splitlines()
    assert all(len(line) <= 100 for line in lines if not line.startswith("/"))
    assert f"{result['price']['leak_gives']['bits']:+.5f}" in printed


def test_several_runs_give_an_error_over_seeds(workshop: Workshop) -> None:
    runs = [workshop.train(f"seed{seed}", "routing=topk", f"seed={seed}") for seed in (1, 2)]
    printed = workshop.command("audit", *map(str, runs), *SMALL, "streaming=false")
    results = [json.loads((run / "audit.json").read_text()) for run in runs]
    together = results[0]["over_runs"]
    assert together == results[1]["over_runs"]
    assert together["seeds"] == [1, 2]
    leaks = [result["price"]["leak_gives"]["bits"] for result in results]
    assert together["leak_gives"]["bits"] == pytest.approx(sum(leaks) / 2)
    assert together["leak_gives"]["standard_error"] == pytest.approx(abs(leaks[0] - leaks[1]) / 2)
    assert results[0]["price"]["positions"] == results[1]["price"]["positions"]
    assert "over 2 runs" in printed
    assert "differ by more than their seed" not in printed
    assert "streaming" not in results[0]["changes"]
    other = workshop.train("wider", "routing=topk", "model.ffn_hidden=24")
    printed = workshop.command("audit", str(runs[0]), str(other), *SMALL)
    assert "differ by more than their seed: model.ffn_hidden" in printed


def test_seed_is_that_of_the_audit(workshop: Workshop) -> None:
    run = workshop.folder / "priced"
    workshop.train("priced", "routing=topk")
    first, again, other = (audited(workshop, run, f"seed={seed}", "streaming=false")[0] for seed in (3, 3, 4))
    assert first["price"] == again["price"] and first["changes"] == again["changes"]
    assert first["price"]["positions"] != other["price"]["positions"]
    assert first["seed"] == other["seed"] == 0


def test_without_a_price_no_data_are_read(workshop: Workshop) -> None:
    run = workshop.train("priceless")
    result, _ = audited(workshop, run, "windows=0", "data.path=nowhere.txt")
    assert "price" not in result
    assert not result["changes"]["teacher_forced"]["sees_future"]


@pytest.mark.parametrize(("routing", "sees"), [("topk", True), ("causal", False)])
def test_a_configuration_is_audited_untrained(workshop: Workshop, routing: str, sees: bool) -> None:
    path = workshop.folder / f"{routing}.json"
    printed = workshop.command("audit", *MODEL, f"routing={routing}", *LONG[:2], f"audit.output={path}")
    result = json.loads(path.read_text())
    assert result["changes"]["teacher_forced"]["sees_future"] is sees
    assert result["config"]["routing"]["selection"] == routing
    assert "a fresh model" in printed and "price" not in printed


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current folder."""
    (tmp_path / "their_models.py").write_text(MODULES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("name", "sees"), [("ahead", True), ("models.deep.ahead", True), ("causal", False)])
def test_a_module_of_other_people(workshop: Workshop, modules: None, name: str, sees: bool) -> None:
    options = ("audit.length=20", "audit.vocabulary=50", "audit.output=result.json")
    printed = workshop.command("audit", f"audit.module=their_models:{name}", *options)
    result = json.loads(Path("result.json").read_text())
    assert result["changes"]["teacher_forced"]["sees_future"] is sees
    assert result["changes"]["length"] == 20
    assert ("sees the future" in printed) is sees


@pytest.mark.parametrize(("name", "sees"), [("peeking", True), ("repeating", False)])
def test_a_module_of_other_people_has_its_price_on_data(
    workshop: Workshop, modules: None, name: str, sees: bool
) -> None:
    options = ("data=text", workshop.text, "audit.windows=4", "audit.positions=6", "audit.length=20")
    printed = workshop.command("audit", f"audit.module=their_models:{name}", *options, "audit.output=result.json")
    price = json.loads(Path("result.json").read_text())["price"]
    assert set(price["bits"]) == {"teacher_forced", "prefix_rerun"} and 0 not in price["positions"]
    # Of 256 logits one is 3 and the rest 0; the last position of a window sees no next unit.
    right, wrong = (math.log2(math.e**3 + 255) - hit * 3 / math.log(2) for hit in (1, 0))
    assert right - 1e-4 <= price["bits"]["prefix_rerun"] <= wrong + 1e-4
    if sees:
        assert price["bits"]["teacher_forced"] < right + (wrong - right) / 4
        assert price["leak_gives"]["bits"] > 1
    else:
        assert price["leak_gives"]["bits"] == pytest.approx(0, abs=1e-6)
    assert f"{price['leak_gives']['bits']:+.5f}" in printed and "scored two ways" in printed


def test_mistakes_are_told_in_a_line(workshop: Workshop, modules: None) -> None:
    run = str(workshop.train("mistaken", "trainer.steps=1"))
    ours = "audit.module=their_models"
    for arguments, said in (
        (["none"], "none: no such folder"),
        (["."], "has no config.yaml"),
        ([run, "none"], "none: no such folder"),
        ([run, "windws=3"], "did you mean 'windows'?"),
        ([run, "model.layers=3"], "rtx audit does not read model.layers"),
        ([run, "module=a:b"], "audit.module=a:b: a run is a model already"),
        ([run, "output=x.json"], "audit.json in its folder"),
        ([run, "audit.length=33"], "audit.length=33 must be at most data.length=32"),
        (["audit.vocabulary=3"], "audit.vocabulary=3: is for audit.module"),
        (["audit.module=their_models"], "must be of the form package.module:callable"),
        (["audit.module=no_such_module:x"], "No module named 'no_such_module'"),
        ([f"{ours}:singel"], "their_models has no 'singel' (did you mean 'single'?)"),
        ([f"{ours}:thing"], "is not callable, it is a int"),
        ([f"{ours}:number"], "must return a torch.nn.Module, not a int"),
        ([f"{ours}:broken"], "calling it failed: RuntimeError: no weights"),
        ([f"{ours}:short", "audit.vocabulary=50"], "outputs must be logits [2, 256, vocabulary]"),
        ([f"{ours}:single", "audit.vocabulary=50"], "audit.double=false keeps its own types"),
        (
            [f"{ours}:causal", "data=text", workshop.text, "audit.vocabulary=50"],
            "index out of range in self; the data have 256 ids",
        ),
        ([f"{ours}:causal", "data.length=300"], "data.length=300: means nothing to audit.module"),
        ([f"{ours}:repeating", "data=recall"], "data=recall: audit.module is priced on text or images"),
        ([f"{ours}:causal", "model.layers=3"], "model.layers=3: means nothing to audit.module"),
        ([f"{ours}:causal", "audit.vocabulary=50", "audit.output=no/such/folder.json"], "cannot write"),
    ):
        printed = workshop.command("audit", *arguments, code=1 if "cannot write" in said else 2)
        assert said in printed
        assert sum(line.startswith("rtx: ") for line in printed.splitlines()) == 1
