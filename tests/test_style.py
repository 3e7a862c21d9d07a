"""What ruff does not know about how this code reads: a statement has one thought."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("rtx", "hydra_plugins", "tests", "benchmarks", "docs")


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
    has_truth = any(is_truth_value(side) for side in sides)
    return has_truth and any(is_sequence(side) for side in sides)


def is_truth_value(node: ast.AST) -> bool:
    """Return whether a node is an expression that is true or false, whatever its names are."""
    if isinstance(node, ast.BoolOp):
        return all(is_truth_value(value) for value in node.values)
    is_negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_negation or isinstance(node, ast.Compare)


def is_sequence(node: ast.AST) -> bool:
    """Return whether a node is a text, a list or a tuple as it is written."""
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
    bounds = (node.lower, node.upper, node.step)
    return any(bound is not None and is_truth_value(bound) for bound in bounds)


TWO_FORS = "a comprehension with two `for`"
"""Tables of cases in tests may have it."""
RULES = {
    "an assignment of a tuple to a tuple": is_tuple_assignment,
    "a conditional expression in another": is_nested_conditional,
    "a conditional expression in an f-string": is_conditional_text,
    "a text or list times a truth value": is_text_times_truth,
    TWO_FORS: is_nested_comprehension,
    "a slice by a truth value": is_truth_slice,
}


def problems(path: Path) -> Iterator[str]:
    """Yield each statement that breaks a rule, with its line."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        for name, breaks in RULES.items():
            is_allowed = name == TWO_FORS and path.parts[0] == "tests"
            if breaks(node) and not is_allowed:
                yield f"{path}:{getattr(node, 'lineno', '?')}: {name}"


def test_a_statement_has_one_thought() -> None:
    lines: list[str] = []
    for path in checked_files():
        lines += problems(path)
    assert not lines, "\n".join(lines)


BROKEN = {
    "a, b = x, y": is_tuple_assignment,
    "a = x if p else y if q else z": is_nested_conditional,
    'f"{x if p else y}"': is_conditional_text,
    '"s" * (n > 1)': is_text_times_truth,
    '"s" * (not n)': is_text_times_truth,
    "[x for y in z for x in y]": is_nested_comprehension,
    "words[: n > 1]": is_truth_slice,
}
"""Lines, and the rule that each breaks."""


@pytest.mark.parametrize("line", BROKEN)
def test_a_rule_finds_what_it_is_for(line: str) -> None:
    nodes = ast.walk(ast.parse(line))
    assert any(BROKEN[line](node) for node in nodes)


@pytest.mark.parametrize("line", ["a, b = b, a", "a, b = f(x)", '"-" * width', "words[: n or 1]"])
def test_plain_statements_break_no_rule(line: str) -> None:
    nodes = list(ast.walk(ast.parse(line)))
    assert not any(breaks(node) for breaks in RULES.values() for node in nodes)
