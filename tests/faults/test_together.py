"""Two commands at once where there is room for one."""

from __future__ import annotations

import re
import signal

from small_runs import SIZES, Workshop, after, difference

from rtx.training.run_folder import read_status, run_state


def test_two_runs_in_one_folder(workshop: Workshop) -> None:
    alone = workshop.train("alone")
    for attempt in range(2):
        run = workshop.folder / f"shared{attempt}"
        processes = [workshop.fork(run, "train", workshop.text, *SIZES) for _ in range(2)]
        codes = [process.wait() for process in processes]
        said = processes[0].log.read_text()
        assert sorted(codes) == [0, 2], said
        refusals = (
            f"rtx: {run} is in use by .*; wait for it, or stop it first",
            f"rtx: RTX_RUN={run} holds a run already; ",
        )
        assert sum(len(re.findall(refusal, said)) for refusal in refusals) == 1, said
        assert difference(run, alone) == ""


def test_two_resumes_of_one_run(workshop: Workshop) -> None:
    alone = workshop.train("long", "trainer.steps=30")
    process = workshop.start("resumed", "trainer.steps=30")
    process.kill_when(after(10))
    processes = [workshop.fork(process.run, "resume", str(process.run)) for _ in range(3)]
    codes = [process.wait() for process in processes]
    assert sorted(codes) == [0, 2, 2], process.log.read_text()
    assert difference(process.run, alone) == ""


def test_a_run_keeps_its_data(workshop: Workshop) -> None:
    process = workshop.start("reading", "trainer.steps=100000", "trainer.val_every=100000")
    process.until(after(2))
    assert ": removed, " in workshop.command("data", "remove", next((workshop.folder / "data").glob("text-*")).name)
    assert process.kill_when(after(2), signal.SIGTERM) == 143
    assert run_state(process.run) == "preempted" == (read_status(process.run) or {})["state"]
