"""A significance filter between servers, in the manner of Gaia (Hsieh et al., Gaia: Geo-Distributed Machine Learning
Approaching LAN Speeds, NSDI 2017).

The replicas of a stage on one server add up their gradients exactly. Between servers only significant entries travel:
those by which the optimiser would move the weight by more than a share v of it:

    η · |a| > v / √t · |w|        a: the server's part of the mean gradient, with what was held back before;
                                  η: the step, see `StepSizes`;
                                  t: updates of the stage so far, this one included; as Gaia's threshold decreases

The others are held back on their server and add up until they are. In Gaia a server applies its own updates at once
and tells the others of significant ones only, so the servers' weights differ. Here every replica applies what has
travelled and nothing else: weights stay equal everywhere, and it is the gradient that comes late (as in gradient
dropping, Aji and Heafield, EMNLP 2017). The last update of a segment travels whole, with all that was held back.

Entries travel as index and value, or all of them in a plain sum where that is fewer bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeplan_launch.buckets import Bucket, Round
from pipeplan_launch.config import LaunchPlan

_INDEX_BYTES = 4


def server_of(plan: LaunchPlan, rank: int) -> int:
    """The server that a worker is on: ranks are counted server by server."""
    server = 0
    while rank >= plan.workers_on(server):
        rank -= plan.workers_on(server)
        server += 1
    return server


def by_server(plan: LaunchPlan, stage: int) -> list[list[int]]:
    """The ranks of a stage's replicas, by server."""
    servers: dict[int, list[int]] = {}
    for rank in sorted(plan.pipeline[stage].workers):
        servers.setdefault(server_of(plan, rank), []).append(rank)
    return [servers[server] for server in sorted(servers)]


class Servers:
    """The replicas of a stage by server, as one of them sees it: on each server, the first speaks for the others."""

    def __init__(self, servers: Sequence[Sequence[int]], rank: int, everyone: dist.ProcessGroup) -> None:
        """`servers`: the ranks on each. `everyone`: the group of them all."""
        self._own = next(list(ranks) for ranks in servers if rank in ranks)
        self._rank, self.everyone = rank, everyone
        self.speaking = [ranks[0] for ranks in servers]
        """Who speaks for each server."""

    @property
    def speaker(self) -> int:
        """Who speaks for this server."""
        return self._own[0]

    @cached_property
    def _groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
        # Made at the first update: setting up may fail in one worker while the others would wait for it here. A replica
        # that is alone on its server makes a group of one, because torch names a group after the number of groups that
        # a process has made before, and names must match (pytorch/pytorch issue 173608).
        here = self._group(self._own)
        return here, self._group(self.speaking) if self._rank == self.speaker else None

    @property
    def here(self) -> dist.ProcessGroup | None:
        """The replicas on this server; None where this one is alone there. All replicas must ask at the same time."""
        return self._groups[0] if len(self._own) > 1 else None

    @property
    def speakers(self) -> dist.ProcessGroup | None:
        """Those who speak for a server; None in the others. All replicas must ask at the same time."""
        return self._groups[1]

    def _group(self, ranks: list[int]) -> Any:
        return dist.new_group(ranks, backend=dist.get_backend(self.everyone), use_local_synchronization=True)


class StepSizes:
    """How far an optimiser moves a weight for a gradient of 1, at its next update. Momentum counts as none.

    Plain descent: the learning rate. An optimiser that divides by the root of the gradient's mean square v̂, as Adam
    (Kingma and Ba, ICLR 2015), RMSprop and Adagrad do: rate / (√v̂ + ε) for every entry, from its state.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = {id(one): group for group in optimizer.param_groups for one in group["params"]}

    def __call__(self, parameter: nn.Parameter) -> Tensor | float | None:
        """None where an optimiser that adapts itself has not made an update yet."""
        group, state = self._groups[id(parameter)], self._optimizer.state.get(parameter, {})
        rate = float(group.get("lr", 1.0))
        kept = next((state[name] for name in ("exp_avg_sq", "square_avg", "sum") if name in state), None)
        if kept is None:
            return None if "betas" in group and not state else rate
        if "exp_avg_sq" in state and "betas" in group and "step" in state:
            kept = kept / (1.0 - group["betas"][1] ** float(state["step"]))
        root: Tensor = kept.sqrt().add_(group.get("eps", 1e-8))
        return rate / root


class SignificanceFilter:
    """Averages a bucket over the replicas of a stage, exactly on a server and by significance between servers."""

    scale = 1.0

    def __init__(self, servers: Servers, share: float, steps: Callable[[nn.Parameter], Tensor | float | None]) -> None:
        """`share`: v, of the weight. `steps`: η of a parameter at this update; None: all of it is significant."""
        self._servers, self._share, self._steps = servers, share, steps
        self._held: dict[int, Tensor] = {}
        """By bucket: what has not travelled, on the replica that speaks for its server."""

    def __call__(self, bucket: Bucket, of: Round) -> None:
        """Average a bucket."""
        servers, values = self._servers, bucket.values
        if servers.here is not None:
            dist.all_reduce(values, group=servers.here)
        if servers.speakers is not None:
            held = self._held.pop(bucket.index, None)
            if held is not None:
                values.add_(held)
            self._between_servers(bucket, of)
        if servers.here is not None:
            dist.broadcast(values, servers.speaker, group=servers.here)
        dist.all_reduce(bucket.flags, group=servers.everyone)

    def draws(self, bucket: Bucket, of: Round) -> bool:
        """Nothing is random."""
        return False

    def reset(self) -> None:
        """Forget what was held back."""
        self._held = {}

    def _between_servers(self, bucket: Bucket, of: Round) -> None:
        servers, values = self._servers, bucket.values
        assert servers.speakers is not None
        if of.whole:
            dist.all_reduce(values, group=servers.speakers)
            return
        chosen = self._significant(bucket, of).nonzero().squeeze(1)
        counts = self._counts(len(chosen), values.device)
        size = values.element_size()
        if sum(counts) * (_INDEX_BYTES + size) >= 2 * values.numel() * size or values.numel() > 2**31:
            dist.all_reduce(values, group=servers.speakers)  # both as sent by all servers together
            return
        self._held[bucket.index] = held = values.clone()
        held[chosen] = 0
        own = (chosen.to(torch.int32), values[chosen])
        values.zero_()
        for speaker, count in zip(servers.speaking, counts, strict=True):
            if count == 0:
                continue
            mine = speaker == dist.get_rank()
            indices = own[0] if mine else own[0].new_empty(count)
            entries = own[1] if mine else own[1].new_empty(count)
            dist.broadcast(indices, speaker, group=servers.speakers)
            dist.broadcast(entries, speaker, group=servers.speakers)
            values.index_add_(0, indices, entries)

    def _significant(self, bucket: Bucket, of: Round) -> Tensor:
        """Which entries of a bucket are."""
        threshold, masks = self._share / math.sqrt(of.number + 1), []
        for name, view in bucket.views.items():
            parameter = bucket.parameters[name]
            step = self._steps(parameter)
            if step is None:
                masks.append(torch.ones(view.numel(), dtype=torch.bool, device=view.device))
            else:
                masks.append(((view * step).abs() > threshold * parameter.data.abs()).flatten())
        return torch.cat(masks)

    def _counts(self, own: int, device: torch.device) -> list[int]:
        """How many entries each server has to send."""
        counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in self._servers.speaking]
        dist.all_gather(counts, torch.tensor([own], device=device), group=self._servers.speakers)
        return [int(count) for count in counts]
