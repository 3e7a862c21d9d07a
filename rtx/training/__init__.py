"""Training: the optimizer step, its callbacks, optimizers, checkpoints and exact resumption."""
