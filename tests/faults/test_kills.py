"""SIGKILL at chosen calls, and by the clock: a run goes on to the bits of the one left alone."""

from __future__ import annotations

import random
import signal

from disturbances import MOMENTS, Ordeal, damaged_bytes, newest_step
from small_runs import SIZES, Workshop, difference

CALLS = {
    "os.fsync": 1,  # while data are prepared
    "rtx.commands.train.build_model": 1,
    "rtx.training.module.after_step": 17,
    "rtx.training.module.score_batch": 2,
    "rtx.training.checkpoint.struct.pack": 2,  # the file is written, but for its checksum
    "rtx.training.checkpoint.sync_folder": 2,
}
"""What the processes of a run die in, one after the other: a function, and which of its calls."""

DYING = """
import itertools, pkgutil, signal
owner, name = pkgutil.resolve_name({owner!r}), {name!r}
real, calls = getattr(owner, name), itertools.count(1)
def dying(*arguments, **options):
    if next(calls) == {call}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **options)
setattr(owner, name, dying)
"""


def test_one_run_is_killed_at_every_kind_of_moment(workshop: Workshop) -> None:
    words, run, saved = ("trainer.steps=40",), workshop.folder / "killed", 0
    for place, call in CALLS.items():
        owner, _, name = place.rpartition(".")
        begun = (run / "config.yaml").exists()
        command = ("resume", str(run)) if begun else ("train", workshop.text, *SIZES, *words)
        process = workshop.fork(run, *command, inside=DYING.format(owner=owner, name=name, call=call))
        assert process.wait() == -signal.SIGKILL, process.said(f"has not died in {place}")
        assert newest_step(run) >= saved and not damaged_bytes(run), place
        saved = newest_step(run)
    assert saved > 17
    workshop.command("resume", str(run))
    assert difference(run, workshop.train("alone", *words)) == ""


def test_resumes_are_killed_too(workshop: Workshop) -> None:
    draw = random.Random(8)
    ordeal = Ordeal(workshop, "resumed", workshop.fork, "trainer.steps=30")
    asked = [moment for moment in MOMENTS if moment != "preparing"] * 2
    kills = [kill for moment in asked if (kill := ordeal.kill(moment, draw, 0.5))]  # on a busy machine some come late
    assert ordeal.finish() == 0, (workshop.folder / "resumed.log").read_text()
    assert not any(kill.lost or kill.damaged for kill in kills), kills
    assert difference(ordeal.run, workshop.train("whole", "trainer.steps=30")) == ""
