"""Somebody else's model, named as package.module:callable."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

from torch import nn

from rtx.errors import UserError, nearest


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
