"""Command lines that go wrong in the ways of people: good ones with one to three slips."""

import math

import hypothesis.strategies as st
from hypothesis.strategies import DrawFn

from rtx.settings.fields import Field
from rtx.settings.presets import options
from rtx.settings.schema import GROUPS, all_fields

RUN = "outputs/rtx/run"
SWEEP = "outputs/rtx"
"""A run's folder, which has a configuration and nothing else, and that of its sweep."""

SMALL = "data=recall model.layers=1 model.hidden=16 model.heads=2 routing.heads=1 routing.layers=1"
GOOD = [
    line.split()
    for line in (
        "train data=recall routing=topk routing.window=16 trainer.steps=2 seed=3",
        f"train {SMALL} trainer.steps=1e1 optimizer.lr=1e-3 name=a_b experiment=null",
        "train experiment=smoke data=recall hardware.compile=no +trainer.clip=0.5",
        "train data=text data.path=book.txt model.positions=shaw model.base=local+full "
        "hardware=cpu",
        f"train -m {SMALL} routing.window=8,16 seed=1,2",
        "train data=recall model=tiny --multirun routing=topk,causal",
        "train --cfg job data=recall trainer.steps=5",
        "train --help seed=1",
        "plan --help routing trainer.steps seed=1",
        "plan data=cifar10 model=rt12-cifar10 data.size=16 routing.clusters=null",
        "plan experiment=enwik8 model.recompute=true trainer.steps=${optimizer.steps}",
        f"eval {RUN} split=test mode=streaming limit=3 hardware=cpu",
        f"sample {RUN} length=20 temperature=0.5 prompt=Once,(upon) top_p=0.9",
        f"resume {RUN} trainer.steps=2000 trainer.max_minutes=5",
        f"audit {RUN} windows=4 prefixes=4",
        f"analyze context {RUN} split=valid windows=2",
        f"analyze coverage {RUN} keys=16 block=8 steps=5",
        f"export {RUN} checkpoint=last output=there",
        f"report {RUN} output=there",
        f"sweep {SWEEP}",
        "data info data=text data.path=book.txt data.tokenizer=words",
        "data list",
    )
]
"""Lines that mean something; those of `train` are small enough to run."""

VALUES = (
    *(
        "",
        " ",
        "''",
        '""',
        "'",
        '"',
        "'a",
        "a'b",
        "{}",
        "{a: 1}",
        "[1,2]",
        "[",
        "(",
        "a=b",
        "=",
        ",",
        "1,,2",
        "1, 2",
    ),
    *(
        "null",
        "NULL",
        "~",
        "..",
        "a/b",
        "nan",
        "inf",
        "1e400",
        "-1",
        "0",
        "1.5",
        "1e3",
        "1_000",
        "0x10",
        "007",
        "1e",
    ),
    *(
        "\u0663",
        "\u00bd",
        "\u202e",
        "\ufeff3",
        "\t3",
        "3\n",
        "a\nb",
        "\x1b[31m",
        "\udcff",
        "TRUE",
        "maybe",
        "\\",
        "x",
    ),
    *(
        "# 3",
        "3 # x",
        "a: b",
        "*",
        "&a",
        "!!int 3",
        "$",
        "${",
        "${}",
        "${seed",
        "${seed}",
        "${nope}",
        "${seed}0",
    ),
    *(
        "${optimizer.lr}",
        "${trainer.steps}",
        "${name}",
        "${model}",
        "${..seed}",
        "${oc.env:HOME}",
        "${oc.env:NO_RTX}",
    ),
    *(
        "${hydra:runtime.cwd}",
        "${oc.decode:'3'}",
        "%(asctime)s",
        "{0}",
        "range(1,4)",
        "range(1,nan)",
        "range(0,1,0)",
    ),
    *(
        "interval(0,1)",
        "shuffle(1,2)",
        "range(4)",
        "range(start=1,stop=3)",
        "range(1e300,1,1e-300)",
        "1..5",
        "1..",
    ),
    *(
        "choice(1,2)",
        "glob(*)",
        "glob([)",
        "9" * 30,
        "9" * 5000,
        "x" * 3000,
        "[" * 400,
        "${" * 300,
        "--help",
        "@file",
    ),
    *(
        "auto",
        "cpu",
        "causal",
        "local+",
        "local++full",
        "32x32x",
        "/",
        "+5",
        "2",
        "8",
        "16",
        "0.5",
        "1e-2",
        "true",
    ),
)
"""Values that somebody has typed, pasted or generated."""
NOISE = "aeiost_.=+-~/ ,'\"{}[]()$\\@#!\u00e90195\n\t\u202e\U0001f600"
FLAGS = (
    *(
        "-m",
        "--multirun",
        "--cfg",
        "--cfg=job",
        "-h",
        "--info",
        "--config-name=x",
        "--version",
        "-x",
        "--",
        "-m=1",
    ),
    *("--config-name", "-cn", "--config-path=x", "--help=routing", "--help", "a b"),
)


@st.composite
def bad_lines(draw: DrawFn) -> list[str]:
    """Draw the words behind `rtx`: a good line with one to three slips."""
    words: list[str] = [*draw(st.sampled_from(GOOD))]
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        words = draw(st.sampled_from(SLIPS))(draw, words)
    return words


def slip_of_the_finger(draw: DrawFn, words: list[str]) -> list[str]:
    """Drop, double, replace or add a letter in a word."""
    at = draw(st.integers(0, max(0, len(words) - 1)))
    letter = draw(st.sampled_from(NOISE))
    word = words[at] if words else ""
    place = draw(st.integers(0, max(0, len(word) - 1)))
    before = word[:place]
    here = word[place : place + 1]
    after = word[place + 1 :]
    slips = (
        before + after,
        before + here * 2 + after,
        before + letter + after,
        before + here + letter + after,
    )
    return [*words[:at], draw(st.sampled_from(slips)), *words[at + 1 :]]


def a_key_more(draw: DrawFn, words: list[str]) -> list[str]:
    """Set another key, or one of the line, in or outside its range, or to another kind of value."""
    given = [word.partition("=")[0] for word in words if word.partition("=")[0] in all_fields()]
    field = all_fields()[draw(st.sampled_from([*given, *given, *all_fields()]))]
    return [
        *words,
        f"{draw(st.sampled_from(('', '', '', '+', '~')))}{field.key}={draw(values_of(field))}",
    ]


def an_option_more(draw: DrawFn, words: list[str]) -> list[str]:
    """Choose an option of a group, misspelt or not; most experiments are sweeps."""
    group = draw(st.sampled_from(GROUPS))
    known = ("smoke", "recall", "enwik8") if group == "experiment" else options(group)
    return [
        *words,
        f"{group}={draw(st.sampled_from((*known, *(name[:-1] for name in known), 'null')))}",
    ]


def a_broken_word(draw: DrawFn, words: list[str]) -> list[str]:
    """Damage a word: its "=", blanks, quotes, a part of it or all; repeat it, or insert a flag."""
    at = draw(st.integers(0, max(0, len(words) - 1)))
    word = words[at] if words else ""
    marked = [f"{mark}{word}" for mark in ("--", "+", "~", "hydra.")] + [
        f"'{word}'",
        f"{word},",
        word.upper(),
    ]
    changed = [word.replace("=", other) for other in ("", "==", " = ", ":")] + [
        word.replace(".", "/")
    ]
    key, equals, text = word.partition("=")
    apart = [[key, equals, text], [key, equals + text], [key + equals, text], [word, text]]
    broken = [
        *([each] for each in (*marked, *changed)),
        [word, word],
        [],
        [word, draw(st.sampled_from(FLAGS))],
        *apart,
    ]
    return [*words[:at], *draw(st.sampled_from(broken)), *words[at + 1 :]]


SLIPS = (
    slip_of_the_finger,
    slip_of_the_finger,
    a_key_more,
    a_key_more,
    a_key_more,
    an_option_more,
    a_broken_word,
)


def values_of(field: Field) -> st.SearchStrategy[str]:
    """Draw a value: at the ends of the range, beyond, of another kind, or near an allowed one."""
    ends = [end for end in (field.low, field.high, field.above) if math.isfinite(end)]
    near = [str(end + step) for end in ends for step in (-1, 0, 1)]
    near += [*field.values, *(choice[:-1] for choice in field.values), str(field.default)]
    return st.one_of(st.sampled_from(near), st.sampled_from(VALUES))
