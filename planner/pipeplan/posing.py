"""From what a user says to one problem: constraints, and the choice of a schedule or of a minibatch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict, Unpack

from pipeplan.auto import Choice, choose
from pipeplan.cluster_data import Cluster
from pipeplan.errors import InputError
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


def options_for(cluster: Cluster, **words: Unpack[Words]) -> Options:
    """The options that the words describe, with the default that depends on the kind of device."""
    if words.get("overlap") is None:
        # On CPUs the cores that compute also move the data, so that nothing hides behind anything.
        words["overlap"] = 1.0 if cluster.device.kind == "cuda" else 0.0
    return Options(**words)  # type: ignore[arg-type]  # the overlap is a number by now


def pose(
    profile: Profile,
    cluster: Cluster,
    *,
    minibatch: int | Literal["auto"] | None = None,
    batch: int | None = None,
    staleness: str = "any",
    maximum_cuts: int = MAXIMUM_CUTS,
    **words: Unpack[Words],
) -> Posed:
    """The problem that the words describe.

    `minibatch` is another size than the profile's, or `auto`: the best of those measured. With `schedule="auto"` the
    best schedule for a global `batch`, in samples per update, among those whose weights are as old as `staleness`
    (`none`, `bounded`, `any`) allows. Raises `InputError` where the words do not go together, `InfeasibleError` where
    nothing that could be chosen fits.
    """
    if words.get("schedule") == AUTO:
        return _scheduled(profile, cluster, minibatch, batch, staleness, maximum_cuts, words)
    if batch is not None:
        raise InputError("--batch goes with --schedule auto; for one schedule give --accumulate")
    options = options_for(cluster, **words)
    if minibatch != AUTO:
        return Posed(Problem(_scaled(profile, minibatch), cluster, options))
    problem, sizes = choose_size(Problem(profile, cluster, options), maximum_cuts)
    return Posed(problem, sizes=tuple(sizes))


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
    options = options_for(cluster, **words)
    scaled = _scaled(profile, minibatch)
    problem, choices = choose(scaled, cluster, options, batch, staleness.lower(), maximum_cuts)
    return Posed(problem, schedules=tuple(choices))


def _scaled(profile: Profile, minibatch: int | None) -> Profile:
    return profile if minibatch in (None, profile.minibatch) else profile.rescaled(minibatch)
