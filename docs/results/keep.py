"""Keep what reports read of runs, in one file: `python docs/results/keep.py RUNS FILE.jsonl`.

Writes configuration, status, environment, rows, evaluations and analyses of each run below RUNS, a
line a run, and the sweeps, timed steps and analyses of pretrained models there; no weights, and
nothing that names a machine. Of the place of a user's own data or model the last name alone is
kept. `rtx report FILE.jsonl` reads the file.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from rtx.runs.folder import run_folders
from rtx.runs.pretrained_record import PretrainedRecord
from rtx.runs.status import changed, state_of
from rtx.runs.study import (
    StudyLine,
    read_pretrained,
    read_run,
    read_steps,
    read_sweeps,
    write_study,
)

PRIVATE = {"host", "pid", "folder"}
DIGITS = 6
"""Behind the point, of numbers in records of pretrained models."""
PROGRAM = re.compile(r"^\S*/(rtx/__main__\.py|rtx) ")
"""The start of a command as Python or a full path has it."""


def main(runs: Path, study: Path) -> None:
    """Write the records of `runs`, a folder of runs or one of them, to a study file."""
    problems: list[str] = []
    lines = []
    for run in run_folders(runs):
        line = read_run(run, problems)
        if state_of(line.status) == "running":
            problems.append(f"{run}: is left out, because it is running")
        else:
            lines.append(with_end(line))
    lines += [StudyLine(sweep=sweep) for sweep in read_sweeps(runs, problems)]
    lines += [StudyLine(steps=steps) for steps in read_steps(runs, problems)]
    for record in read_pretrained(runs, problems):
        lines.append(StudyLine(pretrained=without_folders(record)))
    for problem in problems:
        print(problem, file=sys.stderr)
    places: set[str] = set()
    for line in lines:
        places.update(re.findall(r"^  path: (/.+)$", line.config, re.MULTILINE))
    kept = []
    for line in lines:
        values = without_places(line.model_dump(exclude_defaults=True), places)
        kept.append(StudyLine.model_validate(values))
    write_study(study, kept)


def with_end(line: StudyLine) -> StudyLine:
    """Return the records of a run that has ended; the status of a killed one says so."""
    status = line.status
    if status is None or status.state != "running":
        return line
    return line.model_copy(update={"status": changed(status, state="failed", reason="killed")})


def without_folders(record: PretrainedRecord) -> PretrainedRecord:
    """Return a record with the names of its model and text alone, and with few digits."""
    values = record.to_json_with_none()
    values["analyze"]["model"] = record.model
    values["data"]["source"] = {**values["data"]["source"], "place": record.text}
    return PretrainedRecord.model_validate(rounded(values))


def rounded(value: Any) -> Any:
    """Return JSON values with few digits behind the point."""
    if isinstance(value, float):
        return round(value, DIGITS)
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def without_places(value: Any, places: set[str]) -> Any:
    """Return JSON values without what names a machine, and places by their last names."""
    if isinstance(value, dict):
        names = [name for name in value if name not in PRIVATE]
        return {name: without_places(value[name], places) for name in names}
    if isinstance(value, list | tuple):
        return [without_places(one, places) for one in value]
    if not isinstance(value, str):
        return value
    text = PROGRAM.sub("rtx ", value)
    for place in sorted(places, key=len, reverse=True):
        text = re.sub(rf"(?<![\w./-]){re.escape(place)}(?![\w.-])", Path(place).name, text)
    return text


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
