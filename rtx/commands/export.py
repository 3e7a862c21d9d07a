"""`rtx export RUN [overrides]`: the model of a run as safetensors, its configuration and a card,
for others to load.
"""

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
from rtx.training.checkpoint import check_config, load_for_use
from rtx.training.inference import run_tokenizer, write_export


def main(request: Request) -> int:
    folder = request.run
    options = request.options
    config = request.config
    output = Path(options.output or folder / "export").expanduser()
    if is_export(folder):
        raise UserError(f"{folder} is an exported model already")
    checkpoint = load_for_use(folder / "checkpoints", options.checkpoint)
    check_config(checkpoint, to_dict(config), folder / RUN_CONFIG)
    foreign = output.is_file() or any(path.suffix != MARK for path in output.glob("*"))
    if foreign and not is_export(output):
        raise UserError(
            f"output={output}: is a file, or holds other files; name a new or an empty folder"
        )
    model, kept = checkpoint["model"], ("centroid_HCD", "threshold_HC")
    centroids = sum(tensor.numel() for name, tensor in model.items() if name.endswith(kept))
    page = card(collect([folder]).cells[0], config, checkpoint, centroids)
    files = copies(config.extensions)
    files |= {"config.yaml": to_yaml(config).encode(), "README.md": page.encode()}
    if described := checkpoint["data"].get("tokenizer"):
        tokenizer = run_tokenizer(folder, described)
        files |= {tokenizer.file: tokenizer.content} if tokenizer.file else {}
    write_export(output, checkpoint, files)
    size = sum(path.stat().st_size for path in output.iterdir()) / 1e6
    print(
        f"{shown(output)}: {', '.join(sorted(path.name for path in output.iterdir()))} ({size:,.1f} MB)"
    )
    print(f"next: rtx eval {shown(output)} split=test")
    return 0
