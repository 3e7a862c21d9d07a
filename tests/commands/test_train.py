"""`rtx train`: what a run leaves, its closing score, and what it says when it cannot go on."""

import gzip
import json
import re
from pathlib import Path

import pytest
import torch

from rtx.analysis.speed import Meter
from rtx.data.catalog import open_data
from rtx.evaluation.measures import baselines
from rtx.settings.overrides import LAUNCHED
from rtx.settings.presets import options
from rtx.settings.run_config import load_run_config
from rtx.training import trainer
from rtx.training.checkpoint import read_checkpoint
from rtx.training.hardware import has_compiler
from tests.helpers.small_runs import (
    SAMPLE_LENGTH,
    SMALL_RUN,
    Workshop,
    final,
    read_metrics,
    status_of,
)

XL = "model.base=recurrent model.positions=xl routing.heads=0 routing.layers=0 model.memory=40"
CENTROIDS = "blocks.1.attention.groups.routed.pattern.centroids.centroid_HCD"


def weight(run: Path, name: str = "embedding.table_VS") -> torch.Tensor:
    return weights(run)[name]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(run / "checkpoints" / "last.ckpt")["model"]


@pytest.fixture(scope="module")
def undisturbed(workshop: Workshop) -> Path:
    return workshop.train("undisturbed", "trainer.steps=8")


@pytest.fixture(scope="module")
def brief(workshop: Workshop) -> Path:
    return workshop.train("brief", "trainer.steps=2")


def check_files(run: Path, printed: str) -> None:
    """Check which files a run leaves, and that its sample is printed and saved."""
    names = "checkpoints config.yaml environment.json lock metrics.jsonl samples status.json"
    assert sorted(path.name for path in run.iterdir()) == names.split()
    (sample,) = (run / "samples").iterdir()
    assert len(sample.read_bytes()) == SAMPLE_LENGTH
    assert str(sample) in printed
    assert "a sample (temperature 0.8):" in printed


def check_environment(run: Path, fingerprint: str) -> None:
    environment = json.loads((run / "environment.json").read_text())
    assert environment["threads"] == 1
    assert environment["hardware"]["accelerator"] == "cpu"
    assert {"torch", "lightning", "rtx"} <= environment["versions"].keys()
    assert environment["data"]["fingerprint"] == fingerprint


def check_rows(run: Path) -> None:
    """Check the rows of metrics.jsonl, and that best.ckpt is of the best validation."""
    first, *rows, last = read_metrics(run / "metrics.jsonl")
    assert first["kind"] == "train"
    names = ["bits", "lr", "grad_norm", "tokens_per_second", "data_share", "memory_bytes"]
    names += ["routing/empty_share", "routing/member_most", "routing/in_none"]
    assert {"time", *(f"train/{name}" for name in names)} <= first.keys()
    assert last["kind"] == "final"
    assert last["valid/final_bits"] == final(run)["bits"]
    validations = {row["step"]: row["valid/bits"] for row in rows if row["kind"] == "valid"}
    assert [*validations] == [4, 8, 12]
    best = read_checkpoint(run / "checkpoints" / "best.ckpt")["step"]
    assert validations[best] == min(validations.values())


def test_what_a_run_leaves_and_says(workshop: Workshop, tmp_path: Path) -> None:
    run = tmp_path / "cell"
    printed = workshop.command("train", workshop.text, *SMALL_RUN, "trainer.val_stride=5", run=run)
    check_files(run, printed)
    config = load_run_config(run)
    assert config.routing.clusters == 4  # ceil(32 / 8), frozen
    store = open_data(config.data, workshop.folder / "data")
    check_environment(run, store.fingerprint)
    check_rows(run)
    status = status_of(run)
    closing = final(run)
    units = closing["units"]
    assert (status.state, status.step, units) == ("done", 12, len(store.split("valid")))
    assert f"{closing['bits']:.4f} bits/byte on the validation split" in printed
    scored = f"bits/byte on valid, {units:,} bytes each scored once"
    assert f"{scored}, windows of 32, stride 5" in printed
    assert "selection=nearest: sees no future" in printed
    plain = baselines(store.split("valid"))
    assert closing["baselines"] == plain
    for name, bits in plain.items():
        assert re.search(rf"{name} +{bits:.4f}", printed)
    score, _ = workshop.score(run, "split=valid", "checkpoint=last")
    assert (score["stride"], score["units"]) == (5, units)
    assert score["bits"] == pytest.approx(closing["bits"], abs=1e-9)


@pytest.mark.parametrize("hardware", sorted({*options("hardware")} - {"cpu", "gpu", *LAUNCHED}))
def test_every_hardware_of_a_cpu_takes_a_step(workshop: Workshop, hardware: str) -> None:
    process = workshop.start(
        hardware, "trainer.steps=1", f"hardware={hardware}", "hardware.devices=1"
    )
    assert process.wait() == 0, process.log.read_text()
    assert (
        load_run_config(process.run).hardware.name == hardware
        and final(process.run)["units"] == 150
    )


@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch asks
def test_a_compiled_run_takes_the_same_steps(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = []
    still = ("model.dropout=0", "model.ffn_dropout=0", "model.layers=1", "trainer.steps=2")
    real = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda loss: compiled.append(loss) or real(loss, backend="eager")
    )
    runs = [
        workshop.train(f"compile-{word}", *still, f"hardware.compile={word}")
        for word in ("true", "false", "auto")
    ]
    assert len(compiled) == 1 and final(runs[0])["bits"] == pytest.approx(
        final(runs[1])["bits"], rel=1e-6
    )
    assert final(runs[1]) == final(runs[2]), "auto does not compile on a CPU"


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_where_the_compiler_fails_the_same_steps_are_taken_eagerly(
    workshop: Workshop, brief: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    """The pass by which it was tried leaves no trace: the run has the bits of one without it."""

    class Refusal(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *gradients):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    def broken(loss):
        def refused(*given):
            nats_BN, auxiliary = loss(*given)
            if fails == "forward":
                raise RuntimeError("no kernel image")
            return Refusal.apply(nats_BN), auxiliary

        return refused

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr("rtx.training.hardware.compiles", lambda config, gpu: True)
    run = workshop.folder / f"broken-{fails}"
    said = workshop.command("train", workshop.text, *SMALL_RUN, "trainer.steps=2", run=run)
    reason = {"forward": "no kernel image", "backward": "CUDA out of memory"}[fails]
    (line,) = [
        line for line in said.splitlines() if line.startswith("hardware.compile=auto: not compiled")
    ]
    assert reason in line and line.endswith("the model runs eagerly")
    assert torch.equal(weight(run), weight(brief))
    assert torch.equal(weight(run, CENTROIDS), weight(brief, CENTROIDS))


def test_another_seed_gives_other_bits_and_centroids_may_start_from_the_data(
    workshop: Workshop,
) -> None:
    words = ("routing.init=random", "seed=1", "routing.init=data")
    runs = [workshop.train(word, word, "routing.decay=1.0", "trainer.steps=1") for word in words]
    assert not torch.equal(weight(runs[0]), weight(runs[1]))
    drawn, other, data = (weight(run, CENTROIDS) for run in runs)
    assert not torch.equal(drawn, other) and not torch.equal(drawn, data)


def test_a_nan_ends_the_run_in_one_line(workshop: Workshop) -> None:
    run = workshop.folder / "nan"
    wild = (
        "optimizer.lr=1e30",
        "optimizer.warmup=0",
        "optimizer.schedule=constant",
        "trainer.clip=0",
    )
    said = workshop.command("train", workshop.text, *SMALL_RUN, *wild, run=run, code=1)
    told = (
        r"rtx: step \d: the loss is (nan|inf) at learning rate 1e\+30; no checkpoint had been "
        r"written yet"
    )
    assert re.fullmatch(told, said.splitlines()[-1])
    assert status_of(run).state == "failed"


def test_bf16_and_fp64(workshop: Workshop, brief: Path) -> None:
    runs = {"fp32": brief}
    for precision in ("bf16", "bf16-true", "fp64"):
        words = (f"hardware.precision={precision}", "trainer.steps=2")
        runs[precision] = workshop.train(precision, *words)
    dtypes = {"fp64": torch.float64, "bf16-true": torch.bfloat16}
    scores = {}
    for precision, run in runs.items():
        scores[precision] = final(run)["bits"]
        assert weight(run).dtype == dtypes.get(precision, torch.float32)
        assert weight(run, CENTROIDS).dtype == torch.float32
        environment = json.loads((run / "environment.json").read_text())
        assert environment["hardware"]["precision"] == precision
    assert scores["fp32"] == pytest.approx(scores["fp64"], abs=1e-4)
    assert scores["fp32"] == pytest.approx(scores["bf16"], abs=0.05)
    assert scores["fp32"] == pytest.approx(scores["bf16-true"], abs=0.05)
    assert len(set(scores.values())) == 4


def test_weights_in_bf16_go_on_bit_for_bit_and_can_be_used(workshop: Workshop) -> None:
    narrow = ("hardware.precision=bf16-true", "optimizer.schedule=constant")
    whole = workshop.train("narrow-whole", *narrow, "trainer.steps=2")
    halves = workshop.train("narrow-halves", *narrow, "trainer.steps=1")
    workshop.command("resume", str(halves), "trainer.steps=2")
    assert all(torch.equal(x, weight(halves, name)) for name, x in weights(whole).items())
    assert "narrow-whole" in workshop.command("eval", str(whole), "checkpoint=last", "limit=3")
    workshop.command("sample", str(whole), "length=5")
    said = workshop.command("resume", str(halves), "trainer.steps=3", "hardware.precision=fp32")
    assert "no longer exact: precision bf16-true -> fp32\n" in said
    assert weight(halves).dtype == torch.float32


def test_mistakes_are_told_in_a_line_and_leave_no_folder(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (empty := tmp_path / "empty.txt").touch()
    for words, line in (
        ("hardware=gpu", "hardware=gpu, but torch finds no GPU"),
        ("data.length=4000", "expected at least one sequence of data.length=4000"),
        ("hardware=ddp hardware.devices=2 trainer.batch_size=3", "trainer.batch_size=3"),
        (f"data.path={empty}", "empty.txt"),
        (
            f"{XL} trainer.batch_size=100",
            "=100: expected 100 streams of at least data.length=32 tokens",
        ),
        (f"{XL} model.memory=5000", "model.memory=5000 must be at most 675"),
        (
            "data.tokenizer=words model.embedding=adaptive model.cutoffs=2x5000",
            "=2x5000 must end below the",
        ),
    ):
        said = workshop.command(
            "train", workshop.text, *SMALL_RUN, *words.split(), run=tmp_path / "cell", code=2
        )
        assert line in said and not (tmp_path / "cell").exists()


def test_a_number_of_windows_is_a_sample_and_marked_wherever_it_stands(workshop: Workshop) -> None:
    run = (
        workshop.folder / "out/closing/few"
    )  # of the 10 windows in the validation split a validation takes 5
    few = ("data.length=16", "trainer.final_windows=2", "trainer.steps=4")
    printed = workshop.command("train", workshop.text, *SMALL_RUN, *few, run=run)
    said = " ".join(printed.split())
    assert (
        "on a sample of 2 windows of the validation split" in said
        and "(a sample of 2 windows)" in said
    )
    assert "a short run: optimizer=adamw is made for 1,000 steps" in said and "zlib" not in said
    assert (
        "the learning rate (optimizer.schedule=cosine) ended at 10% of optimizer.lr=0.003" in said
    )
    assert (
        final(run)["windows"] == 2 and final(run)["units"] <= 32 and "baselines" not in final(run)
    )
    assert f" ~{final(run)['bits']:.4f} " in workshop.command("runs")
    assert "bits/byte on 2 windows of the validation split" in workshop.command("resume", str(run))
    assert "a sample of 2 windows" in workshop.command("report", str(run))
    workshop.command("resume", str(run), "trainer.steps=5", "trainer.final_windows=null")
    assert (
        final(run)["protocol"].get("windows") is None
        and final(run)["units"] == 150
        and "zlib" in final(run)["baselines"]
    )
    assert f" {final(run)['bits']:.4f} " in workshop.command("runs")


def test_auto_takes_all_windows_in_time_and_what_does_not_fit_is_said_at_once(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rtx.training.step_clock.RunClock.seconds", 0.0)
    monkeypatch.setattr("rtx.commands.train.device_memory", lambda config, processes=0: 2**10)
    for seconds, windows in ((1e9, None), (1e-9, 5)):  # no fewer than a validation takes
        monkeypatch.setattr(trainer, "CLOSING_SECONDS", seconds)
        run = workshop.folder / f"auto{windows}"
        words = ("data.length=16", "model.recompute=false", "trainer.steps=1")
        said = workshop.command("train", workshop.text, *SMALL_RUN, *words, run=run)
        assert final(run)["protocol"].get("windows") == windows and (
            final(run)["units"] == 150
        ) == (windows is None)
        line = next(
            line for line in said.splitlines() if not line.startswith(("preparing", "data=text"))
        )
        told = (
            "warning: may not fit: hardware.precision=fp32 trainer.micro_batch_size=2 "
            "model.recompute="
        )
        assert (
            line.startswith(told)
            and "of 0.0 GiB, by rtx plan, which leaves too little; less is needed" in line
        )


@pytest.mark.parametrize(("steps", "recorded"), [(8, 2), (5, 0)])
def test_some_steps_are_recorded_behind_the_first_and_change_nothing(
    workshop: Workshop, tmp_path: Path, undisturbed: Path, steps: int, recorded: int
) -> None:
    run = tmp_path / "run"
    asked = f"trainer.profile={max(1, recorded)}"
    said = workshop.command(
        "train", workshop.text, *SMALL_RUN, f"trainer.steps={steps}", asked, run=run
    )
    trace = run / "trace.json.gz"
    assert trace.exists() == (recorded > 0)
    if not recorded:
        assert "trainer.profile=1: the run ended before step 6 of this process" in said
        return
    assert (
        f"the trace of {recorded} step" in said
        and f"{trace}: https://ui.perfetto.dev opens it" in said
    )
    names = [
        event.get("name", "")
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ]
    assert "aten::embedding" in names
    assert len([name for name in names if name.startswith("ProfilerStep#")]) >= recorded
    assert torch.equal(weight(run), weight(undisturbed))
    assert "is done" in workshop.command("resume", str(run), "trainer.profile=9")


def test_rows_status_and_lines_tell_the_share_of_the_peak(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rtx.commands.train.run_meter", lambda *given: Meter(operations_per_unit=2e6, peak=1e12)
    )
    run = tmp_path / "run"
    said = workshop.command("train", workshop.text, *SMALL_RUN, "trainer.steps=2", run=run)
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
    assert all(
        row["train/mfu"] == pytest.approx(2e-6 * row["train/tokens_per_second"]) for row in rows
    )
    assert status_of(run).mfu == rows[-1]["train/mfu"]
    assert re.search(r"units/s \(\d+% of the peak\), \d\d:\d\d left", said)
