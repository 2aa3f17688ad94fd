"""What a problem is described with on the command line: the same arguments for every command that solves one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipeplan import resources
from pipeplan.api import cluster
from pipeplan.bundled_profiles import bundled, read
from pipeplan.cli.options import bundled_clusters, bundled_profiles, completing, words
from pipeplan.errors import InputError
from pipeplan.files import Node
from pipeplan.plan import ACCUMULATING, SCHEDULES, STASHING
from pipeplan.posing import Words, options_for
from pipeplan.problem import BOUNDARIES, Options, Problem
from pipeplan.profile_data import Profile
from pipeplan.rescale import describe_rescaling
from pipeplan.text import one_line

DEFAULT_PROFILE = Path("profile.json")
BUNDLED_PROFILE = "vgg16-v100.json"

_ARGUMENTS = (
    click.argument(
        "profile",
        required=False,
        type=click.Path(path_type=Path),
        shell_complete=completing(bundled_profiles, ".json"),
    ),
    click.option(
        "--cluster",
        "cluster_name",
        default="local",
        show_default=True,
        shell_complete=completing(bundled_clusters, ".toml"),
        help="A, B, C, local, or a TOML file.",
    ),
    click.option("--servers", type=int, help="Another number of servers than the cluster's own."),
    click.option("--workers", type=int, help="With --cluster local: how many workers."),
    click.option(
        "--minibatch", type=int, help="Another minibatch size: as measured, between measured ones, or in proportion."
    ),
    click.option("--inference", is_flag=True, help="Plan the forward pass only."),
    click.option("--stages", type=int, help="Exactly so many stages."),
    click.option("--max-replicas", type=int, help="No stage on more workers; 1 makes the pipeline straight."),
    click.option("--straight", is_flag=True, help="One worker a stage, one pipeline."),
    click.option("--grid", is_flag=True, help="As many replicas for every stage, as trainers with a uniform grid."),
    click.option(
        "--overlap", type=float, help="Share of gradient sync hidden by compute  [default: 1 on GPUs, 0 on CPUs]"
    ),
    click.option("--ignore-memory", is_flag=True, help="Plan as if memory had no end."),
    click.option(
        "--schedule",
        metavar="NAME",
        shell_complete=words(*SCHEDULES, "auto"),
        help=f"Of training: {', '.join(SCHEDULES)}, or `solve` with auto  [default: {STASHING}]",
    ),
    click.option("--accumulate", type=int, metavar="M", help="Minibatches per update, for 2bw, gpipe and 1f1b-flush."),
    click.option("--no-recompute", is_flag=True, help="Never drop activations to compute them again."),
    click.option(
        "--no-contention", is_flag=True, help="Plan as if cards were not shared, and data parallelism hid all-reduces."
    ),
    click.option(
        "--boundary",
        metavar="NAME",
        shell_complete=words(*BOUNDARIES),
        help=f"Traffic between two stages: {' or '.join(BOUNDARIES)}  [default: single]",
    ),
    click.option("--max-stages", type=int, help="At most so many stages."),
    click.option("--max-workers", type=int, help="At most so many workers with something to do."),
    click.option("--pin", "pins", multiple=True, metavar="LAYER=STAGE", help="Put a layer in a stage, from 1. Repeat."),
    click.option("--together", multiple=True, metavar="A,B,…", help="Keep layers in one stage. Repeat."),
    click.option("--no-cut-after", multiple=True, metavar="LAYER", help="No boundary may cross its output. Repeat."),
)


@dataclass(frozen=True)
class Source:
    """Where the profile came from, and what was done to it."""

    profile: Profile
    text: str


Function = Callable[..., Any]


def problem_arguments(*without: str) -> Callable[[Function], Function]:
    """A decorator that gives a command all arguments of `problem_of` but the named ones, which are then None."""

    def decorate(function: Function) -> Function:
        # Click collects in reverse order what decorators say; the arguments are tried on a function of their own first.
        for argument in reversed(_ARGUMENTS):
            tried: Any = argument(lambda: None)
            if tried.__click_params__[0].name not in without:
                function = argument(function)
        return function

    return decorate


def problem_of(given: dict[str, Any]) -> tuple[Problem, str]:
    """The problem that the arguments describe, and a line on where its profile comes from."""
    source = read_profile(given.get("profile"), given.get("minibatch"))
    there = cluster(given["cluster_name"], servers=given.get("servers"), workers=given.get("workers"))
    return Problem(source.profile, there, options_of(given, there.device.kind)), source.text


def options_of(given: dict[str, Any], kind: str) -> Options:
    """The options that the arguments name, for workers on devices of a kind."""
    return options_for(kind, **words_of(given))


def words_of(given: dict[str, Any]) -> Words:
    """The same in the words of the API."""
    check_schedules([given["schedule"]] if given.get("schedule") else [], given)
    return Words(
        inference=given["inference"],
        overlap=given["overlap"],
        memory=not given["ignore_memory"],
        stages=given["stages"],
        max_replicas=1 if given["straight"] else given["max_replicas"],
        allow_copies=not given["straight"],
        schedule=given.get("schedule") or STASHING,
        accumulate=given["accumulate"],
        recompute=not given["no_recompute"],
        contention=not given["no_contention"],
        boundary=given["boundary"] or BOUNDARIES[0],
        max_stages=given["max_stages"],
        max_workers=given["max_workers"],
        pins=tuple(_pin(text) for text in given["pins"]),
        together=tuple(tuple(name.strip() for name in text.split(",")) for text in given["together"]),
        no_cut_after=tuple(given["no_cut_after"]),
        grid=bool(given.get("grid")),
    )


def check_schedules(names: Sequence[str], given: dict[str, Any]) -> None:
    """Raise an `InputError` where the named schedules and the other arguments do not go together."""
    if given["inference"] and (names or given["accumulate"] is not None):
        raise InputError(f"{'--schedule' if names else '--accumulate'} is for training: leave it out with --inference")
    accumulating = [name for name in names if name in ACCUMULATING]
    if accumulating and given["accumulate"] is None:
        raise InputError(f"--schedule {accumulating[0]} needs a number of minibatches per update: give --accumulate")
    # What a plan is made for may have a schedule of its own.
    told = bool(given.get("target_name")) and not names
    if given["accumulate"] is not None and not accumulating and not told and not set(names) - set(SCHEDULES):
        raise InputError(f"--accumulate goes with --schedule {', '.join(ACCUMULATING)}: the others need no number")


def _pin(text: str) -> tuple[str, int]:
    layer, _, stage = text.rpartition("=")
    if not layer or not stage.isdecimal() or int(stage) < 1:
        raise InputError(f"--pin: expected a layer and a stage from 1 on, as in conv1=1, found {text!r}")
    return layer, int(stage)


def read_profile(path: Path | None, minibatch: int | None) -> Source:
    """The profile at `path` or bundled under that name, else ./profile.json, else VGG-16's; for another minibatch if
    asked."""
    if path is None and DEFAULT_PROFILE.exists():
        path, why = DEFAULT_PROFILE, "profile.json in this folder"
    elif path is None:
        path, why = resources.folder("profiles") / BUNDLED_PROFILE, "bundled, as there is no profile.json here"
    else:
        why = "bundled" if str(path) in bundled() and not path.is_file() else str(path)
    profile = read(str(path))
    origin = profile.provenance
    text = f"profile: {profile.model_name} ({why}); {origin.kind} on {origin.device_name or 'an unnamed device'}"
    if origin.kind == "modelled":
        text += ", not measured"
    if minibatch is not None and minibatch != profile.minibatch:
        text += f"; {describe_rescaling(profile.all_sizes, minibatch)}"
        profile = profile.rescaled(minibatch)
    return Source(profile, one_line(text))


def profile_of_plan(root: Node, plan: Path, given: Path | None) -> Profile:
    """The profile with the digest that a plan.json names, scaled to the plan's minibatch.

    It is the one at `given`, else looked for beside the plan, in the folder above, here, and among the bundled ones.
    Raises `InputError` where it is not there.
    """
    digest, minibatch = root["profile"]["digest"].text(), root["profile"]["minibatch"].integer(minimum=1)
    if given is not None:
        profile = _scaled(given, minibatch)
        if profile.digest() != digest:
            raise InputError(f"{given} is not the profile that {plan} was made from: their digests differ")
        return profile
    near = [plan.parent / "profile.json", plan.parent.parent / "profile.json", DEFAULT_PROFILE]
    for path in [*near, *sorted(resources.folder("profiles").glob("*.json"))]:
        if path.is_file() and (profile := _scaled(path, minibatch)).digest() == digest:
            return profile
    raise InputError(f"the profile that {plan} was made from is not beside it: name it with --profile")


def _scaled(path: Path, minibatch: int) -> Profile:
    profile = Profile.load(path)
    return profile if profile.minibatch == minibatch else profile.rescaled(minibatch)
