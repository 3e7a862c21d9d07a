"""Where a run computes: wishes against the machine, and against whoever started the process."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from rtx.config import Config, HardwareConfig, TrainerConfig
from rtx.errors import UserError
from rtx.training.hardware import Hardware, prepare_torch, resolve_hardware
from rtx.training.run_folder import environment

VARIABLES = (
    *(
        "RANK",
        "LOCAL_RANK",
        "RTX_PARENT",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TORCHELASTIC_RUN_ID",
    ),
    *("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NNODES"),
)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPU, and a process that nobody started."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def resolved(batch: int = 8, micro: int | None = None, **wishes: object) -> Hardware:
    wish = dataclasses.replace(HardwareConfig(), **wishes)  # type: ignore[arg-type]
    return resolve_hardware(Config(hardware=wish, trainer=TrainerConfig(batch_size=batch, micro_batch_size=micro)))


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (resolved().accelerator, resolved().world, resolved().distributed) == ("cpu", 1, False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert (resolved().accelerator, resolved().world) == ("gpu", 1)
    assert resolved(name="cpu").accelerator == "cpu"
    assert resolved(name="ddp").devices == 4
    with pytest.raises(UserError, match=r"hardware\.devices=8, but this machine has 4"):
        resolved(name="ddp", devices=8)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="finds no GPU"):
        resolved(name="gpu")
    with pytest.raises(UserError, match="tf32 needs a GPU"):
        resolved(precision="tf32")


def test_the_global_batch_is_cut_over_devices_and_passes() -> None:
    one, two = resolved(), resolved(name="ddp", devices=2)
    assert (one.micro_batch_size, one.accumulate) == (8, 1)
    assert (two.micro_batch_size, two.accumulate) == (4, 1)
    many = resolved(name="ddp", devices=2, micro=1)
    assert (many.micro_batch_size, many.accumulate) == (1, 4)
    with pytest.raises(UserError, match="must be a multiple"):
        resolved(name="ddp", devices=3)


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    hardware = resolved(name="ddp")
    assert (hardware.launcher, hardware.devices, hardware.nodes, hardware.rank) == ("torchrun", 2, 2, 3)
    with pytest.raises(UserError, match="torchrun started 4 processes, but hardware=cpu asks for 1"):
        resolved(name="cpu")
    with pytest.raises(UserError, match="torchrun started 4 processes"):
        resolved(name="ddp", devices=2, nodes=4, batch=16)


def test_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NNODES": "2"}.items():
        monkeypatch.setenv(name, value)
    hardware = resolved(name="ddp")
    assert (hardware.launcher, hardware.devices, hardware.nodes, hardware.rank) == ("srun", 2, 2, 2)
    monkeypatch.setenv("SLURM_NTASKS", "1")  # an interactive shell, or one task of a sweep
    assert resolved(name="cpu").launcher == "lightning"
    assert resolved(name="ddp", devices=2).rank == 0


def test_children_of_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RTX_PARENT", str(os.getppid()))
    assert resolved(name="ddp", devices=2).rank == 1
    for name, value in {"NODE_RANK": "2", "MASTER_ADDR": "host", "MASTER_PORT": "9000"}.items():
        monkeypatch.setenv(name, value)
    assert resolved(name="ddp", devices=2, nodes=4, batch=16).rank == 5


def test_machines_that_nobody_joins_need_to_know_where_to_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "host")
    with pytest.raises(
        UserError, match=r"hardware\.nodes=2 without torchrun or srun: .*not set: MASTER_PORT, NODE_RANK"
    ):
        resolved(name="fsdp", devices=2, nodes=2)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"NODE_RANK": "1"}, r"NODE_RANK=1: must be 0, by hardware\.nodes=1 .*; unset it if it is a leftover"),
        ({"NODE_RANK": "x"}, "NODE_RANK=x: must be 0, by"),
        ({"LOCAL_RANK": "1"}, "LOCAL_RANK=1: rtx sets it for processes that it starts itself, .*; unset it"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS=many: must be 1 or more"),
        ({"TORCHELASTIC_RUN_ID": "a"}, "WORLD_SIZE=: must be 1 or more"),
        ({"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2"}, "SLURM_PROCID=2: must be 0 to 1"),
    ],
)
def test_what_another_launcher_left_behind_is_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], told: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    name, devices = ("ddp", 2) if "SLURM_NTASKS" in variables else ("auto", None)
    with pytest.raises(UserError, match=told):
        resolved(name=name, devices=devices)


def test_where_to_meet_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [("NODE_RANK", "2", "0 to 1, by hardware"), ("MASTER_PORT", "65536", "1 to 65535")]
    for name, value, allowed in wrong:
        for right in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK"):
            monkeypatch.setenv(right, "1")
        monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"{name}={value}: must be {allowed}"):
            resolved(name="ddp", devices=1, nodes=2)


def test_a_local_rank_of_0_would_keep_lightning_from_starting_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert resolved(name="ddp", devices=1).rank == 0
    with pytest.raises(UserError, match="LOCAL_RANK=0: "):
        resolved(name="ddp", devices=2)


def test_parameters_are_shared_out_by_fsdp_alone() -> None:
    found = {name: resolved(name=name) for name in ("cpu", "ddp", "fsdp")}
    assert [(hardware.distributed, hardware.sharded) for hardware in found.values()] == [
        *[(False, False), (True, False), (True, True)],
    ]


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    config = Config(hardware=HardwareConfig(compile=True))
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler"):
        prepare_torch(config, resolved())


@pytest.mark.parametrize(
    ("given", "threads"),
    [((2, None, {}), 3), ((4, None, {}), 1), ((2, 5, {}), 5), ((2, None, {"OMP_NUM_THREADS": "1"}), 2)],
)
def test_the_threads_of_each_process_are_those_on_record_before_lightning_starts_it(
    monkeypatch: pytest.MonkeyPatch, given: tuple[int, int | None, dict[str, str]], threads: int
) -> None:
    devices, wished, variables = given
    monkeypatch.setattr("rtx.training.hardware.cores", lambda: 7)
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.delenv("OMP_NUM_THREADS")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    before = torch.get_num_threads()
    torch.set_num_threads(2)  # torch's own choice
    try:
        wish = HardwareConfig(name="ddp", devices=devices, threads=wished)
        prepare_torch(Config(hardware=wish), resolved(name="ddp", devices=devices))
        recorded = environment({})["threads"]
        assert recorded == threads == torch.get_num_threads()
        assert os.environ["OMP_NUM_THREADS"] == variables.get("OMP_NUM_THREADS", str(threads))  # of the others
    finally:
        torch.set_num_threads(before)
