"""Files are opened by rtx.disk, which follows no link; a line that does it otherwise says why."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BY_PATH = "# by path: "
"""Begins the comment that says why a line opens a file without rtx.disk, in the line or above."""
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
"""Functions that take the path of a file, by their module; "" has those of plain names."""
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
    if owner == "os":
        return call.attr in CALLS_BY_PATH["os"]
    # The method of a text has two arguments.
    is_rename = call.attr == "replace" and len(node.args) == 1 and not node.keywords
    is_function = call.attr in CALLS_BY_PATH.get(owner, ())
    return is_function or is_rename or call.attr in METHODS_BY_PATH


def opened_by_path(path: Path) -> Iterator[str]:
    """Yield the place of each call in a file that opens by path and does not say why."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if opens_by_path(node):
            number = getattr(node, "lineno", 0)
            here_and_above = lines[number - 2 : number]
            if not any(BY_PATH in line for line in here_and_above):
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
