"""A few of the attacks that tests/campaigns/attacks.py draws, on a run, its data and a sweep."""

import itertools
from pathlib import Path

from tests.campaigns.attacks import RUN, Campaign, Command, World, make_world
from tests.helpers.forking import Forker
from tests.helpers.small_runs import Workshop

CASES = 10
QUICK = {
    RUN: (Command(("runs",), 2), Command(("eval", "RUN", "limit=1"), 1)),
    "data": (Command(("data", "list"), 1), Command(("data", "verify", "data=text", "TEXT"), 1)),
    "out/swept": (Command(("sweep", "out/swept"), 2), Command(("runs", "out/swept"), 1)),
}


def test_drawn_attacks_change_nothing_outside_and_end_in_a_line(
    tmp_path: Path, forker: Forker
) -> None:
    workshop = Workshop(tmp_path, forker)
    world = make_world(workshop, tmp_path / "world", added=())
    campaign = Campaign(workshop, world, seed=1, limit=300, drawn=QUICK)
    for case in itertools.islice(campaign.cases(), CASES):
        campaign.happen(case)
    assert campaign.failures == []
    assert sum(campaign.codes.values()) == CASES and 0 in campaign.codes


def test_what_is_a_failure(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.outside.mkdir()
    campaign = Campaign(Workshop(tmp_path), world, seed=1, limit=300)
    (world.outside / "file").write_text("changed")
    assert campaign.problem(0, "") == "changed outside: file"
    assert campaign.problem(-14, "") == "no end after 300 s"
    assert campaign.problem(0, "Traceback (most recent call last):") == "a traceback"
    assert campaign.problem(2, "rtx: a line") == ""
