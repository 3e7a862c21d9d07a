"""Checkpoints of strangers, with right checksums, whose tensors are not as a model's are.

Kernels take a tensor from a file for a dense one, and read and write as many elements as its shape
says.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rtx.training.checkpoint import save_checkpoint
from tests.helpers.disturbances import asked
from tests.helpers.small_runs import SMALL_RUN, Workshop

pytestmark = pytest.mark.filterwarnings("ignore")  # torch says of some layouts that they may change

SPOILT: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda tensor: torch.zeros(1).expand(tensor.shape),
    "overlapping": lambda tensor: torch.zeros(tensor.numel()).as_strided(tensor.shape, (1, 1)),
    "with gaps": lambda tensor: torch.zeros(2 * tensor.numel())[::2].view(tensor.shape),
    "sparse": lambda tensor: tensor.to_sparse(),
    "csr": lambda tensor: tensor.to_sparse_csr(),
    "quantized": lambda tensor: torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8),
    "on the meta device": lambda tensor: torch.empty(tensor.shape, device="meta"),
    "nested": lambda tensor: torch.nested.nested_tensor([*tensor]),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "negated": lambda tensor: torch.view_as_complex(torch.zeros(*tensor.shape, 2)).conj().imag,
    "with an attribute": lambda tensor: with_attribute(tensor.clone()),
}
LAYOUTS = pytest.mark.parametrize("kind", SPOILT)


def with_attribute(tensor: Tensor) -> Tensor:
    tensor.is_nested_here = True  # type: ignore[attr-defined]
    return tensor


def craft(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a checkpoint, and write it with a checksum that is right."""
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint)
    path.with_name("previous.ckpt").unlink(missing_ok=True)
    with warnings.catch_warnings(action="ignore"):
        save_checkpoint(checkpoint, path)


def moments(checkpoint: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what the optimizer keeps of each matrix."""
    states = checkpoint["optimizer_states"][0]["state"].values()
    return [state for state in states if state["exp_avg"].ndim == 2]


def refused(workshop: Workshop, run: Path, *words: str) -> None:
    """Ask for a command that must refuse `last.ckpt` in one line, and leave the run's status."""
    before = (run / "status.json").read_bytes()
    code, said = asked(workshop, *words)
    lines = [line for line in said.splitlines() if line.startswith("rtx: ")]
    assert code == 2 and len(lines) == 1, said
    assert lines[0].startswith(f"rtx: {run}/checkpoints/last.ckpt is refused: ")
    assert (run / "status.json").read_bytes() == before


def test_expanded_moments_do_not_crash_the_interpreter(workshop: Workshop, copy: Path) -> None:
    def expand(checkpoint: dict[str, Any]) -> None:
        for state in checkpoint["optimizer_states"][0]["state"].values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros(1).expand(state[name].shape)

    craft(copy / "checkpoints" / "last.ckpt", expand)
    process = workshop.fork(copy, "resume", str(copy), "trainer.steps=13")
    assert process.wait() == 2, process.log.read_text()
    assert "last.ckpt is refused: its optimizer_states holds a tensor" in process.log.read_text()


@LAYOUTS
def test_moments_of_another_layout_are_refused(workshop: Workshop, copy: Path, kind: str) -> None:
    def spoil(checkpoint: dict[str, Any]) -> None:
        for state in moments(checkpoint):
            state["exp_avg"] = SPOILT[kind](state["exp_avg"])

    craft(copy / "checkpoints" / "last.ckpt", spoil)
    refused(workshop, copy, "resume", str(copy), "trainer.steps=13")


@LAYOUTS
def test_weights_of_another_layout_are_refused(
    workshop: Workshop,
    copy: Path,
    tmp_path: Path,
    kind: str,
) -> None:
    def spoil(checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["model"]
        weights["embedding.table_VS"] = SPOILT[kind](weights["embedding.table_VS"])

    craft(copy / "checkpoints" / "last.ckpt", spoil)
    for words in (["eval"], ["sample", "length=2"], ["export", f"output={tmp_path / 'out'}"]):
        refused(workshop, copy, words[0], str(copy), "checkpoint=last", *words[1:])
    refused(workshop, copy, "resume", str(copy), "trainer.steps=13")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_moments_that_are_not_finite_are_refused(
    workshop: Workshop,
    copy: Path,
    value: float,
) -> None:
    path = copy / "checkpoints" / "last.ckpt"
    craft(path, lambda found: moments(found)[0]["exp_avg_sq"][0].fill_(value))
    refused(workshop, copy, "resume", str(copy), "trainer.steps=13")


def test_weights_that_are_not_finite_draw_no_sample(workshop: Workshop, copy: Path) -> None:
    path = copy / "checkpoints" / "last.ckpt"
    craft(path, lambda found: found["model"]["embedding.table_VS"].fill_(float("inf")))
    code, said = asked(workshop, "sample", str(copy), "checkpoint=last", "length=2")
    assert code == 1 and "holds NaN or infinities, first in embedding.table_VS" in said


@pytest.mark.parametrize("place", ["callbacks", "loops", "lr_schedulers"])
def test_tensors_of_another_layout_are_refused_wherever_they_are(
    workshop: Workshop,
    copy: Path,
    place: str,
) -> None:
    hidden = {"a": [({"b": torch.zeros(1).expand(9)},)]}
    craft(copy / "checkpoints" / "last.ckpt", lambda found: found.update({place: hidden}))
    refused(workshop, copy, "resume", str(copy), "trainer.steps=13")


def test_a_third_moment_is_compared_with_its_weight(workshop: Workshop, copy: Path) -> None:
    def add(checkpoint: dict[str, Any]) -> None:
        (optimizer,) = checkpoint["optimizer_states"]
        for group in optimizer["param_groups"]:
            group["amsgrad"] = True
        for state in optimizer["state"].values():
            state["max_exp_avg_sq"] = torch.zeros(1)

    craft(copy / "checkpoints" / "last.ckpt", add)
    process = workshop.fork(copy, "resume", str(copy), "trainer.steps=13")
    assert process.wait() == 2, process.log.read_text()
    assert "max_exp_avg_sq is not like its weight" in process.log.read_text()


def shared(checkpoint: dict[str, Any]) -> None:
    """Let all moments be views of one tensor."""
    everything = torch.zeros(1 << 22)
    for state in moments(checkpoint):
        for number in range(20):
            state[f"view{number}"] = everything[:]


def nested(checkpoint: dict[str, Any]) -> None:
    """Nest lists of nine references each: 9 to the 40th values in some hundred bytes."""
    bomb: list[Any] = []
    for _ in range(40):
        bomb = [bomb] * 9
    checkpoint["loops"] = bomb


def endless(checkpoint: dict[str, Any]) -> None:
    """Let a list hold itself."""
    loop: list[Any] = []
    loop.append(loop)
    checkpoint["loops"] = loop


@pytest.mark.parametrize("change", [shared, nested, endless])
def test_references_to_references_are_refused_before_they_are_counted(
    workshop: Workshop, copy: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    craft(copy / "checkpoints" / "last.ckpt", change)
    refused(workshop, copy, "resume", str(copy), "trainer.steps=13")


PATTERN = """import rtx, torch
class Kept(rtx.attention.Local):
    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("kept", {kept})
rtx.register_pattern("kept", lambda heads, config, layer: Kept(window=config.model.window))
"""


@pytest.mark.parametrize("kept", ["torch.zeros(1).expand(7)", "torch.zeros(7).to(torch.complex64)"])
def test_a_pattern_that_keeps_what_no_checkpoint_holds_is_refused_before_a_step(
    workshop: Workshop, tmp_path: Path, kept: str
) -> None:
    (tmp_path / "kept.py").write_text(PATTERN.format(kept=kept))
    own = (f"extensions={tmp_path / 'kept.py'}", "model.base=kept")
    process = workshop.fork(tmp_path / "kept", "train", workshop.text, *SMALL_RUN, *own)
    assert process.wait() == 2, process.log.read_text()
    assert "kept.pattern.kept is a tensor " in process.log.read_text()
    assert "which no checkpoint holds: keep it contiguous and real" in process.log.read_text()
