"""Which engine computes each pattern of a run on a GPU.

It follows from shapes and types, so no GPU is needed: tensors of the meta device have shapes alone,
and engines treat them as those of a GPU.

Shapes: N positions, D head size, T distances that tables tell apart.
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from rtx.attention import Random
from rtx.attention.adaptive_span import AdaptiveSpan
from rtx.attention.centroids import statistics_paused
from rtx.attention.clusters import Routing
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
from rtx.attention.reads import IndexReads, QueriesKeys, RangeReads, Reads
from rtx.attention.top_keys import TopKeys
from rtx.model.heads import head_size, make_pattern
from rtx.settings.derived import ROUTED, layer_patterns, memory_slots
from rtx.settings.requirements import precision_on
from rtx.settings.schema import Config

META = torch.device("meta")

TYPES = {"bf16": torch.bfloat16, "bf16-true": torch.bfloat16, "fp64": torch.float64}
"""The type of queries, keys and values by precision; float32 for the other precisions."""

NAMES = {
    dense: "torch's scaled_dot_product_attention",
    flash: "torch's flash kernel",
    by_triton: "our kernels for packed lists",
    flex: "torch's FlexAttention",
    windows: "torch's operations on tiles of the lists",
    blocks: "torch's operations on blocks of the lists",
    indexed: "torch's operations on all scores",
}
"""The engines in words."""


class Computed(NamedTuple):
    """A part of what a pattern reads, and the engine that computes it."""

    problem: Problem
    engine: ModuleType | None
    """None: no engine that hardware.attention allows can compute it."""
    refusals: dict[str, str]
    """Why engines that are made for such a part cannot compute it, by their names."""

    def phrase(self) -> str:
        """Return "by <engine>", and which other engines cannot compute this and why."""
        phrase = "by no engine"
        if self.engine is not None:
            phrase = f"by {NAMES[self.engine]}"
        if not self.refusals:
            return phrase
        reasons = [f"not {name}: {reason}" for name, reason in self.refusals.items()]
        return f"{phrase} ({'; '.join(reasons)})"


def gpu_here() -> torch.device:
    """Return the GPU of this machine, which may be too old for an engine.

    Without one, return the meta device, which represents a recent GPU.
    """
    if torch.cuda.device_count():
        return torch.device("cuda")
    return META


def attention_line(config: Config, device: torch.device = META) -> str:
    """Return by which engine a GPU computes each pattern of the run, in words."""
    phrases: dict[str, str] = {}
    for layer in range(config.model.layers):
        for name in layer_patterns(config, layer):
            label = name
            if name == ROUTED:
                label = config.routing.selection
            if label not in phrases:
                phrases[label] = phrase_of(name, config, layer, device)
    return ", ".join(f"{label} {phrase}" for label, phrase in phrases.items())


def phrase_of(name: str, config: Config, layer: int, device: torch.device) -> str:
    """Return by which engines a GPU computes a pattern of a layer, in words."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        pattern = make_pattern(name, 1, config, layer).eval()
        phrase = joined_phrases(pattern, config, device)
        if isinstance(pattern, Indexer) and pattern.is_dense:
            pattern.set_steps(pattern.warmup)
            later = joined_phrases(pattern, config, device)
            return f"{phrase} in {pattern.warmup:,} steps, then {later}"
    return phrase


def joined_phrases(pattern: Pattern, config: Config, device: torch.device) -> str:
    """Return the phrases of all parts that a pattern reads, each once."""
    parts = parts_of(pattern, config, gpu=True)
    phrases = [part.phrase() for part in computed(pattern, parts, config, device)]
    return " and ".join(dict.fromkeys(phrases))


def parts_of(pattern: Pattern, config: Config, gpu: bool) -> list[Reads]:
    """Return what a pattern of one head reads in a sequence of random vectors, see `Pattern.reads`.

    For a GPU, lists of clusters have the capacity that they have there, and no numbers.
    """
    N = config.data.length
    size = head_size(config)
    memory_length = memory_slots(config.model)
    if isinstance(pattern, TopKeys) and pattern.has_index:
        index_NK = torch.zeros(N, pattern.max_keys(N), dtype=torch.int8)
        return [IndexReads(index_NK, N, both_sides=not pattern.causal)]
    # Lists that read both sides have the lengths that their scores give them, on a GPU, too.
    if gpu and isinstance(pattern, Routing | Probed) and pattern.causal:
        return static_parts(pattern.to(META).train(), N, size)
    if gpu and isinstance(pattern, AdaptiveSpan):
        # On a GPU spans reach as far as the window: their true reach would make the CPU wait.
        pattern.to(META)
    q_11ND, k_11ND = torch.randn(2, 1, 1, N + memory_length, size)
    qk = queries_and_keys(pattern, q_11ND, k_11ND)
    return pattern.reads(qk._replace(memory=memory_length), False)


def static_parts(pattern: Routing | Probed, length: int, size: int) -> list[Reads]:
    """Return the lists of a head of clusters as training on a GPU makes them, in shapes alone."""
    q_11ND, k_11ND = torch.empty(2, 1, 1, length, size, device=META)
    with statistics_paused():
        return pattern.reads(queries_and_keys(pattern, q_11ND, k_11ND), False)


def queries_and_keys(pattern: Pattern, q_11ND: Tensor, k_11ND: Tensor) -> QueriesKeys:
    """Return queries and keys as a pattern reads them, without rotation."""
    if pattern.has_keys:
        return pattern.inputs(q_11ND, k_11ND, None)
    return pattern.inputs(q_11ND, None, None)


def computed(
    pattern: Pattern,
    parts: list[Reads],
    config: Config,
    device: torch.device = META,
) -> list[Computed]:
    """Return the engine that computes each part in training on a GPU.

    Args:
        pattern: has one head.
        parts: what it reads.
    """
    size = head_size(config)
    terms = pattern.terms(size, relative_of(config))._replace(dropout=pattern.dropout)
    by_member = len(parts) > 1 or pattern.merge != "mean" or config.model.sinks
    all_computed = []
    for part in parts:
        q_11ND = vectors(part.length, size, config, device)
        k_11ND = vectors(part.length, size, config, device)
        v_11ND = vectors(part.length, size, config, device)
        if shares_keys(pattern):
            k_11ND = q_11ND
        problem = Problem(q_11ND, k_11ND, v_11ND, part, terms, by_member)
        all_computed.append(choose_engine(problem, config.hardware.attention))
    return all_computed


def vectors(length: int, size: int, config: Config, device: torch.device) -> Tensor:
    """Return a tensor `[1, 1, N, D]` of the type in which a GPU attends.

    It takes the memory of one number.
    """
    dtype = TYPES.get(precision_on(config.hardware, gpu=True), torch.float32)
    return torch.empty(1, dtype=dtype, device=device).expand(1, 1, length, size)


def shares_keys(pattern: Pattern) -> bool:
    """Return whether queries and keys are one tensor."""
    return isinstance(pattern, Routing | Random) and not pattern.has_keys


def distances_of(config: Config) -> int:
    """Return how many distances the tables of positions tell apart; 0 without tables."""
    model = config.model
    if model.positions == "shaw":
        return model.max_distance + 1
    if model.positions == "xl":
        reach = config.data.length + memory_slots(model)
        if model.clamp:
            return min(reach, model.clamp + 1)
        return reach
    return 0


def relative_of(config: Config) -> RelativeTables | None:
    """Return tables by distance of one head, in shapes alone; None if positions have none."""
    T = distances_of(config)
    size = head_size(config)
    if config.model.positions == "shaw":
        keys_TD = torch.empty(T, size, device=META)
        values_TD = torch.empty(T, size, device=META)
        return RelativeTables(keys_TD, values_TD)
    if config.model.positions == "xl":
        keys_1TD = torch.empty(1, T, size, device=META)
        bias_1T = torch.empty(1, T, device=META)
        return RelativeTables(keys_1TD, None, bias_1T)
    return None


def choose_engine(problem: Problem, backend: str) -> Computed:
    """Return the engine of a backend that computes a problem, and the refusals of others."""
    engines = ENGINES[backend]
    try:
        engine = choose(problem, backend)
    except ValueError:
        reason = engines[0].refusal(problem)
        assert reason is not None
        return Computed(problem, None, {f"hardware.attention={backend}": reason})
    refusals: dict[str, str] = {}
    for earlier in engines[: engines.index(engine)]:
        reason = earlier.refusal(problem)
        if reason is not None and is_made_for(earlier, problem.part):
            refusals[NAMES[earlier]] = reason
    return Computed(problem, engine, refusals)


def is_made_for(engine: ModuleType, part: Reads) -> bool:
    """Return whether an engine computes parts of such a form, of any size, type and terms."""
    if not isinstance(part, RangeReads):
        return False
    if engine in (dense, flash):
        if part.window is None:
            return False
        # torch's kernel for whole sequences, or its flash kernel for windows.
        return dense.reads_everything(part.window) == (engine is dense)
    return engine in (by_triton, flex)
