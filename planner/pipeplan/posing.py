"""From what a user says to one problem: constraints, the choice of a schedule or of a minibatch size, a trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypedDict, Unpack

from pipeplan.auto import Choice, choose
from pipeplan.cluster_data import Cluster
from pipeplan.errors import InputError
from pipeplan.exports.aim import Aim
from pipeplan.exports.target import target as target_of
from pipeplan.problem import Options, Problem
from pipeplan.profile_data import Profile
from pipeplan.sized import Sized, choose_size
from pipeplan.solving import MAXIMUM_CUTS

AUTO: Literal["auto"] = "auto"


class Words(TypedDict, total=False):
    """The fields of `pipeplan.Options`, which has what each means. Those left out have their defaults."""

    inference: bool
    overlap: float | None
    """None: all of it hides behind compute on GPUs, nothing on CPUs."""
    memory: bool
    stages: int | None
    max_replicas: int | None
    allow_copies: bool
    schedule: str
    """Or `auto`, with a global `batch`."""
    accumulate: int | None
    recompute: bool
    contention: bool
    boundary: str
    max_stages: int | None
    max_workers: int | None
    pins: tuple[tuple[str, int], ...]
    together: tuple[tuple[str, ...], ...]
    no_cut_after: tuple[str, ...]
    grid: bool


@dataclass(frozen=True)
class Posed:
    """A problem, and what choosing a schedule or a minibatch size for it showed."""

    problem: Problem
    schedules: tuple[Choice, ...] = ()
    """Best first; empty where none was to be chosen."""
    sizes: tuple[Sized, ...] = ()
    """Likewise."""
    aim: Aim | None = None
    """The trainer that the plan is for."""


def options_for(kind: str, **words: Unpack[Words]) -> Options:
    """The options that the words describe, with the default that depends on the kind of device, `cuda` or `cpu`."""
    if words.get("overlap") is None:
        # On CPUs the cores that compute also move the data, so that nothing hides behind anything.
        words["overlap"] = 1.0 if kind == "cuda" else 0.0
    return Options(**words)  # type: ignore[arg-type]  # the overlap is a number by now


def pose(
    profile: Profile,
    cluster: Cluster,
    *,
    minibatch: int | Literal["auto"] | None = None,
    batch: int | None = None,
    staleness: str = "any",
    target: str | None = None,
    maximum_cuts: int = MAXIMUM_CUTS,
    **words: Unpack[Words],
) -> Posed:
    """The problem that the words describe.

    `minibatch` is another size than the profile's, or `auto`: the best of those measured. With `schedule="auto"` the
    best schedule for a global `batch`, in samples per update, among those whose weights are as old as `staleness`
    (`none`, `bounded`, `any`) allows. With a `target`, an export's name, only plans that it can express, of `batch`
    samples per update if that is given. Raises `InputError` where the words do not go together, `InfeasibleError` where
    nothing that could be chosen fits.
    """
    if words.get("schedule") == AUTO:
        if target is not None:
            raise InputError("--for has a schedule of its own: leave out --schedule auto")
        return _scheduled(profile, cluster, minibatch, batch, staleness, maximum_cuts, words)
    if batch is not None and target is None:
        raise InputError("--batch goes with --schedule auto or --for; for one schedule give --accumulate")
    scaled = profile if minibatch == AUTO else _scaled(profile, minibatch)
    if batch is not None:
        sizes = [size.minibatch for size in profile.all_sizes] if minibatch == AUTO else [scaled.minibatch]
        words["accumulate"] = _accumulated(words.get("accumulate"), batch, sizes)
    free = Problem(scaled, cluster, options_for(cluster.device.kind, **words))
    aim = None if target is None else Aim(target_of(target), free)
    problem = free if aim is None else aim.problem
    if minibatch != AUTO:
        return Posed(problem, aim=aim)
    problem, tried = choose_size(problem, maximum_cuts, batch)
    if aim is not None:
        options = replace(free.options, accumulate=problem.options.accumulate)
        aim = replace(aim, free=replace(free, profile=problem.profile, options=options))
    return Posed(problem, sizes=tuple(tried), aim=aim)


def _accumulated(accumulate: int | None, batch: int, sizes: list[int]) -> int:
    """Minibatches per update for a batch of so many samples: of the first size that it can be cut into."""
    if accumulate is not None:
        raise InputError("--accumulate follows from --batch: leave one of them out")
    fitting = [size for size in sizes if batch % size == 0]
    if batch < 1 or not fitting:
        raise InputError(
            f"a batch of {batch} samples cannot be cut into minibatches of {' or '.join(map(str, sizes))}: give "
            "--batch a multiple, or --minibatch another size"
        )
    return batch // fitting[0]


def _scheduled(
    profile: Profile,
    cluster: Cluster,
    minibatch: int | Literal["auto"] | None,
    batch: int | None,
    staleness: str,
    maximum_cuts: int,
    words: Words,
) -> Posed:
    """The problem under the best schedule."""
    if minibatch == AUTO:
        raise InputError("--schedule auto chooses the minibatch size itself, from --batch: leave out --minibatch auto")
    if batch is None:
        raise InputError("--schedule auto needs the global batch: give --batch, in samples per update")
    if words.get("accumulate") is not None:
        raise InputError("--accumulate follows from --batch with --schedule auto: leave it out")
    if words.get("inference"):
        raise InputError("--schedule is for training: leave it out with --inference")
    del words["schedule"]
    options = options_for(cluster.device.kind, **words)
    scaled = _scaled(profile, minibatch)
    problem, choices = choose(scaled, cluster, options, batch, staleness.lower(), maximum_cuts)
    return Posed(problem, schedules=tuple(choices))


def _scaled(profile: Profile, minibatch: int | None) -> Profile:
    return profile if minibatch in (None, profile.minibatch) else profile.rescaled(minibatch)
