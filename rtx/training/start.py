"""What a run starts from, a checkpoint or first weights, and what it records before that."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rtx.attention.centroids import all_centroids
from rtx.disk import is_file_inside, read_inside, rename_inside, write_inside
from rtx.errors import UserError
from rtx.model.transformer import Transformer
from rtx.progress import say, warn
from rtx.runs.environment import record_start
from rtx.runs.folder import shown
from rtx.runs.resumption import Differences, differences, refuse_changes
from rtx.settings.extensions import code_of, copies
from rtx.settings.run_config import load_run_config, to_yaml
from rtx.settings.run_values import RUN_CONFIG
from rtx.settings.schema import Config, to_dict
from rtx.training.checkpoint import Checkpoint, newest_checkpoint, tensor_problem
from rtx.training.pretrained import load_pretrained
from rtx.training.session import Session


def find_start(session: Session) -> tuple[Checkpoint | None, Differences | None]:
    """Return the checkpoint to go on from, and the keys that have other values than before.

    The checkpoint is None where the run begins at its first step. The keys are None for a new run,
    and on all ranks but the first. Raises `UserError` where checkpoint, configuration and data do
    not fit together.
    """
    if not session.resumed:
        say(f"run: {shown(session.folder)}")
        return None, None
    folder = session.folder / "checkpoints"
    is_first = session.status is not None
    start = newest_checkpoint(folder, set_aside=is_first, report=say)
    # `Ranks.compare` compares the other ranks with the first.
    if not is_first:
        return start, None
    changed = changed_keys(session, start)
    if start:
        check_start(session, start, changed)
        begins = f"from step {start['step']:,}"
    else:
        set_best_aside(session)
        begins = "from the beginning: it has no checkpoint"
    lines = [f"resuming {shown(session.folder)} ({session.reason}) {begins}"]
    for key, (old, new) in changed.items():
        lines.append(f"  {key}: {old} -> {new}")
    say("\n".join(lines))
    return start, changed


def changed_keys(session: Session, start: Checkpoint | None) -> Differences:
    """Return the keys with other values than before; `UserError` where one must not change."""
    now = to_dict(session.config)
    # An editor, or a disk, may have changed config.yaml: the checkpoint is compared as well.
    changed = differences(start["config"] if start else {}, now, shared=True)
    changed |= differences(to_dict(load_run_config(session.folder)), now)
    refuse_changes(changed)
    return changed


def check_start(session: Session, start: Checkpoint, changed: Differences) -> None:
    """Raise `UserError` where a run cannot go on from a checkpoint."""
    steps = session.config.trainer.steps
    step = start["step"]
    if "trainer.steps" in changed and steps <= step:
        newest = f"the newest checkpoint is of step {step}"
        raise UserError(f"trainer.steps={steps}: {newest}; give more than that")
    if start["data"]["fingerprint"] != session.store.fingerprint:
        name = session.store.name
        raise UserError(f"the data of {name} are not those that the run began with")


def set_best_aside(session: Session) -> None:
    """Rename an existing best.ckpt: a run from the beginning would replace it."""
    best = "checkpoints/best.ckpt"
    if is_file_inside(session.folder, best):
        aside = f"best-{time.time_ns()}.ckpt"
        rename_inside(session.folder, best, aside)
        say(f"{session.folder / best} is kept as {aside}")


def record_beginning(session: Session, parameters: int, changed: Differences | None) -> None:
    """Record machine, software and configuration, once they are known to fit the checkpoint."""
    record: dict[str, Any] = {
        "hardware": vars(session.hardware),
        "data": session.store.describe(),
        "parameters": parameters,
        "extensions": extension_names(session.config),
    }
    if session.command:
        record["command"] = session.command
    inexact = record_start(session.folder, record, changed, anew=session.start is None)
    if inexact:
        warn(f"no longer exact: {', '.join(inexact)}")
    if session.resumed:
        # That of a new run was written when its folder was locked.
        write_config(session.config, session.folder)
    tokenizer = session.store.tokenizer_file
    if tokenizer:
        # With this file `rtx sample` needs no data.
        content = read_inside(tokenizer.parent, tokenizer.name)
        write_inside(session.folder, tokenizer.name, content)


def extension_names(config: Config) -> dict[str, str]:
    """Return the names of the extensions in the run's configuration, by their paths."""
    return {str(code.path): name for name, code in code_of(config.extensions).items()}


def write_config(config: Config, folder: Path) -> None:
    """Write config.yaml, and copies of the extensions, into a run's folder."""
    for name, content in copies(config.extensions).items():
        write_inside(folder, name, content)
    write_inside(folder, RUN_CONFIG, to_yaml(config).encode())


def build_model(
    config: Config, vocabulary: int, first_sequence: Callable[[], Tensor] | None
) -> Transformer:
    """Return the model of a configuration with its first weights.

    Args:
        first_sequence: returns the sequence `[N]` at whose vectors centroids start, with
            routing.init=data and for probed keys. None: a checkpoint has weights and centroids, and
            model.start is not read.

    Raises:
        UserError: a pattern that the user has written has a tensor that no checkpoint may hold, or
            model.start does not fit the configuration or the data.
    """
    seed_everything(config.seed)
    model = Transformer(config, vocabulary)
    check_savable(model)
    start = config.model.start
    if first_sequence and start is not None:
        load_pretrained(model, start)
    reads_data = config.routing.init == "data" or config.routing.selection == "probed"
    if first_sequence and reads_data:
        initialise_from_data(model, first_sequence()[None])
    return model


@torch.no_grad()
def initialise_from_data(model: nn.Module, tokens_BN: Tensor) -> None:
    """Start the centroids of all layers at vectors of one training sequence, on every rank alike.

    The loss of the sequence is computed once, without dropout; the centroids of a layer start as it
    reaches them. Those that it does not reach, or reaches with padding alone, start at the next
    training batch.
    """
    was_training = model.training
    model.eval()
    for centroids in all_centroids(model):
        centroids.seed_with_next = True
        centroids.train()
    model(tokens_BN[:1])
    model.train(was_training)


def check_savable(model: nn.Module) -> None:
    """Raise `UserError` for a tensor that no reader of a checkpoint would take."""
    change = "keep it contiguous and real, or register it with persistent=False"
    for name, tensor in model.state_dict().items():
        problem = tensor_problem(tensor)
        if problem:
            raise UserError(f"{name} is {problem}, which no checkpoint holds: {change}")


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed torch on all devices, the only source of random numbers here.

    Every rank draws the weights with `rank=0`.
    """
    torch.manual_seed(int(np.random.SeedSequence([seed, rank]).generate_state(1)[0]))
