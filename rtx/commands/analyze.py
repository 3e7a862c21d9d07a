"""`rtx analyze WHAT RUN`: what heads read, and what far context is worth.

Each analysis has a file in `rtx/commands/analyses`. That of pretrained models takes no run.
"""

import dataclasses

from rtx.cli.request import Request
from rtx.commands.analyses.context import context
from rtx.commands.analyses.coverage import coverage
from rtx.commands.analyses.divergence import divergence
from rtx.commands.analyses.patterns import patterns
from rtx.runs.folder import save
from rtx.runs.records import AnalysisFile
from rtx.runs.status import utc_now
from rtx.settings.identity import short_hash
from rtx.training.inference import open_run
from rtx.training.uploads import add_to_wandb

ANALYSES = {
    "divergence": divergence,
    "patterns": patterns,
    "context": context,
    "coverage": coverage,
}
"""What each analysis computes and prints, by its word on the command line."""


def main(request: Request) -> int:
    """Run an analysis, and record it and its picture in the run's `analysis/` folder."""
    if request.command.name == "analyze pretrained":
        # transformers is an extra, and takes seconds.
        from rtx.commands.analyses.pretrained import main as analyze_pretrained

        return analyze_pretrained(request)
    folder = request.run
    options = request.options
    run, store = open_run(folder, request.config, options.checkpoint)
    name = request.command.name.removeprefix("analyze ")
    result = ANALYSES[name](run, store, options)
    picture = result.pop("picture", None)
    settings = {"analyze": dataclasses.asdict(options), "length": request.config.data.length}
    checkpoint = run.checkpoint
    file_name = f"{name}-{options.split}-{checkpoint['file']}-step{checkpoint['step']}"
    file_name += f"-{short_hash({**settings, 'data': store.fingerprint})}"
    files = []
    if picture:
        files.append(save(folder, f"analysis/{file_name}.png", picture))
    record = AnalysisFile.model_validate(
        {
            "what": name,
            **result,
            **settings,
            "checkpoint": run.facts(),
            "data": store.describe(),
            "time": utc_now(),
        }
    ).root
    files.append(save(folder, f"analysis/{file_name}.json", record.to_json_with_none()))
    add_to_wandb(folder, name, {}, files, checkpoint["step"])
    return 0
