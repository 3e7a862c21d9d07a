"""Processes of one run: one that dies is noticed; parameters shared out take the steps of whole ones."""

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from small_runs import Workshop
from torch.distributed.device_mesh import init_device_mesh

import rtx.training.distributed as room
from rtx.analysis.attention_weights import read_telemetry
from rtx.attention.centroids import after_step
from rtx.attention.patterns import AdaptiveSpan
from rtx.checks import resolve
from rtx.config import Config, DataConfig, ModelConfig, OptimizerConfig, RoutingConfig
from rtx.model.transformer import Transformer
from rtx.training.distributed import is_part, shard, shared_as, whole
from rtx.training.module import TrainingModule, build_optimizer


def test_a_child_that_ends_otherwise_than_by_leaving_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "PATIENCE_SECONDS", 0.0)
    for command, told in (("true", []), ("exit 3", ["ended with 3"]), ("kill -9 $$", ["was killed by SIGKILL"])):
        children, lines = [subprocess.Popen(["sh", "-c", each]) for each in (command, "sleep 0.05")], []
        room.watch_ranks(children, lines.append)
        for child in children:
            child.wait()
        assert [line.partition(" the run ")[2] for line in lines] == told


KINDS: dict[str, dict[str, Any]] = {
    "tied": {"tie_embeddings": True, "ffn": "geglu"},
    "spans": {"base": "adaptive_span", "positions": "none", "span_cost": 0.1},
    "recomputed": {"positions": "shaw", "recompute": True, "ffn_parts": 3, "embedding": 7},
    "axial": {"positions": "axial", "axes": "8x3", "base": "lsh", "norm": "post", "optimizer": "adamw"},
}
STEPS, VOCABULARY = 4, 11


def config_of(kind: str) -> Config:
    """Return a model of odd sizes, so that parts differ, and its optimizer."""
    options = {"layers": 2, "heads": 3, "hidden": 18, "window": 5, "ffn_hidden": 13, "max_distance": 8, **KINDS[kind]}
    optimizer = OptimizerConfig(name=options.pop("optimizer", "adam"), lr=0.01, weight_decay=0.1)
    routing = RoutingConfig(heads=2, layers=1, window=6, clusters=4)
    return resolve(
        Config(data=DataConfig(length=24), model=ModelConfig(**options), routing=routing, optimizer=optimizer)
    )


def trained(config: Config, mesh: Any, rows: slice) -> tuple[TrainingModule, torch.optim.Optimizer]:
    """Take a few steps with some sequences of each batch, the parameters shared out where there is a mesh."""
    torch.manual_seed(0)
    module = TrainingModule(Transformer(config, VOCABULARY).double(), config)
    for heads in (heads for heads in module.modules() if isinstance(heads, AdaptiveSpan)):
        heads.share_H.data.fill_(0.5)  # at 0 the gradient of each part of a batch is held by itself, which is no sum
    if mesh is not None:
        shard(module.model, mesh)
    optimizer = build_optimizer(module.model, config.optimizer)
    for step in range(STEPS):
        tokens_BN = torch.randint(VOCABULARY, (4, 24), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        module.training_step(tokens_BN[rows], 0).backward()
        module.configure_gradient_clipping(optimizer)
        optimizer.step()
        after_step(module.model)
    return module, optimizer


def furthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest relative difference between tensors of the same names; those of `one` may be shared out."""
    assert one.keys() == other.keys()
    pairs = [(whole(one[name]).double(), other[name].double()) for name in other]
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1e-12)) for a, b in pairs)


def rank_main(rank: int, folder: str) -> None:
    """One of two processes: whole parameters with all sequences, then its part of them with every other sequence."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    mesh, found = init_device_mesh("cpu", (2,)), {}
    for kind in KINDS:
        config = config_of(kind)
        (plain, plain_optimizer), (parts, optimizer) = (
            trained(config, where, rows) for where, rows in ((None, slice(None)), (mesh, slice(rank, None, 2)))
        )
        assert all(is_part(p) for p in parts.parameters()) and not any(is_part(p) for p in plain.parameters())
        held = sum(parameter.to_local().numel() for parameter in parts.model.parameters())  # type: ignore[attr-defined]
        states, plain_states = (each.state_dict()["state"] for each in (optimizer, plain_optimizer))
        found[kind] = {
            "weights": furthest(parts.model.state_dict(), plain.model.state_dict()),
            "optimizer": max(furthest(states[number], plain_states[number]) for number in plain_states),
            "norm": abs(float(parts.norm) / float(plain.norm) - 1),
            "held": held / sum(parameter.numel() for parameter in plain.model.parameters()),
            "told": len(read_telemetry(parts.model)) - len(read_telemetry(plain.model)),
            "centroids": [buffer for name, buffer in parts.model.named_buffers() if "centroid_HCD" in name],
        }
        for parameter in parts.parameters():  # shared out again, a whole tensor is what it was
            assert torch.equal(whole(shared_as(whole(parameter), parameter)), whole(parameter))
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(workshop: Workshop) -> list[dict[str, dict[str, Any]]]:
    inside = f"sys.path[:] = {sys.path!r}; import test_distributed; test_distributed.rank_main"
    folder, ranks = workshop.folder, range(2)
    processes = [workshop.fork(folder / "rank", inside=f"{inside}({rank}, {str(folder)!r})") for rank in ranks]
    for process in processes:
        process.wait()
        assert (folder / f"{processes.index(process)}.pt").exists(), process.log.read_text()
    return [torch.load(folder / f"{rank}.pt") for rank in ranks]


@pytest.mark.parametrize("kind", KINDS)
def test_two_parts_take_the_steps_of_the_whole(ranks: list[dict[str, dict[str, Any]]], kind: str) -> None:
    for found in (rank[kind] for rank in ranks):
        assert max(found["weights"], found["optimizer"], found["norm"]) < 1e-9
        assert found["told"] == 0
    assert sum(rank[kind]["held"] for rank in ranks) == pytest.approx(1)
    assert max(rank[kind]["held"] for rank in ranks) < 0.6
    (first,), (second,) = (rank[kind]["centroids"] for rank in ranks)
    assert torch.equal(first, second) and first.any()
