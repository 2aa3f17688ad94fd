"""The arguments that describe a problem on the command line, shared by every command that solves one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from pipeplan.api import cluster
from pipeplan.cli.shared.options import Complete, bundled_clusters, bundled_profiles, complete_names, complete_words
from pipeplan.errors import InputError
from pipeplan.from_options.build_problem import BuiltProblem, build_problem
from pipeplan.from_options.option_fields import option_fields, options_for, parse_pin
from pipeplan.plan.schedules import ACCUMULATING, CORRECTIONS, SCHEDULES
from pipeplan.problem.options import BOUNDARIES, Options
from pipeplan.problem.plan_profile import PROFILE
from pipeplan.profile_data.bundled import bundled_profile_paths, load_profile
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.rescale import describe_rescaling
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
            profile = read_profile(named, None).profile
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
        help="The cluster: A, B, C, local, or a TOML file.",
    ),
    click.option("--servers", type=int, help="Number of servers, instead of the cluster's own."),
    click.option("--workers", type=int, help="With --cluster local: number of workers."),
    click.option(
        "--minibatch", type=int, help="Plan for this minibatch size, interpolated or rescaled from the measured ones."
    ),
    click.option("--inference", is_flag=True, help="Plan the forward pass only."),
    click.option("--stages", type=int, help="Exact number of stages."),
    click.option(
        "--max-replicas", type=int, help="Maximum number of replicas of a stage; 1 makes the pipeline straight."
    ),
    click.option("--straight", is_flag=True, help="One worker for each stage, and no copies of the pipeline."),
    click.option(
        "--grid", is_flag=True, help="The same number of replicas for every stage, as in trainers with a uniform grid."
    ),
    click.option(
        "--overlap",
        type=float,
        help="Share of gradient synchronisation hidden by compute  [default: 1 on GPUs, 0 on CPUs]",
    ),
    click.option("--ignore-memory", is_flag=True, help="Plan as if memory were unlimited."),
    click.option(
        "--schedule",
        metavar="NAME",
        shell_complete=complete_words(*SCHEDULES, "best", "auto"),
        help=f"Training schedule: {', '.join(SCHEDULES)}, best, or auto (`solve` only)  [default: best; in `replan` "
        "that of the plan]",
    ),
    click.option(
        "--accumulate", type=int, metavar="M", help="Minibatches per update, for 2bw and the synchronous schedules."
    ),
    click.option(
        "--virtual-stages",
        type=int,
        metavar="V",
        help="Stages of each worker, for interleaved-1f1b (`solve` only)  [default: the best number]",
    ),
    click.option(
        "--correction",
        type=click.Choice(CORRECTIONS),
        help="Correct updates from old gradients: ef, error feedback  [default: with --schedule best ef where it was "
        "seen to help, otherwise none]",
    ),
    click.option(
        "--shard-optimizer",
        is_flag=True,
        help="Let the replicas of each stage divide the optimiser's state among them (ZeRO stage 1).",
    ),
    click.option("--no-recompute", is_flag=True, help="Never drop activations and recompute them."),
    click.option(
        "--no-contention",
        is_flag=True,
        help="Plan as if network cards were not shared, and data parallelism hid its all-reduces.",
    ),
    click.option(
        "--boundary",
        metavar="NAME",
        shell_complete=complete_words(*BOUNDARIES),
        help="Traffic between two stages uses a single link at a time, or parallel links  [default: single]",
    ),
    click.option("--max-stages", type=int, help="Maximum number of stages."),
    click.option("--max-workers", type=int, help="Maximum number of busy workers; the others stay idle."),
    click.option(
        "--pin",
        "pins",
        multiple=True,
        callback=_parse_pins,
        metavar="LAYER=STAGE",
        shell_complete=_complete_layers("="),
        help="Put a layer in a stage, counted from 1. Can be repeated.",
    ),
    click.option(
        "--together",
        multiple=True,
        callback=_parse_groups,
        metavar="A,B,…",
        shell_complete=_complete_layers(),
        help="Keep these layers in one stage. Can be repeated.",
    ),
    click.option(
        "--no-cut-after",
        multiple=True,
        metavar="LAYER",
        shell_complete=_complete_layers(),
        help="Keep a layer in one stage with all layers that read its output. Can be repeated.",
    ),
)


@dataclass(frozen=True)
class ProfileSource:
    """A profile, and a line that says where it comes from and whether it was rescaled."""

    profile: Profile
    text: str
    minibatch: int
    """The profile's own minibatch size, before it was rescaled."""
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
    source = read_profile(arguments.get("profile"), arguments.get("minibatch"))
    machines = cluster(arguments["cluster_name"], servers=arguments.get("servers"), workers=arguments.get("workers"))
    fields = checked_option_fields(arguments)
    return build_problem(source.profile, machines, deadline=deadline, **fields), source.text


def options_of(arguments: dict[str, Any], kind: str) -> Options:
    """The options that the arguments describe, for workers on devices of a kind, `cuda` or `cpu`."""
    return options_for(kind, **checked_option_fields(arguments))


def checked_option_fields(arguments: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Options` that the arguments set. Raises `InputError` where they contradict each other."""
    check_schedules([arguments["schedule"]] if arguments.get("schedule") else [], arguments)
    return option_fields(arguments)


def check_schedules(names: Sequence[str], arguments: dict[str, Any]) -> None:
    """Raise an `InputError` where the named schedules contradict the other arguments."""
    if arguments["inference"] and (names or arguments["accumulate"] is not None):
        raise InputError(f"{'--schedule' if names else '--accumulate'} is for training: leave it out with --inference")
    accumulating = [name for name in names if name in ACCUMULATING]
    if accumulating and arguments["accumulate"] is None:
        raise InputError(f"--schedule {accumulating[0]} needs a number of minibatches per update: give --accumulate")
    # A trainer that the plan is made for may impose a schedule that accumulates.
    imposed = bool(arguments.get("target_name")) and not names
    if arguments["accumulate"] is not None and not accumulating and not imposed and not set(names) - set(SCHEDULES):
        raise InputError(f"--accumulate goes with --schedule {', '.join(ACCUMULATING)}: the others need no number")


def read_profile(path: Path | None, minibatch: int | None) -> ProfileSource:
    """The profile at `path`, or the bundled one of that name; rescaled if `minibatch` is another size than its own.

    Without a path it is ./profile.json, or the bundled VGG-16 where there is no such file.
    """
    example = path is None and not DEFAULT_PROFILE.exists()
    if path is None and DEFAULT_PROFILE.exists():
        path, why = DEFAULT_PROFILE, "profile.json in this folder"
    elif path is None:
        path, why = Path(EXAMPLE), "bundled, as there is no profile.json here"
    else:
        why = "bundled" if str(path) in bundled_profile_paths() and not path.is_file() else str(path)
    profile = load_profile(str(path))
    origin = profile.provenance
    own = profile.minibatch
    text = f"profile: {profile.model_name} ({why}); {origin.kind} on {origin.device_name or 'an unnamed device'}"
    if origin.kind == "modelled":
        text += ", not measured"
    if minibatch is not None and minibatch != profile.minibatch:
        text += f"; {describe_rescaling(profile.all_sizes, minibatch)}"
        profile = profile.rescaled(minibatch)
    return ProfileSource(profile, one_line(text), own, example)
