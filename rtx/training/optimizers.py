"""Optimizers, the learning rate of each step, and the clipping of gradients."""

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from rtx.model.block import Block
from rtx.settings.schema import Config, OptimizerConfig
from rtx.sharded import whole
from rtx.training.adafactor import Adafactor
from rtx.training.muon import MuonWithAdamW


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer of a configuration; its learning rate must be set before each step.

    The weights of linear layers decay, and `output_VS` where it is not the embedding table; all
    else does not. With muon, AdamW updates what `hidden_matrices` does not have. Adafactor is
    torch's (`rtx.training.adafactor`). Two things differ from Shazeer and Stern (2018): the step
    size is min(lr, 1 / sqrt(step)), and means of squares are at least 1e-18, where they add 1e-30
    to each square. torch's default of 1e-7 would hide the gradients of large models.
    """
    *matrices, decaying, exempt = parameter_groups(model, config.name)
    groups = [
        {"params": list(decaying.values()), "weight_decay": config.weight_decay},
        {"params": list(exempt.values()), "weight_decay": 0.0},
    ]
    if config.name == "adafactor":
        return Adafactor(groups, lr=config.lr, beta2_decay=-0.8, eps=(1e-18, 1e-3), d=1.0)
    betas = (config.beta1, config.beta2)
    if config.name == "muon":
        return MuonWithAdamW(
            list(matrices[0].values()),
            groups,
            lr=config.lr,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            betas=betas,
        )
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    return kinds[config.name](groups, lr=config.lr, betas=betas, fused=True)


def parameter_groups(model: nn.Module, optimizer: str) -> list[dict[str, nn.Parameter]]:
    """Return the parameters of each group of an optimizer, by their names, in the group's order.

    The last two groups are those whose weights decay, and those whose weights do not; muon has the
    hidden matrices in a group before them.
    """
    decaying, exempt = decaying_and_exempt(model)
    if optimizer != "muon":
        return [decaying, exempt]
    matrices = hidden_matrices(model)
    others = {name: weight for name, weight in decaying.items() if name not in matrices}
    return [matrices, others, exempt]


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the matrices of linear layers in the blocks of a model, by their names.

    Queries, keys and values are one matrix, and so are both halves of a gated feed-forward layer.
    """
    matrices = {}
    for block_name, block in model.named_modules():
        if not isinstance(block, Block):
            continue
        for name, module in block.named_modules(prefix=block_name):
            if isinstance(module, nn.Linear):
                matrices[f"{name}.weight"] = module.weight
    return matrices


def decaying_and_exempt(
    model: nn.Module,
) -> tuple[dict[str, nn.Parameter], dict[str, nn.Parameter]]:
    """Return the parameters whose weights decay, and the others, by their names."""
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    decaying: dict[str, nn.Parameter] = {}
    exempt: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        is_matrix = id(parameter) in linear or name.rpartition(".")[2] == "output_VS"
        group = decaying if is_matrix else exempt
        group[name] = parameter
    return decaying, exempt


def learning_rate(config: Config, step: int) -> float:
    """Return the learning rate of step `step`, from 1 on.

    It rises linearly to `optimizer.lr` in `optimizer.warmup` steps. Then it is
    peak * sqrt(warmup / step) (rsqrt, as in the paper), a cosine that ends at a tenth of the peak
    at `trainer.steps`, or the peak throughout (constant). A pure function of the step has no state
    that a checkpoint would have to hold.
    """
    assert step >= 1
    peak = config.optimizer.lr
    warmup = config.optimizer.warmup
    if step < warmup:
        return peak * step / warmup
    if config.optimizer.schedule == "constant":
        return peak
    if config.optimizer.schedule == "rsqrt":
        return peak * math.sqrt(warmup / step)
    share = min(1.0, (step - warmup) / max(1, config.trainer.steps - warmup))
    return peak * (0.1 + 0.45 * (1.0 + math.cos(math.pi * share)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def check_moments(optimizer: torch.optim.Optimizer) -> None:
    """Raise ValueError for a moment of another shape or type than its weight.

    A fused step would write outside such a tensor.
    """
    for weight, state in optimizer.state.items():
        shapes = moment_shapes(optimizer, weight)
        for name in shapes.keys() - state.keys():
            raise ValueError(f"a weight has no {name}")
        for name, moment in state.items():
            if not torch.is_tensor(moment) or moment.shape != shapes.get(name):
                raise ValueError(f"{name} is not like its weight, {[*weight.shape]}")
            if name != "step" and moment.dtype != weight.dtype:
                raise ValueError(f"{name} is not like its weight, of {weight.dtype}")


def moment_shapes(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, torch.Size]:
    """Return the shapes of the state of a weight in an optimizer, by name."""
    shape = weight.shape
    if isinstance(optimizer, MuonWithAdamW) and optimizer.has_matrix(weight):
        return {"momentum_buffer": shape}
    step = {"step": torch.Size([])}
    if not isinstance(optimizer, Adafactor):
        return {**step, "exp_avg": shape, "exp_avg_sq": shape}
    if len(shape) <= 1:
        return {**step, "variance": shape}
    rows = torch.Size([*shape[:-1], 1])
    columns = torch.Size([*shape[:-2], 1, shape[-1]])
    return {**step, "row_var": rows, "col_var": columns}


def clip_gradients(model: nn.Module, limit: float | None) -> Tensor:
    """Scale the whole gradient down to the norm `limit`, and return the norm that it had, a scalar.

    Without a limit (None or 0) it is only measured.
    """
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    norm = whole(get_total_norm(gradients))
    if limit:
        clip_grads_with_norm_(model.parameters(), limit, norm)
    return norm
