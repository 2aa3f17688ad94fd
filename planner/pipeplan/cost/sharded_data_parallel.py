"""Data parallelism that divides the weights: FSDP over all workers, and HSDP inside each server.

A microbatch passes the units of the model (`profile_data.fsdp_units`) in order, and every pass gathers the weights of a
unit before it computes. Two resources work side by side, the workers and the network:

    forward    root + g(1) + Σ over units i of max( f(i), g(i+1) )
    backward   root + g(n) + Σ over units i, from n down to 1, of max( b(i), r(i+1) + g(i-1) ) + r(1) + r(root)
    update     under HSDP, the all-reduces across servers that remain when the last backward pass ends

Here f and b are the times of a unit's passes, g the all-gather of its weights and r the reduce-scatter of the gradients
of its trained weights. g and r each take half of a ring all-reduce. `root` is the all-gather of the weights outside of
units. While a unit computes, the network reduces the gradients of the previous unit and gathers the weights of the next
unit. Every microbatch gathers weights and reduces its gradients, so a worker accumulates only the gradients of its own
shard. With an overlap ω below 1, max(c, g) becomes max(c, g) + (1-ω) min(c, g). Under HSDP, gathers and reduce-scatters
stay inside a server. In the last microbatch of an update, all workers of a server also reduce their shards across
servers at the same time, over the server's only card.

Source: Zhao et al., PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel, VLDB 2023. The order of
prefetching is documented for torch.distributed.fsdp.fully_shard (FSDP2).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan.plan.plan import Plan
from pipeplan.problem.options import Sharding
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.fsdp_units import FsdpUnit, fsdp_units

EXCHANGING = "gathering weights and reducing gradients"
"""Name of the limiting resource if the network is busier than the workers."""
Rate = tuple[float, float]
"""Bandwidth in bytes/s and latency in seconds of a ring."""


@dataclass(frozen=True)
class ShardGroups:
    """The groups of workers that exchange weights and gradients."""

    shards: int
    """Number of workers that together hold the weights once."""
    replicas: int
    """Number of groups that hold the weights once each."""
    inside: Rate
    """Rate of the slowest ring inside one group."""
    across: Rate
    """Rate of the slowest ring among workers that hold the same shard."""

    @staticmethod
    def of(plan: Plan, problem: Problem, links: Links) -> ShardGroups:
        """The groups of a plan of one stage: all its workers, or under HSDP the workers of each server."""
        groups = shard_groups(plan, problem)
        rates = [links.allreduce_among(group) for group in groups]
        inside = min(rate for rate, _ in rates), max(latency for _, latency in rates)
        across = links.allreduce_among([group[0] for group in groups])
        return ShardGroups(len(groups[0]), len(groups), inside, across)

    def gather_s(self, size: float) -> float:
        """Seconds of an all-gather of weights with `size` bytes, or of a reduce-scatter of their gradients."""
        return float(formulas.ring_allreduce_time(self.shards, size, *self.inside)) / 2 if size else 0.0

    def across_s(self, size: float) -> float:
        """Seconds in which all workers of a group reduce their shards of `size` bytes with the other groups."""
        return float(formulas.ring_allreduce_time(self.replicas, size, *self.across)) if size else 0.0


def shard_groups(plan: Plan, problem: Problem) -> list[tuple[int, ...]]:
    """The workers of a plan of one stage, in groups that hold the weights once each."""
    workers = plan.stages[0].workers
    if problem.options.sharding == Sharding.FULL:
        return [workers]
    servers: dict[int, list[int]] = {}
    for worker in workers:
        servers.setdefault(problem.cluster.server_of(worker), []).append(worker)
    return [tuple(group) for group in servers.values()]


@dataclass(frozen=True)
class ShardedPasses:
    """The passes of one microbatch on the slowest worker, and the exchanges of one update, in seconds."""

    forward_s: float
    """Forward pass, including the waits for gathered weights."""
    backward_s: float
    """Backward pass, including the waits for gathered weights, reduce-scatters and recomputation."""
    exposed_s: float
    """Seconds that the all-reduces across servers add to the last backward pass of an update."""
    across_s: float
    """Seconds of all all-reduces across servers of one update."""
    bound: str
    """The resource that is busier during one microbatch, in words."""


@dataclass(frozen=True)
class _Times:
    """The times of one unit in seconds."""

    forward_s: float
    backward_s: float
    gather_s: float
    scatter_s: float
    across_s: float


def sharded_passes(plan: Plan, problem: Problem, links: Links) -> ShardedPasses:
    """The passes of a plan whose replicas divide the weights, by the recurrence of this module."""
    groups, units = ShardGroups.of(plan, problem, links), fsdp_units(problem.profile.layers)
    speed, again = problem.cluster.speed_of(plan.stages[0].workers), plan.stages[0].recompute
    times = []
    for unit in units:
        forward_s = sum(layer.forward_s for layer in unit.layers) / speed
        backward_s = sum(layer.backward_s for layer in unit.layers) / speed + again * unit.wrapped * forward_s
        times.append(_times(groups, forward_s, backward_s, unit.gathered_bytes, unit.reduced_bytes))
    root = _times(groups, 0.0, 0.0, *_root_bytes(problem, units))
    overlap = problem.options.overlap
    forward_s = root.gather_s + times[0].gather_s
    for one, following in zip(times, [*times[1:], None], strict=True):
        wait_s = 0.0 if following is None else following.gather_s
        forward_s += float(formulas.overlapped(one.forward_s, wait_s, overlap))
    backward_s, exposed_s = _backward_s(times[::-1], root, overlap)
    across_s = sum(one.across_s for one in [*times, root])
    computes = sum(one.forward_s + one.backward_s for one in times)
    exchanges = sum(2 * one.gather_s + one.scatter_s for one in [*times, root])
    bound = EXCHANGING if exchanges > computes else "compute of stage 1"
    return ShardedPasses(forward_s, backward_s, exposed_s, across_s, bound)


def _times(groups: ShardGroups, forward_s: float, backward_s: float, gathered: int, reduced: int) -> _Times:
    """The times of a unit with `gathered` bytes of weights and `reduced` bytes of gradients."""
    return _Times(forward_s, backward_s, groups.gather_s(gathered), groups.gather_s(reduced), groups.across_s(reduced))


def _root_bytes(problem: Problem, units: Sequence[FsdpUnit]) -> tuple[int, int]:
    """Bytes of the weights that belong to no unit, and of their gradients."""
    layers = problem.profile.layers
    gathered, reduced = sum(layer.weight_bytes for layer in layers), sum(layer.parameter_bytes for layer in layers)
    return gathered - sum(unit.gathered_bytes for unit in units), reduced - sum(unit.reduced_bytes for unit in units)


def _backward_s(behind: Sequence[_Times], root: _Times, overlap: float) -> tuple[float, float]:
    """Seconds of a backward pass, and further seconds that the all-reduces across servers add to it.

    `behind` are the units in the order of the backward pass.
    """
    end_s, across_end_s = root.gather_s + behind[0].gather_s, 0.0
    before = _Times(0.0, 0.0, 0.0, 0.0, 0.0)
    for unit, following in zip(behind, [*behind[1:], None], strict=True):
        across_end_s = max(across_end_s, end_s + before.scatter_s) + before.across_s
        network_s = before.scatter_s + (0.0 if following is None else following.gather_s)
        end_s += float(formulas.overlapped(unit.backward_s, network_s, overlap))
        before = unit
    for last in (before, root):
        end_s += last.scatter_s
        across_end_s = max(across_end_s, end_s) + last.across_s
    late_s, across_s = max(0.0, across_end_s - end_s), sum(unit.across_s for unit in [*behind, root])
    return end_s, late_s + (1 - overlap) * (across_s - late_s)


def sharded_memory(plan: Plan, problem: Problem) -> tuple[float, float]:
    """Peak memory of one worker without workspace, and the part of it for activations of its microbatch, in bytes.

    Workers divide the weights, and the gradients and optimiser state of trained weights. The rest of the memory is
    largest while some unit runs backward. It consists of three parts: the gathered weights of the root, this unit and
    the next unit; the whole gradients of this unit, of the unit whose gradients are reduced, and of the root's layers
    from this unit on; and the remaining activations.
    """
    profile, units = problem.profile, fsdp_units(problem.profile.layers)
    (root, root_reduced), shards = _root_bytes(problem, units), len(shard_groups(plan, problem)[0])
    unit_of = {layer.name: number for number, unit in enumerate(units) for layer in unit.layers}
    started = [sum(layer.parameter_bytes for layer in unit.layers) * (not unit.wrapped) for unit in units]
    for tie in profile.tied:  # charged to the first of its layers; the last layer computes the gradient first
        started[unit_of[tie.layers[-1]]] += tie.bytes
    activations = _activation_bytes(problem, units, unit_of, recompute=plan.stages[0].recompute)
    gathered = [0, *(unit.gathered_bytes for unit in units)]
    reduced = [*(unit.reduced_bytes for unit in units), 0]
    peak = 0.0
    for number, kept in enumerate(activations):
        weights, gradients = root + sum(gathered[number : number + 2]), sum(reduced[number : number + 2])
        peak = max(peak, weights + gradients + min(root_reduced, sum(started[number:])) + kept)
    frozen = sum(layer.frozen_bytes for layer in profile.layers)
    buffers = sum(layer.buffer_bytes for layer in profile.layers) - frozen
    divided = ((2 + problem.state_ratio) * problem.parameter_bytes + frozen) / shards
    return divided + peak + buffers, max(activations)


def _activation_bytes(
    problem: Problem, units: Sequence[FsdpUnit], unit_of: Mapping[str, int], *, recompute: bool
) -> list[float]:
    """Bytes of activations of one microbatch while each unit runs backward.

    With recomputation a unit keeps only the tensors that it reads from other units. While the unit runs backward, it
    holds all of its activations.
    """
    share = 1 + problem.cluster.executor.activation_share
    saved = [share * sum(layer.saved_bytes for layer in unit.layers) for unit in units]
    if not recompute:
        return list(itertools.accumulate(saved))
    crossing = sum(
        tensor.bytes
        for tensor in problem.profile.tensors
        if any(unit_of[name] != unit_of[tensor.producer] for name in tensor.consumers)
    )
    whole = itertools.accumulate(size * (not unit.wrapped) for size, unit in zip(saved, units, strict=True))
    return [crossing + kept + size * unit.wrapped for kept, size, unit in zip(whole, saved, units, strict=True)]
