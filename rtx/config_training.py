"""The part of the schema that says where a run trains and how; as in `rtx/config.py`, docstrings become help."""

from __future__ import annotations

from dataclasses import dataclass

from rtx.limits import one_of, ranged

SPREAD = ("ddp", "fsdp")
"""Values of hardware.name that run one process per device."""


@dataclass
class HardwareConfig:
    """Where and with what arithmetic the run computes."""

    name: str = one_of("auto", "cpu", "gpu", "ddp", "fsdp")
    """auto: a GPU if there is one; ddp: a process per device; fsdp: weights and optimizer shared out, too."""
    devices: int | None = ranged(None, low=1)
    """Processes on each machine; unset: one, or with ddp and fsdp those that a launcher started, else all GPUs."""
    nodes: int = ranged(1, low=1)
    """Machines that share the run."""
    precision: str = one_of("fp32", "bf16", "tf32", "fp64")
    """Arithmetic: fp32, bf16 (mixed), tf32 (GPU only), fp64 (for tests)."""
    attention: str = one_of("auto", "torch", "native", "flex")
    """Who attends: torch's kernels, a C++ kernel compiled here (CPU, float32), FlexAttention (GPU); auto: native from
    1,024 positions on where it can run, else torch."""
    compile: bool = False
    """Compile the model with torch.compile (needs a C++ compiler on a CPU)."""
    deterministic: bool = False
    """Use only deterministic GPU kernels, so that the same seed gives the same bits."""
    threads: int | None = ranged(None, low=1, high=1024)
    """CPU threads of each process; unset: torch's own choice, or its share of the cores. Bits depend on it."""
    workers: int = ranged(0, low=0)
    """Processes that prepare batches ahead; 0: in the training process."""


@dataclass
class TrainerConfig:
    """The training loop, counted in optimizer steps."""

    steps: int = ranged(200_000, low=1)
    """Optimizer steps to train; unset: optimizer.steps."""
    max_minutes: float | None = ranged(None, above=0.0)
    """Stop, and save, after this many minutes of training if the steps are not done by then."""
    batch_size: int = ranged(8, low=1)
    """Sequences per optimizer step, over all devices and micro-batches."""
    micro_batch_size: int | None = ranged(None, low=1)
    """Sequences per device and forward pass; unset: batch_size / devices (no accumulation)."""
    clip: float = ranged(1.0, low=0.0)
    """Largest norm of the whole gradient; 0: no clipping."""
    val_every: int = ranged(250, low=1)
    """Steps between validations; the last step is always validated."""
    val_windows: int | None = ranged(64, low=1)
    """Windows scored in a validation during training (the same ones every time); unset: the whole split."""
    checkpoint_every: int = ranged(250, low=1)
    """Steps between checkpoints; one is also written at the end and on a signal."""
    checkpoint_minutes: float | None = ranged(None, above=0.0)
    """Minutes after which a checkpoint is due, if no step of checkpoint_every comes before; unset: by steps alone."""
    keep_checkpoints: int = ranged(2, low=1, high=10_000)
    """Whole checkpoints to keep: last.ckpt, previous.ckpt, then step_<step>.ckpt (best.ckpt is one more)."""
    log_every: int = ranged(10, low=1)
    """Steps between rows in metrics.jsonl."""
