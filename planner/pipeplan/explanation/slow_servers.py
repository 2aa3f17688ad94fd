"""Says why several servers train no faster than one: what limits data parallelism, and what would be faster.

All figures are predicted from the profile of a model and from measurements of the servers and their links. A cause is
judged by the throughput that data parallelism would have without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pipeplan.cluster_data.cluster import Cluster, Server
from pipeplan.cluster_data.variants import with_faster_devices, with_faster_links, with_halved_gradients
from pipeplan.cost.evaluate import evaluate
from pipeplan.cost.stage_times import plain_data_parallel
from pipeplan.errors import InfeasibleError, NotFoundInTimeError
from pipeplan.planning.candidate_search import DDP, FSDP, HSDP, PIPELINE, UNIFORM
from pipeplan.planning.candidates import candidate_of
from pipeplan.planning.choose import choose
from pipeplan.planning.figure import figured
from pipeplan.planning.question import Machines, Question, problem_of
from pipeplan.problem.options import Options
from pipeplan.profile_data.profile import Profile
from pipeplan.util.deadline import Deadline
from pipeplan.util.units import show_rate, show_throughput, show_time

SAME_SPEED, SAME_RATE = 0.05, 1.5
"""Speeds of servers count as unequal above this relative difference. Rates count as unequal above this factor."""
LEAST_GAIN = 0.05
"""Smallest relative gain in throughput for which something counts as a cause."""
MOST_OF = 0.5
"""A special cause, such as one slow direction, is named if it explains this share of the cost of the links."""
GOAL = 0.9
"""The share of perfect scaling that the links should allow."""
ACCUMULATED = 8
"""Microbatches of an update on every worker, in the prediction with accumulated gradients."""
LARGEST_FACTOR = 4096.0
LINK, DIRECTION, CARD, SWITCH, SLOW_SERVER, LOADER = "link", "direction", "card", "switch", "slow server", "loader"


@dataclass(frozen=True)
class ServerFacts:
    """Measurements of the servers of a cluster, in addition to its links."""

    names: tuple[str, ...]
    speeds: tuple[float, ...]
    """Speed of each server relative to the fastest server, which has 1."""
    one_way: tuple[tuple[int, int, float], ...] = ()
    """(sender, receiver, bytes/s) of directions between servers, each measured alone."""
    together: float = 1.0
    """Rate of a pair of servers while all pairs send at once, relative to its rate alone."""
    clock_s: float = 0.0
    """The largest difference between two clocks, in seconds."""


@dataclass(frozen=True)
class Cause:
    """Something that makes data parallelism on all servers slower."""

    kind: str
    text: str
    without_per_s: float
    """Samples per second without this cause."""


@dataclass(frozen=True)
class SlowServers:
    """Why several servers are slower than they should be. Throughputs are samples per second."""

    facts: ServerFacts
    cluster: Cluster
    batch: int
    """Samples of an update: one microbatch on every worker."""
    one_per_s: float | None
    """Throughput of data parallelism on the workers of one server; None if the model does not fit in memory."""
    all_per_s: float | None
    """Throughput of data parallelism on all workers; None if the model does not fit in memory."""
    needed_rate: float | None
    """Rate between servers in bytes/s at which scaling reaches `GOAL`; None if the goal is already or never reached."""
    causes: tuple[Cause, ...]
    """The causes, the largest first."""
    others: tuple[tuple[str, float | None], ...] = ()
    """Alternatives to DDP on all workers, as (name, samples per second); None if a plan does not fit in memory."""

    @property
    def scaling(self) -> float | None:
        """Throughput of all servers, divided by that of one server times their number; None if unknown."""
        if not self.one_per_s or not self.all_per_s:
            return None
        return self.all_per_s / self.one_per_s / len(self.facts.names)

    @property
    def bottleneck(self) -> Cause | None:
        """The largest cause."""
        return self.causes[0] if self.causes else None

    def to_json(self) -> dict[str, Any]:
        """All fields, as `doctor --hosts --json` prints them."""
        shown = {name: value for name, value in asdict(self).items() if name not in ("cluster", "others")}
        found = {"format": "pipeplan-servers", "version": 1, "scaling": self.scaling, "cluster": self.cluster.to_json()}
        return found | shown | {"others": dict(self.others)}


def with_speeds(cluster: Cluster, speeds: Sequence[float]) -> Cluster:
    """The cluster with the speed of each server's devices multiplied by its measured speed.

    A cluster file cannot describe islands inside servers together with servers that differ. In that case the slowest
    server stands for all.
    """
    if not _differ(speeds):
        return cluster
    if cluster.uniform and cluster.server_level > 1:
        return with_faster_devices(cluster, max(speeds, key=lambda speed: abs(speed - 1)))
    machines = cluster.machines or tuple(Server(cluster.device, cluster.levels[0]) for _ in speeds)
    firsts = itertools.accumulate((machine.inside.count for machine in machines), initial=0)
    changed = []
    for machine, first in zip(machines, firsts, strict=False):
        speed = speeds[cluster.server_of(first)]
        device = replace(machine.device, speed=machine.device.speed * speed)
        named = replace(device, name=f"{device.name} at {speed:.0%}") if speed < 1 - SAME_SPEED else device
        changed.append(replace(machine, device=named))
    return Cluster.of_servers(cluster.name, changed, cluster.levels[1:], cluster.executor)


def _differ(speeds: Sequence[float]) -> bool:
    return max(speeds) - min(speeds) >= SAME_SPEED * max(speeds)


def diagnose_servers(profile: Profile, cluster: Cluster, facts: ServerFacts, deadline: Deadline) -> SlowServers:
    """Predict data parallelism on measured servers, and name what limits it. `with_others` adds alternatives.

    `cluster` has the measured links, and the speeds of servers if these differ.
    """
    machines = Machines(profile, cluster)
    batch = profile.minibatch * cluster.workers
    one_per_s = _on_one_server(machines, batch, deadline)
    all_per_s = _data_parallel(machines, batch, deadline)
    needed = None
    if one_per_s and all_per_s:
        needed = _needed_rate(machines, batch, GOAL * one_per_s * len(facts.names), deadline)
    causes = _causes(machines, batch, facts, all_per_s, deadline) if all_per_s else ()
    return SlowServers(facts, cluster, batch, one_per_s, all_per_s, needed, causes)


def with_others(found: SlowServers, profile: Profile, deadline: Deadline) -> SlowServers:
    """The diagnosis with the throughput of the alternatives to DDP."""
    return replace(found, others=tuple(_others(Machines(profile, found.cluster), found.batch, deadline)))


def _data_parallel(machines: Machines, batch: int, deadline: Deadline) -> float | None:
    """Samples per second of DDP on all workers with the profile's microbatches; None if it does not fit."""
    problem = problem_of(machines, Options(stages=1), machines.profile.minibatch, batch)
    plan = plain_data_parallel(problem, machines.cluster.workers)
    score = evaluate(plan, problem)
    if not score.fits:
        return None
    return problem.profile.minibatch / figured(plan, score, problem, deadline).step_s


def _on_one_server(machines: Machines, batch: int, deadline: Deadline) -> float | None:
    """Samples per second of DDP on the workers of the server where it is fastest; None if it does not fit."""
    options = Options(stages=1, max_workers=max(machines.cluster.server_sizes))
    found, _ = candidate_of(DDP, problem_of(machines, options, machines.profile.minibatch, batch), 1000, deadline)
    return None if found is None else 1 / found.sample_s


def _with_links(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with links between servers that are `factor` times as fast."""
    for index in range(cluster.server_level, len(cluster.levels)):
        cluster = with_faster_links(cluster, index, factor)
    return cluster


def _needed_rate(machines: Machines, batch: int, goal: float, deadline: Deadline) -> float | None:
    """The smallest link rate at which DDP reaches a throughput; None if DDP already or never reaches it."""

    def reaches(factor: float) -> bool:
        faster = Machines(machines.profile, _with_links(machines.cluster, factor))
        return (_data_parallel(faster, batch, deadline) or 0.0) >= goal

    low, high = 1.0, LARGEST_FACTOR
    if reaches(low) or not reaches(high):
        return None
    while high / low > 1.05:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return machines.cluster.levels[machines.cluster.server_level].bandwidth * high


def _causes(
    machines: Machines, batch: int, facts: ServerFacts, all_per_s: float, deadline: Deadline
) -> tuple[Cause, ...]:
    """The causes, found by predicting DDP on all servers with one possible cause removed at a time."""

    def without(profile: Profile, cluster: Cluster) -> float:
        return _data_parallel(Machines(profile, cluster), batch, deadline) or all_per_s

    profile, cluster = machines.profile, machines.cluster
    found: list[Cause] = []
    if _differ(facts.speeds):
        slowest = min(range(len(facts.speeds)), key=facts.speeds.__getitem__)
        even = with_speeds(cluster, [1 / speed for speed in facts.speeds])
        text = f"{facts.names[slowest]} computes at {facts.speeds[slowest]:.0%} of the fastest server"
        found.append(Cause(SLOW_SERVER, text, without(profile, even)))
    if profile.read_s:
        text = f"reading a microbatch takes {show_time(profile.read_s)} on every worker"
        found.append(Cause(LOADER, text, without(replace(profile, read_s=0.0), cluster)))
    best_per_s = without(profile, _with_links(cluster, LARGEST_FACTOR))
    kind, text = LINK, f"the links between servers carry {show_rate(cluster.levels[cluster.server_level].bandwidth)}"
    for special, factor in _special(facts, cluster):
        mended_per_s = without(profile, _with_links(cluster, factor))
        # Removing the special cause saves this share of the links' cost in seconds per sample.
        if 1 / all_per_s - 1 / mended_per_s >= MOST_OF * (1 / all_per_s - 1 / best_per_s):
            kind, text = special
            break
    found.append(Cause(kind, text, best_per_s))
    found = [cause for cause in found if cause.without_per_s >= (1 + LEAST_GAIN) * all_per_s]
    return tuple(sorted(found, key=lambda cause: -cause.without_per_s))


def _special(facts: ServerFacts, cluster: Cluster) -> Iterator[tuple[tuple[str, str], float]]:
    """((kind, text) of a possible slow link, card or switch, speedup of the links without this cause)."""
    rates = {(sender, receiver): rate for sender, receiver, rate in facts.one_way}
    ratios = {pair: rates[pair[::-1]] / rate for pair, rate in rates.items() if pair[::-1] in rates and rate > 0}
    if ratios and max(ratios.values()) >= SAME_RATE:
        pair = max(ratios, key=lambda one: ratios[one])
        sender, receiver = (facts.names[server] for server in pair)
        back = show_rate(rates[pair[::-1]])
        text = f"{sender} sends to {receiver} at {show_rate(rates[pair])}, the other direction carries {back}"
        yield (DIRECTION, text), ratios[pair]
    cards = [machine.card for machine in cluster.machines]
    if cards and min(cards) > 0 and max(cards) >= SAME_RATE * min(cards):
        slowest = cards.index(min(cards))
        text = f"the card of {facts.names[slowest]} carries {show_rate(min(cards))}, others {show_rate(max(cards))}"
        yield (CARD, text), max(cards) / min(cards)
    if facts.together <= 1 / SAME_RATE:
        text = f"servers that send at once reach {facts.together:.0%} of the rate of two alone"
        yield (SWITCH, text), 1 / facts.together


def _others(machines: Machines, batch: int, deadline: Deadline) -> Iterator[tuple[str, float | None]]:
    """(name, samples per second) of alternatives to DDP; None if a plan does not fit in memory."""
    several = ACCUMULATED * batch
    accumulated = _data_parallel(machines, several, deadline)
    yield f"DDP, {ACCUMULATED} microbatches accumulated (batch {several})", accumulated
    halved = Machines(machines.profile, with_halved_gradients(machines.cluster))
    yield "DDP, gradients in bfloat16", _data_parallel(halved, batch, deadline)
    try:
        choice = choose(Question(machines, Options(), batch, machines.profile.minibatch), deadline)
    except (InfeasibleError, NotFoundInTimeError):
        return
    for kind in (FSDP, HSDP, UNIFORM, PIPELINE):
        rival = choice.rival(kind)
        if rival is not None and (kind in (FSDP, HSDP) or len(rival.plan.stages) > 1):
            name = kind if kind in (FSDP, HSDP) else f"{kind} {rival.plan.config}, {rival.plan.schedule}"
            yield name, 1 / rival.sample_s


def servers_lines(found: SlowServers) -> Iterator[str]:
    """The answer, in about ten lines."""
    facts, level = found.facts, found.cluster.levels[found.cluster.server_level]
    speeds = ", ".join(f"{name} {speed:.0%}" for name, speed in zip(facts.names, facts.speeds, strict=True))
    yield f"{len(facts.names)} servers, {found.cluster.workers} workers. Measured; throughputs are predictions."
    yield f"compute  {speeds}"
    names = facts.names
    ways = "; ".join(f"{names[one]} to {names[other]} {show_rate(rate)}" for one, other, rate in facts.one_way)
    yield f"links    both ways at once {show_rate(level.bandwidth)}; alone {ways}"
    yield f"clocks   differ by {show_time(facts.clock_s)}"
    scaling = "" if found.scaling is None else f", {found.scaling:.0%} of {len(facts.names)} times one server"
    yield f"DDP      one server {_shown(found.one_per_s)}, all servers {_shown(found.all_per_s)}{scaling}"
    if found.needed_rate is not None:
        yield f"         {GOAL:.0%} would need {show_rate(found.needed_rate)} between servers"
    for name, per_s in found.others:
        yield f"instead  {name}: {_shown(per_s)}"
    cause = found.bottleneck
    if found.all_per_s is None:
        yield "WHY      the model does not fit on a worker, so DDP cannot train it"
    elif cause is None:
        yield "WHY      nothing that was measured slows it down by 5% or more"
    else:
        yield f"WHY      {cause.kind}: {cause.text}; without that {_shown(cause.without_per_s)}"


def _shown(per_s: float | None) -> str:
    return "does not fit" if per_s is None else show_throughput(per_s)
