"""The state of each rank in checkpoints: random generators, sums of losses, recurrent memories."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from rtx.model.memory import Memory
from rtx.training.checkpoint import resuming_from
from rtx.training.module import TrainingModule
from rtx.training.session import Session
from rtx.training.start import seed_everything


class RankStates(Callback):
    """Saves the state of each rank in checkpoints, and restores it."""

    def __init__(self, session: Session, module: TrainingModule) -> None:
        self.session = session
        self.module = module
        self.restored: list[dict[str, Any]] = []
        """The state of each rank in the checkpoint; empty without a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all ranks; all ranks must call this."""
        streams = {name: stream.get_rng_state() for name, stream in random_streams().items()}
        state = {
            "rng": streams,
            "sums": self.module.sums.tolist(),
            "memory": packed(self.module.memories),
        }
        return {"ranks": self.session.ranks.gather(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not isinstance(state_dict["ranks"], list):
            raise TypeError("its random streams")
        self.restored = state_dict["ranks"]

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        if self.session.start:
            with resuming_from(self.session.start):
                self.restore(trainer.global_step)
        else:
            self.seed_anew(trainer.global_step)

    def restore(self, step: int) -> None:
        """Restore the state of this rank.

        If the checkpoint is of another number of ranks, only its share of the memories is restored.
        """
        self.restore_memories()
        ranks = self.session.ranks
        if len(self.restored) != ranks.world:
            self.seed_anew(step)
            return
        state = self.restored[ranks.rank]
        sums = torch.tensor(state["sums"], dtype=torch.float64)
        self.module.sums = sums.view_as(self.module.sums)
        for name, stream in random_streams().items():
            if name in state["rng"]:
                stream.set_rng_state(state["rng"][name])

    def seed_anew(self, step: int) -> None:
        """Seed the random generators of this rank by the step, without a state of them."""
        ranks = self.session.ranks
        seed_everything(self.session.config.seed, 1 + ranks.rank + ranks.world * step)

    def restore_memories(self) -> None:
        """Restore this rank's share of the memories, for any number of ranks and micro-batches."""
        stored = [state["memory"] for state in self.restored]
        # Of all ranks in the order of the batch: [micro-batches, ranks, B, ...] -> [streams, ...].
        streams = [torch.stack(parts, dim=1).flatten(0, 2) for parts in zip(*stored, strict=True)]
        if not streams:
            return
        ranks = self.session.ranks
        parts = self.session.hardware.accumulate
        size = len(streams[0]) // (parts * ranks.world)
        for part in range(parts):
            first = (part * ranks.world + ranks.rank) * size
            share = [stream[first : first + size] for stream in streams]
            memory = unpacked([each.to(self.module.device) for each in share], self.module)
            self.module.memories.append(memory)


def random_streams() -> dict[str, Any]:
    """Return the module with the random generator of each kind of device."""
    streams: dict[str, Any] = {"torch": torch}
    if torch.cuda.is_available():
        streams["cuda"] = torch.cuda
    return streams


def packed(memories: Sequence[Memory]) -> list[Tensor]:
    """Return the tensors of memories, last tokens and states of layers: `[memories, B, ...]`."""
    tensors = [[memory.last_B, *memory.layers, *memory.compressed] for memory in memories]
    return [torch.stack(parts).cpu() for parts in zip(*tensors, strict=True)]  # type: ignore[arg-type]


def unpacked(tensors: Sequence[Tensor], module: TrainingModule) -> Memory:
    """Return the memory of one micro-batch from its tensors, in the order of `packed`."""
    model = module.config.model
    memory = Memory(model)
    memory.last_B = tensors[0]
    memory.layers = list(tensors[1 : 1 + model.layers])
    memory.compressed = list(tensors[1 + model.layers :])
    return memory
