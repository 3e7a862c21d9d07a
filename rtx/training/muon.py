"""Muon for the matrices of the blocks, and AdamW for all other weights, as one optimizer.

torch's Muon takes matrices alone. Its documentation names AdamW for embeddings, biases and other
vectors. Lightning counts the steps of every optimizer, so a run has one that holds both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Options = Mapping[str, Any]


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's Muon and AdamW, whose groups and states are those of this optimizer.

    The updates of Muon are scaled to the size of AdamW's (Liu et al. 2025, arXiv 2502.16982), so
    both take the same learning rate and weight decay.

    Args:
        matrices: the weights that Muon updates, of two dimensions each.
        groups: the parameter groups of AdamW.
        momentum: of Muon.
        options: of AdamW; Muon takes `lr` and `weight_decay` of them.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        groups: Sequence[Options],
        *,
        lr: float,
        weight_decay: float,
        momentum: float,
        betas: tuple[float, float],
    ) -> None:
        self.muon = torch.optim.Muon(
            [{"params": [*matrices]}],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        self.adamw = torch.optim.AdamW([dict(group) for group in groups], lr, betas, fused=True)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})
        self.share_groups()

    def share_groups(self) -> None:
        """Let both optimizers read and change the groups and the states of this one."""
        self.muon.param_groups = self.param_groups[:1]
        self.adamw.param_groups = self.param_groups[1:]
        self.muon.state = self.state
        self.adamw.state = self.state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set groups and states, which `load_state_dict` replaces by new objects."""
        super().__setstate__(state)
        self.share_groups()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all weights that have a gradient; return what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.muon.step()
        self.adamw.step()
        return loss

    def has_matrix(self, weight: Tensor) -> bool:
        """Return whether Muon updates a weight."""
        return any(weight is matrix for matrix in self.param_groups[0]["params"])
