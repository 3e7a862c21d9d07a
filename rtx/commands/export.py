"""`rtx export RUN [overrides]`: a run's model as safetensors, with its configuration and a card."""

from collections.abc import Sequence
from pathlib import Path

import torch

from rtx.cli.request import Request
from rtx.data.tokenizers import Tokenizer
from rtx.disk import ITSELF, remove_file, status_inside
from rtx.errors import UserError
from rtx.paths import expand_path
from rtx.report.run_records import collect
from rtx.report.summary import card
from rtx.runs.folder import is_export, refuse_links, shown
from rtx.settings.extensions import copies
from rtx.settings.run_config import to_yaml
from rtx.settings.run_values import RUN_CONFIG
from rtx.settings.schema import to_dict
from rtx.training.checkpoint import Checkpoint, check_config, load_for_use
from rtx.training.export import former_files, names_of, write_export
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
    refuse_links(folder)
    checkpoint = load_for_use(folder / "checkpoints", options.checkpoint)
    check_config(checkpoint, to_dict(config), folder / RUN_CONFIG)
    root = folder
    name = "hf" if for_transformers else "export"
    if options.output:
        root = expand_path(options.output, "output")
        name = ITSELF
    former = former_files(root, name)
    files = files_of(request, checkpoint)
    if for_transformers:
        run = load_run(folder, run_config(folder), options.checkpoint, CPU, say=lambda line: None)
        # The names of tensors in an older checkpoint may be others.
        checkpoint["model"] = run.model.state_dict()
        files |= hf_files(config, run.model, tokenizer_of(request, checkpoint))
    refuse_other_files(root, name, names_of(files), former)
    for other in HF_FILES:
        is_ours = former is None or other in former
        if is_ours and other not in files:
            remove_file(root, f"{name}/{other}")
    write_export(root, checkpoint, files, name, former or ())
    output = root / name
    paths = sorted(output.iterdir())
    size = sum(path.lstat().st_size for path in paths) / 1e6
    names = ", ".join(path.name for path in paths)
    print(f"{shown(output)}: {names} ({size:,.1f} MB)")
    print(f"next: rtx eval {shown(output)} split=test")
    return 0


def refuse_other_files(
    root: Path, name: str, files: Sequence[str], former: Sequence[str] | None
) -> None:
    """Raise `UserError` where one of these files exists that no earlier export has written.

    `former`: what that has written; None: any of them.
    """
    for file in files:
        is_there = status_inside(root, f"{name}/{file}") is not None
        if is_there and former is not None and file not in former:
            other = f"holds a {file} that rtx export did not write"
            raise UserError(f"output={root / name}: {other}; name a new or an empty folder")


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
