"""Gaia's significance filter between servers (Hsieh et al., Gaia: Geo-Distributed Machine Learning Approaching LAN
Speeds, NSDI 2017).

The replicas of a stage on one server sum their gradients exactly. Between servers only significant entries are sent. An
entry is significant if it would change its weight by more than a share v of the weight:

    η · |a| > v / √t · |w|        a: the server's part of the mean gradient, including entries held back before;
                                  η: the step size, see `StepSizes`;
                                  w: the weight;
                                  t: number of this update of the stage, from 1; the threshold decreases as in Gaia

Other entries are held back on their server and accumulate until they are significant. In Gaia, a server applies its own
updates at once and sends only significant updates to the others, so the servers' weights differ. Here every replica
applies only the entries that were sent, so weights stay equal everywhere and gradients are late instead (as in gradient
dropping, Aji and Heafield, EMNLP 2017). The last update of a segment is sent completely, together with all entries that
were held back.

Entries are sent as index and value, or as a dense sum if that takes fewer bytes.
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

from pipeplan_launch.comm.buckets import Bucket, BucketExchange, UpdateGroup, as_real

_INDEX_BYTES = 4


class StepSizes:
    """The distance by which an optimiser moves a weight for a gradient of 1 at its next update, ignoring momentum.

    For plain gradient descent this is the learning rate. Adam (Kingma and Ba, ICLR 2015), RMSprop and Adagrad divide by
    the root of the gradient's mean square v̂, which is in the optimiser's state. For them the step size of an entry is
    rate / (√v̂ + ε).
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = {id(one): group for group in optimizer.param_groups for one in group["params"]}

    def __call__(self, parameter: nn.Parameter) -> Tensor | float | None:
        """The step size of each real number of a parameter; None before an adaptive optimiser's first update."""
        group, state = self._groups[id(parameter)], self._optimizer.state.get(parameter, {})
        rate = float(group.get("lr", 1.0))
        mean_square = next((state[name] for name in ("exp_avg_sq", "square_avg", "sum") if name in state), None)
        if mean_square is None:
            return None if "betas" in group and not state else rate
        if "exp_avg_sq" in state and "betas" in group and "step" in state:
            mean_square = mean_square / (1.0 - group["betas"][1] ** float(state["step"]))
        root: Tensor = as_real(mean_square).sqrt().add_(group.get("eps", 1e-8))
        return rate / root


class SignificanceFilter(BucketExchange):
    """Averages a bucket over the replicas of a stage: exactly within a server, and by significance between servers.

    The first replica of each server is its leader.
    """

    def __init__(
        self,
        servers: Sequence[Sequence[int]],
        everyone: dist.ProcessGroup,
        share: float,
        steps: Callable[[nn.Parameter], Tensor | float | None],
    ) -> None:
        """`servers`: the ranks on each server. `everyone`: the process group of all replicas. `share`: v, a share of
        the weight. `steps`: η of a parameter at this update, or None if all entries count as significant.
        """
        self._rank, self._everyone = dist.get_rank(), everyone
        self._own = next(list(ranks) for ranks in servers if self._rank in ranks)
        self._leaders = [ranks[0] for ranks in servers]
        self._share, self._steps = share, steps
        self._held: dict[int, Tensor] = {}
        """Entries that have not been sent, by bucket index; on the leader of a server only."""

    @cached_property
    def _groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
        """(this server's replicas, all servers' leaders or None if not a leader). All replicas make them together."""
        # Made at the first update, not at setup: if setup failed in one worker, the others would wait for it here. A
        # replica that is alone on its server also makes a group. torch names a group by counting the groups that a
        # process has made, and the names must match on all processes (pytorch/pytorch issue 173608).
        own_group = self._group(self._own)
        return own_group, self._group(self._leaders) if self._rank == self._own[0] else None

    def _group(self, ranks: list[int]) -> Any:
        return dist.new_group(ranks, backend=dist.get_backend(self._everyone), use_local_synchronization=True)

    def __call__(self, bucket: Bucket, update: UpdateGroup) -> None:
        """Average a bucket."""
        (server, leaders), values = self._groups, bucket.values
        if len(self._own) > 1:
            dist.all_reduce(values, group=server)
        if leaders is not None:
            held = self._held.pop(bucket.index, None)
            if held is not None:
                values.add_(held)
            self._between_servers(bucket, update, leaders)
        if len(self._own) > 1:
            dist.broadcast(values, self._own[0], group=server)
        dist.all_reduce(bucket.flags, group=self._everyone)

    def reset(self) -> None:
        """Drop the entries that were held back."""
        self._held = {}

    def _between_servers(self, bucket: Bucket, update: UpdateGroup, leaders: dist.ProcessGroup) -> None:
        values = bucket.values
        if update.ends_segment:
            dist.all_reduce(values, group=leaders)
            return
        chosen = self._significant(bucket, update).nonzero().squeeze(1)
        sent = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in self._leaders]
        dist.all_gather(sent, torch.tensor([len(chosen)], device=values.device), group=leaders)
        counts, size = [int(count) for count in sent], values.element_size()
        if sum(counts) * (_INDEX_BYTES + size) >= 2 * values.numel() * size or values.numel() > 2**31:
            dist.all_reduce(values, group=leaders)  # both sides above are the bytes that all servers send
            return
        self._held[bucket.index] = held = values.clone()
        held[chosen] = 0
        own = (chosen.to(torch.int32), values[chosen])
        values.zero_()
        for leader, count in zip(self._leaders, counts, strict=True):
            if count == 0:
                continue
            mine = leader == self._rank
            indices = own[0] if mine else own[0].new_empty(count)
            entries = own[1] if mine else own[1].new_empty(count)
            dist.broadcast(indices, leader, group=leaders)
            dist.broadcast(entries, leader, group=leaders)
            values.index_add_(0, indices, entries)

    def _significant(self, bucket: Bucket, update: UpdateGroup) -> Tensor:
        """Mask of the significant entries of a bucket."""
        threshold, masks = self._share / math.sqrt(update.number + 1), []
        for name, view in bucket.real_views.items():
            parameter = bucket.parameters[name]
            step = self._steps(parameter)
            if step is None:
                masks.append(torch.ones(view.numel(), dtype=torch.bool, device=view.device))
            else:
                masks.append(((view * step).abs() > threshold * as_real(parameter.data).abs()).flatten())
        return torch.cat(masks)
