"""How Lightning spreads a run over processes: the whole model on each (ddp), or its parameters shared out (fsdp)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.optim import Optimizer

from rtx.training.children import Launcher
from rtx.training.optimizers import SharedAdafactor
from rtx.training.sharding import shared_as, whole


class WatchedChildren:
    """A strategy whose processes, where Lightning starts them, are watched by us."""

    def _configure_launcher(self) -> None:
        super()._configure_launcher()  # type: ignore[misc]
        if getattr(self, "_launcher", None) is not None:
            self._launcher = Launcher(self.cluster_environment, self.num_processes, self.num_nodes)  # type: ignore[attr-defined]


class Replicated(WatchedChildren, DDPStrategy):
    """hardware=ddp: every process has the model, gradients are averaged."""

    def __init__(self) -> None:
        super().__init__(broadcast_buffers=False)  # centroids are kept equal by after_step


class Shared(WatchedChildren, ModelParallelStrategy):
    """hardware=fsdp: parameters, gradients and optimizer state are shared out among the processes (`sharding.shard`).

    A checkpoint is that of any other run: whole tensors in the layout of torch's own optimizers, gathered on the first
    process for one file. Lightning's own layout names parameters where torch's numbers them, and its loading wants its
    own files.
    """

    def __init__(self, world: int) -> None:
        super().__init__(data_parallel_size=world, tensor_parallel_size=1, save_distributed_checkpoint=False)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the whole weights and buffers on the first process, nothing on the others; all call it."""
        assert self.lightning_module is not None
        return self.gathered(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the optimizer's whole state on the first process, its options alone on the others; all call it."""
        state = optimizer.state_dict()
        kept = {number: self.gathered(values) for number, values in state["state"].items()}
        return {"state": kept, "param_groups": state["param_groups"]}

    def gathered(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Gather tensors one after the other; only the first process keeps them, in CPU memory."""
        kept = {}
        for name, value in values.items():
            everything = whole(value)
            if self.is_global_zero:
                kept[name] = value if everything is value else everything.cpu()
        return kept

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole weights, which every process has read: each takes its part."""
        assert self.lightning_module is not None
        own = self.lightning_module.state_dict()
        parts = {name: shared_as(value, own[name]) for name, value in checkpoint["state_dict"].items() if name in own}
        self.lightning_module.load_state_dict({**checkpoint["state_dict"], **parts}, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load a whole optimizer state, which every process has read: each takes its part."""
        (optimizer,), (state,) = self.optimizers, checkpoint["optimizer_states"]
        if not isinstance(optimizer, SharedAdafactor):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            parts = {
                number: {
                    name: shared_as(value, parameters[number]) if value.shape == parameters[number].shape else value
                    for name, value in values.items()
                }
                for number, values in state["state"].items()
            }
            state = {**state, "state": parts}
        optimizer.load_state_dict(state)
