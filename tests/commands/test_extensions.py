"""Patterns, data sets and presets of the user's own: the examples of docs/attention.md and
extending.md as printed, in
every command.
"""

import json
import re
import shutil
from pathlib import Path

import pytest

from rtx.settings.names import KINDS_OF_HEADS
from tests.helpers.small_runs import SMALL_RUN, Workshop

PAGES = "".join(
    (Path(__file__).resolve().parents[2] / "docs" / page).read_text()
    for page in ("attention.md", "extending.md")
)
MODEL = [word for word in SMALL_RUN if not word.startswith("data=")]
KEPT = "extensions=kept_dilated.py:kept_primes.py"
"""The code of the run, which has moved since."""
OWN = ["data=primes", "model.base=dilated", "model.stride=3"]
ABSTRACT = """class Half(rtx.attention.Pattern): pass
rtx.register_pattern('halved', lambda heads, config, layer: Half())
"""
FAR = """class Far(rtx.attention.Local):
    def __init__(self, *, reach, **options): super().__init__(**options)
"""
OPEN = """class Far(rtx.attention.Local):
    def __init__(self, **options): super().__init__(**options)
"""
ARGUMENTS = "is called with heads, config and layer"
CALLED = "register a function that makes it: lambda heads, config, layer: Far(...)"


NOTHING_RUNS = """
import subprocess
from rtx.sweeps.launcher import Launcher
Launcher.begin = lambda launcher, cell, place: subprocess.Popen(["true"])
"""
"""A sweep whose cells end as soon as they have begun."""
INSTALLED = """
import sys
import rtx.settings.presets, rtx.settings.schema
sys.path.insert(0, {site!r})
rtx.settings.schema.add_installed.cache_clear()
rtx.settings.presets.forget()
"""
"""Code that adds a folder of installed packages to a process that has looked for them before."""
ATTRIBUTES = ("update", "keys", "half", "training")


def naming(name: str) -> str:
    """Return a line that registers a pattern, which is none, by a name."""
    return f"rtx.register_pattern({name!r}, dict)\n"


def making(made: str, classes: str = FAR) -> str:
    """Return lines that register, as `far`, what an expression makes."""
    return f"{classes}rtx.register_pattern('far', lambda heads, config, layer: {made})\n"


def block(language: str, heading: str) -> str:
    """Return the first block of a language behind a heading of the pages."""
    found = re.search(rf"```{language}\n(.*?)```", PAGES[PAGES.index(f"\n## {heading}\n") :], re.S)
    assert found
    return found[1]


class Place(Workshop):
    """A workshop with the files of the page, each command in a process of its own, and a run."""

    def asked(self, *words: str, code: int = 0, run: str = "asked", inside: str = "") -> str:
        """Run a command, check its exit code, and return what it printed."""
        folder = self.folder / run
        (log := self.folder / f"{folder.name}.log").unlink(missing_ok=True)
        variables = {"COLUMNS": "200"}
        inside = f"import os; os.chdir({str(self.folder)!r})\n{inside}"
        variables |= {} if words[0] == "train" else {"RTX_RUN": ""}
        assert self.fork(folder, *words, inside=inside, **variables).wait() == code, log.read_text()
        assert "Traceback" not in log.read_text()
        return log.read_text()


@pytest.fixture(scope="module")
def place(workshop: Workshop) -> Place:
    place = Place(workshop.folder, workshop.forker)
    for name, heading in (("dilated", "A pattern of your own"), ("primes", "A data set")):
        (place.folder / f"{name}.py").write_text(text := block("python", heading))
        assert text.count("\n") < 40
    (place.folder / "presets" / "model").mkdir(parents=True)
    for name, text in {
        "mine": block("yaml", "Presets"),
        "bare": "layers: 3\n",
        "recall": "name: recall\n",
    }.items():
        (place.folder / "presets" / "model" / f"{name}.yaml").write_text(text)
    said = place.asked("train", "extensions=dilated.py:primes.py", *OWN, *MODEL, run="out/own/run")
    assert said.startswith(f"extensions: running the code of {place.folder}/dilated.py (sha256 ")
    for name in ("dilated.py", "primes.py"):  # the place of code is not part of a run
        (place.folder / name).rename(place.folder / f"kept_{name}")
    return place


def test_a_run_keeps_the_code_and_says_where_it_was(place: Place) -> None:
    run = place.folder / "out/own/run"
    facts = json.loads((run / "environment.json").read_text())["extensions"]
    assert [*facts] == [f"{place.folder}/dilated.py", f"{place.folder}/primes.py"]
    (line,) = (
        text
        for text in (run / "config.yaml").read_text().splitlines()
        if text.startswith("extensions: ")
    )
    assert re.fullmatch(r"extensions: dilated\.py@[0-9a-f]{64}:primes\.py@[0-9a-f]{64}", line)
    assert (run / "dilated.py").read_bytes() == (place.folder / "kept_dilated.py").read_bytes()
    for words in (["report", "last"], ["runs"]):  # which need no code of a run
        assert "running the code" not in (said := place.asked(*words))
    assert "own/run" in said


def test_commands_on_a_run_take_the_code_that_the_user_names(place: Place) -> None:
    for words, said in (
        ("eval last mode=streaming split=test", "windows of 32, stride 32, streaming"),
        ("audit last prefixes=2 windows=2 positions=2", "dilated"),
        ("analyze patterns last", "dilated"),
        ("sample last length=5", "samples/step"),
        ("resume last trainer.steps=14", "done after 14 steps"),
        ("export last", "dilated.py"),
        ("eval out/own/run/export", "bits/byte"),
    ):
        printed = place.asked(*words.split(), KEPT)
        assert said in printed
        assert f"extensions: running the code of {place.folder}/kept_dilated.py " in printed


def test_no_code_runs_from_the_folder_of_a_run(place: Place) -> None:
    foreign = place.folder / "foreign"
    shutil.copytree(place.folder / "out/own/run", foreign)
    for name in ("dilated.py", "primes.py"):
        (foreign / name).write_text("import sys; sys.exit('run')\n")
    for words in ("eval foreign", "resume foreign trainer.steps=20", "sample foreign"):
        said = place.asked(*words.split(), code=2)
        assert "trained with the code of dilated.py (sha256 " in said and "running" not in said
        assert "name that code: extensions=<path of dilated.py>" in said
    assert "bits/byte" in place.asked("eval", "foreign", KEPT)
    said = place.asked("eval", "foreign", "extensions=kept_dilated.py", code=2)
    assert "trained with the code of primes.py" in said
    (place.folder / "other").mkdir()
    (place.folder / "other" / "primes.py").write_text("")
    words = ["eval", "foreign", "extensions=kept_dilated.py:other/primes.py"]
    assert "other/primes.py is other code" in place.asked(*words, code=2)
    text = (foreign / "config.yaml").read_text()
    (foreign / "config.yaml").write_text(re.sub("@[0-9a-f]{64}", "", text))
    assert "(sha256 unknown)" in place.asked("eval", "foreign", KEPT, code=2)


def test_an_installed_module_is_imported_and_recorded(place: Place) -> None:
    (place.folder / "site" / "mine").mkdir(parents=True)
    (place.folder / "site" / "mine" / "__init__.py").touch()
    text = (place.folder / "kept_dilated.py").read_text()
    (place.folder / "site" / "mine" / "patterns.py").write_text(text)
    inside = f"import sys; sys.path.insert(0, {str(place.folder / 'site')!r})"
    words = ["extensions=mine.patterns", "model.base=dilated", "model.stride=3"]
    assert "dilated heads" in place.asked("plan", *words, inside=inside)
    said = place.asked("train", "--cfg", "job", *words, inside=inside)
    assert re.search(r"(?m)^extensions: mine\.patterns@[0-9a-f]{64}$", said)
    for name in ("mine.absent", "absent.patterns"):
        said = place.asked("plan", f"extensions={name}", inside=inside, code=2)
        assert f"no installed module {name}; name a Python file" in said


def test_a_sweep_hands_extensions_and_presets_to_its_cells(place: Place) -> None:
    words = [
        "-m",
        f"extensions={place.folder}/kept_dilated.py:kept_primes.py",
        "--config-dir",
        "presets",
        "model=mine",
    ]
    words += [
        "model.heads=2",
        *OWN,
        *MODEL[2:],
        "model.base=dilated",
        "name=grid",
        "trainer.steps=1",
    ]
    before, _, after = place.asked("train", *words, run="sweep").partition("cell 1 of 1")
    assert "not" not in before and "done" in after
    (record,) = (place.folder / "out/grid").glob("*/config.yaml")
    assert "name: mine" in record.read_text()
    assert ": done before\n" in place.asked("train", *words, run="sweep")
    with open(place.folder / "kept_dilated.py", "a") as file:  # other code makes other cells
        file.write("# changed\n")
    said = place.asked("train", *words, run="sweep", inside=NOTHING_RUNS, code=1)
    assert ": begins\n" in said
    assert len([*(place.folder / "out/grid").glob("*/output.log")]) == 2


def test_plan_and_data_take_them_and_help_lists_them(place: Place) -> None:
    said = place.asked("plan", KEPT, "data=primes", "model.base=dilated")
    assert "dilated heads; " in said and " of primes " in " ".join(said.split())
    assert "mine: 2 layers" in place.asked("plan", "--config-dir", "presets", "model=mine")
    assert "primes, " in place.asked("data", "info", KEPT, "data=primes")
    page = place.asked("train", "--help", "--config-dir=presets", KEPT)
    assert "\n  primes  " in page and "Half of tiny." in page
    assert "fixed_summary, dilated, joined" in " ".join(page.split())
    assert "bare: 3 layers" in place.asked(
        "plan", "--config-dir", "presets", "experiment=smoke", "model=bare"
    )


MISTAKES = (
    ("1 / 0\n", "my.py", "my.py, line 2: ZeroDivisionError: division by zero"),
    ("def f(:\n", "my.py", "my.py, line 2: SyntaxError: invalid syntax"),
    ("import sys; sys.exit(0)\n", "my.py", "my.py, line 2: SystemExit: 0\n"),
    (
        naming("local"),
        "my.py",
        "my.py, line 2: UserError: cannot be registered: 'local' is one of rtx's own\n",
    ),
    (naming("Mine"), "my.py", "'Mine' must be of small letters, digits and _, a letter first\n"),
    (naming("null"), "my.py", "cannot be registered: 'null' unsets a key\n"),
    *(
        (naming(name), "my.py", f"{name!r} is what rtx calls heads of another kind\n")
        for name in KINDS_OF_HEADS
    ),
    *(
        (naming(name), "my.py", f"{name!r} is an attribute of torch.nn.ModuleDict")
        for name in ATTRIBUTES
    ),
    (
        f"{FAR}rtx.register_pattern('far', Far)",
        "my.py",
        f"'far': Far {ARGUMENTS}: missing a required",
    ),
    (f"{FAR}rtx.register_pattern('far', Far)", "my.py", CALLED),
    (
        "rtx.register_pattern('far', lambda config: 1)",
        "my.py",
        f"'far': <lambda> {ARGUMENTS}: got an",
    ),
    ("rtx.register_pattern('far', 'Far')", "my.py", "'far': 'Far' is no function"),
    (
        "rtx.register_data('x', print, lenth=3)\n",
        "my.py",
        "unknown key 'data.lenth' (did you mean ",
    ),
    (
        "rtx.register_data('x', print, length=1)\n",
        "my.py",
        "data.length=1: must be an integer, at",
    ),
    ("", "my.py data=primes", "data=primes (did you mean 'images'?): must be one of cifar10"),
    ("", "no/my.py", "my.py: No such file or directory"),
    ("", "my.py:my.py", "extensions=my.py:my.py: name a Python file, my.py, a module"),
    ("", "absent", "no installed module absent; name a Python file, my.py, a module"),
    ("", "a-b", "extensions=a-b: name a Python file, my.py, a module, my.module"),
    ("", "my.py --config-dir nowhere", "--config-dir nowhere: holds no preset"),
    ("", "my.py --config-dir", "--config-dir : holds no preset"),
)
"""Mistakes that are found before anything is registered: contents of my.py, words, message."""
LATER_MISTAKES = (
    (
        naming("halved"),
        "my.py model.base=halved",
        "halved: its function returned a dict, which is no",
    ),
    (
        ABSTRACT,
        "my.py model.base=halved",
        "my.py, line 3: TypeError: Can't instantiate abstract class Half",
    ),
    (f"{OPEN}rtx.register_pattern('far', Far)", "my.py model.base=far", CALLED),
    (
        making("Far(window=4)"),
        "my.py model.base=far",
        "far: {folder}/my.py, line 4: TypeError: Far.__init__() missing 1",
    ),
    (
        making("Far(window=0, reach=1)"),
        "my.py model.base=far",
        "my.py, line 3: ValueError: window=0",
    ),
    (
        making("Far(window=config.model.reach)"),
        "my.py model.base=far",
        "line 4: AttributeError: 'ModelConfig'",
    ),
    (
        "",
        "my.py --config-dir presets experiment=memory model=mine",
        "experiment=memory lays out a model of its",
    ),
    (
        "",
        "my.py --config-dir presets model=mien",
        "model=mien (did you mean 'mine'?): must be one of ",
    ),
)
"""The same, found after a pattern or a folder of presets has been registered."""


def plan_with(place: Place, text: str, words: str) -> list[str]:
    """Write my.py, and return the words of a plan that has it as an extension."""
    (place.folder / "my.py").write_text(f"import rtx.attention\n{text}")
    return ["plan", *f"extensions={words}".split()]


def test_mistakes_of_a_file_and_of_words(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.folder)
    for text, words, said in MISTAKES:
        assert said in place.command(*plan_with(place, text, words), code=2)


def test_mistakes_after_a_registration(place: Place) -> None:
    for text, words, said in LATER_MISTAKES:
        printed = place.asked(*plan_with(place, text, words), code=2)
        assert said.format(folder=place.folder) in printed


def test_the_function_of_an_extension_gets_heads_configuration_and_layer(place: Place) -> None:
    made = "print('made of', heads, config.model.window, layer) or Far(reach=1, window=heads)"
    (place.folder / "far.py").write_text(f"import rtx.attention\n{making(made)}")
    words = ["extensions=far.py", "model.base=far", "model.window=7", "routing.heads=0"]
    said = place.asked("plan", *words)
    assert all(f"made of 4 7 {layer}\n" in said for layer in range(4))


def test_a_name_that_begins_as_one_of_ours_is_not_taken_for_it(place: Place) -> None:
    text = (place.folder / "kept_dilated.py").read_text()
    plans = []
    for name in ("fixed_mine", "else_mine"):
        (place.folder / "named.py").write_text(text.replace('"dilated"', repr(name)))
        said = place.asked("plan", "extensions=named.py", f"model.base={name}", "routing.heads=0")
        plans.append(said[said.index("parameters ") :])
    assert plans[0] == plans[1]
    own = (
        "rtx.register_pattern('blocks_mine', lambda heads, config, layer: Exact(window=8), "
        "selection=True)\n"
    )
    (place.folder / "named.py").write_text(f"import rtx\nfrom rtx.attention import Exact\n{own}")
    words = [
        "routing.selection=blocks_mine",
        "routing.keys=separate",
        "routing.window=8",
        "routing.block=16",
    ]
    assert "what fits" in place.asked("plan", "extensions=named.py", *words)


def test_an_exit_of_an_extension_is_no_success(place: Place) -> None:
    own = "class Far(rtx.attention.Local):\n    def __init__(self): raise SystemExit(0)\n"
    (place.folder / "leaves.py").write_text(f"import rtx.attention\n{making('Far()', own)}")
    words = ["extensions=leaves.py", "model.base=far", *MODEL, "data=recall"]
    said = place.asked("train", *words, code=2, run="leaves")
    assert "rtx: sys.exit(0) was called before the end, by an extension or a package\n" in said


def test_a_pattern_that_reads_the_future_is_refused(place: Place) -> None:
    text = (place.folder / "kept_dilated.py").read_text()
    (place.folder / "ahead.py").write_text(
        text.replace("def __init__", "strictly_causal = False\n    def __init__")
    )
    said = place.asked(
        "train", "extensions=ahead.py:kept_primes.py", *OWN, *MODEL, code=2, run="ahead"
    )
    assert "dilated: strictly_causal=False" in said


def test_a_package_is_known_by_its_entry_points(place: Place) -> None:
    site = place.folder / "site"
    (site / "mypackage").mkdir(parents=True)
    for name in ("dilated", "primes"):
        code = (place.folder / f"kept_{name}.py").read_text().partition("\n\n\nrtx.register")[0]
        (site / "mypackage" / f"{name}.py").write_text(code)
    points = re.sub(
        r"(?m)^\[project\.entry-points\.\"(.*?)\"\].*$", r"[\1]", block("toml", "A package")
    )
    points = points.replace(
        "dilated =", "routed = mypackage.no:No\nupdate = mypackage.no:No\ndilated ="
    )
    (site / "mypackage-1.5.dist-info").mkdir()
    (site / "mypackage-1.5.dist-info" / "entry_points.txt").write_text(points.replace('"', ""))
    (site / "mypackage-1.5.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: mypackage\nVersion: 1.5\n"
    )
    inside = INSTALLED.format(site=str(site))
    words = [*OWN, *MODEL, "trainer.steps=1"]
    said = place.asked("train", *words, run="package", inside=inside)
    assert " (tiny), primes, 1 steps of " in said
    assert (
        "rtx: mypackage is without rtx.patterns routed: 'routed' is what rtx calls heads of "
        "another kind\n" in said
    )
    said = place.asked("plan", "model.base=update", inside=inside, code=2)
    assert (
        "rtx: 'update' is an attribute of torch.nn.ModuleDict, which holds the heads by their "
        "names\n" in said
    )
    record = json.loads((place.folder / "package" / "environment.json").read_text())
    assert record["versions"]["mypackage"] == "1.5"
