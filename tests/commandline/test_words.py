"""What stands behind a command: run folders, options, overrides; what is taken, and what is refused
in which words.
"""

import shlex
from pathlib import Path

import pytest

from rtx.cli import main as cli
from rtx.cli.commands import BY_NAME
from rtx.cli.options import EvalOptions, SampleOptions, SweepOptions
from rtx.cli.request import Request, read_request
from rtx.settings.compose import compose
from rtx.settings.overrides import check_overrides
from rtx.settings.schema import all_fields, flat, to_dict

SWEEP = "is a sweep (heads=full,local,random): rtx train -m runs it; for one cell of it"
ROUTING = ("heads: 0", "layers: 0", "selection: random")
"""Of runs that are named after it."""
BLANKS = "no blanks around =: key=value is one word\n"
ONE = "takes one value; a sweep tries several: rtx train -m"
RANGE = "takes one value; for a sweep: rtx train -m 'seed=range(1,6)'\n"
NOT_READ = "rtx does not read this key of Hydra; RTX_OUTPUTS=<folder> and name= say where"
PRESETS = "model= and experiment= choose presets: model=tiny\n"
DATA = "say prepare, verify, info data=<set>, list, or remove <a store of that list>"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A current folder with runs, which have a configuration and nothing else, and a sweep."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RTX_DATA", "stores")
    monkeypatch.setenv("WANDB_MODE", "onlin")
    texts = {
        "a": "seed: 0",
        "b": "seed: 0",
        **{routing: f"routing:\n  {routing}" for routing in ROUTING},
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"{text}\n")
    (tmp_path / "grid").mkdir()
    (tmp_path / "grid" / "sweeps.jsonl").touch()


def test_a_value_is_taken_as_it_is_written() -> None:
    for word, value in (
        ("trainer.steps=1e3", 1000),
        ("trainer.steps = 5 ", 5),
        ("++trainer.steps=${optimizer.warmup}", 50),
        ("routing.attend_self=no", False),
        ("trainer.max_minutes=NULL", None),
        ("optimizer.lr=1e-5", 1e-5),
        ("name=007", "007"),
        ('name="null"', "null"),
        ("name='a,b'", "a,b"),
        ("logger.group=(x) [y", "(x) [y"),
        ("logger.group=glob(*)", "glob(*)"),
        ("name=1..5", "1..5"),
        ("logger.group=${name}/x", "rtx/x"),
    ):
        assert flat(to_dict(compose([word])))[word.partition("=")[0].strip("+ ")] == value


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train routing.windw=3", "unknown key 'routing.windw' (did you mean 'routing.window'?)"),
        ("train +lrr=3", "unknown key 'lrr' (did you mean 'optimizer.lr'?)"),
        ("train modell=rt24", "unknown key 'modell' (did you mean 'model'?)"),
        (
            "train experiment=memory model=tiny",
            "experiment=memory lays out a model of its own, memory; leave",
        ),
        ("train TRAINER.STEPS=3", "(did you mean 'trainer.steps'?)"),
        ("train routing.hiden=3", "(did you mean 'model.hidden'?)"),
        ("train data=enwik9", "data=enwik9 (did you mean 'enwik8'?): must be one of cifar10, copy"),
        (
            "train data=enwik9",
            "tracking, wikitext103 (a file of conf/data/); extensions=<file>.py adds names of your "
            "own\n",
        ),
        ("train model=RT24", "model=RT24 (did you mean 'rt24'?): must be one of adaptive_input, "),
        (
            "train model=RT24",
            "sparse_transformer-cifar10, ... (21 in all) (a file of conf/model/)\n",
        ),
        ("train data=Enwik8", "data=Enwik8 (did you mean 'enwik8'?): must be one of "),
        (
            "train model.base=Local+FUL",
            "model.base=Local+FUL (did you mean 'local'?): must be one or more of local, full",
        ),
        (
            "train model.base=dilated",
            "lsh two to one); extensions=<file>.py adds names of your own\n",
        ),
        (
            "train routing.selection=x",
            "or chosen keys); extensions=<file>.py adds names of your own\n",
        ),
        (
            "train trainer.batch_size=1000000000",
            "trainer.batch_size=1000000000: must be an integer, at least 1, at m",
        ),
        (
            "plan hardware.workers=1000000",
            "hardware.workers=1000000: must be auto or an integer, at least 0, at most 256 (",
        ),
        ("train data=../routing/causal", "data=../routing/causal: must be one of cifar10"),
        ("train 'trainer={steps: 3}'", "trainer={steps: 3}: must be one of debug, overfit"),
        (
            "train trainer.steps=abc",
            "trainer.steps=abc: must be an integer, at least 1, at most 1,000,000,000,000 (",
        ),
        ("train trainer.steps=٤", "trainer.steps=٤: must be an integer"),
        ("train trainer.steps=1e300", "trainer.steps=1e300: must be an integer"),
        ("train optimizer.lr=nan", "optimizer.lr=nan: must be a number, greater than 0"),
        ("train routing.decay=1.5", "routing.decay=1.5: must be a number, at least 0, at most 1 ("),
        ("train hardware.compile=maybe", "hardware.compile=maybe: must be auto or true or false"),
        ("train trainer.micro_batch_size=0", "must be auto or an integer, at least 1"),
        (
            "train routing.selection=causl",
            "routing.selection=causl (did you mean 'causal'?): must be one of ",
        ),
        (
            "train model.base=local+none",
            "adaptive_span, strided, fixed, fixed_block, fixed_summary, joined",
        ),
        (
            "train name=a,b",
            "takes one value; several make a sweep (rtx train -m); "
            "quote it where it is one: 'name=\"",
        ),
        (
            "train hydra.run.dir=x",
            f"hydra.run.dir=x: {NOT_READ}",
        ),
        (
            "train -m seed=1,2 hydra/launcher=joblib",
            "by itself; sweep.parallel=<number> runs cells side by side, hardware=slurm as jobs\n",
        ),
        (
            "train trainer.max_epochs=3",
            "unknown key 'trainer.max_epochs' (did you mean 'trainer.steps'?)",
        ),
        ("train foo=3", "unknown key 'foo'; --help lists them"),
        ("train trainer.stps", "'trainer.stps' is not of the form key=value"),
        ("train ~routing", "~routing: a run cannot be without routing; choose an option: "),
        ("train ~seed", "~seed: a run cannot be without seed; give it a value: seed=<value>\n"),
        ("train ~trainer.max_minutes=3", "write ~trainer.max_minutes, or trainer.max_minutes=null"),
        ("train ~routing.hed", "unknown key 'routing.hed' (did you mean 'routing.heads'?)"),
        ("train seed = 3", f"'seed' is not of the form key=value; {BLANKS}"),
        ("train seed =3", f"'seed' is not of the form key=value; {BLANKS}"),
        ("train seed= 3", f"'3' is not of the form key=value; {BLANKS}"),
        ("train =3", f"'=3' is not of the form key=value; {BLANKS}"),
        ("eval a split = test", f"'split' is not of the form key=value; {BLANKS}"),
        (
            "train data=text data.path=my books/a.txt",
            "'books/a.txt' is not of the form key=value; quote a value with bl",
        ),
        (
            "train data=text data.path=my old books/a b",
            "with blanks: 'data.path=my old books/a b'\n",
        ),
        (
            "sample a prompt=Once upon seed=3",
            "'upon' is not of the form key=value; quote a value with blanks: 'prompt=",
        ),
        ("train seed=3 tiny", "'tiny' is not of the form key=value\n"),
        (
            "train 'routing.heads=range(1,3)'",
            f"routing.heads=range(1,3): {ONE} 'routing.heads=range(1,3)'\n",
        ),
        ("train 'seed=choice(1,2)'", f"seed=choice(1,2): {ONE} 'seed=choice(1,2)'\n"),
        ("plan 'model=glob(rt*)'", f"model=glob(rt*): {ONE} 'model=glob(rt*)'\n"),
        ("train -m 'routing.heads=range(1,x)'", "routing.heads=range(1,x): "),
        ("train -m 'seed=range(1,4,0)'", "seed=range(1,4,0): range() arg 3 must not be zero\n"),
        ("train -m 'seed=range(1e12)'", "contains more than 10,000 values\n"),
        ("train -m 'seed=range(4,1)'", "seed=range(4,1): contains no value\n"),
        ("train -m 'routing.heads=range(1,3,0.5)'", "routing.heads=1.5: must be an integer"),
        ("train -m 'routing.heads=choice(1,many)'", "routing.heads=many: must be an integer"),
        ("train -m 'model=glob(rx*)'", "model=glob(rx*): matches nothing, of adaptive_input, "),
        ("train -m 'name=glob(*)'", "matches nothing, because name has no list of names\n"),
        (
            "train -m 'optimizer.lr=interval(1e-4,1e-2)'",
            "an interval has no list of values; hydra/sweeper=optuna draws from it; for a grid",
        ),
        (
            "train -m 'routing.heads=interval(1,4)'",
            "draws fractions; write routing.heads=int(interval(1,4))\n",
        ),
        (
            "train -m 'optimizer.lr=interval(-1,1)'",
            "optimizer.lr=-1.0: must be a number, greater than 0",
        ),
        (
            "train -m 'seed=1,2' hydra/sweeper=nevergrad",
            "hydra/sweeper=nevergrad: needs a plug-in: pip install hydra-nevergrad-sweeper\n",
        ),
        (
            "train -m seed=1,2 hydra/sweeper=xyzzy",
            "hydra/sweeper=xyzzy: there is no such sweeper; here are basic, ",
        ),
        ("train -m seed=1 +hydra.sweeper.params.seed=1,2", "write the key of the run itself"),
        ("train seed=1..5", f"seed=1..5: {RANGE}"),
        (
            "train -m seed=1..5",
            "seed=1..5: takes one value; for a sweep: 'seed=range(1,6)'\n",
        ),
        ("plan seed=1..5", f"seed=1..5: {RANGE}"),
        (
            "train hydra/sweeper=optuna",
            "hydra/sweeper=optuna: only a sweep reads it: rtx train -m\n",
        ),
        ("train hydra.job.chdir=true", "no run changes the folder; RTX_OUTPUTS=<folder>"),
        ("train hydra.verbose=true", "what a run prints is in its output.log"),
        ("train --info", "--info: unknown flag of rtx train; --cfg job prints the configuration\n"),
        ("train --config-name=tiny", f"--config-name=tiny: unknown flag of rtx train; {PRESETS}"),
        ("train --config-name tiny", f"--config-name: unknown flag of rtx train; {PRESETS}"),
        ("train -cn config", f"-cn: unknown flag of rtx train; {PRESETS}"),
        (
            "train --config-path=conf",
            "--config-path=conf: unknown flag of rtx train; --config-dir <folder> adds presets",
        ),
        (
            "train --help=routing",
            "--help=routing: unknown flag of rtx train; write --help routing\n",
        ),
        (
            "train --help rotuing",
            "rtx train --help rotuing: say one of data, routing, optimizer, hardware, logger, "
            "model, ",
        ),
        ("plan --help trainer.step", "trainer, or a key (did you mean 'trainer.steps'?)\n"),
        ("train 'a\nb=3'", "unknown key 'a b'"),
        ("train sweep.retry=true", "sweep.retry is an option of rtx train -m"),
        (
            "train eval.split=test",
            "rtx train does not read eval.split; split is an option of rtx eval",
        ),
        ("train -m routing.heads=2,x", "routing.heads=x: must be an integer"),
        ("train -m model=rt24,rtx", "model=rtx (did you mean 'rt24'?): must be one of"),
        ("trian", "unknown command 'trian' (did you mean 'train'?)"),
        ("bogus", "unknown command 'bogus'; the commands are train, "),
        ("--hlep", "unknown command '--hlep' (did you mean '--help'?)"),
        ("train --multrun", "--multrun: unknown flag of rtx train (did you mean '--multirun'?)"),
        ("train --cfg", "--cfg: say --cfg job"),
        ("eval outputs/rtx/run --cfg job", "--cfg: unknown flag of rtx eval"),
        (
            "train --dry-run",
            "--dry-run: unknown flag of rtx train; rtx plan says what a run would cost, ",
        ),
        ("completion fish", "rtx completion takes bash or zsh"),
        (
            "plan hardware=slurm",
            "hardware=slurm: makes jobs of the cells of a sweep (rtx train -m;",
        ),
        ("eval outputs/\x1b[31mred", "outputs/�[31mred: no such folder"),
        ("eval a splt=test", "unknown key 'splt' (did you mean 'split'?)"),
        (
            "eval a optimizer.lr=5",
            "rtx eval does not read optimizer.lr; it reads checkpoint, split",
        ),
        (
            "eval a memory=5",
            "rtx: memory=5 has no effect with model.base=local; it is for recurrent",
        ),
        (
            "eval a eval.split=test",
            "rtx eval does not read eval.split; split is an option of rtx eval",
        ),
        ("eval a hardware=ddp", "hardware=ddp: not for rtx eval"),
        ("resume a hardware=slurm", "hardware=slurm: not for rtx resume"),
        ("sample a data.path=x", "rtx sample does not read data.path"),
        ("resume a model=rt24", "rtx resume does not read model; it reads hardware, logger, "),
        ("eval split=test", "rtx eval needs the run's folder first; usage: rtx eval <run>"),
        ("eval a b", "takes 1 run, not also 'b'"),
        ("eval grid", "has no config.yaml"),
        (
            "eval 'heads: 0' ablate=random",
            "ablate=random: the model has no routing heads to take away",
        ),
        (
            "eval 'layers: 0' ablate=local",
            "ablate=local: the model has no routing heads to take away",
        ),
        (
            "eval 'selection: random' ablate=random",
            "ablate=random: the heads of selection=random read random members",
        ),
        ("analyze patterns a lyer=1", "unknown key 'lyer' (did you mean 'layer'?)"),
        (
            "analyze diverge a",
            "say divergence, patterns, context, coverage, pretrained (did you mean 'divergence'?)",
        ),
        ("sweep", "rtx sweep needs the sweep's folder: rtx sweep outputs/<name>"),
        ("sweep grids", "holds no sweep; a sweep is a folder such as"),
        (
            "train --cfg job experiment=cifar10_baselines",
            f"rtx: experiment=cifar10_baselines {SWEEP}",
        ),
        ("data", f"rtx: rtx data: {DATA}\n"),
        ("data prepar", f"rtx: rtx data prepar: {DATA} (did you mean 'prepare'?)\n"),
        ("data list data=text", f"rtx: rtx data list data=text: {DATA}\n"),
        (f"data list {'9' * 3000}", f"rtx: rtx data list {'9' * 83}...: {DATA}\n"),
        ("data remove", f"rtx: rtx data remove: {DATA}\n"),
        (f"runs {'9' * 3000}", "...: cannot be read (File name too long)\n"),
        (
            f"train --cfg job data=recall data.path={'9' * 3000}",
            "999... has no effect with data.name=recall",
        ),
        (f"train extensions={'9' * 3000}.py", f"{'9' * 99} ... {'9' * 99}"),
        (f"runs --{'9' * 3000}", f"rtx: --{'9' * 95}...: unknown flag of rtx runs\n"),
        ("data remove text-12", "rtx: text-12: no store of this name in "),
        ("data info", "not prepared; to prepare it: rtx data prepare"),
        ("data prepare data=text", "rtx: data=text needs data.path=<file, folder or glob>\n"),
        (
            "data prepare data=enwik8 data.path=nowhere",
            "data.path=nowhere: expected enwik8.zip or enwik8, found n",
        ),
        (
            "data prepare data=kernel data.path=nowhere",
            "data.path=nowhere: expected linux-6.12.tar.xz, another rel",
        ),
        ("data prepare trainer.steps=5", "rtx: rtx data does not read trainer.steps; "),
        ("train routing.heads=9", "routing.heads=9 must be at most model.heads=4"),
        ("train trainer.steps=${seeed}", "trainer.steps: Interpolation key 'seeed' not found"),
        (
            "train trainer.steps=${oc.env:NO_SUCH_VARIABLE}",
            "Environment variable 'NO_SUCH_VARIABLE' not found",
        ),
        ("train name=${name}", "name: Recursive interpolation detected"),
        ("train data.length=${seed}", "data.length=0: must be an integer, at least 2"),
        (
            "train model.tie_embeddings=${seed} seed=3",
            "model.tie_embeddings=3: must be true or false",
        ),
        (
            "train",
            "WANDB_MODE='onlin': must be one of online, run, offline, dryrun, disabled (did you "
            "mean 'online'?)",
        ),
        (
            "train hardware.attention=flex hardware=cpu logger=jsonl",
            "hardware.attention=flex is for a GPU: on a CPU",
        ),
        ("train data=text", "data=text needs data.path=<file, folder or glob>"),
    ],
)
def test_a_mistake_is_told_in_a_line(
    runs: None, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    assert cli.main(shlex.split(line)) == 2
    out, error = capsys.readouterr()
    assert out == "" and said in error
    assert all(row.startswith("rtx: ") and len(row) < 550 for row in error.splitlines())


def test_what_a_sweep_lists() -> None:
    listed = {
        "routing.heads=2, 4": ("2", " 4"),
        "data.path=a.txt,'b,c.txt'": ("a.txt", "'b,c.txt'"),
        "model=rt10, 'rt12'": ("rt10", "rt12"),
        "hydra.launcher.setup=[a,b]": ("[a,b]",),
        "logger.group=(a,b),c": ("(a,b)", "c"),
        r"name=a\,b,c": ("'a,b'", "c"),
        "routing.heads=range(1,4)": ("1", "2", "3"),
        "optimizer.lr=range(0.5,2,0.5)": ("0.5", "1.0", "1.5"),
        "data.path=choice(a.txt,'b,c.txt')": ("a.txt", "'b,c.txt'"),
        "routing.attend_self=choice(true,false)": ("true", "false"),
        "seed=sort(3,1,2)": ("1", "2", "3"),
        "model=glob(rt2*,exclude=*64)": ("rt22", "rt24"),
        "routing.layers=int(2)": ("2",),
        "optimizer.lr=tag(log,interval(1e-4,1e-2))": (),
        "~trainer.max_minutes": ("null",),
    }
    checked = check_overrides(listed, sweep=True)
    assert [override.values for override in checked] == [*listed.values()]


def request(command: str, *words: str) -> Request:
    return read_request(BY_NAME[command], words)


def test_options_are_read_beside_keys(runs: None) -> None:
    words = ("a", "split=test", "limit=5", "seed=3", "hardware=cpu", "data.path=a=b")
    scored = request("eval", *words)
    assert (scored.run, scored.options) == (Path("a"), EvalOptions(split="test", limit=5))
    assert list(map(str, scored.overrides)) == ["seed=3", "hardware=cpu", "data.path=a=b"]
    assert scored.named == {"split", "limit"} and scored.words == words
    drawn = ("a", "prompt=Once, (upon) a=b", "seed=3", "top_k=null", "temperature=5e-1")
    expected = SampleOptions(prompt="Once, (upon) a=b", seed=3, temperature=0.5)
    assert request("sample", *drawn).options == expected
    assert request("sample", "a", "~top_k", "prompt='  null '").options.prompt == "  null "
    swept = request("train -m", "seed=1,2", "sweep.parallel=2")
    assert swept.options == SweepOptions(parallel=2)
    assert [override.values for override in swept.overrides] == [("1", "2")]
    assert request("audit", "a", "b", "seed=4").runs == (Path("a"), Path("b"))
    assert request("report").runs == ()
    assert request("data", "remove", "one", "other").names == ("remove", "one", "other")


def test_every_key_has_a_docstring_of_one_sentence_or_more() -> None:
    docs = {key: field.doc for key, field in all_fields().items()}
    docs |= {
        f"{name} {key}": own.doc
        for name, command in BY_NAME.items()
        for key, own in command.own.items()
    }
    assert [key for key, doc in docs.items() if not doc.endswith(".")] == []
