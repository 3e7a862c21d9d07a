"""Which engine computes each pattern of a run on a GPU: by shapes and types alone, so that no GPU need be here.

Tensors of the meta device have shapes alone, and take the way of a GPU.
"""

import itertools
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention.adaptive_span import AdaptiveSpan
from rtx.attention.centroids import statistics_paused
from rtx.attention.clusters import Random
from rtx.attention.engine import (
    ENGINES,
    blocks,
    by_triton,
    choose,
    dense,
    flash,
    flex,
    indexed,
    windows,
)
from rtx.attention.engine.problem import Problem
from rtx.attention.engine.softmax import RelativeTables
from rtx.attention.indexer import Indexer
from rtx.attention.pattern import Pattern
from rtx.attention.probed import Probed
from rtx.attention.reads import IndexReads, RangeReads, Reads
from rtx.attention.routing import Routing
from rtx.attention.top_keys import TopKeys
from rtx.model.heads import make_pattern
from rtx.settings.derived import ROUTED, layer_patterns, memory_slots
from rtx.settings.devices import precision_on
from rtx.settings.schema import Config

META = torch.device("meta")
TYPES = {"bf16": torch.bfloat16, "bf16-true": torch.bfloat16, "fp64": torch.float64}
"""Of queries, keys and values, by precision; float32 with the others."""
NAMES = {
    dense: "torch's scaled_dot_product_attention",
    flash: "torch's flash kernel",
    by_triton: "our kernels for packed lists",
    flex: "torch's FlexAttention",
    windows: "torch's operations on tiles of the lists",
    blocks: "torch's operations on blocks of the lists",
    indexed: "torch's operations on all scores",
}
"""In words."""


class Computed(NamedTuple):
    """A part of what a pattern reads, and the engine that computes it."""

    problem: Problem
    engine: ModuleType | None
    """None: hardware.attention leaves none that can."""
    refusals: dict[str, str]
    """By names of engines that are made for such a part, why they cannot run it."""

    def phrase(self) -> str:
        """Return "by <engine>", and which other engines cannot compute this and why."""
        by = "by no engine" if self.engine is None else f"by {NAMES[self.engine]}"
        reasons = [f"not {name}: {reason}" for name, reason in self.refusals.items()]
        return f"{by} ({'; '.join(reasons)})" if reasons else by


def gpu_here() -> torch.device:
    """Return the GPU of this machine, which may be too old for an engine; without one, what stands for a recent one."""
    return torch.device("cuda") if torch.cuda.device_count() else META


def attention_line(config: Config, device: torch.device = META) -> str:
    """Return by which engine a GPU computes each pattern of the run."""
    phrases: dict[str, str] = {}
    for layer in range(config.model.layers):
        for name in layer_patterns(config, layer):
            label = config.routing.selection if name == ROUTED else name
            if label not in phrases:
                phrases[label] = phrase_of(name, config, layer, device)
    return ", ".join(f"{label} {phrase}" for label, phrase in phrases.items())


def phrase_of(name: str, config: Config, layer: int, device: torch.device) -> str:
    """Return by which engines a GPU computes a pattern of a layer."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        pattern = make_pattern(name, 1, config, layer).eval()
        phrase = joined_phrases(pattern, config, device)
        if isinstance(pattern, Indexer) and pattern.dense:
            pattern.set_steps(pattern.warmup)
            return f"{phrase} in {pattern.warmup:,} steps, then {joined_phrases(pattern, config, device)}"
    return phrase


def joined_phrases(pattern: Pattern, config: Config, device: torch.device) -> str:
    """Return the phrases of all parts that a pattern reads, each once."""
    parts = parts_of(pattern, config, gpu=True)
    return " and ".join(
        dict.fromkeys(one.phrase() for one in computed(pattern, parts, config, device))
    )


def parts_of(pattern: Pattern, config: Config, gpu: bool) -> list[Reads]:
    """Return who reads whom in a sequence of random vectors, by a pattern of one head.

    For a GPU, lists of clusters have the room that they have there, and hold no numbers.
    """
    model, N = config.model, config.data.length
    size, memory = model.hidden // model.heads, memory_slots(model)
    if isinstance(pattern, TopKeys) and pattern.has_index:
        return [IndexReads(torch.zeros(N, pattern.max_keys(N), dtype=torch.int8), N)]
    if gpu and isinstance(pattern, Routing | Probed):
        return static_parts(pattern.to(META).train(), N, size)
    if gpu and isinstance(pattern, AdaptiveSpan):
        pattern.to(META)  # a GPU's spans reach as far as the window: nobody waits for them
    q_11ND, k_11ND = torch.randn(2, 1, 1, N + memory, size)
    qk = pattern.inputs(q_11ND, k_11ND if pattern.has_keys else None, None)
    return pattern.reads(qk._replace(memory=memory), False)


def static_parts(pattern: Routing | Probed, length: int, size: int) -> list[Reads]:
    """Return the lists of a head of clusters as training on a GPU makes them, in shapes alone."""
    q_11ND, k_11ND = torch.empty(2, 1, 1, length, size, device=META)
    with statistics_paused():
        return pattern.reads(
            pattern.inputs(q_11ND, k_11ND if pattern.has_keys else None, None), False
        )


def computed(
    pattern: Pattern, parts: list[Reads], config: Config, device: torch.device = META
) -> list[Computed]:
    """Return the engine that computes each part of what a pattern of one head reads in training on a GPU."""
    model = config.model
    size = model.hidden // model.heads
    terms = pattern.terms(size, relative_of(config))._replace(dropout=pattern.dropout)
    by_member = len(parts) > 1 or pattern.merge != "mean"
    found = []
    for part in parts:
        q_11ND, k_11ND, v_11ND = (vectors(part.length, size, config, device) for _ in range(3))
        if shares_keys(pattern):
            k_11ND = q_11ND
        problem = Problem(q_11ND, k_11ND, v_11ND, part, terms, by_member)
        found.append(chosen(problem, config.hardware.attention))
    return found


def vectors(length: int, size: int, config: Config, device: torch.device) -> Tensor:
    """Return a tensor `[1, 1, N, D]` of the type that a GPU attends in; it takes the memory of one number."""
    dtype = TYPES.get(precision_on(config.hardware, gpu=True), torch.float32)
    return torch.empty(1, dtype=dtype, device=device).expand(1, 1, length, size)


def shares_keys(pattern: Pattern) -> bool:
    """Tell whether the tensor of the queries is that of the keys."""
    return isinstance(pattern, Routing | Random) and not pattern.has_keys


def distances_of(config: Config) -> int:
    """Return how many distances tables of positions tell apart, 0 without tables."""
    model = config.model
    if model.positions == "shaw":
        return model.max_distance + 1
    if model.positions == "xl":
        reach = config.data.length + memory_slots(model)
        return min(reach, (model.clamp or reach) + 1)
    return 0


def relative_of(config: Config) -> RelativeTables | None:
    """Return tables by distance of one head, in shapes alone; None where positions have none."""
    T, size = distances_of(config), config.model.hidden // config.model.heads
    if config.model.positions == "shaw":
        return RelativeTables(torch.empty(T, size, device=META), torch.empty(T, size, device=META))
    if config.model.positions == "xl":
        return RelativeTables(
            torch.empty(1, T, size, device=META), None, torch.empty(1, T, device=META)
        )
    return None


def chosen(problem: Problem, backend: str) -> Computed:
    """Return the engine of a backend that runs the problem, and why those made for such a part do not."""
    refusals: dict[str, str] = {}
    try:
        engine = choose(problem, backend)
    except ValueError:
        reason = ENGINES[backend][0].refusal(problem)
        assert reason is not None
        return Computed(problem, None, {f"hardware.attention={backend}": reason})
    for earlier in itertools.takewhile(lambda each: each is not engine, ENGINES[backend]):
        reason = earlier.refusal(problem)
        if reason is not None and is_made_for(earlier, problem.part):
            refusals[NAMES[earlier]] = reason
    return Computed(problem, engine, refusals)


def is_made_for(engine: ModuleType, part: Reads) -> bool:
    """Tell whether an engine computes parts of such a form, whatever their sizes, types and terms."""
    if not isinstance(part, RangeReads):
        return False
    if engine in (dense, flash):
        reads_everything = part.window is not None and dense.reads_everything(part.window)
        return part.window is not None and reads_everything == (engine is dense)
    return engine in (by_triton, flex)
