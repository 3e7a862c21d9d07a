"""What ruff does not know about how this code reads: a statement has one thought."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("rtx", "hydra_plugins", "tests", "benchmarks", "docs")
TRUTH_VALUES = (ast.Compare, ast.BoolOp)


def checked_files() -> list[Path]:
    """Return the Python files that are checked, relative to the checkout."""
    files: list[Path] = []
    for room in ROOMS:
        files += sorted((ROOT / room).rglob("*.py"))
    return [path.relative_to(ROOT) for path in files]


def is_tuple_assignment(node: ast.AST) -> bool:
    """Return whether a node is `a, b = x, y`, and no exchange of the same values."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Tuple):
        return False
    target = node.targets[0]
    if not isinstance(target, ast.Tuple):
        return False
    targets = {ast.unparse(element) for element in target.elts}
    return targets != {ast.unparse(element) for element in node.value.elts}


def is_nested_conditional(node: ast.AST) -> bool:
    """Return whether a node is a conditional expression with another one inside."""
    if not isinstance(node, ast.IfExp):
        return False
    return any(isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node)


def is_conditional_text(node: ast.AST) -> bool:
    """Return whether a node is an f-string with a conditional expression inside."""
    if not isinstance(node, ast.JoinedStr):
        return False
    return any(isinstance(inner, ast.IfExp) for inner in ast.walk(node))


def is_text_times_truth(node: ast.AST) -> bool:
    """Return whether a node is a text or list times a truth value."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return False
    sides = (node.left, node.right)
    has_truth = any(isinstance(side, TRUTH_VALUES) for side in sides)
    return has_truth and any(is_sequence(side) for side in sides)


def is_sequence(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr | ast.List | ast.Tuple)


def is_nested_comprehension(node: ast.AST) -> bool:
    """Return whether a node is a comprehension with more than one `for`."""
    if not isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return False
    return len(node.generators) > 1


def is_truth_slice(node: ast.AST) -> bool:
    """Return whether a node is a slice by a truth value."""
    if not isinstance(node, ast.Slice):
        return False
    return any(isinstance(bound, TRUTH_VALUES) for bound in (node.lower, node.upper, node.step))


IN_TABLES = "a comprehension with two `for`"
"""Tables of cases in tests may have it."""
RULES = {
    "an assignment of a tuple to a tuple": is_tuple_assignment,
    "a conditional expression in another": is_nested_conditional,
    "a conditional expression in an f-string": is_conditional_text,
    "a text or list times a truth value": is_text_times_truth,
    IN_TABLES: is_nested_comprehension,
    "a slice by a truth value": is_truth_slice,
}


BY_PATH = "# by path: "
"""Begins a comment in or above a line that opens or changes a file without rtx.disk, and why."""
OWN_DOORS = ("rtx/disk.py", "rtx/attention/engine/compiler.py")
"""Our door to files, and the one to compiled code, which asks for more."""
CALLS_BY_PATH = {
    "": {"open", "ZipFile", "safe_open", "NamedTemporaryFile", "TemporaryDirectory", "memmap"},
    "os": {
        "open",
        "replace",
        "rename",
        "renames",
        "remove",
        "unlink",
        "rmdir",
        "removedirs",
        "mkdir",
        "makedirs",
        "link",
        "symlink",
        "truncate",
        "chmod",
    },
    "torch": {"load"},
    "np": {"load", "memmap", "fromfile"},
}
"""Functions that take the path of a file, by the module that they are called of."""
METHODS_BY_PATH = {
    "open",
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
    "mkdir",
    "rmdir",
    "unlink",
    "rename",
    "touch",
    "chmod",
    "symlink_to",
    "hardlink_to",
    "ZipFile",
    "NamedTemporaryFile",
    "TemporaryDirectory",
    "mkdtemp",
    "mkstemp",
}
"""Methods of paths, and functions of modules, that open or change files."""
HARMLESS = {"which", "get_terminal_size"}
"""Functions of shutil that open no file."""


def opens_by_path(node: ast.AST) -> bool:
    """Return whether a node is a call that opens or changes a file by its path."""
    if not isinstance(node, ast.Call):
        return False
    call = node.func
    if isinstance(call, ast.Name):
        return call.id in CALLS_BY_PATH[""]
    if not isinstance(call, ast.Attribute):
        return False
    owner = ast.unparse(call.value)
    if owner == "shutil":
        return call.attr not in HARMLESS
    if owner == "os" or call.attr in CALLS_BY_PATH.get(owner, ()):
        return call.attr in CALLS_BY_PATH[owner]
    # The method of a text has two arguments.
    is_rename = call.attr == "replace" and len(node.args) == 1 and not node.keywords
    return is_rename or call.attr in METHODS_BY_PATH


def opened_by_path(path: Path) -> Iterator[str]:
    """Yield the place of each call in a file that opens by path and does not say why."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if opens_by_path(node):
            number = getattr(node, "lineno", 0)
            above = lines[number - 2 : number]
            if not any(BY_PATH in line for line in above):
                yield f"{path}:{number}: {lines[number - 1].strip()}"


def test_files_are_opened_by_one_module_or_a_line_says_why() -> None:
    lines: list[str] = []
    for room in ("rtx", "hydra_plugins"):
        for path in sorted((ROOT / room).rglob("*.py")):
            name = path.relative_to(ROOT)
            if name.as_posix() not in OWN_DOORS:
                lines += opened_by_path(name)
    assert not lines, "open it by rtx.disk, or say why not:\n" + "\n".join(lines)


@pytest.mark.parametrize(
    "line",
    [
        "open(path)",
        "os.open(path, flags)",
        "path.open()",
        "path.read_text()",
        "(folder / name).write_bytes(content)",
        "path.parent.mkdir(parents=True)",
        "path.unlink(missing_ok=True)",
        "path.replace(other)",
        "shutil.rmtree(path)",
        "os.replace(old, new)",
        "torch.load(path)",
        "np.load(path)",
        "np.memmap(path, dtype)",
        "tempfile.mkdtemp()",
    ],
)
def test_calls_that_open_by_path_are_found(line: str) -> None:
    nodes = ast.walk(ast.parse(line))
    assert any(opens_by_path(node) for node in nodes)


@pytest.mark.parametrize(
    "line",
    [
        'text.replace("a", "b")',
        "dataclasses.replace(config, seed=1)",
        "shutil.which(name)",
        "open_inside(folder, name)",
        "os.path.isdir(path)",
    ],
)
def test_calls_that_open_nothing_are_left_alone(line: str) -> None:
    nodes = ast.walk(ast.parse(line))
    assert not any(opens_by_path(node) for node in nodes)


def problems(path: Path) -> Iterator[str]:
    """Yield each statement that breaks a rule, with its line."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        for name, breaks in RULES.items():
            is_table = name == IN_TABLES and path.parts[0] == "tests"
            if breaks(node) and not is_table:
                yield f"{path}:{getattr(node, 'lineno', '?')}: {name}"


def test_a_statement_has_one_thought() -> None:
    lines: list[str] = []
    for path in checked_files():
        lines += problems(path)
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize(
    "line",
    [
        "a, b = x, y",
        "a = x if p else y if q else z",
        'f"{x if p else y}"',
        '"s" * (n > 1)',
        "[x for y in z for x in y]",
        "words[: n > 1]",
    ],
)
def test_a_rule_finds_what_it_is_for(line: str) -> None:
    nodes = list(ast.walk(ast.parse(line)))
    assert any(breaks(node) for breaks in RULES.values() for node in nodes)


@pytest.mark.parametrize("line", ["a, b = b, a", "a, b = f(x)", '"-" * width', "words[:n]"])
def test_plain_statements_break_no_rule(line: str) -> None:
    nodes = list(ast.walk(ast.parse(line)))
    assert not any(breaks(node) for breaks in RULES.values() for node in nodes)
