"""The arguments that describe a problem on the command line, shared by all commands that solve one, and their help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from pipeplan.api import cluster
from pipeplan.cli.options import Complete, bundled_clusters, bundled_profiles, complete_names, complete_words
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.from_options.build_problem import BuiltProblem, Request, build_problem
from pipeplan.from_options.option_fields import option_fields, parse_pin
from pipeplan.plan.schedules import SCHEDULES
from pipeplan.planning.choose import ANY
from pipeplan.problem.plan_profile import PROFILE
from pipeplan.profile_data.profile import Profile, bundled_profile_paths, load_profile
from pipeplan.util.deadline import Deadline
from pipeplan.util.text import one_line

DEFAULT_PROFILE = Path(PROFILE)
EXAMPLE = "vgg16-v100"
"""The bundled profile that stands in where there is no other."""


def _complete_layers(ending: str = "") -> Complete:
    """A completion to the names of the profile's layers, each with this ending; of names with commas to the last."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        # Click leaves the arguments before an option without a value in `args`.
        named = context.params.get("profile") or next(map(Path, context.args), None)
        try:
            profile = read_profile(named).profile
        except InputError:
            return []
        before, comma, begun = incomplete.rpartition(",")
        names = [layer.name for layer in profile.layers if layer.name.startswith(begun)]
        return [CompletionItem(f"{before}{comma}{name}{ending}") for name in names]

    return complete


def _parse_pins(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(parse_pin(text) for text in texts)


def _parse_groups(context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(tuple(name.strip() for name in text.split(",")) for text in texts)


def _parse_stages(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, int] | None:
    """The fewest and the most stages of `3` or `1-4`."""
    if text is None:
        return None
    first, dash, last = text.partition("-")
    if not first.isdecimal() or (dash and not last.isdecimal()):
        raise InputError(f"--stages: expected a number or a range, as in 3 or 1-4, found {text!r}")
    least, most = int(first), int(last or first)
    if not 1 <= least <= most:
        raise InputError(f"--stages: expected at least 1 stage, and the smaller number first, found {text!r}")
    if dash and least > 1 and least != most:
        raise InputError(f"--stages: a range begins with 1, as in 1-{most}; found {text!r}")
    return least, most


def _parse_staleness(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """The oldest gradients, in updates, of `2` or `any`."""
    if text is None:
        return None
    if text.lower() == "any":
        return ANY
    if not text.isdecimal():
        raise InputError(f"--staleness: expected a number of updates or any, found {text!r}")
    return int(text)


_ARGUMENTS = (
    click.argument(
        "profile",
        required=False,
        type=click.Path(path_type=Path),
        shell_complete=complete_names(bundled_profiles, ".json"),
    ),
    click.option(
        "--cluster",
        "cluster_name",
        default="local",
        show_default=True,
        shell_complete=complete_names(bundled_clusters, ".toml"),
        help="Plan for this cluster: A, B, C, local, or a TOML file.",
    ),
    click.option("--servers", type=int, help="Use this number of servers instead of the cluster's own."),
    click.option("--workers", type=int, help="Use this number of workers, on a cluster of one server such as local."),
    click.option(
        "--batch", type=int, metavar="SAMPLES", help="Train this global batch  [default: a microbatch on every worker]"
    ),
    click.option(
        "--microbatch",
        type=int,
        metavar="SAMPLES",
        help="Cut the batch into microbatches of this size  [default: the best of the measured sizes]",
    ),
    click.option(
        "--staleness",
        metavar="N|any",
        callback=_parse_staleness,
        shell_complete=complete_words("any"),
        help="Allow gradients that are up to N updates old  [default: 0]",
    ),
    click.option(
        "--schedule",
        metavar="NAME",
        shell_complete=complete_words(*SCHEDULES),
        help=f"Use this training schedule: {', '.join(SCHEDULES)}  [default: the best; in `replan` that of the plan]",
    ),
    click.option("--inference", is_flag=True, help="Plan the forward pass only."),
    click.option(
        "--stages",
        metavar="N|1-M",
        callback=_parse_stages,
        help="Use exactly N stages, or 1 to M.",
    ),
    click.option("--max-replicas", type=int, help="Limit the replicas of a stage; 1 gives an unreplicated pipeline."),
    click.option("--max-workers", type=int, help="Limit the busy workers; the others stay idle."),
    click.option("--grid", is_flag=True, help="Give every stage the same number of replicas."),
    click.option(
        "--pin",
        "pins",
        multiple=True,
        callback=_parse_pins,
        metavar="LAYER=STAGE",
        shell_complete=_complete_layers("="),
        help="Put a layer in a stage, counted from 1; can be repeated.",
    ),
    click.option(
        "--together",
        multiple=True,
        callback=_parse_groups,
        metavar="A,B,…",
        shell_complete=_complete_layers(),
        help="Keep these layers in one stage; can be repeated.",
    ),
    click.option(
        "--shard-optimizer",
        is_flag=True,
        help="Divide the optimiser's state among the replicas of each stage (ZeRO stage 1).",
    ),
    click.option("--no-recompute", is_flag=True, help="Never drop activations and recompute them."),
    click.option("--ignore-memory", is_flag=True, help="Plan as if memory were unlimited."),
)


GROUPS = {
    "What I train": ("--batch", "--microbatch", "--staleness", "--schedule", "--inference"),
    "Where": ("--cluster", "--servers", "--workers", "--max-workers"),
    "Constraints": (
        "--stages",
        "--max-replicas",
        "--grid",
        "--pin",
        "--together",
        "--shard-optimizer",
        "--no-recompute",
        "--ignore-memory",
    ),
    "Search": ("--time-limit", "--solver"),
    "Output": ("--output", "--force", "--no-write", "--json", "--quiet", "--for", "--help"),
}
"""The options under each heading, in the order of the help."""


class GroupedCommand(click.Command):
    """A command whose help lists its options under the headings of `GROUPS`, and further ones under "Options"."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options to the help."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {option.opts[-1]: option.get_help_record(ctx) for option in options}
        grouped = {name for names in GROUPS.values() for name in names}
        groups = {"Options": [name for name in records if name not in grouped]} | GROUPS
        for heading, names in groups.items():
            rows = [record for name in names if (record := records.get(name)) is not None]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


@dataclass(frozen=True)
class ProfileSource:
    """A profile, and a line that says where it comes from."""

    profile: Profile
    text: str
    example: bool = False
    """Whether it is the bundled profile that stands in where none is named and there is no ./profile.json."""


Function = Callable[..., Any]


def problem_arguments(*without: str) -> Callable[[Function], Function]:
    """A decorator that gives a command all arguments of `problem_of` except for those named in `without`."""

    def decorate(function: Function) -> Function:
        # Decorators apply from the last to the first. Each is applied to a dummy to learn the name of its parameter.
        for argument in reversed(_ARGUMENTS):
            dummy: Any = argument(lambda: None)
            if dummy.__click_params__[0].name not in without:
                function = argument(function)
        return function

    return decorate


def problem_of(arguments: dict[str, Any], deadline: Deadline) -> tuple[BuiltProblem, str]:
    """The problem that the arguments describe, and a line on where its profile comes from.

    The choice between synchronous and asynchronous plans, where the arguments leave it open, has a share of the time
    until the deadline.
    """
    source = read_profile(arguments.get("profile"))
    machines = cluster(arguments["cluster_name"], servers=arguments.get("servers"), workers=arguments.get("workers"))
    return build_problem(request_of(arguments, source.profile, machines, deadline=deadline)), source.text


def request_of(arguments: dict[str, Any], profile: Profile, machines: Cluster, **more: Any) -> Request:
    """The request that the arguments describe; `more` are further fields of it. Raises `InputError`."""
    return Request(
        profile,
        machines,
        batch=arguments.get("batch"),
        microbatch=arguments.get("microbatch"),
        staleness=arguments.get("staleness"),
        options=checked_option_fields(arguments),
        **more,
    )


def checked_option_fields(arguments: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Options` that the arguments set. Raises `InputError` where they contradict each other."""
    if arguments.get("inference") and arguments.get("schedule"):
        raise InputError("--schedule is for training: leave it out with --inference")
    least, most = arguments.get("stages") or (None, None)
    exact = {"stages": least} if least == most else {"stages": None, "max_stages": most}
    return option_fields(arguments | exact)


def read_profile(path: Path | None) -> ProfileSource:
    """The profile at `path`; without one ./profile.json, or the bundled VGG-16 where there is no such file."""
    example = path is None and not DEFAULT_PROFILE.exists()
    if path is None and DEFAULT_PROFILE.exists():
        path, why = DEFAULT_PROFILE, "profile.json in this folder"
    elif path is None:
        path, why = Path(EXAMPLE), "bundled, as there is no profile.json here"
    else:
        why = "bundled" if str(path) in bundled_profile_paths() and not path.is_file() else str(path)
    profile = load_profile(str(path))
    origin = profile.provenance
    text = f"profile: {profile.model_name} ({why}); {origin.kind} on {origin.device_name or 'an unnamed device'}"
    if origin.kind == "modelled":
        text += ", not measured"
    return ProfileSource(profile, one_line(text), example)
