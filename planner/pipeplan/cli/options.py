"""Options that commands share under the same name, and their completion in a shell.

-o         the file or folder to write
--force    replace an existing file; without it a command replaces only its own older output
--no-write print the answer without writing files
--json     print the answer as one JSON document on standard output
-q         print nothing but errors and what --json asks for
--seed     seed of the random numbers
--profile  the profile that a plan was made from
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from pipeplan.cli import output

Function = TypeVar("Function", bound=Callable[..., Any])
Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]
FILE, FOLDER = "Write to this file; missing folders are made.", "Write to this folder; missing ones are made."
PATH = click.Path(path_type=Path)
FORCE = "Replace existing files."
JSON = "Print the answer as one JSON document."
QUIET = "Print nothing but errors and what --json asks for."
SEED = "Seed the random numbers with this number."
PLAN_PROFILE = "Read the plan's profile from this file  [default: beside the plan, here, or a bundled profile]"


class NumberRange(click.FloatRange):
    """A range of numbers that refuses NaN, which every range of click accepts."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number that a text stands for."""
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def _output(text: str, metavar: str, default: Path | None = None, *, note: str = "") -> Callable[[Function], Function]:
    words = text + (f"  [default: {note}]" if note else "")
    return click.option("-o", "--output", type=PATH, default=default, metavar=metavar, help=words)


output_file = functools.partial(_output, FILE, "FILE")
"""`-o FILE`, a Path named `output`; `note` describes a default that is not a fixed name."""
output_folder = functools.partial(_output, FOLDER, "FOLDER")
"""`-o FOLDER`, a Path named `output`; `note` is as for `output_file`."""
force_option = click.option("--force", is_flag=True, help=FORCE)
no_write_option = click.option("--no-write", is_flag=True, help="Print the answer without writing files.")
json_option = click.option("--json", "as_json", is_flag=True, help=JSON)
plan_profile_option = click.option("--profile", "profile_file", type=PATH, help=PLAN_PROFILE)
seed_option = click.option("--seed", type=int, default=0, metavar="N", help=SEED)


def quiet_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """`-q`, which silences the command except for the JSON document of `--json` and a file printed on standard output.

    The command itself gets no parameter for `-q`. Errors are still printed, because the command raises them and
    `pipeplan.cli.main` prints them.
    """

    @functools.wraps(function)
    def command(*arguments: Any, quiet: bool, **named: Any) -> Any:
        if not quiet:
            return function(*arguments, **named)
        with output.silenced():
            return function(*arguments, **named)

    return click.option("-q", "--quiet", is_flag=True, help=QUIET)(command)


def complete_names(names: Callable[[], Iterable[str]], suffix: str = "") -> Complete:
    """A completion of names and files. Files that end in `suffix` are listed before the shell adds others."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        matching_names = [name for name in names() if name.startswith(incomplete)]
        # The item of type "file" makes shells add files, but bash does so only if nothing else matches. So list likely
        # files.
        files = sorted(str(path) for path in Path().glob(f"*{suffix}") if path.is_file()) if suffix else []
        matching = [name for name in files if name.startswith(incomplete) and name not in matching_names]
        return [CompletionItem(incomplete, type="file"), *map(CompletionItem, [*matching_names, *matching])]

    return complete


def model_words() -> list[str]:
    """Words that may follow `pipeplan profile`: a bundled model, or a subcommand."""
    from pipeplan_launch.job.bundled_models import BUNDLED

    return [*BUNDLED, "show", "diff"]


def bundled_clusters() -> list[str]:
    """Names that `--cluster` takes."""
    from pipeplan.cluster_data.cluster_toml import bundled_cluster_names

    return ["local", *bundled_cluster_names()]


def bundled_profiles() -> list[str]:
    """Names of the bundled profiles."""
    from pipeplan.profile_data.profile import bundled_profile_paths

    return list(bundled_profile_paths())


def device_names() -> list[str]:
    """Names that `pipeplan profile --device` takes."""
    from pipeplan.cluster_data.devices import LOCAL_DEVICES, bundled_device_names

    return [*LOCAL_DEVICES, *bundled_device_names()]


def complete_words(*names: str) -> Complete:
    """A completion of only the given words."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(name) for name in names if name.startswith(incomplete)]

    return complete
