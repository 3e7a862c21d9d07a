"""Keep what reports read of runs, without weights or names of machines: `python docs/results/keep.py RUNS FOLDER`.

Copies configuration, environment, rows, status and evaluations of each run below RUNS, and what was timed of them; of
the place of a user's own data the last name alone.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

KEPT = ("config.yaml", "metrics.jsonl", "sweeps.jsonl")
NAMELESS = ("environment.json", "status.json", "eval/*.json", "bench/*.json", "analysis/*.json")
PRIVATE = {"host", "pid", "folder"}


def nameless(value: Any) -> Any:
    """Return JSON values without what names a machine, commands without the folder of the program."""
    if isinstance(value, dict):
        return {key: nameless(one) for key, one in value.items() if key not in PRIVATE}
    if isinstance(value, list):
        return [nameless(one) for one in value]
    return re.sub(r"^\S*/rtx/__main__\.py ", "rtx ", value) if isinstance(value, str) else value


def main(runs: Path, folder: Path) -> None:
    """Copy the records of `runs`, a folder of runs or one of them, to `folder`, which is made anew."""
    shutil.rmtree(folder, ignore_errors=True)
    paths = [*runs.glob("config.yaml"), *runs.glob("*/config.yaml")]
    configs = [path.read_text(encoding="utf-8") for path in paths]
    found = {
        place
        for config in configs
        for place in re.findall(r"^  path: (/.+)$", config, re.MULTILINE)
    }
    places = sorted(found, key=len, reverse=True)
    for pattern in (*KEPT, *NAMELESS):
        for path in [*runs.glob(pattern), *runs.glob(f"*/{pattern}")]:
            target = folder / path.relative_to(runs)
            target.parent.mkdir(parents=True, exist_ok=True)
            text = path.read_text(encoding="utf-8")
            for place in places:
                text = re.sub(rf"(?<![\w./-]){re.escape(place)}(?![\w.-])", Path(place).name, text)
            is_named = pattern in NAMELESS
            target.write_text(
                json.dumps(nameless(json.loads(text)), indent=1) + "\n" if is_named else text
            )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
