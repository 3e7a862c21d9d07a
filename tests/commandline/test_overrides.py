"""Overrides before Hydra sees them: what is taken, in which form, and what is refused in which words."""

from __future__ import annotations

import pytest

from rtx.commandline.overrides import check_overrides
from rtx.errors import UserError


def taken(*arguments: str, sweep: bool = False) -> list[str]:
    """Return the overrides in Hydra's grammar."""
    return [str(override) for override in check_overrides(arguments, sweep=sweep)]


def refusal(argument: str, sweep: bool = False) -> str:
    """Return what is said of an override that is refused."""
    with pytest.raises(UserError) as caught:
        check_overrides([argument], sweep=sweep)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    assert "HYDRA_FULL_ERROR" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("argument", "form"),
    [
        ("trainer.steps=1e3", "trainer.steps=1000"),
        ("trainer.steps = 5 ", "trainer.steps=5"),
        ("model.layers=1_000", "model.layers=1000"),
        ("hardware.compile=1", "hardware.compile=true"),
        ("routing.attend_self=no", "routing.attend_self=false"),
        ("routing.clusters=null", "routing.clusters=null"),
        ("+experiment=smoke", "experiment=smoke"),
        ("++trainer.steps=5", "trainer.steps=5"),
        ("trainer.steps=${optimizer.steps}", "trainer.steps=${optimizer.steps}"),
        ("name=1e3", "name='1e3'"),
        ("name=007", "name='007'"),
        ("data.path=~/book.txt", "data.path='~/book.txt'"),
        ("data.path=books/*.txt", "data.path='books/*.txt'"),
        ('data.path="a=b,c.txt"', "data.path='a=b,c.txt'"),
        ("data.path=null", "data.path=null"),
        ("data.path=${oc.env:HOME}/book.txt", "data.path=${oc.env:HOME}/book.txt"),
        ('data.path="null"', "data.path='null'"),
        ("data.path=", "data.path=''"),
    ],
)
def test_forms(argument: str, form: str) -> None:
    assert taken(argument) == [form]
    assert taken(form) == [form]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("routing.windw=3", "unknown key 'routing.windw' (did you mean 'routing.window'?)"),
        ("+lrr=3", "unknown key 'lrr' (did you mean 'optimizer.lr'?)"),
        ("heads=3", "unknown key 'heads' (did you mean 'routing.heads' or 'model.heads'?)"),
        ("~routing.heads", "~routing.heads: a key or group can be set, not removed"),
        (
            "data=enwik9",
            "data=enwik9: no such option (did you mean 'enwik8'?); data takes cifar10, enwik8, imagenet64, images, "
            "pg19, recall, stdlib, text, wikitext103",
        ),
        (
            "data=",
            "data=: no such option; data takes cifar10, enwik8, imagenet64, images, pg19, recall, stdlib, text, "
            "wikitext103",
        ),
        ("data=../routing/causal", "data=../routing/causal: no such option"),
        ("logger=[auto]", "logger=['auto']: no such option"),
        ("experiment=smok", "(did you mean 'smoke'?); experiment takes cifar10, cifar10_baselines, cifar10_full, "),
        ("trainer={steps: 3}", "trainer is a section; set its keys one by one, such as trainer.<key>=..."),
        ("trainer.steps=abc", "trainer.steps=abc: must be an integer, at least 1 (Optimizer steps to train;"),
        ("trainer.steps=1.5", "trainer.steps=1.5: must be an integer, at least 1"),
        ("trainer.steps=null", "trainer.steps=null: must be an integer"),
        ("bench.turns=9", "rtx train does not read bench.turns; it is an option of rtx bench steps"),
        ("sweep.retry=true", "rtx train does not read sweep.retry; it is an option of rtx train -m"),
        ("eval.stride=9", "is an option of rtx eval; for validations in training: trainer.val_stride"),
        ("trainer.steps=\n", "trainer.steps=?: must be an integer"),
        ("trainer.steps=٤", "trainer.steps=٤: must be an integer"),
        ("trainer.steps=1e400", "trainer.steps=1e400: must be an integer"),
        ("optimizer.lr=nan", "optimizer.lr=nan: must be a number, greater than 0"),
        ("hardware.compile=maybe", "hardware.compile=maybe: must be true or false"),
        (
            "routing.selection=causl",
            "must be one of causal, topk, nearest, random, exact, blocks, blocks_random, indexer (did you mean ",
        ),
        ("name=null", "name=null: must be text"),
        ("data.path=a=b", "a value with any of = , ( [ { or quotes in it needs quotes of its own: 'data.path=\"...\"'"),
        ("data.path=${", "needs quotes of its own"),
        ("routing.heads=2,4", "routing.heads=2,4: takes one value; several make a sweep (rtx train -m)"),
        (
            "name=a,b",
            "takes one value; several make a sweep (rtx train -m); if it is one value, quote it: 'name=\"...\"'",
        ),
        ("hydra.run.dir=x", "hydra.run.dir=x: keys of hydra have an effect in a sweep (-m) only"),
        ("hardware.precision=fp16", "must be one of auto, fp32, bf16, tf32, fp64 (Arithmetic"),
        ("foo=3", "unknown key 'foo'; rtx train --help lists them"),
        ("foo", "'foo' is not of the form key=value"),
        ("data.length", "'data.length' is not of the form key=value; say data.length=..."),
        ("model", "'model' is not of the form key=value; say model=..."),
        ("trainer.stps", "'trainer.stps' is not of the form key=value (did you mean 'trainer.steps'?)"),
        ("", "'' is not of the form key=value"),
        ("--foo=3", "--foo=3: unknown flag"),
        ("a\nb=3", "unknown key 'a?b'"),
        ("trainer.steps=" + "9" * 5000, "...: must be an integer"),
        ("trainer.steps=1e300", "trainer.steps=1e300: must be an integer, at least 1, at most 9007199254740992 ("),
        ("trainer.steps=" + "[" * 2000, "...: must be an integer"),
        ("data.path=" + "(" * 2000, "...: a value with any of"),
    ],
)
def test_refusals(argument: str, said: str) -> None:
    assert said in refusal(argument)


def test_every_mistake_is_told_at_once() -> None:
    with pytest.raises(UserError) as caught:
        check_overrides(["trainer.steps=abc", "seed=1", "nmae=x", "~data"])
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("argument", "form"),
    [
        ("routing.heads=2,4", "routing.heads=2,4"),
        ("trainer.steps=1e2,1e3", "trainer.steps=100,1000"),
        ("routing.attend_self=true,false", "routing.attend_self=true,false"),
        ("seed=range(1,4)", "seed=1,2,3"),
        ("optimizer.lr=range(0.1,0.4,0.1)", "optimizer.lr=0.1,0.2,0.3"),
        ("optimizer.lr=sort(3,1,2)", "optimizer.lr=1.0,2.0,3.0"),
        ("data.path=a.txt,'b,c.txt'", "data.path='a.txt','b,c.txt'"),
        ("model=glob(rt1*)", "model=rt10,rt12,rt12-cifar10"),
        ("hydra/launcher=basic", "hydra/launcher=basic"),
        ("hydra.launcher.partition=a", "hydra.launcher.partition=a"),
    ],
)
def test_forms_of_a_sweep(argument: str, form: str) -> None:
    assert taken(argument, sweep=True) == [form]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("routing.heads=2,x", "routing.heads=x: must be an integer"),
        ("model=rt24,rt25", "model=rt25: no such option (did you mean"),
        ("model=glob(x*)", "model=glob(x*): stands for no value"),
        ("seed=range(1,3,0)", "and the step not 0"),
        ("seed=range(1,nan)", "seed=range(1,nan): the ends and the step of a range must be finite"),
        ("seed=range(0,1e9)", "stands for too many values"),
        ("seed=interval(0,1)", "an interval has no end of values"),
        ("hydra.sweep.dir=x", "hydra.sweep.dir=x: has no effect"),
    ],
)
def test_refusals_of_a_sweep(argument: str, said: str) -> None:
    assert said in refusal(argument, sweep=True)


def test_a_shuffle_keeps_the_values() -> None:
    (shuffled,) = check_overrides(["seed=shuffle(range(0,20))"], sweep=True)
    assert sorted(int(value) for value in shuffled.values) == list(range(20))
