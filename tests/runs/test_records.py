"""Records of runs: what is written is read again, damage is one line, older records are read."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rtx.runs import older
from rtx.runs.records import (
    AnalysisFile,
    AuditRecord,
    ContextRecord,
    EnvironmentRecord,
    EvaluationRecord,
    MetricsRow,
    OlderFinal,
    PatternsRecord,
    ResumeRow,
    ScoreRecord,
    StatusRecord,
    StepsRecord,
    SweepRow,
    read_record,
    read_rows,
)
from rtx.runs.study import StudyLine

DATA = {"name": "text", "unit": "byte", "fingerprint": "f00d" * 16, "splits": {"train": 90}}
CHECKPOINT = {"name": "best", "step": 40}
PROTOCOL = {
    "split": "valid",
    "mode": "parallel",
    "unit": "byte",
    "data": "text",
    "fingerprint": "f00d" * 16,
    "length": 64,
    "stride": 32,
    "windows": 8,
    "ablate": "none",
    "stamps": ["newlines dropped"],
}
SCORE = {
    "protocol": PROTOCOL,
    "bits": 2.5,
    "units": 512,
    "windows": 8,
    "nats": 887.2,
    "standard_error": 0.01,
    "sees_future": True,
    "selection": "selection=topk",
    "accuracy_by_distance": {"16": [0.5, 12]},
}
RUNNING = {"state": "running", "pid": 7, "host": "here", "heartbeat": "2026-01-31T12:00:00.000Z"}
MODE = {
    "sees_future": True,
    "arises_in": [[1, "routed"]],
    "repeat": 0.0,
    "rows": [{"layer": "", "heads": "logits", "largest": 0.5, "moved": 0.25}],
}
DIFFERENCE = {"bits": 0.1, "over_positions": 0.02, "over_windows": None}
AUDIT = {
    "run": "outputs/a/b",
    "checkpoint": CHECKPOINT,
    "seed": 3,
    "time": "2026",
    "changes": {
        "sequences": 2,
        "length": 64,
        "prefixes": [1, 8],
        "tolerance": 1e-9,
        "teacher-forced": MODE,
        "streaming": MODE,
    },
    "choices": [
        {"layer": 1, "heads": "routed", "trained_by": "queries", "gradient": None, "missing": True}
    ],
    "price": {
        "unit": "byte",
        "split": "valid",
        "windows": 2,
        "positions": [[1, 5], [1, 5]],
        "length": 64,
        "precision": "fp32",
        "data": DATA,
        "bits": {"teacher-forced": 2.0, "streaming": 2.1},
        "leak_gives": DIFFERENCE,
        "competing_costs": DIFFERENCE,
        "together": DIFFERENCE,
    },
}
OF_ANALYSES = {"checkpoint": CHECKPOINT, "data": DATA, "length": 64, "analyze": {"seed": 0}}
DIVERGENCE = {"kind": ["local", "routed"], "mean": 0.2, "deviation": 0.1, "nats_R": [0.1, 0.3]}
POINT = {"keys": 8.0, "share": 0.9, "error": 0.01, "of all": 0.7}
ANALYSES = {
    "divergence": {"layers": [{**DIVERGENCE, "layer": 0, "share": 1.0}], "over_layers": []},
    "patterns": {
        "start": 0,
        "units": 64,
        "heads": [{"layer": 1, "head": 0, "pattern": "local", "reads_share": 1.0, "keys": 8.0}],
    },
    "context": {
        "unit": "byte",
        "positions": [{"first": 0, "last": 31, "bits": 2.0, "error": None}],
        "gains": [{"context": [32, 63], "bits": 2.0, "error": 0.1, "gain": 0.0, "gain_error": 0.0}],
        "windows": 8,
        "protocol": PROTOCOL,
    },
    "coverage": {
        "window": 8,
        "keys": 16,
        "block": 4,
        "beyond": {"mean": 0.9, "error": None, "layer 0": 0.9},
        "rows": [{"selection": "topk", **POINT, "layer 0": 0.9, "curve": [POINT]}],
    },
}
RECORDS: list[tuple[type[BaseModel], dict[str, Any]]] = [
    (StatusRecord, {**RUNNING, "step": 4, "steps": 9, "best": {"bits": 2.5, "step": 4}}),
    (StatusRecord, {"state": "done", "step": 9, "seconds": 1.5, "final": SCORE}),
    (EnvironmentRecord, {"versions": {"torch": "2.11"}, "data": DATA, "precision": "fp32"}),
    (ResumeRow, {"changed": {"trainer.steps": [4, 9]}, "threads": 2, "python": "3.11"}),
    (MetricsRow, {"step": 4, "time": "2026", "train/bits": 2.5, "train/norm": None}),
    (EvaluationRecord, {**SCORE, "checkpoint": CHECKPOINT, "data": DATA, "own_data": True}),
    (AuditRecord, AUDIT),
    *((AnalysisFile, {"what": what, **OF_ANALYSES, **ANALYSES[what]}) for what in ANALYSES),
    (SweepRow, {"time": "2026", "command": "rtx train -m seed=1,2", "cells": {"a": "seed=1"}}),
    (
        StepsRecord,
        {
            "what": "training steps in turn",
            "bench": {"per_turn": 2, "warmup": 1, "turns": 3},
            "device": "CPU",
            "ids": "training batches",
            "time": "2026",
            "rows": [{"config": {"seed": 0}, "ms_turns": [1.5, 1.6], "parameters": 9}],
        },
    ),
]


@pytest.mark.parametrize("kind, content", RECORDS, ids=lambda part: getattr(part, "__name__", ""))
def test_a_record_is_written_as_it_was_read(kind: type[BaseModel], content: dict[str, Any]):
    record = kind.model_validate(content)
    written = json.loads(record.model_dump_json(exclude_unset=True))
    assert written == content
    assert kind.model_validate_json(json.dumps(content)) == record


def test_unknown_keys_of_a_status_are_left_out_and_those_of_an_environment_kept():
    status = StatusRecord.model_validate({"state": "done", "moon": "full"})
    assert "moon" not in status.to_json()
    environment = EnvironmentRecord.model_validate({"versions": {}, "data": DATA, "moon": "full"})
    assert environment.to_json()["moon"] == "full"


DAMAGED: list[tuple[type[BaseModel], str, str]] = [
    (StatusRecord, "", "cannot be read; half written, or damaged"),
    (StatusRecord, '{"state": "done", "step": 1', "cannot be read; half written, or damaged"),
    (StatusRecord, "[]", "is damaged: Input should be an object"),
    (StatusRecord, '{"state": "sleeping"}', "state is damaged: Input should be 'running', 'done'"),
    (StatusRecord, '{"state": "running"}', "is damaged: Value error, a running process needs pid"),
    (
        StatusRecord,
        json.dumps({**RUNNING, "heartbeat": "2026-01-31T12:00:00"}),
        "is damaged: Value error, 2026-01-31T12:00:00 has no time zone",
    ),
    (StatusRecord, json.dumps({**RUNNING, "pid": -1}), "pid is damaged: Input should be greater"),
    (
        StatusRecord,
        '{"state": "done", "final": {"bits": NaN}}',
        "final.bits is damaged: Input should be a finite number",
    ),
    (
        StatusRecord,
        json.dumps({"state": "done", "final": {**SCORE, "protocol": {}}}),
        "final.protocol.split is damaged: Field required",
    ),
    (EnvironmentRecord, '{"versions": {}}', "data is damaged: Field required"),
    (EvaluationRecord, "7", "is damaged: Input should be an object"),
    (EvaluationRecord, '{"split": "test"}', "protocol.split"),
    (AnalysisFile, '{"what": "astrology"}', "is damaged: Input tag 'astrology analysis'"),
    (
        AnalysisFile,
        json.dumps({"what": "divergence", **OF_ANALYSES}),
        "layers is damaged: Field required",
    ),
    (AuditRecord, json.dumps({**AUDIT, "changes": {}}), "changes.sequences is damaged: Field"),
]


@pytest.mark.parametrize("kind, text, problem", DAMAGED)
def test_a_damaged_record_is_named_in_one_line(
    kind: type[Any], text: str, problem: str, tmp_path: Path
):
    path = tmp_path / "record.json"
    path.write_text(text)
    problems: list[str] = []
    assert read_record(kind, tmp_path, path.name, problems) is None
    (line,) = problems
    if problem != "protocol.split":
        assert line.startswith(f"{path}: {problem}")
    assert "\n" not in line and "pydantic" not in line


def test_a_record_that_cannot_be_opened_is_named(tmp_path: Path):
    problems: list[str] = []
    assert read_record(StatusRecord, tmp_path, "status.json", problems) is None
    assert read_record(StatusRecord, tmp_path.parent, tmp_path.name, problems) is None
    assert problems[0] == f"{tmp_path / 'status.json'}: missing"
    assert problems[1].startswith(f"{tmp_path}: cannot be read (")


def test_broken_rows_are_counted_and_left_out(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    rows = ['{"step": 1, "train/bits": 3.0}', '{"step": "x"}', '{"step": 3, "train/bi']
    path.write_text("\n".join(rows))
    problems: list[str] = []
    read = read_rows(MetricsRow, tmp_path, path.name, problems)
    assert [row.get("train/bits") for row in read] == [3.0]
    (line,) = problems
    assert line.startswith(f"{path}: 2 broken rows left out (line 2: step is damaged: ")
    assert read_rows(MetricsRow, tmp_path, "none.jsonl", problems) == [] and len(problems) == 1


def test_older_rows_of_metrics_have_todays_names():
    train = MetricsRow.model_validate({"kind": "train", "step": 1, "bits": 3.0, "norm": 1.0})
    valid = MetricsRow.model_validate({"kind": "valid", "step": 2, "val_bits": 2.9})
    final = MetricsRow.model_validate({"kind": "final", "step": 2, "val_bits": 2.8, "val_se": 0.1})
    assert train.metrics == {"train/bits": 3.0, "train/norm": 1.0}
    assert valid.metrics == {"valid/bits": 2.9}
    assert final.metrics == {"valid/final_bits": 2.8, "valid/final_standard_error": 0.1}
    assert [row.kind for row in (train, valid, final)] == ["train", "valid", "final"]


def test_an_older_evaluation_has_its_protocol_apart():
    record = EvaluationRecord.model_validate(
        {
            "bits_per_byte": 2.5,
            "units": 512,
            "split": "valid",
            "mode": "streaming",
            "ablate": "local",
            "length": 64,
            "stride": 32,
            "partial": True,
            "windows": 8,
            "data": {**DATA, "stamps": {"newlines": "drop"}},
            "memory": ["a memory of 64"],
            "own_data": False,
            "selection_sees_future": False,
            "protocol": "bits/byte on valid, streaming; selection=topk: sees no future",
            "checkpoint": CHECKPOINT,
        }
    )
    protocol = record.protocol
    assert (record.bits, record.selection, record.sample) == (2.5, "selection=topk", 8)
    assert protocol.data == f"text{older.FOREIGN}" and protocol.ablate == "local"
    assert protocol.stamps == ("newlines dropped", "a memory of 64")


def test_an_older_final_score_has_no_protocol():
    older_run = StatusRecord.model_validate({"state": "done", "final": {"bits": 3.0, "units": 9}})
    newer_run = StatusRecord.model_validate({"state": "done", "final": SCORE})
    assert isinstance(older_run.final, OlderFinal) and isinstance(newer_run.final, ScoreRecord)


def test_older_analyses_and_audits_are_read():
    head = {"layer": 0, "head": 0, "pattern": "full", "reads_share": 0.5}
    patterns = {"what": "patterns", **OF_ANALYSES, "start": 0, "positions": 64, "heads": [head]}
    record = AnalysisFile.model_validate(patterns).root
    assert isinstance(record, PatternsRecord) and (record.units, record.positions) == (64, [])
    context = {"what": "context", **OF_ANALYSES, **ANALYSES["context"], "protocol": "a line"}
    record = AnalysisFile.model_validate(context).root
    assert isinstance(record, ContextRecord) and record.protocol is None
    audit = {**AUDIT, "price": {**AUDIT["price"], "positions": [1, 5]}}
    assert AuditRecord.model_validate(audit) == AuditRecord.model_validate(AUDIT)


def test_a_study_line_of_todays_records_is_read_again():
    values = {
        "run": "a",
        "config": "seed: 0\n",
        "status": {"state": "done", "final": SCORE},
        "metrics": [{"step": 1, "train/bits": 3.0}],
        "analyses": [{"what": what, **OF_ANALYSES, **ANALYSES[what]} for what in ANALYSES],
    }
    line = StudyLine.model_validate(values)
    text = line.model_dump_json(exclude_defaults=True)
    assert StudyLine.model_validate_json(text) == line
