"""Triton's interpreter, which runs GPU kernels on a CPU."""

import importlib.util
import os
from types import SimpleNamespace
from typing import Any


def prepare_triton() -> None:
    """Run Triton kernels in Triton's interpreter, if there is no GPU.

    This must happen before Triton is imported.
    """
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    # Triton exists for Linux alone.
    has_triton = importlib.util.find_spec("triton") is not None
    if has_triton and os.environ.get("TRITON_INTERPRET") == "1":
        quicken_interpreter()
        share_facts_of_types()


def quicken_interpreter() -> None:
    """Leave out work of Triton's interpreter that changes no number.

    The interpreter replaces functions in all of Triton's language at every launch of a kernel and
    at every call in it. Here they are replaced once, for good. It computes integer results twice to
    find overflows, which it reports with its option `debug` alone. It builds a table of types at
    each look-up. Here the answers are kept.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    # Stands for a kernel that sees both modules.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    assert not interpreter.interpreter_builder.options.debug
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )
    numpy_type = interpreter._get_np_dtype
    types: dict[str, Any] = {}

    def cached_type(kind: Any) -> Any:
        if kind.name not in types:
            types[kind.name] = numpy_type(kind)
        return types[kind.name]

    interpreter._get_np_dtype = cached_type


def share_facts_of_types() -> None:
    """Let the tensors of a type share what Triton derives from it.

    For the result of each operation it makes a type, its name and a shape of constants again, which
    takes a seventh of the time of the kernels' tests.
    """
    from triton.language import core

    make_type = core.block_type.__init__
    make_tensor = core.tensor.__init__
    facts_of_types: dict[tuple[Any, ...], dict[str, Any]] = {}
    facts_of_tensors: dict[str, dict[str, Any]] = {}

    def shared_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = core._unwrap_shape(shape)
        key = (element_ty.name, *sizes)
        if key not in facts_of_types:
            make_type(self, element_ty, sizes)
            facts_of_types[key] = dict(vars(self))
        vars(self).update(facts_of_types[key])

    def shared_tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name not in facts_of_tensors:
            make_tensor(self, handle, type)
            facts = dict(vars(self))
            del facts["handle"]
            facts_of_tensors[type.name] = facts
        vars(self).update(facts_of_tensors[type.name])
        self.handle = handle
        self.type = type

    core.block_type.__init__ = shared_type
    core.tensor.__init__ = shared_tensor
