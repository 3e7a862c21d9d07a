"""What help pages and messages know of the schema and the groups."""

from __future__ import annotations

import pytest

from rtx.config import GROUPS, all_fields, sections
from rtx.keys import conf_dir, option_doc, options, suggest_key
from rtx.options import READS


def test_every_field_has_a_docstring_of_one_sentence_or_more() -> None:
    for field in all_fields().values():
        assert field.doc.endswith("."), field.key
    for command in READS.values():
        assert all(field.doc.endswith(".") for field in command.own.values())
    for section, doc in sections().items():
        assert doc.endswith("."), section


def test_fields_know_what_they_allow() -> None:
    allowed = {key: field.allowed for key, field in all_fields().items()}
    assert allowed["routing.clusters"] == "an integer, at least 1, or null"
    assert allowed["optimizer.lr"] == "a number, greater than 0"
    assert allowed["hardware.precision"] == "one of auto, fp32, bf16, tf32, fp64"
    assert allowed["seed"] == "an integer, at least 0, at most 4294967295"
    assert allowed["model.recompute"] == "auto, true or false"
    assert allowed["data.path"] == "text, or null"


def test_every_group_is_a_folder_of_options_that_say_what_they_are() -> None:
    assert sorted(GROUPS) == sorted(folder.name for folder in conf_dir().iterdir() if folder.is_dir())
    for group in GROUPS:
        assert options(group)
        for option in options(group):
            assert option_doc(group, option).endswith(".")


@pytest.mark.parametrize(
    ("word", "suggested"),
    [
        ("routing.windw", " (did you mean 'routing.window'?)"),
        ("lrr", " (did you mean 'optimizer.lr'?)"),
        ("TRAINER.STEPS", " (did you mean 'trainer.steps'?)"),
        ("heads", " (did you mean 'routing.heads' or 'model.heads'?)"),
        ("routing.hiden", " (did you mean 'model.hidden'?)"),
        ("eval.xyzzy", ""),
        ("modle", " (did you mean 'model'?)"),
        ("xyzzy", ""),
        ("", ""),
        ("é" * 2000, ""),
    ],
)
def test_suggestions(word: str, suggested: str) -> None:
    assert suggest_key(word, [*GROUPS, *all_fields()]) == suggested
