"""The training room: the loop, optimizers, checkpoints and exact resume, progress, signals and the run's records."""
