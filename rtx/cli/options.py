"""The options of each command, as dataclasses: type, range and docstring of each.

No torch, no Hydra, no YAML.
"""

from dataclasses import dataclass
from typing import Literal

from rtx.settings.fields import LARGEST, POSITIONS, WINDOWS
from rtx.settings.fields import key as option


@dataclass(kw_only=True)
class RunOptions:
    checkpoint: Literal["best", "last"] = "best"
    """Checkpoint of the run: of the best validation, or the last."""


@dataclass
class EvalOptions(RunOptions):
    split: Literal["valid", "test", "train"] = "valid"
    """Part of the data to score."""
    mode: Literal["parallel", "streaming"] = "parallel"
    """parallel: one pass over each window (teacher-forced); streaming: every decision from the
    prefix alone.
    """
    stride: int | None = option(None, low=1, high=POSITIONS)
    """Units by which windows advance; unset: N (65,536 with a memory). Smaller gives more context,
    at more cost.
    """
    length: str | None = None
    """Units N of a window; unset: the run's data.length. Several, such as 2048,4096,8192, make a
    table. What reads as many keys as N in the run does so at each length.
    """
    limit: int | None = option(None, low=1, high=WINDOWS)
    """Score a seeded sample of this many windows only; the protocol says so."""
    batch_size: int | None = option(None, low=1, high=2**20)
    """Windows scored at once; unset: as many as make 16,384 units."""
    memory: int | None = option(None, low=0, high=POSITIONS)
    """Units of memory (model.base=recurrent; data.length=N says how many make a segment); unset:
    the run's.
    """
    clamp: int | None = option(None, low=1, high=POSITIONS)
    """Largest distance told apart (model.positions=xl); unset: the run's."""
    same_length: bool = False
    """Let every position read as many keys, the memory's number (model.base=recurrent)."""
    protocol: Literal["whole", "released"] = "whole"
    """whole: every unit of the split once; released: the text as the paper's released code reads
    it, parts left out.
    """
    ablate: Literal["none", "routing", "local", "random"] = "none"
    """Score without routing: its heads' outputs zero (routing), their keys the last W (local), or
    random members.
    """


@dataclass
class SampleOptions(RunOptions):
    length: int | None = option(None, low=1, high=2**30)
    """Units to generate; unset: 1,000 of text, a whole image of N."""
    temperature: float = option(1.0, low=0.0, high=LARGEST)
    """Divides the logits; 0: always the most likely unit."""
    top_k: int | None = option(None, low=1, high=2**30)
    """Draw from this many most likely units only."""
    top_p: float | None = option(None, above=0.0, high=1.0)
    """Draw from the most likely units that hold this share of the probability (nucleus)."""
    prompt: str = ""
    """Text to continue."""
    seed: int = option(0, low=0, high=2**53)
    """Seed of the draw."""


@dataclass
class AnalyzeOptions(RunOptions):
    split: Literal["valid", "test", "train"] = "valid"
    """Part of the data to take sequences from."""
    seed: int = option(0, low=0, high=2**31 - 1)
    """Seed of what is drawn: the same for every run."""


@dataclass
class AuditOptions(AnalyzeOptions):
    sequences: int = option(2, low=1, high=2**20)
    """Sequences whose future is changed."""
    prefixes: int = option(24, low=1, high=2**20)
    """Prefix lengths behind which everything is changed, one after the other."""
    tolerance: float = option(1e-9, low=0.0, high=LARGEST)
    """Relative change from which on an output counts as moved."""
    windows: int = option(32, low=1, high=2**20)
    """Windows of a run's data that are priced."""
    positions: int = option(32, low=1, high=POSITIONS)
    """Positions scored in each window: each is a run of the model on its prefix alone."""


@dataclass
class DivergenceOptions(AnalyzeOptions):
    sequences: int = option(1, low=1, high=2**20)
    """Sequences read; draws take them in turn."""
    draws: int = option(10, low=1, high=10_000)
    """Pairs of heads drawn for each layer and kind of pair."""


@dataclass
class PatternsOptions(AnalyzeOptions):
    layer: int | None = option(None, low=0, high=10_000)
    """Layer to draw, 0 the lowest; unset: the topmost."""


@dataclass
class ContextOptions(AnalyzeOptions):
    windows: int = option(64, low=1, high=2**20)
    """Windows scored."""
    mode: Literal["parallel", "streaming"] = "parallel"
    """parallel: one pass over each window (teacher-forced); streaming: every decision from the
    prefix alone.
    """


@dataclass
class CoverageOptions(AnalyzeOptions):
    windows: int = option(8, low=1, high=2**20)
    """Windows scored."""
    window: int | None = option(None, low=0, high=POSITIONS)
    """Keys, the own included, that local heads read anyhow; unset: the run's model.window; 0: none,
    all keys count.
    """
    keys: int | None = option(None, low=1, high=POSITIONS)
    """Keys at which selections are compared (not indexer, which must train); unset: the run's
    routing.window.
    """
    block: int | None = option(None, low=1, high=POSITIONS)
    """Positions of a block (blocks, blocks_random), at most its keys; unset: the run's
    routing.block.
    """
    steps: int = option(50, low=1, high=10**9)
    """Training batches that centroids and thresholds are fitted to, the model frozen."""


@dataclass
class PretrainedOptions:
    model: str = ""
    """Model of Hugging Face transformers: an id of the hub, a folder, or a .gguf file."""
    length: int = option(2048, low=16, high=2**20)
    """Tokens of a window (N), of the model's tokenizer."""
    windows: int = option(4, low=1, high=10_000)
    """Windows scored, evenly from the second half of the text."""
    window: int = option(64, low=1, high=POSITIONS)
    """Last keys that every head reads, its own position's included."""
    sinks: int = option(4, low=0, high=POSITIONS)
    """First keys that every head reads."""
    selection: str = "exact,probed,causal,blocks,lsh,random"
    """Selections of further keys, separated by commas: exact, probed, causal, nearest, topk,
    blocks, blocks_random, lsh, random, drawn.
    """
    keys: str = "32,64,128"
    """Keys that a selection may choose for a query, separated by commas; each is tried."""
    per: str = "head"
    """Who chooses: every query head, or all of one key-value head together (group); head,group
    tries both.
    """
    rotary: str = "after"
    """Whether queries and keys are compared after or before their rotary angles; after,before tries
    both.
    """
    dense_layers: str = "0"
    """First layers that stay dense; 0,3 tries both."""
    clusters: int | None = option(None, low=1, high=POSITIONS)
    """Clusters of a head; unset: 128 for probed, else length / keys."""
    candidates: int | None = option(None, low=1, high=POSITIONS)
    """Keys that probed compares with a query at least; unset: four times its keys."""
    block: int = option(16, low=1, high=POSITIONS)
    """Positions of a block (blocks, blocks_random), at most its keys."""
    rounds: int = option(4, low=1, high=1_000)
    """Hash rounds (lsh)."""
    buckets: int = option(32, low=2, high=POSITIONS)
    """Hash values of a round (lsh), an even number."""
    fit: str | None = None
    """Text file that centroids are fitted to; unset: the first half of the text."""
    fit_windows: int = option(3, low=1, high=1_000)
    """Windows that centroids are fitted to."""
    fit_steps: int = option(10, low=1, high=10_000)
    """How often centroids move when they are fitted."""
    seed: int = option(0, low=0, high=2**31 - 1)
    """Seed of what is drawn."""


@dataclass
class ReportOptions:
    output: str | None = None
    """Folder to write report.{md,csv,tex,html} to; unset: report/ in the first, with the names of
    others.
    """


@dataclass
class ExportOptions(RunOptions):
    format: Literal["rtx", "hf"] = "rtx"
    """rtx: a folder for rtx eval, rtx sample and rtx.load; hf: the same folder loads with
    AutoModelForCausalLM of Hugging Face transformers, too.
    """
    output: str | None = None
    """Folder to write to; unset: export/ in the run's folder, hf/ with format=hf."""


@dataclass
class PlanOptions:
    memory: float | None = option(None, above=0.0, high=1e6)
    """GiB of the GPU (with hardware=cpu: of the machine) to plan for; unset: usual GPUs and this
    machine.
    """


@dataclass
class SweepOptions:
    parallel: int | None = option(None, low=1, high=1_000)
    """Cells side by side; unset: one after the other, or with hardware=slurm all of them, as the
    queue takes them.
    """
    retry: bool = False
    """Run failed cells again, from their checkpoint if there is one; otherwise they are reported as
    they failed.
    """


KEY_OPTIONS = {
    "length": "data.length",
    "memory": "model.memory",
    "clamp": "model.clamp",
    "same_length": "model.same_length",
}
"""Options of rtx eval that change a key of the run's configuration."""
