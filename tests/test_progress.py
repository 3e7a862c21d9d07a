"""Messages: they go through the logger `rtx`, and the first process of a run alone prints them."""

import logging

import pytest

from rtx.progress import say, warn


def test_messages_are_printed_whole(capsys: pytest.CaptureFixture[str]):
    say("50% of\ntwo lines")
    warn("careful")
    assert capsys.readouterr().out == "50% of\ntwo lines\ncareful\n"


def test_a_level_of_the_logger_silences_all_but_warnings(capsys: pytest.CaptureFixture[str]):
    logger = logging.getLogger("rtx")
    logger.setLevel(logging.WARNING)
    try:
        say("step 1")
        warn("careful")
    finally:
        logger.setLevel(logging.INFO)
    assert capsys.readouterr().out == "careful\n"


def test_other_processes_of_a_run_print_no_messages(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    variables = {"TORCHELASTIC_RUN_ID": "a", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        say(f"rank {rank}")
    assert capsys.readouterr().out == "rank 0\n"
