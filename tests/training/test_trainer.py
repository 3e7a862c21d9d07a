"""A run is the plain loop it looks like, with the optimizers and learning rates of the papers."""

import math
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rtx.attention.centroids import after_step
from rtx.data.batches import MicroBatches
from rtx.data.catalog import open_data
from rtx.data.sampler import ShuffledWindows
from rtx.evaluation.scores import score_batch
from rtx.settings.compose import compose
from rtx.settings.run_config import load_run_config
from rtx.settings.schema import Config, OptimizerConfig, TrainerConfig
from rtx.training.adafactor import Adafactor
from rtx.training.checkpoint import read_checkpoint, save_checkpoint
from rtx.training.optimizers import build_optimizer, learning_rate, set_learning_rate
from rtx.training.start import build_model, seed_everything
from tests.helpers.small_runs import Workshop, difference, read_metrics, status_of


def last(run: Path) -> Path:
    return run / "checkpoints" / "last.ckpt"


def test_a_run_is_the_plain_loop_bit_for_bit_and_has_a_bar_on_a_terminal(
    workshop: Workshop,
) -> None:
    words = ("trainer.clip=0.5", "trainer.steps=6")
    process = workshop.start("plain", *words, inside="sys.stdout.isatty = lambda: True")
    assert process.wait() == 0, process.log.read_text()
    shown = process.log.read_bytes().decode()
    assert re.search(r"\rstep 6/6, \d\S+ bits, lr \S+, \S+ units/s, 00:00 left, \S+ GB \|", shown)
    assert re.search(r"step 4: validation \S+ bits \(\d+ units\)\n", shown)
    config = load_run_config(process.run)
    tokens = open_data(config.data, workshop.data).split("train")
    batch_size = config.trainer.batch_size
    sampler = ShuffledWindows(tokens, config.data.length, config.seed, batch_size)
    batches = MicroBatches(sampler, 2)
    model = build_model(config, 256, None)
    optimizer = build_optimizer(model, config.optimizer)
    seed_everything(config.seed, 1)
    for step in range(6):
        optimizer.zero_grad()
        for first in (4 * step, 4 * step + 2):
            nats_BN, auxiliary = model.loss(batches[first].long())
            ((nats_BN.mean() + auxiliary) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        set_learning_rate(optimizer, learning_rate(config, step + 1))
        optimizer.step()
        after_step(model)  # once per optimizer step, not per micro-batch
    trained = read_checkpoint(last(process.run))["model"]
    assert [
        name for name, value in model.state_dict().items() if not torch.equal(value, trained[name])
    ] == []


def test_scores_of_other_windows_are_not_compared(workshop: Workshop) -> None:
    run = workshop.train(
        "few", "trainer.steps=4", "trainer.val_windows=2", "optimizer.schedule=constant"
    )
    better = read_checkpoint(last(run))
    assert better["callbacks"]["Validations"]["best"]["windows"] == 2
    better["callbacks"]["Validations"]["best"]["bits"] = (
        0.1  # as if the few windows had been easy ones
    )
    save_checkpoint(better, last(run))
    workshop.command("resume", str(run), "trainer.steps=8", "trainer.val_windows=null")
    best = status_of(run).best
    assert best is not None and best.windows == 5 and best.bits > 1


MEETS = """
import itertools, rtx.data.windows, rtx.training.module as module
rtx.data.windows.BATCH_UNITS = 32
calls, real = itertools.count(1), module.{name}
def meets(*arguments, **options):
    if next(calls) == {call}:
        {what}
    return real(*arguments, **options)
module.{name} = meets
"""
"""What happens in a call of a function; five batches make a validation."""


def test_a_run_stopped_before_a_validation_makes_it_when_it_goes_on_and_has_the_same_bits(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rtx.data.windows.BATCH_UNITS", 32)
    steps = "trainer.steps=9"
    whole = workshop.train("whole", steps)
    stop = f"os.kill(os.getpid(), {int(signal.SIGUSR1)})"
    fail = MEETS.format(name="after_step", call=1, what="1 / 0")
    for name, call in (
        ("after_step", 8),
        ("score_batch", 7),
    ):  # in step 8, and in the validation behind it
        process = workshop.start(name, steps, inside=MEETS.format(name=name, call=call, what=stop))
        assert process.wait() == 143 and read_checkpoint(last(process.run))["step"] == 8, (
            process.log.read_text()
        )
        failed = workshop.fork(
            process.run, "resume", str(process.run), inside=fail
        )  # behind the validation
        assert failed.wait() == 1 and read_checkpoint(last(process.run))["step"] == 8, (
            failed.log.read_text()
        )
        workshop.command("resume", str(process.run))
        assert difference(process.run, whole) == ""


def test_seconds_of_training_leave_validations_out_and_go_on_in_a_resumed_run(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*arguments: Any) -> torch.Tensor:
        time.sleep(1.0)
        return score_batch(*arguments)

    monkeypatch.setattr("rtx.training.module.score_batch", slow)
    run = workshop.train("slow", "trainer.steps=8", "optimizer.schedule=constant")
    workshop.command("resume", str(run), "trainer.steps=12")
    rows = read_metrics(run / "metrics.jsonl")
    seconds = [row["valid/train_seconds"] for row in rows if row["kind"] == "valid"]
    assert 0 < seconds[0] < seconds[1] < seconds[2], "the resumed run does not begin at zero"
    assert rows[-1]["kind"] == "final" and rows[-1]["valid/final_train_seconds"] == seconds[2]
    (whole,) = [
        row["train/seconds"] for row in rows if row["kind"] == "train" and row["step"] == 12
    ]
    # They take 3 s and more. The seconds of steps are partly estimated, so half of that is a safe
    # margin.
    assert seconds[2] < whole - 1.5, "three validations do not count"


def scheduled(schedule: Any, warmup: int) -> Config:
    optimizer = OptimizerConfig(lr=0.4, schedule=schedule, warmup=warmup)
    return Config(optimizer=optimizer, trainer=TrainerConfig(steps=100))


def test_the_warm_up_is_linear_and_what_follows_is_what_its_name_says() -> None:
    for schedule in ("rsqrt", "cosine", "constant"):
        rates = [learning_rate(scheduled(schedule, 8), step) for step in range(1, 9)]
        assert rates == pytest.approx([0.4 * step / 8 for step in range(1, 9)], rel=1e-15)
    assert learning_rate(scheduled("rsqrt", 4), 64) == pytest.approx(0.4 * math.sqrt(4 / 64))
    assert (
        learning_rate(scheduled("constant", 4), 64)
        == 0.4
        == learning_rate(scheduled("constant", 0), 1)
    )
    cosine = [learning_rate(scheduled("cosine", 20), step) for step in (60, 100, 1000)]
    assert cosine == pytest.approx([0.4 * 0.55, 0.04, 0.04])
    assert learning_rate(scheduled("cosine", 0), 1) == pytest.approx(0.4, rel=1e-3)


def test_only_matrices_decay() -> None:
    model = build_model(compose(["model.positions=shaw", "model.embedding=8"]), 11, None)
    decaying, exempt = build_optimizer(
        model, OptimizerConfig(name="adamw", weight_decay=0.1)
    ).param_groups
    assert (decaying["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kinds = {names[id(parameter)].rpartition(".")[2] for parameter in decaying["params"]}
    assert kinds == {"weight", "output_VS"} and all(
        parameter.ndim == 2 for parameter in decaying["params"]
    )
    assert {"bias", "weight", "table_VS", "start_S"} <= {
        names[id(each)].rpartition(".")[2] for each in exempt["params"]
    }


def test_adafactor_does_what_torchs_does_without_a_wait_for_the_device() -> None:
    generator = torch.Generator().manual_seed(3)
    start = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((4, 6), (5,), ())
    ]
    options: dict[str, Any] = {"lr": 0.02, "eps": (1e-18, 1e-3), "weight_decay": 0.1}
    results = []
    for kind in (Adafactor, torch.optim.Adafactor):
        weights = [nn.Parameter(x.clone()) for x in start]
        optimizer = kind(weights, **options)
        for step in range(5):
            for weight in weights:
                weight.grad = torch.sin(weight.detach() * (step + 1)) * 10.0 ** (step - 2)
            optimizer.step()
        results.append(
            [*weights, *optimizer.state[weights[0]].values(), *optimizer.state[weights[1]].values()]
        )
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)
    on_device = [nn.Parameter(x.to("meta")) for x in start]  # where a number read back raises
    optimizer = Adafactor(on_device, **options)
    for weight in on_device:
        weight.grad = torch.ones_like(weight)
    optimizer.step()


@pytest.mark.parametrize("scale", [1.0, 1e-4, 1e-7])
def test_adafactor_is_shazeer_and_stern_at_any_size_of_gradient(scale: float) -> None:
    model = nn.Linear(6, 4, bias=False, dtype=torch.float64)
    generator = torch.Generator().manual_seed(3)
    x = 0.05 * torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    model.weight.data.copy_(x)
    optimizer = build_optimizer(model, OptimizerConfig(name="adafactor"))
    row = torch.zeros(4, 1, dtype=torch.float64)
    column = torch.zeros(1, 6, dtype=torch.float64)
    for t, rate in enumerate((0.0025, 0.005, 0.0075, 0.01), 1):
        gradient = scale * torch.randn(4, 6, generator=generator, dtype=torch.float64)
        model.weight.grad = gradient.clone()
        set_learning_rate(optimizer, rate)
        optimizer.step()
        decay = 1 - t**-0.8
        row = decay * row + (1 - decay) * (gradient**2).mean(1, keepdim=True)
        column = decay * column + (1 - decay) * (gradient**2).mean(0, keepdim=True)
        update = gradient / (row * column / row.mean()).sqrt()
        update = update / max(1.0, update.square().mean().sqrt().item())
        x = x - rate * max(1e-3, x.square().mean().sqrt().item()) * update
    torch.testing.assert_close(model.weight.detach(), x, rtol=1e-9, atol=1e-12)
