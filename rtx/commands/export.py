"""`rtx export RUN [overrides]`: a run's model as safetensors, with its configuration and a card."""

from collections.abc import Mapping
from pathlib import Path

import torch

from rtx.cli.request import Request
from rtx.data.tokenizers import Tokenizer
from rtx.disk import MARK
from rtx.errors import UserError
from rtx.paths import expand_path
from rtx.report.run_records import collect
from rtx.report.summary import card
from rtx.runs.folder import is_export, shown
from rtx.settings.extensions import copies
from rtx.settings.run_config import RUN_CONFIG, to_yaml
from rtx.settings.schema import to_dict
from rtx.training.checkpoint import Checkpoint, check_config, load_for_use
from rtx.training.export import write_export
from rtx.training.hf_export import HF_FILES, hf_files
from rtx.training.inference import load_run, run_config, run_tokenizer

CPU = torch.device("cpu")

ROUTING_STATE = ("centroid_HCD", "threshold_HC")
"""What the names of the tensors end with that routing keeps beside the weights."""


def main(request: Request) -> int:
    """Write the model of a run to a folder, for others to load."""
    folder = request.run
    options = request.options
    config = request.config
    for_transformers = options.format == "hf"
    if is_export(folder):
        raise UserError(f"{folder} is an exported model already")
    checkpoint = load_for_use(folder / "checkpoints", options.checkpoint)
    check_config(checkpoint, to_dict(config), folder / RUN_CONFIG)
    default = "hf" if for_transformers else "export"
    output = expand_path(options.output, "output") if options.output else folder / default
    refuse_other_files(output)
    files = files_of(request, checkpoint)
    if for_transformers:
        run = load_run(folder, run_config(folder), options.checkpoint, CPU, say=lambda line: None)
        # The names of tensors in an older checkpoint may be others.
        checkpoint["model"] = run.model.state_dict()
        files |= hf_files(config, run.model, tokenizer_of(request, checkpoint))
    remove_hf_files(output, files)
    write_export(output, checkpoint, files)
    paths = sorted(output.iterdir())
    size = sum(path.stat().st_size for path in paths) / 1e6
    names = ", ".join(path.name for path in paths)
    print(f"{shown(output)}: {names} ({size:,.1f} MB)")
    print(f"next: rtx eval {shown(output)} split=test")
    return 0


def remove_hf_files(output: Path, files: Mapping[str, bytes]) -> None:
    """Remove what an earlier export for `transformers` wrote and this one does not write."""
    for name in HF_FILES:
        if name not in files:
            (output / name).unlink(missing_ok=True)


def refuse_other_files(output: Path) -> None:
    """Raise `UserError` where a folder has files that are of no export."""
    others = output.is_file() or any(path.suffix != MARK for path in output.glob("*"))
    if others and not is_export(output):
        instead = "name a new or an empty folder"
        raise UserError(f"output={output}: is a file, or holds other files; {instead}")


def files_of(request: Request, checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return what belongs to an exported model beside its weights: contents by their names."""
    config = request.config
    state = 0
    for name, tensor in checkpoint["model"].items():
        if name.endswith(ROUTING_STATE):
            state += tensor.numel()
    for_transformers = request.options.format == "hf"
    cell = collect([request.run]).cells[0]
    page = card(cell, config, checkpoint, state, for_transformers=for_transformers)
    files = copies(config.extensions)
    files["config.yaml"] = to_yaml(config).encode()
    files["README.md"] = page.encode()
    tokenizer = tokenizer_of(request, checkpoint)
    if tokenizer is not None and tokenizer.file:
        files[tokenizer.file] = tokenizer.content
    return files


def tokenizer_of(request: Request, checkpoint: Checkpoint) -> Tokenizer | None:
    """Return the tokenizer of a run; None where its data are no text."""
    described = checkpoint["data"].get("tokenizer")
    if not described:
        return None
    return run_tokenizer(request.run, described)
