"""The records of many runs: from their folders, or in a study file, which has a line for each run.

Reports read both. Nothing here imports torch.
"""

from collections.abc import Iterable
from pathlib import Path

from rtx.disk import names_inside, read_inside, read_named, write_inside
from rtx.errors import UserError
from rtx.runs.folder import ENVIRONMENT, METRICS, RESUMES, SWEEPS
from rtx.runs.records import (
    LARGEST_ROWS,
    AnalysisFile,
    EnvironmentRecord,
    EvaluationRecord,
    Kind,
    MetricsRow,
    ResumeRow,
    StepsRecord,
    StudyLine,
    SweepRow,
    parsed,
    read_record,
    read_rows,
)
from rtx.runs.status import read_status
from rtx.settings.run_config import LARGEST_CONFIG, RUN_CONFIG

STUDY_SUFFIX = ".jsonl"


def is_study(place: Path) -> bool:
    """Tell whether a path is a study file and no folder of runs."""
    return place.suffix == STUDY_SUFFIX and place.is_file()


def read_run(folder: Path, problems: list[str]) -> StudyLine:
    """Return the records of a run; `problems` gets a line for each that cannot be read."""
    try:
        config = read_inside(folder, RUN_CONFIG, LARGEST_CONFIG).decode()
    except (OSError, UnicodeDecodeError):
        config = ""
    except UserError as error:
        problems.append(str(error))
        config = ""
    return StudyLine(
        run=folder.name,
        config=config,
        status=read_status(folder, problems),
        environment=read_record(EnvironmentRecord, folder, ENVIRONMENT, problems),
        metrics=read_rows(MetricsRow, folder, METRICS, problems),
        resumes=read_rows(ResumeRow, folder, RESUMES, problems),
        evaluations=read_all(EvaluationRecord, folder, "eval", problems),
        analyses=read_all(AnalysisFile, folder, "analysis", problems),
    )


def read_all(kind: type[Kind], folder: Path, inner: str, problems: list[str]) -> list[Kind]:
    """Return the records of the *.json of a folder in the folder of a run, in order of names."""
    try:
        names = names_inside(folder, inner, "*.json")
    except (OSError, UserError) as error:
        problems.append(str(error))
        return []
    records = []
    for name in names:
        record = read_record(kind, folder, f"{inner}/{name}", problems)
        if record is not None:
            records.append(record)
    return records


def read_sweeps(folder: Path, problems: list[str]) -> list[SweepRow]:
    """Return the sweeps of a folder, the oldest first."""
    return read_rows(SweepRow, folder, SWEEPS, problems)


def steps_files(folder: Path) -> list[Path]:
    """Return the records of timed steps in a folder, or in a folder of it."""
    here = folder.glob("bench/steps-*.json")
    return sorted([*here, *folder.glob("*/bench/steps-*.json")])


def read_steps(folder: Path, problems: list[str]) -> list[StepsRecord]:
    """Return the records of timed steps in a folder, or in a folder of it."""
    records = []
    for path in steps_files(folder):
        place = path.parents[1]
        record = read_record(StepsRecord, place, path.relative_to(place), problems)
        if record is not None:
            records.append(record)
    return records


def read_study(path: Path, problems: list[str]) -> list[StudyLine]:
    """Return the lines of a study file."""
    try:
        lines = read_named(path, LARGEST_ROWS).splitlines()
    except OSError as error:
        problems.append(f"{path}: cannot be read ({error.strerror})")
        return []
    return parsed(StudyLine, lines, path, problems)


def write_study(path: Path, lines: Iterable[StudyLine]) -> None:
    """Replace a study file."""
    text = "".join(f"{line.model_dump_json(exclude_defaults=True)}\n" for line in lines)
    write_inside(path.parent, path.name, text.encode())
