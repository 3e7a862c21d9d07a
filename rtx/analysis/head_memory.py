"""What the heads of a layer save for the backward pass, and what they work with in it.

A pattern of one head is made, and chooses what it reads of random vectors; nothing is attended.
What the engines then save follows from what it reads.

Shapes: N positions, D head size, P query members and M key members of all lists together, E width
of an indexer.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from rtx.analysis.engines import computed, distances_of, parts_of
from rtx.analysis.gpu_memory import (
    DISTANCE_COPIES,
    INDEX,
    SCORE_COPIES,
    WIDE,
    Part,
    Saved,
    saved_by_engine,
)
from rtx.analysis.planned_device import on_gpu, widths_of
from rtx.attention import Random
from rtx.attention.blocks import Blocks
from rtx.attention.clusters import Routing
from rtx.attention.engine import blocks as engine_blocks
from rtx.attention.engine import native
from rtx.attention.engine.blocks import MAX_SCORES_CPU, MAX_SCORES_GPU
from rtx.attention.engine.rounding import whole_pieces
from rtx.attention.indexer import Indexer
from rtx.attention.lsh import Lsh
from rtx.attention.pattern import Pattern
from rtx.attention.reads import IndexReads, RangeReads, Reads
from rtx.attention.top_keys import TopKeys
from rtx.model.heads import head_size, make_pattern
from rtx.settings.derived import ROUTED, layer_patterns, memory_slots, queries_of_key_head
from rtx.settings.requirements import precision_on
from rtx.settings.schema import CLUSTERED, Config


class HeadsMemory(NamedTuple):
    """Bytes of the heads of a layer, for each position of a micro-batch."""

    saved: float
    """What they save for the backward pass."""
    working: float
    """What they hold besides in the backward pass."""


def attention_bytes(config: Config, layer: int, micro_batch: int) -> HeadsMemory:
    """Return what the heads of a layer save, and what they work with."""
    N = config.data.length
    groups = layer_patterns(config, layer)
    saved = 0.0
    working = 0.0
    transient = 0.0
    recomputed = 0.0
    has_projection = False
    for name, count in groups.items():
        head = saved_by_head(name, config, layer, heads=count * micro_batch)
        saved += count * (head.vectors - head.views + head.others) / N
        working += count * (head.vectors - head.freed) / N
        transient = max(transient, count * head.transient / N)
        recomputed = max(recomputed, head.recomputed / (N * micro_batch))
        has_projection = has_projection or head.projection
        if has_norms(name, config):
            has_projection = True
            saved += norm_bytes(name, count, config)
    if has_projection:
        saved += projection_bytes(config, groups)
    return HeadsMemory(saved, working + transient + recomputed)


def has_norms(name: str, config: Config) -> bool:
    """Return whether the model normalises the queries and keys of a group (model.qk_norm)."""
    routing = config.routing
    is_normalised = name == ROUTED and (routing.qk_norm or routing.selection in CLUSTERED)
    return config.model.qk_norm and not is_normalised


def norm_bytes(name: str, count: int, config: Config) -> int:
    """Return the bytes that norms of queries and keys save besides their input, by position.

    Args:
        count: the number of heads in the group.
    """
    if not saves_result(config):
        return 0
    vectors = count
    if name != "lsh":
        vectors += count // queries_of_key_head(config.model)
    return vectors * head_size(config) * widths_of(config).wide


def saves_result(config: Config) -> bool:
    """Return whether a norm saves normalised vectors besides its input: RMSNorm's on a CPU does."""
    return config.model.norm_kind == "rmsnorm" and not on_gpu(config)


def projection_bytes(config: Config, groups: Mapping[str, int]) -> int:
    """Return the bytes of queries, keys and values as the layer's matrix makes them.

    They are of one position.

    Args:
        groups: the number of heads in each group.
    """
    tensors = 0
    for name, count in groups.items():
        has_keys = name != "lsh"
        if name == ROUTED:
            has_keys = config.routing.keys in ("separate", "projected")
        kv_count = count // queries_of_key_head(config.model)
        tensors += count + kv_count
        if has_keys:
            tensors += kv_count
    return tensors * head_size(config) * widths_of(config).narrow


saved_by_key: dict[str, list[Saved]] = {}
"""The phases of patterns that were counted before, by what they depend on."""


def saved_by_head(name: str, config: Config, layer: int, heads: int) -> Saved:
    """Return what a head of a group saves in the phase of a training in which it saves most.

    Args:
        heads: of this group, in all sequences of a micro-batch.
    """
    N = config.data.length
    key = repr((name, config.model, config.routing, N, config.hardware, on_gpu(config)))
    if key not in saved_by_key:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            pattern = make_pattern(name, 1, config, layer).eval()
            saved_by_key[key] = phases_of(pattern, config)
    phases = [with_scores(phase, heads, on_gpu(config)) for phase in saved_by_key[key]]
    fullest = max(phases, key=lambda phase: phase.vectors + phase.others)
    recomputed = max(phase.recomputed for phase in phases)
    return fullest._replace(recomputed=recomputed)


def with_scores(saved: Saved, heads: int, gpu: bool) -> Saved:
    """Return what a head saves together with the scores of an index.

    Scores of all pairs are computed in pieces and again in the backward pass, or saved if they are
    few.

    Args:
        heads: of the group, in all sequences of a micro-batch.
    """
    if not saved.pairs:
        return saved
    pairs_of_all_heads = heads * saved.pairs
    most = MAX_SCORES_CPU
    if gpu:
        most = MAX_SCORES_GPU
    others = saved.others
    if pairs_of_all_heads <= MAX_SCORES_CPU:
        others += saved.scores
    recomputed = min(most, pairs_of_all_heads) * saved.score_recomputed
    return saved._replace(others=others, recomputed=recomputed)


def phases_of(pattern: Pattern, config: Config) -> list[Saved]:
    """Return what a pattern of one head saves in each phase of a training.

    An indexer reads everything while it warms up, and by an index later.
    """
    phases = [saved_by_pattern(pattern, config)]
    if isinstance(pattern, Indexer) and pattern.is_dense:
        pattern.set_steps(pattern.warmup)
        phases.append(saved_by_pattern(pattern, config))
    return phases


def saved_by_pattern(pattern: Pattern, config: Config) -> Saved:
    """Return what a pattern of one head saves."""
    gpu = on_gpu(config)
    size = head_size(config)
    reads = parts_of(pattern, config, gpu)
    if gpu:
        parts = saved_on_gpu(pattern, reads, config)
    else:
        parts = saved_on_cpu(pattern, reads, config)
    saved = added(parts)
    vectors = saved.vectors + vectors_of_pattern(pattern, config)
    return saved._replace(
        vectors=vectors * size,
        freed=saved.freed * size,
        views=saved.views * size,
        projection=saved.projection or reads_projection(pattern, config),
    )


def added(parts: list[Saved]) -> Saved:
    """Return what all parts save; they are computed, and computed again, one after the other."""
    return Saved(
        vectors=sum(part.vectors for part in parts),
        others=sum(part.others for part in parts),
        recomputed=max(part.recomputed for part in parts),
        projection=any(part.projection for part in parts),
        freed=sum(part.freed for part in parts),
        views=sum(part.views for part in parts),
        transient=max(part.transient for part in parts),
        pairs=max(part.pairs for part in parts),
        scores=max(part.scores for part in parts),
        score_recomputed=max(part.score_recomputed for part in parts),
    )


def vectors_of_pattern(pattern: Pattern, config: Config) -> float:
    """Return the bytes of vectors that a pattern saves itself, by column of a head."""
    N = config.data.length
    narrow = widths_of(config).narrow
    vectors = 0.0
    if isinstance(pattern, TopKeys) and config.routing.key_conv > 1:
        # What a convolution of keys reads, and its results.
        vectors += 2 * N * narrow
    if has_compressed_branch(pattern, config):
        # Both branches, and what gates them.
        vectors += 4 * N * narrow
    if isinstance(pattern, Indexer):
        # Its queries and keys.
        E = pattern.query_HDE.shape[-1]
        vectors += 2 * N * narrow * E / head_size(config)
    if norm_copies(pattern, config):
        tensors = 1
        if pattern.has_keys:
            tensors = 2
        vectors += tensors * N * WIDE
    return vectors


def has_compressed_branch(pattern: Pattern, config: Config) -> bool:
    """Return whether a pattern also reads compressed blocks."""
    return isinstance(pattern, Blocks) and config.routing.compressed


def normalises(pattern: Pattern) -> bool:
    """Return whether a pattern normalises queries and keys."""
    return isinstance(pattern, Routing | Random)


def norm_copies(pattern: Pattern, config: Config) -> bool:
    """Return whether the norm of queries and keys reads a wide copy of them.

    torch's does of narrow vectors; our kernel reads the projection in any type.
    """
    is_ours = on_gpu(config) and config.hardware.attention != "torch"
    return normalises(pattern) and widths_of(config).narrow < WIDE and not is_ours


def reads_projection(pattern: Pattern, config: Config) -> bool:
    """Return whether a pattern saves the product that makes queries, keys and values."""
    if normalises(pattern):
        return not norm_copies(pattern, config)
    return has_compressed_branch(pattern, config) or isinstance(pattern, Lsh | Indexer)


def saved_on_gpu(pattern: Pattern, reads: list[Reads], config: Config) -> list[Saved]:
    """Return what each part of what a head reads saves on a GPU, vectors by column."""
    all_saved = []
    for part_computed in computed(pattern, reads, config):
        part_reads = part_computed.problem.part
        is_first = part_reads is reads[0]
        narrow = widths_of(config).narrow
        saved = saved_by_engine(Part(part_computed, pattern, config, narrow, is_first))
        if saved is None:
            part = TorchPart(
                part_reads, pattern, config, combines(pattern, reads, config), is_first
            )
            saved = saved_by_part(part)
        all_saved.append(saved)
    return all_saved


def saved_on_cpu(pattern: Pattern, reads: list[Reads], config: Config) -> list[Saved]:
    """Return what each part of what a head reads saves on a CPU, vectors by column."""
    all_saved = []
    for part_reads in reads:
        is_first = part_reads is reads[0]
        part = TorchPart(part_reads, pattern, config, combines(pattern, reads, config), is_first)
        all_saved.append(saved_by_part(part))
    return all_saved


def combines(pattern: Pattern, reads: list[Reads], config: Config) -> bool:
    """Return whether outputs of lists are combined by their log-sums, as sinks need it, too."""
    return len(reads) > 1 or pattern.merge == "lse" or config.model.sinks


class TorchPart(NamedTuple):
    """A part of what the heads of a pattern read, by an engine that a CPU has."""

    reads: Reads
    pattern: Pattern
    config: Config
    combines: bool
    """Whether outputs of lists are combined by their log-sums."""
    is_first: bool
    """Whether this is the first of the parts, which share queries, keys and values."""

    @property
    def by_distance(self) -> bool:
        """Whether logits have terms by distance."""
        if self.config.model.positions in ("shaw", "xl"):
            return True
        return self.pattern.terms(head_size(self.config), None).by_distance

    @property
    def has_dropout(self) -> bool:
        """Whether attention weights have dropout."""
        return self.config.model.attention_dropout > 0

    @property
    def is_native(self) -> bool:
        """Whether our kernels for CPUs compute it."""
        if on_gpu(self.config) or self.by_distance or self.has_dropout:
            return False
        is_float32 = precision_on(self.config.hardware, gpu=False) == "fp32"
        wanted = native.wanted(self.config.hardware.attention, self.config.data.length)
        return wanted and is_float32

    @property
    def most_scores(self) -> int:
        """The most scores that are computed at once."""
        if on_gpu(self.config):
            return MAX_SCORES_GPU
        return MAX_SCORES_CPU


def saved_by_part(part: TorchPart) -> Saved:
    """Return what a part saves, vectors by column; see `rtx.attention.engine.attend`."""
    if isinstance(part.reads, IndexReads):
        return saved_by_index(part, part.reads)
    if part.is_native:
        return saved_by_native(part, part.reads)
    return saved_by_blocks(part, part.reads)


def saved_by_index(part: TorchPart, index: IndexReads) -> Saved:
    """Return what attention by an index saves: vectors and a row number for each key."""
    N = part.config.data.length
    wide, narrow = widths_of(part.config)
    saved = Saved(vectors=3 * N * narrow, others=INDEX * index.index_RK.numel())
    if part.is_native:
        return saved
    # The weight of a pair, and whether it is read.
    score_bytes = wide + 1
    if part.by_distance:
        score_bytes += INDEX + wide + 2
    if part.has_dropout:
        score_bytes += wide + 2
    scores = N * N
    if not on_gpu(part.config) and not index.both_sides:
        # A CPU computes scores in pieces of a quarter of the queries, with the keys up to the last
        # of them.
        scores = N * (N + whole_pieces(N, 4)) // 2
    copies = SCORE_COPIES + DISTANCE_COPIES / N * distances_of(part.config)
    return saved._replace(
        pairs=N * N,
        scores=score_bytes * scores,
        score_recomputed=wide * copies,
    )


def saved_by_native(part: TorchPart, ranges: RangeReads) -> Saved:
    """Return what our kernels for CPUs save."""
    N = part.config.data.length
    P = len(ranges.start_P)
    vectors = 0
    if part.is_first:
        # Normalised queries that serve as keys are saved once.
        vectors = 2 * N
        if part.pattern.has_keys or not normalises(part.pattern):
            vectors = 3 * N
    if part.combines:
        # Outputs are by member, and each has a share.
        vectors += 2 * P
    # Lists, and a log-sum and a factor for each query.
    others = (3 * INDEX + 8) * P
    if ranges.query is not ranges.key:
        others += INDEX * len(ranges.key.row_M)
    if ranges.holes is not None:
        others += INDEX * sum(tensor.numel() for tensor in ranges.holes)
    return Saved(vectors * widths_of(part.config).narrow, others)


class Slots(NamedTuple):
    """The slots of the blocks that are cut from lists."""

    queries: int
    keys: int
    pairs: int
    """Query slots times key slots of their block."""
    masks: int
    """Pairs of blocks that have a mask of their own."""
    shortest: int
    """Key slots of the block that has the fewest."""

    @property
    def gathered(self) -> int:
        """The number of queries, keys and values."""
        return self.queries + 2 * self.keys


def slots_of(blocks: Sequence[engine_blocks.FormBlocks]) -> Slots:
    """Return the slots of blocks."""
    masks = 0
    for block in blocks:
        # A mask that serves all blocks of a form is small.
        if block.mask is not None and block.has_masks:
            masks += block.mask.numel()
    return Slots(
        queries=sum(block.query_GQ.numel() for block in blocks),
        keys=sum(block.key_GK.numel() for block in blocks),
        pairs=sum(block.query_GQ.numel() * block.key_GK.shape[1] for block in blocks),
        masks=masks,
        shortest=min(block.key_GK.shape[1] for block in blocks),
    )


def saved_by_blocks(part: TorchPart, ranges: RangeReads) -> Saved:
    """Return what blocks that are cut from lists save, by torch's kernels or our softmax."""
    by_our_softmax = part.by_distance or part.combines
    if part.has_dropout and not on_gpu(part.config):
        by_our_softmax = True
    blocks = engine_blocks.cut(ranges, triangles=not by_our_softmax)
    if not blocks:
        # Nobody reads.
        return Saved(0, 0)
    slots = slots_of(blocks)
    N = part.config.data.length
    wide, narrow = widths_of(part.config)
    # The sum over lists saves what it adds, and the row numbers to which it adds.
    others = (INDEX + wide) * slots.queries
    if slots.queries != N or slots.keys != N:
        # Gathers save their row numbers.
        others += INDEX * slots.gathered
    piece = part.most_scores
    recomputed = 0.0
    if by_our_softmax:
        vectors = slots.gathered * narrow + slots.queries * wide
        others += INDEX * (slots.queries + slots.keys) + slots.masks
        recomputed = recomputed_scores(part, slots)
    else:
        vectors = slots.gathered * narrow + slots.queries * 2 * narrow
        # torch's kernels save masks as numbers that they add.
        others += narrow * slots.masks + 4 * slots.queries
        if slots.masks:
            piece = engine_blocks.MAX_MASK
    # Gathered vectors are freed piece by piece as their gradients come.
    share_freed = max(0.0, 1 - piece / (part.config.model.heads * slots.pairs))
    freed = max(0, slots.gathered - 3 * N) * narrow * share_freed
    return Saved(vectors, others, recomputed, freed=freed)


def recomputed_scores(part: TorchPart, slots: Slots) -> float:
    """Return the bytes of a piece of scores that our softmax computes again."""
    N = part.config.data.length
    scores = min(part.most_scores, N * (N + memory_slots(part.config.model)))
    rows = min(scores // slots.shortest, slots.queries * part.config.model.heads)
    by_distance = DISTANCE_COPIES * rows * distances_of(part.config)
    return widths_of(part.config).wide * (SCORE_COPIES * scores + by_distance)
