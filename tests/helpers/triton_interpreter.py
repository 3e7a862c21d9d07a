"""Triton's interpreter, which runs GPU kernels on a CPU."""

import contextlib
import os
from types import SimpleNamespace
from typing import Any


def prepare_triton() -> None:
    """Run Triton's kernels in its interpreter, if there is no GPU.

    This must happen before Triton is imported.
    """
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if os.environ.get("TRITON_INTERPRET") == "1":
        # Triton exists for Linux alone.
        with contextlib.suppress(ImportError):
            quicken_interpreter()


def quicken_interpreter() -> None:
    """Skip most of the work of Triton's interpreter that changes no number.

    For every launch of a kernel and for every function that a kernel calls, it replaces functions
    in all of Triton's language: once is enough. It computes sums of integers a second time to find
    overflows, and reports none, because its option `debug` is off.
    """
    import triton.language as tl
    from triton.runtime import interpreter

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
    share_facts_of_types()


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
