"""The first habits of somebody who knows Hydra: each works, or its refusal names what to write
instead.
"""

import shlex

import pytest

from rtx.cli import main as cli

WORKS = {
    "train --cfg job seed=3": [{"seed": "3"}],
    "train -c job seed=3": [{"seed": "3"}],
    "train --cfg=job seed=3": [{"seed": "3"}],
    "train --cfg job --resolve optimizer.steps=70": [{"steps": "70"}],
    "train --cfg job +trainer.clip=0.5 ++seed=4": [{"clip": "0.5", "seed": "4"}],
    "train --cfg job trainer.max_minutes=5 ~trainer.max_minutes": [{"max_minutes": "null"}],
    "train --cfg job experiment=smoke ~experiment": [{"name": "rtx"}],
    "train --cfg job optimizer=adamw experiment=null": [{"name": "rtx"}],
    "train --cfg job 'trainer.steps=${optimizer.warmup}' optimizer.warmup=9": [{"steps": "9"}],
    "train --cfg job 'name=\"a,b\"'": [{"name": "a,b"}],
    r"train --cfg job 'name=a\,b'": [{"name": "a,b"}],
    "train --cfg job 'routing.heads=int(1.0)'": [{"heads": "1"}],
    "train --multirun --cfg job seed=1,2": [{"seed": "1"}, {"seed": "2"}],
    "train seed=1,2 -m --cfg job": [{"seed": "1"}, {"seed": "2"}],
    "train -m --cfg job 'routing.heads=range(1,3)'": [{"heads": "1"}, {"heads": "2"}],
    "train -m --cfg job 'routing.selection=choice(causal,topk)'": [
        {"selection": "causal"},
        {"selection": "topk"},
    ],
    "train -m --cfg job 'routing=glob(blocks*)'": [
        {"selection": "blocks"},
        {"selection": "blocks_random"},
    ],
    "train -m --cfg job 'routing=glob([blocks*,topk],exclude=*_random)'": [
        {"selection": "blocks"},
        {"selection": "topk"},
    ],
    "train -m --cfg job 'seed=sort(3,1)' 'trainer.max_minutes=choice(5,null)'": None,
    "train -m --cfg job 'seed=sort(3,1)' trainer.max_minutes=5,null": [
        {"seed": "1", "max_minutes": "5.0"},
        {"seed": "1", "max_minutes": "null"},
        {"seed": "3", "max_minutes": "5.0"},
        {"seed": "3", "max_minutes": "null"},
    ],
    "train -m --cfg job hydra/sweeper=basic seed=1": [{"seed": "1"}],
    "train -m --cfg job hydra/launcher=rtx_processes seed=1": [{"seed": "1"}],
}
"""Lines, and of each cell that they print some keys with their values; None: Hydra's parser refuses
the line, too.
"""

REFUSED = {
    "train -m 'optimizer.lr=interval(1e-4,1e-2)'": "hydra/sweeper=optuna draws from it",
    "train -m seed=1,2 hydra/launcher=joblib": "sweep.parallel=<number> runs cells side by side",
    "train -m seed=1,2 hydra/launcher=submitit_slurm": "hardware=slurm as jobs",
    "train -m seed=1,2 hydra.sweep.dir=runs": "RTX_OUTPUTS=<folder> and name= say where runs go",
    "train hydra.run.dir=runs": "RTX_OUTPUTS=<folder> and name= say where runs go",
    "train hydra.job.chdir=true": "no run changes the folder",
    "train hydra.mode=MULTIRUN": "rtx train -m starts a sweep",
    "train hydra.verbose=true": "what a run prints is in its output.log",
    "train hydra/job_logging=disabled": "what a run prints is in its output.log",
    "train --config-name tiny": "model= and experiment= choose presets",
    "train --info defaults": "--cfg job prints the configuration",
    "train --hydra-help": "--help lists the keys",
    "train --experimental-rerun x": "rtx resume <run> continues a run",
    "train 'seed=range(1,4)'": "rtx train -m 'seed=range(1,4)'",
    "train data@here=text": "rtx has no packages: data=text",
    "train ~seed": "give it a value: seed=<value>",
    "train ~routing": "choose an option: routing=<option>",
    "train --resolve": "goes with --cfg job",
    "train --cfg hydra": "say --cfg job; --help <group> prints one group",
    "train -m seed=1,2 hydra/sweeper=optun": "(did you mean 'optuna'?)",
}
"""Lines, and what their refusal says to write instead."""


@pytest.mark.parametrize("line", WORKS)
def test_it_works(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    cells = WORKS[line]
    assert cli.main(shlex.split(line)) == (0 if cells else 2)
    printed, error = capsys.readouterr()
    if cells is None:
        assert error.startswith("rtx: ") and len(error.splitlines()) == 1
        return
    assert error == ""
    pages = printed.split("---\n")[1:] or [printed]
    assert len(pages) == len(cells)
    for page, keys in zip(pages, cells, strict=True):
        lines = [text.strip() for text in page.splitlines()]
        for key, value in keys.items():
            assert f"{key}: {value}" in lines, (key, value)


@pytest.mark.parametrize("line", REFUSED)
def test_a_refusal_names_what_to_write_instead(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(shlex.split(line)) == 2
    printed, error = capsys.readouterr()
    assert printed == "" and REFUSED[line] in error
    assert error.startswith("rtx: ") and len(error.splitlines()) == 1
