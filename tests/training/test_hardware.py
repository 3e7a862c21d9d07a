"""Where a run computes: wishes against the machine, its memory, and whoever started the process."""

import ctypes
import dataclasses
import errno
import importlib.util
import os
from pathlib import Path
from typing import Literal

import pytest
import torch

from rtx.errors import UserError
from rtx.machine import out_of_memory
from rtx.settings.compose import compose
from rtx.settings.schema import Config, HardwareConfig, ModelConfig, TrainerConfig
from rtx.training.hardware import (
    Hardware,
    compiles,
    device_memory,
    prepare_torch,
    records,
    resolve_hardware,
)
from tests.helpers.small_runs import Workshop

VARIABLES = ("RANK", "LOCAL_RANK", "RTX_PARENT", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK")
TORCHRUN = {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "3"}
SRUN = {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NNODES": "2"}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPU, and a process that nobody started."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in (*VARIABLES, *TORCHRUN, *SRUN):
        monkeypatch.delenv(name, raising=False)


def resolved(batch: int = 8, micro: int | Literal["auto"] = "auto", **wishes: object) -> Hardware:
    wish = dataclasses.replace(HardwareConfig(), **wishes)  # type: ignore[arg-type]
    return resolve_hardware(
        Config(hardware=wish, trainer=TrainerConfig(batch_size=batch, micro_batch_size=micro))
    )


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [resolved(name=name) for name in ("cpu", "ddp", "fsdp")]
    assert [(one.distributed, one.sharded) for one in found] == [
        (False, False),
        (True, False),
        (True, True),
    ]
    assert (resolved().accelerator, resolved().world, resolved().precision) == ("cpu", 1, "fp32")
    assert resolved(precision="fp64").precision == "fp64"
    for key, value, told in (
        ("name", "gpu", "finds no GPU"),
        ("precision", "tf32", "tf32 needs a GPU"),
    ):
        with pytest.raises(UserError, match=told):
            resolved(**{key: value})  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert (resolved().accelerator, resolved().world, resolved(name="cpu").accelerator) == (
        "gpu",
        1,
        "cpu",
    )
    precisions = [resolved(name=name).precision for name in ("auto", "cpu", "gpu", "fsdp")]
    assert (
        precisions == ["bf16", "fp32", "bf16", "bf16"]
        and resolved(precision="fp32").precision == "fp32"
    )
    assert resolved(name="ddp").devices == 4
    with pytest.raises(UserError, match=r"hardware\.devices=8, but this machine has 4"):
        resolved(name="ddp", devices=8)


def test_a_gpu_compiles_and_has_its_batches_prepared_where_nobody_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (resolved().workers, resolved().compile) == (0, False)
    assert (resolved(workers=3).workers, resolved(compile=True).compile) == (3, True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for able in (True, False):
        monkeypatch.setattr("rtx.training.hardware.has_gpu_compiler", lambda able=able: able)
        assert (resolved().workers, resolved().compile) == (2, able)
        assert not resolved(compile=False).compile
        assert not resolved(name="fsdp").compile
        assert (resolved(name="cpu").workers, resolved(name="cpu").compile) == (0, False)
        assert resolved().graphs and not resolved(graphs=False).graphs
        assert not any(resolved(name=name).graphs for name in ("cpu", "ddp", "fsdp"))
    memory = Config(model=dataclasses.replace(ModelConfig(), memory=8))
    assert not compiles(memory, gpu=True) and not records(memory, gpu=True)
    with pytest.raises(UserError, match="needs Triton and a C compiler"):
        prepare_torch(Config(hardware=HardwareConfig(compile=True)), resolved(compile=True))


def test_what_needs_a_gpu_or_a_package_that_is_not_here_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match=r"hardware\.graphs=true needs a GPU"):
        resolved(graphs=True)
    with pytest.raises(UserError, match=r"hardware\.loss=liger needs a GPU; take"):
        resolved(loss="liger")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert resolved(graphs=True).accelerator == "gpu"
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "liger_kernel" else found(name)
    )
    with pytest.raises(
        UserError,
        match=r"hardware\.loss=liger needs Liger-Kernel: pip install 'rtx\[liger\]'; take",
    ):
        resolved(loss="liger")


@pytest.mark.parametrize(("launcher", "rank"), [("torchrun", 3), ("srun", 2)])
def test_what_a_launcher_started_is_what_runs(
    monkeypatch: pytest.MonkeyPatch, launcher: str, rank: int
) -> None:
    for name, value in {"torchrun": TORCHRUN, "srun": SRUN}[launcher].items():
        monkeypatch.setenv(name, value)
    for wish in ({}, {"nodes": 2}, {"devices": 2}):
        hardware = resolved(name="ddp", **wish)
        assert (hardware.launcher, hardware.devices, hardware.nodes, hardware.rank) == (
            launcher,
            2,
            2,
            rank,
        )
    with pytest.raises(
        UserError, match=f"{launcher} started 4 processes, but hardware=cpu asks for 1"
    ):
        resolved(name="cpu")
    with pytest.raises(UserError, match=f"{launcher} started 4 processes"):
        resolved(name="ddp", devices=2, nodes=4, batch=16)


def test_one_task_of_slurm_and_leftovers_of_a_launcher_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {**SRUN, "SLURM_NTASKS": "1", "LOCAL_RANK": "1", "NODE_RANK": "x"}.items():
        monkeypatch.setenv(name, value)
    assert resolved(name="cpu").launcher == "rtx"
    assert resolved(name="ddp", devices=2).rank == 0


def test_several_machines_need_a_launcher_and_compiling_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(
        UserError, match=r"hardware\.nodes=2: start the run on all machines by torchrun or srun"
    ):
        resolved(name="fsdp", devices=2, nodes=2)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        prepare_torch(Config(hardware=HardwareConfig(compile=True)), resolved())


@pytest.mark.parametrize(
    ("wished", "given", "threads"), [(None, "", 3), (5, "", 5), (None, "1", None)]
)
def test_processes_of_one_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, wished: int | None, given: str, threads: int | None
) -> None:
    monkeypatch.setattr("rtx.training.hardware.cores", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", (taken := []).append)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    if not given:
        monkeypatch.delenv("OMP_NUM_THREADS")
    wish = HardwareConfig(name="ddp", devices=2, threads=wished)
    prepare_torch(Config(hardware=wish), resolved(name="ddp", devices=2))
    assert taken == ([threads] if threads else [])  # else it is torch's own choice
    assert os.environ["OMP_NUM_THREADS"] == (
        given or str(threads)
    )  # of the processes that rtx starts


def test_a_refusal_of_memory_is_known_and_nothing_else_taken_for_it() -> None:
    refusals = [
        torch.OutOfMemoryError("CUDA out of memory."),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ]
    others = [
        RuntimeError("mat1 and mat2 shapes"),
        OSError(errno.ENOSPC, "No space left"),
        ValueError("out of memory"),
    ]
    assert all(map(out_of_memory, refusals)) and not any(map(out_of_memory, others))


def test_the_processes_of_a_run_share_the_memory_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = device_memory(compose(["hardware=cpu"])) or 0
    assert whole > 2**28
    assert (
        device_memory(compose(["hardware=ddp", "hardware.devices=2", "trainer.batch_size=2"]))
        == whole // 2
    )
    assert (
        device_memory(compose(["hardware=ddp", "trainer.batch_size=4"]), processes=4) == whole // 4
    )
    assert device_memory(compose(["hardware=gpu"])) is None
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("rtx.machine.CONTAINER_LIMIT", limit)
    limit.write_text("268435456\n")
    assert device_memory(compose(["hardware=cpu"])) == 2**28
    limit.write_text("max\n")
    assert (device_memory(compose(["hardware=cpu"])) or 0) >= whole


PROGRAM = """
import resource
from rtx.training.hardware import keep_freed_memory
import torch

keep_freed_memory()
for turn in range(9):
    parts = [torch.ones(2**22) for _ in range(4)]
    if turn == 6:  # by then the places have settled
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    del parts
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_freed_memory_is_kept(workshop: Workshop) -> None:
    process = workshop.fork(workshop.folder / "freed", inside=PROGRAM)
    process.wait()
    assert int(process.log.read_text().splitlines()[0]) < 64
