"""The options that commands share: the same name, the same words, and the same meaning in all of them.

`-o`  where to write; `--force`  replace what is there; `--json`  the answer as one JSON document on standard output;
`-q`  nothing but errors on standard error; `--seed`  of what is drawn at random. And what their values complete to.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

Function = TypeVar("Function", bound=Callable[..., Any])
Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]

FILE, FOLDER, FORCE = "The file to write.", "The folder to write to.", "Replace what is there."
JSON = "Print the answer as one JSON document."
QUIET = "Print nothing but errors on standard error."
SEED = "Of what is drawn at random."


def output_file(default: Path | None = None, *, note: str = "") -> Callable[[Function], Function]:
    """`-o FILE`, a Path named `output`; `note` says what the default is where it is no fixed name."""
    return _output(FILE, "FILE", default, note)


def output_folder(default: Path | None = None, *, note: str = "") -> Callable[[Function], Function]:
    """`-o FOLDER`, a Path named `output`; `note` says what the default is where it is no fixed name."""
    return _output(FOLDER, "FOLDER", default, note)


def _output(text: str, metavar: str, default: Path | None, note: str) -> Callable[[Function], Function]:
    return click.option(
        "-o",
        "--output",
        type=click.Path(path_type=Path),
        default=default,
        metavar=metavar,
        show_default=default is not None,
        help=text + (f"  [default: {note}]" if note else ""),
    )


def force_option(function: Function) -> Function:
    """`--force`, a bool named `force`."""
    return click.option("--force", is_flag=True, help=FORCE)(function)


def json_option(function: Function) -> Function:
    """`--json`, a bool named `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=JSON)(function)


def seed_option(function: Function) -> Function:
    """`--seed N`, an int named `seed`, 0 unless given."""
    return click.option("--seed", type=int, default=0, metavar="N", show_default=True, help=SEED)(function)


def quiet_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`-q`: while the command runs, nothing is printed on standard error. The command itself is not told.

    Its errors are: they are raised, and printed by the one place that decides the exit code.
    """

    @functools.wraps(function)
    def command(*arguments: Any, quiet: bool, **named: Any) -> Any:
        if not quiet:
            return function(*arguments, **named)
        with redirect_stderr(io.StringIO()):
            return function(*arguments, **named)

    return click.option("-q", "--quiet", is_flag=True, help=QUIET)(command)


def completing(names: Callable[[], Iterable[str]], suffix: str = "") -> Complete:
    """Complete to names, and to files, first of all those that end in `suffix`."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        known = [name for name in names() if name.startswith(incomplete)]
        # Shells take the marker as "files too", and of bash's only where nothing else fits: so those are listed.
        files = sorted(str(path) for path in Path().glob(f"*{suffix}") if path.is_file()) if suffix else []
        near = [name for name in files if name.startswith(incomplete) and name not in known]
        return [CompletionItem(incomplete, type="file"), *map(CompletionItem, [*known, *near])]

    return complete


def bundled_models() -> list[str]:
    """Names of the bundled models."""
    from pipeplan.cli.models import names

    return names()


def bundled_clusters() -> list[str]:
    """Names that `--cluster` takes."""
    from pipeplan.cluster_file import bundled_names

    return ["local", *bundled_names()]


def bundled_profiles() -> list[str]:
    """Names of the bundled profiles."""
    from pipeplan.bundled_profiles import bundled

    return list(bundled())


def words(*names: str) -> Complete:
    """Complete to these words alone."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]

    return complete


def model_words() -> list[str]:
    """What may follow `pipeplan profile`: a model, or what else it does."""
    return [*bundled_models(), "show", "diff"]
