"""The command as a user starts it, killed at every kind of moment: the run of one left alone, bit for bit."""

from __future__ import annotations

import random

from disturbances import MOMENTS, Ordeal
from small_runs import Workshop, difference


def test_one_run_is_killed_at_every_kind_of_moment(workshop: Workshop) -> None:
    draw = random.Random(7)
    steps = "trainer.steps=40"
    ordeal = Ordeal(workshop, "killed", workshop.begin, steps)
    kills = [ordeal.kill(moment, draw, 5.0) for moment in ("preparing", "begun", "validating", "saving")]
    assert ordeal.finish() == 0, (workshop.folder / "killed.log").read_text()
    met = [(kill.met, kill.lost, kill.damaged) for kill in kills if kill]
    assert len(met) == 4 and all((lost, damaged) == (False, 0) for _, lost, damaged in met), kills
    assert met[0][0] == "data preparation", kills
    assert difference(ordeal.run, workshop.train("alone", steps)) == ""


def test_resumes_are_killed_too(workshop: Workshop) -> None:
    draw = random.Random(8)
    ordeal = Ordeal(workshop, "resumed", workshop.fork, "trainer.steps=30")
    asked = [moment for moment in MOMENTS if moment != "preparing"] * 2
    kills = [kill for moment in asked if (kill := ordeal.kill(moment, draw, 0.5))]
    assert ordeal.finish() == 0, (workshop.folder / "resumed.log").read_text()
    assert any(kill.resumed for kill in kills)
    assert not any(kill.lost or kill.damaged for kill in kills), kills
    assert difference(ordeal.run, workshop.train("whole", "trainer.steps=30")) == ""
