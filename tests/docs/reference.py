"""The reference pages that follow from the code: docs/reference/cli.md and api.md.

`python tests/docs/reference.py` writes them anew; `test_reference.py` holds them to what the code says.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from blocks import BEGINS

import pipeplan
from pipeplan.cli import cli
from pipeplan_launch.command_line import worker_parser

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"
EXAMPLES = "<!-- not run: examples of many kinds; a test has their options read -->"
NOTE = "<!-- Written by `python tests/docs/reference.py`; do not edit. -->"


def command_line() -> str:
    """Every command with its usage, what it does, its examples and its options, as `--help` has them."""
    parts = [
        f"{NOTE}\n\n# Command line\n",
        "Every command prints this with `--help`. Results go to standard output, notes and errors to standard error.\n",
    ]
    top = click.Context(cli, info_name="pipeplan", **cli.context_settings)
    parts += _command(top, 2)
    parts += _launcher()
    return "\n".join(parts)


def _command(context: click.Context, level: int) -> list[str]:
    command = _measured(context.command)
    parts = [f"{'#' * level} {context.command_path}\n"]
    usage = _usage(context, command)
    parts.append(f"```text\n{usage}\n```\n")
    parts.append(described(command.help or ""))
    if command.epilog:
        parts.append(described(command.epilog))
    parts.append(_options(context, command))
    for inner in _children(context):
        parts += _command(inner, level + 1 if context.parent else level)
    return [part for part in parts if part]


def _children(context: click.Context) -> Iterator[click.Context]:
    """The contexts of the commands inside a command, in the order of its help."""
    group = context.command
    if isinstance(group, click.Group):
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield click.Context(command, info_name=name, parent=context)


def _measured(command: click.Command) -> click.Command:
    """Of `profile`, which is a command and has others, the command that stands behind its name."""
    if command.name == "profile" and isinstance(command, click.Group):
        inner = command.get_command(click.Context(command), "measure")
        assert inner is not None
        return inner
    return command


def _usage(context: click.Context, command: click.Command) -> str:
    return " ".join(f"{context.command_path} {' '.join(command.collect_usage_pieces(context))}".split())


def described(text: str) -> str:
    """A help text as Markdown: what click keeps as it is, below a `\\b`, in blocks; lists of commands too."""
    out = []
    for paragraph in inspect.cleandoc(text).replace("\f", "").split("\n\n"):
        lines = paragraph.strip("\n").split("\n")
        if lines[0].strip() == "\b":
            inside = "\n".join(line.rstrip() for line in lines[1:])
            out.append(f"{EXAMPLES}\n```bash\n{inside}\n```\n" if BEGINS.match(inside) else f"```text\n{inside}\n```\n")
        elif paragraph.strip():
            out.append(_escaped(" ".join(line.strip() for line in lines)) + "\n")
    return "\n".join(out)


def _options(context: click.Context, command: click.Command) -> str:
    rows = []
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or not record[1] or "--help" in parameter.opts:
            continue
        names = record[0].replace("|", "\\|")
        rows.append(f"| `{names}` | {_escaped(record[1]).replace('|', chr(92) + '|')} |")
    return "| option | |\n|---|---|\n" + "\n".join(rows) + "\n" if rows else ""


def _launcher() -> list[str]:
    """The options of a plan folder's launch.sh."""
    rows = []
    made = worker_parser("launch.sh")
    for action in made._actions:
        if not action.option_strings or "--help" in action.option_strings:
            continue
        names = ", ".join(action.option_strings) + (f" {action.metavar}" if action.metavar else "")
        rows.append(f"| `{names}` | {_escaped((action.help or '').replace('%%', '%'))} |")
    return [
        "## launch.sh\n",
        "```text\nPLAN_FOLDER/launch.sh [OPTIONS]\n```\n",
        "Runs the plan, as [Run a plan](../running.md) describes. The file is the same on every server.\n",
        "| option | |\n|---|---|\n" + "\n".join(rows) + "\n",
    ]


def _escaped(text: str) -> str:
    """Angle brackets and underscores outside of code would be read as Markdown."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else re.sub(r"([<*_\[\]])", r"\\\1", piece) for piece in pieces)


def api() -> str:
    """The Python API: what `import pipeplan` has, from signatures and docstrings."""
    module = inspect.getmodule(pipeplan.solve)
    assert module is not None
    names = list(module.__all__)
    functions = [name for name in names if inspect.isfunction(getattr(pipeplan, name))]
    order = sorted(functions, key=lambda name: inspect.getsourcelines(getattr(pipeplan, name))[1])
    classes = [name for name in names if inspect.isclass(getattr(pipeplan, name))]
    types = [name for name in classes if not issubclass(getattr(pipeplan, name), Exception)]
    errors = [name for name in classes if name not in types]
    parts = [f"{NOTE}\n\n# Python API\n", _doc(module.__doc__ or "")]
    parts.append("## Functions\n")
    parts += [_function(name, getattr(pipeplan, name)) for name in order]
    parts.append("## What they take and return\n")
    parts += [_class(name, getattr(pipeplan, name)) for name in types]
    parts.append("## Errors\n")
    parts += [
        f"**`{name}`** ({_bases(getattr(pipeplan, name))}): {_first(getattr(pipeplan, name))}\n" for name in errors
    ]
    return "\n".join(part for part in parts if part)


def _doc(text: str) -> str:
    """A docstring as Markdown: indented lines are Python."""
    out = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if all(line.startswith("    ") for line in paragraph.splitlines()):
            out.append("<!-- not run: an outline -->\n```python\n" + inspect.cleandoc(paragraph) + "\n```\n")
        else:
            out.append(" ".join(paragraph.split()) + "\n")
    return "\n".join(out)


def _function(name: str, function: Callable[..., Any]) -> str:
    return f"### {name}\n\n```text\n{signature(name, function)}\n```\n\n{_doc(function.__doc__ or '')}"


def signature(name: str, function: Callable[..., Any]) -> str:
    """One line where it fits, else one parameter a line, as ruff formats it."""
    found = inspect.signature(function)
    parameters = []
    star = False
    for parameter in found.parameters.values():
        if parameter.kind == parameter.KEYWORD_ONLY and not star:
            parameters.append("*")
            star = True
        parameters.append(_parameter(parameter))
    tail = "" if found.return_annotation is inspect.Signature.empty else f" -> {_type(found.return_annotation)}"
    line = f"{name}({', '.join(parameters)}){tail}"
    return line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(parameters) + f",\n){tail}"


def _parameter(parameter: inspect.Parameter) -> str:
    text = {parameter.VAR_KEYWORD: "**", parameter.VAR_POSITIONAL: "*"}.get(parameter.kind, "") + parameter.name
    if parameter.annotation is not inspect.Parameter.empty:
        text += f": {_type(parameter.annotation)}"
    if parameter.default is not inspect.Parameter.empty:
        shown = "..." if callable(parameter.default) else repr(parameter.default)
        text += f" = {shown}"
    return text


def _type(annotation: object) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"\b(Positive|Natural|Bytes)\b", "int", re.sub(r"\bAmount\b", "float", text))
    return text.replace("os.PathLike[str]", "PathLike")


def _class(name: str, kind: type) -> str:
    rows = []
    if dataclasses.is_dataclass(kind):
        said = _said_of_fields(kind)
        for field in dataclasses.fields(kind):
            if not field.name.startswith("_"):
                default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
                rows.append((field.name, f"`{_type(field.type)}{default}`", said.get(field.name, "")))
    for one, value in vars(kind).items():
        if one.startswith("_"):
            continue
        if isinstance(value, property | functools.cached_property):
            rows.append((one, "property", _first(value)))
        elif inspect.isfunction(value) or isinstance(value, classmethod):
            rows.append((f"{one}()", "method", _first(getattr(kind, one))))
    shown = "".join(
        f"| `{first}` | {second.replace('|', chr(92) + '|')} | {third} |\n" for first, second, third in rows
    )
    return f"### {name}\n\n{_doc(kind.__doc__ or '')}\n" + (f"| | | |\n|---|---|---|\n{shown}" if rows else "")


def _said_of_fields(kind: type) -> dict[str, str]:
    """The strings that stand below fields in the source."""
    (body,) = (
        node.body
        for node in ast.parse(inspect.cleandoc(inspect.getsource(kind))).body
        if isinstance(node, ast.ClassDef)
    )
    said = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            said[field.target.id] = _escaped(" ".join(str(below.value.value).split())).replace("|", "\\|")
    return said


def _first(value: object) -> str:
    """The first sentence or so of a docstring, in one line."""
    return _escaped(" ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())).replace("|", "\\|")


def _bases(kind: type) -> str:
    return ", ".join(f"`{base.__name__}`" for base in kind.__bases__)


def main() -> None:
    """Write both pages."""
    REFERENCE.mkdir(exist_ok=True)
    for name, text in (("cli.md", command_line()), ("api.md", api())):
        (REFERENCE / name).write_text(text.strip() + "\n", encoding="utf-8")
        print(f"written: {REFERENCE / name}", file=sys.stderr)


if __name__ == "__main__":
    main()
