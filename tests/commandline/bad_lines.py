"""Command lines and configuration files that go wrong in the ways of people: good ones with one to three slips."""

from __future__ import annotations

import re

import hypothesis.strategies as st
from hypothesis.strategies import DrawFn

from rtx.config import GROUPS, all_fields
from rtx.keys import Field, options

RUN, SWEEP = "outputs/rtx/run", "outputs/rtx"
"""A run's folder, which has a configuration and nothing else, and that of its sweep."""

SMALL = ("data=recall", "model.layers=1", "model.hidden=16", "model.heads=2", "routing.heads=1", "routing.layers=1")
GOOD = (
    ("train", "data=recall", "routing=topk", "routing.window=16", "trainer.steps=2", "seed=3"),
    ("train", *SMALL, "trainer.steps=1e1", "optimizer.lr=1e-3", "name=a b"),
    ("train", *SMALL, "experiment=null", "trainer.steps=2"),
    ("train", "experiment=smoke", "data=recall", "hardware.compile=no", "+trainer.clip=0.5"),
    ("train", "data=text", "data.path=book.txt", "model.positions=shaw", "model.base=local+full", "hardware=cpu"),
    ("train", "-m", *SMALL, "routing.window=8,16", "seed=range(1,3)"),
    ("train", "data=recall", "model=glob(t*)", "--multirun", "routing=topk,causal"),
    ("train", "--cfg", "job", "data=recall", "trainer.steps=5"),
    ("train", "--help", "seed=1"),
    ("plan", "data=enwik8", "model=rt24", "trainer.micro_batch_size=2", "hardware.precision=bf16"),
    ("plan", "data=cifar10", "model=rt12-cifar10", "data.size=16", "routing.clusters=null"),
    ("plan", "experiment=enwik8", "model.recompute=true", "trainer.steps=${optimizer.steps}"),
    ("eval", RUN, "split=test", "mode=streaming", "eval.limit=3", "hardware=cpu"),
    ("sample", RUN, "length=20", "temperature=0.5", "prompt=Once, (upon)", "top_p=0.9"),
    ("resume", RUN, "trainer.steps=2000", "trainer.max_minutes=5"),
    ("audit", RUN, "windows=0", "prefixes=4"),
    ("audit", *SMALL, "audit.sequences=1"),
    ("analyze", "context", RUN, "split=valid", "windows=2"),
    ("export", RUN, "checkpoint=last", "output=there"),
    ("bench", "steps", *SMALL, "routing.heads=0,1", "seed=1,2", "bench.turns=1"),
    ("report", RUN, "logger=jsonl"),
    ("sweep", SWEEP, "once=true"),
    ("data", "info", "data=text", "data.path=book.txt", "data.tokenizer=words"),
    ("data", "verify", "data=enwik8", "data.newlines=drop"),
    ("data", "list"),
)
"""Lines that mean something; those of `train` are small enough to run."""

CLASHES = (
    ("data.length=8",),
    ("routing.window=4096", "data.length=64"),
    ("model.hidden=30", "model.heads=4"),
    ("trainer.batch_size=6", "trainer.micro_batch_size=4"),
    ("routing.heads=9",),
    ("hardware.devices=3", "hardware=cpu"),
    ("model.base=local+local+lsh",),
    ("model.positions=axial", "model.axes=4x4x8", "data.length=128"),
    ("routing.keys=separate", "routing=random"),
    ("trainer.val_stride=100000",),
    ("data=cifar10", "data.length=100"),
    ("data.tokenizer=sentencepiece", "data=recall"),
)
"""Settings that contradict what stands in most of the lines, or each other; a few fit after all."""

VALUES = (
    *("", " ", "''", '""', "'", '"', "''''", "'a", 'a"b', "a'b", "{", "}", "{}", "{a: 1}", "[1,2]", "[]", "[", "("),
    *("a=b", "=", "==3", ",", "1,,2", ",1", "1,2,", "1, 2", "null", "NULL", "None", "~", ".", "..", "../..", "a/b"),
    *("nan", "inf", "-inf", "1e400", "-1", "0", "-0", "1.5", "1e3", "1e-3", "1_000", "0x10", "007", "1e", "1.2.3"),
    *("\u0663", "\u00bd", "\uff19", "\u00e9", "e\u0301", "\U0001f600", "\u202e", "\u00a0", "\ufeff3", "\t3", "3\n"),
    *("a\nb", "\x1b[31m", "\udcff", "true", "TRUE", "no", "off", "maybe", "\\", "\\\\", "a\\,b", "a b", " 3", "3 "),
    *("# 3", "3 # x", "a: b", "*", "&a", "!!int 3", "$", "$$", "${", "${}", "${seed", "${seed}", "${nope}", "${seed}0"),
    *("${optimizer.lr}", "${trainer.steps}", "${name}", "${model}", "${.steps}", "${..seed}", "${oc.env:HOME}"),
    *("${oc.env:RTX_NOT_SET}", "${oc.env:}", "${hydra:runtime.cwd}", "${oc.decode:'3'}", "${nope:3}", "${seed:3}"),
    *("$(seed)", "`id`", "%s", "%(asctime)s", "{0}", "range(1,4)", "range(1,nan)", "range(1,inf)", "range(4)"),
    *("range(0,1,0)", "range(1,4", "choice(1,2)", "choice()", "sort(3,1)", "sort(a,1)", "shuffle(1,2)", "glob(*)"),
    *("glob([)", "interval(0,1)", "tag(a,1)", "extend_list(1)", "9" * 30, "-" + "9" * 400, "9" * 5000, "x" * 3000),
    *("[" * 400, "(" * 2000, "${" * 300, "1e99", "99999999999999999999", "-", "--", "--help", "-m", "@file", "train"),
    *("auto", "cpu", "causal", "local+", "+local", "local++full", "32x32x", "9" * 5000 + "x3", "/", "+5", "())"),
)
"""Values that somebody has typed, pasted or generated."""

MILD = ("1", "2", "8", "16", "64", "0.5", "1e-2", "4.0", "true", "no", "a_b", "null", "${seed}", "1_0", "'x y'", "last")
"""Values that some keys take."""

NOISE = "aeiost_.=+-~/ ,'\"{}[]()$\\@#!\u00e90195\n\t\u202e\U0001f600"


@st.composite
def bad_lines(draw: DrawFn) -> list[str]:
    """Draw the words behind `rtx`: a good line with one to three slips."""
    words = list(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        slip = draw(st.sampled_from(SLIPS))
        words = slip(draw, words)
    return words


def slip_of_the_finger(draw: DrawFn, words: list[str]) -> list[str]:
    """Drop, double, swap, replace or add a letter in a word."""
    at = draw(st.integers(0, len(words) - 1))
    word = words[at]
    place = draw(st.integers(0, max(0, len(word) - 1)))
    letter = draw(st.sampled_from(NOISE))
    before, here, after = word[:place], word[place : place + 1], word[place + 1 :]
    mended = (before + after, before + here * 2 + after, before + letter + after, before + here + letter + after)
    swapped = before + after[:1] + here + after[1:]
    return [*words[:at], draw(st.sampled_from((*mended, swapped))), *words[at + 1 :]]


def another_value(draw: DrawFn, words: list[str]) -> list[str]:
    """Write something else behind a key of the line."""
    set_here = [at for at, word in enumerate(words) if "=" in word]
    if not set_here:
        return a_key_more(draw, words)
    at = draw(st.sampled_from(set_here))
    key = words[at].partition("=")[0]
    field = all_fields().get(key.lstrip("+"))
    value = draw(values_of(field) if field else st.sampled_from(VALUES))
    return [*words[:at], f"{key}={value}", *words[at + 1 :]]


def a_key_more(draw: DrawFn, words: list[str]) -> list[str]:
    """Set a further key, in range or out of it or to something else altogether."""
    field = draw(st.sampled_from(list(all_fields().values())))
    mark = draw(st.sampled_from(("", "", "", "+", "++", "~")))
    return [*words, f"{mark}{field.key}={draw(values_of(field))}"]


def an_option_more(draw: DrawFn, words: list[str]) -> list[str]:
    """Choose an option of a group, misspelt or not; experiments but for the small ones are sweeps of their own."""
    group = draw(st.sampled_from(GROUPS))
    known = ("smoke", "recall", "enwik8") if group == "experiment" else options(group)
    option = draw(st.sampled_from((*known, *(name[:-1] for name in known), *(name.upper() for name in known), "null")))
    return [*words, f"{group}={option}"]


def a_clash(draw: DrawFn, words: list[str]) -> list[str]:
    """Add settings that contradict others."""
    return [*words, *draw(st.sampled_from(CLASHES))]


def a_broken_word(draw: DrawFn, words: list[str]) -> list[str]:
    """Lose the "=", double it, put blanks around it, or mark, quote, repeat or lose the word."""
    at = draw(st.integers(0, len(words) - 1))
    word = words[at]
    marked = [f"{mark}{word}" for mark in ("--", "-", "+", "++", "~", "hydra.")] + [f"'{word}'", f"{word},"]
    changed = [word.replace("=", other) for other in ("", "==", " = ", ":", "=,")] + [
        word.upper(),
        word.replace(".", "/"),
    ]
    broken = [*([each] for each in (*marked, *changed)), word.split("="), [word, word], []]
    return [*words[:at], *draw(st.sampled_from(broken)), *words[at + 1 :]]


def a_flag(draw: DrawFn, words: list[str]) -> list[str]:
    """Put a flag of ours, of Hydra's or of nobody's somewhere behind the command."""
    ours = ("-m", "--multirun", "--cfg", "--cfg=job", "-c", "-h")
    others = ("--info", "--resolve", "--hydra-help", "--config-name=x", "-cd", "--version", "-x", "--", "-", "-m=1")
    at = draw(st.integers(1, len(words)))
    return [*words[:at], draw(st.sampled_from((*ours, *others))), *words[at:]]


def shuffled(draw: DrawFn, words: list[str]) -> list[str]:
    """Bring the words into another order, or lose all but the first."""
    return draw(st.sampled_from((words[:1], [*words[1:], *words[:1]], [words[0], *reversed(words[1:])], words * 2)))


SLIPS = (
    *(slip_of_the_finger, slip_of_the_finger, another_value, another_value, a_key_more, a_key_more, an_option_more),
    *(a_clash, a_broken_word, a_broken_word, a_flag, shuffled),
)


def values_of(field: Field) -> st.SearchStrategy[str]:
    """Draw a value for a key: at the ends of its range and beyond, of another kind, of its own list and near it."""
    ends = [field.metadata.get(end) for end in ("low", "high", "above")]
    near = [str(end + step) for end in ends if end is not None for step in (-1, 0, 1)]
    choices = field.values
    near += [*choices, *(choice[:-1] for choice in choices), *(choice.title() for choice in choices)]
    usual = ["null" if field.default is None else str(field.default)]
    return st.one_of(st.sampled_from(near or MILD), st.sampled_from(VALUES), st.sampled_from((*usual, *MILD)))


@st.composite
def bad_files(draw: DrawFn, good: str) -> bytes:
    """Draw the bytes of a run's config.yaml with one to three slips."""
    lines = good.splitlines()
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        at = draw(st.integers(0, len(lines) - 1))
        line = lines[at]
        key, value = re.fullmatch(r"( *[^:]*:?)(.*)", line, re.DOTALL).groups()  # type: ignore[union-attr]
        odd = draw(st.sampled_from(VALUES) | st.sampled_from(MILD))
        slips = [
            *([f"{key} {odd}"], [f"{key} {odd}"], [line[1:]], ["  " + line], [line, line], [], ["---", line]),
            *([line.replace(":", "")], [key.replace(":", "s:") + value], [key], ["\t" + line], [line + " " + odd]),
            *([f"{key} !!python/object/apply:os.getcwd []"], [f"{key} *alias"], [f"{key} |"], [f"{key} [{odd}"]),
            *([f"{odd}: 1"], [f"{key} {{a: {odd}}}"], [f"{key} !!binary aGk="], [f"{key} '{odd}'"], ["? " + odd]),
        ]
        lines[at : at + 1] = draw(st.sampled_from(slips))
        lines = lines or [""]
    content = ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape")
    cut = draw(st.sampled_from((len(content), len(content), len(content), len(content) // 2, 0)))
    return content[:cut] + draw(st.sampled_from((b"", b"", b"", b"\x00", b"\xff\xfe", b"\n- 3\n", b"seed: 1\n")))
