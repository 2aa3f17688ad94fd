"""Where the user's code writes a buffer or an attribute, and whether anything reads it, found in the source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from types import ModuleType

from pipeplan_launch.runtime.self_check.kept_values import is_users_class


def place_of_write(kind: type, name: str) -> str | None:
    """`file:line` where a class writes its attribute `name`, else of its `forward`; None if its source is not the
    user's.
    """
    for one in kind.__mro__:
        if not is_users_class(one) or (parsed := _parsed(one)) is None:
            continue
        tree, file, first = parsed
        writes = [node for method in _methods(tree) for node in ast.walk(method) if _writes(node, name)]
        lines = [node.lineno for node in writes if isinstance(node, (ast.stmt, ast.expr))] or [
            method.lineno for method in _methods(tree) if method.name == "forward"
        ]
        if lines:
            return f"{file}:{first + lines[0] - 1}"
    return None


def is_read(name: str, files: Iterable[ModuleType]) -> bool:
    """Whether some code in these files uses an attribute or variable other than to write it anew.

    `self.calls += 1` alone is no use, and neither is a method of that name. True for a file without source.
    """
    for file in files:
        try:
            tree = ast.parse(inspect.getsource(file))
        except (OSError, TypeError, SyntaxError):
            return True
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        if any(_reads(node, name) for node in ast.walk(tree) if id(node) not in called):
            return True
    return False


@cache
def _parsed(kind: type) -> tuple[ast.AST, str, int] | None:
    """(syntax tree of a class, its file, its first line)."""
    try:
        lines, first = inspect.getsourcelines(kind)
        return ast.parse(textwrap.dedent("".join(lines))), inspect.getsourcefile(kind) or "", first
    except (OSError, TypeError, SyntaxError):
        return None


def _methods(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """The methods of a class but for `__init__`, `forward` first."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    yield from sorted(found, key=lambda node: node.name != "forward")


def _writes(node: ast.AST, name: str) -> bool:
    """Whether a statement assigns to an attribute, or calls one of its methods that write in place."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_writer(node.func.attr):
        targets = [node.func.value]
    return any(_is_name(inner, name) for target in targets for inner in ast.walk(target))


def _is_writer(method: str) -> bool:
    """Whether a method of this name writes in place: `copy_`, `append`."""
    return method.endswith("_") or method in ("append", "extend", "update", "add", "pop")


def _reads(node: ast.AST, name: str) -> bool:
    """Whether a node loads the attribute or variable of that name, also for a call of one of its methods."""
    return _is_name(node, name) and isinstance(getattr(node, "ctx", None), ast.Load)


def _is_name(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name)
