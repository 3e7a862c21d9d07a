"""`rtx export RUN [overrides]`: a run's model as safetensors, with its configuration and a card."""

from pathlib import Path

from rtx.cli.request import Request
from rtx.disk import MARK
from rtx.errors import UserError
from rtx.report.run_records import collect
from rtx.report.summary import card
from rtx.runs.folder import is_export, shown
from rtx.settings.extensions import copies
from rtx.settings.run_config import RUN_CONFIG, to_yaml
from rtx.settings.schema import to_dict
from rtx.training.checkpoint import Checkpoint, check_config, load_for_use
from rtx.training.export import write_export
from rtx.training.inference import run_tokenizer

ROUTING_STATE = ("centroid_HCD", "threshold_HC")
"""What the names of the tensors end with that routing keeps beside the weights."""


def main(request: Request) -> int:
    """Write the model of a run to a folder, for others to load."""
    folder = request.run
    options = request.options
    if is_export(folder):
        raise UserError(f"{folder} is an exported model already")
    checkpoint = load_for_use(folder / "checkpoints", options.checkpoint)
    check_config(checkpoint, to_dict(request.config), folder / RUN_CONFIG)
    output = Path(options.output or folder / "export").expanduser()
    refuse_other_files(output)
    write_export(output, checkpoint, files_of(request, checkpoint))
    paths = sorted(output.iterdir())
    size = sum(path.stat().st_size for path in paths) / 1e6
    names = ", ".join(path.name for path in paths)
    print(f"{shown(output)}: {names} ({size:,.1f} MB)")
    print(f"next: rtx eval {shown(output)} split=test")
    return 0


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
    page = card(collect([request.run]).cells[0], config, checkpoint, state)
    files = copies(config.extensions)
    files["config.yaml"] = to_yaml(config).encode()
    files["README.md"] = page.encode()
    described = checkpoint["data"].get("tokenizer")
    if described:
        tokenizer = run_tokenizer(request.run, described)
        if tokenizer.file:
            files[tokenizer.file] = tokenizer.content
    return files
