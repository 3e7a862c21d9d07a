"""Somebody else's model, named as package.module:callable."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from rtx.errors import UserError, nearest


class NextUnit(nn.Module):
    """Somebody else's model as one that scores: its logits at position i are for the unit at i + 1.

    Nothing stands in front of the first unit, so that has no score.
    """

    def __init__(self, module: nn.Module, vocabulary: int) -> None:
        super().__init__()
        self.module, self.vocabulary = module, vocabulary

    def loss(self, tokens_BN: Tensor, prefix: bool = False) -> tuple[Tensor, None]:
        """Return the nats of every unit `[B, N]`, 0 for the first.

        Raises:
            ValueError: with `prefix`, or what it returns are no logits of these units.
        """
        if prefix:
            raise ValueError("somebody else's model has no streaming of its own")
        out = logits_of(self.module(tokens_BN[:, :-1]))
        rows = tokens_BN[:, 1:]
        if not isinstance(out, Tensor) or out.shape[:-1] != rows.shape or out.shape[-1] < self.vocabulary:
            given = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(f"must return logits {(*rows.shape, self.vocabulary)}, not {given}")
        nats_BM = F.cross_entropy(out.flatten(0, 1).float(), rows.flatten(), reduction="none").view(rows.shape)
        return F.pad(nats_BM, (1, 0)), None


def logits_of(out: Any) -> Any:
    """Return the logits of what a model returned: the first of several things."""
    return out[0] if isinstance(out, tuple) and out else out


def build_module(name: str) -> nn.Module:
    """Return what the callable that `name` stands for returns when it is called without arguments.

    Modules are looked for in the current folder, too.

    Raises:
        UserError: `name` is not of the form package.module:callable, there is no such thing, or it makes no module.
    """
    path, colon, attribute = name.partition(":")
    if not path or not colon or not attribute:
        raise UserError(f"audit.module={name}: must be of the form package.module:callable")
    make = find(name, path, attribute)
    if not callable(make):
        raise UserError(f"audit.module={name}: is not callable, it is a {type(make).__name__}")
    try:
        module = make()
    except Exception as error:
        raise UserError(f"audit.module={name}: calling it failed: {told(error)}") from error
    if not isinstance(module, nn.Module):
        raise UserError(f"audit.module={name}: must return a torch.nn.Module, not a {type(module).__name__}")
    return module


def find(name: str, path: str, attribute: str) -> Any:
    """Import the module `path` and return its attribute (dots reach further in); errors as `build_module`."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        package = importlib.import_module(path)
    except Exception as error:
        raise UserError(f"audit.module={name}: importing {path} failed: {told(error)}") from error
    try:
        return functools.reduce(getattr, attribute.split("."), package)
    except AttributeError:
        hint = nearest(attribute, [public for public in vars(package) if not public.startswith("_")])
        raise UserError(f"audit.module={name}: {path} has no {attribute!r}{hint}") from None


def told(error: BaseException) -> str:
    """Return an error's type and the first line of what it says."""
    said = str(error).strip().partition("\n")[0]
    return type(error).__name__ + (f": {said}" if said else "")
