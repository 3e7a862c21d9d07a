"""torch.compile around a whole model: what attention chooses stays outside of its graphs, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from tiny_models import gradients, tiny_model, tokens

from rtx.model.transformer import compile_loss
from rtx.training.hardware import has_compiler


@pytest.mark.skipif(not has_compiler(), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # torch asks, we do not
def test_a_compiled_model_has_the_same_loss_and_gradients() -> None:
    plain, compiled = tiny_model(selection="causal").train(), tiny_model(selection="causal").train()
    compiled.loss = compile_loss(compiled, compiled.loss)  # type: ignore[method-assign]
    expected, found = gradients(plain, tokens()), gradients(compiled, tokens())
    assert set(found) == set(expected)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
