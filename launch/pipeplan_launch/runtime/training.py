"""The common part of all training engines: losses, groups of minibatches, and updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipeplan_launch.comm.buckets import UpdateGroup
from pipeplan_launch.comm.gradient_allreduce import average_buffers
from pipeplan_launch.comm.ordered_transport import AnyTransport
from pipeplan_launch.comm.p2p import peer_loss_explained
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.hidden_state import check_loss
from pipeplan_launch.job.hooks import GradientHook, hooked_gradients, parameter_hooks
from pipeplan_launch.job.loss import checked_loss, constant_loss_message, loss_text, weight_of
from pipeplan_launch.job.nested_tensors import bytes_of_tensors
from pipeplan_launch.job.pass_conditions import autocast
from pipeplan_launch.plan.schedule import ActionKind, group_count, group_members, own_members
from pipeplan_launch.runtime.backward_passes import preserved_random_state
from pipeplan_launch.runtime.engine import ActionHandler, Engine, StageContext
from pipeplan_launch.runtime.optimizer_shards import DividedState
from pipeplan_launch.runtime.stage_optimizer import StageOptimizer
from pipeplan_launch.telemetry.recorder import Recorder, Stopwatch
from pipeplan_launch.telemetry.run_folder import ALL_REDUCE, UPDATE, WAIT

MOST_CHECKED_BYTES = 1 << 26
"""Largest model output in bytes for which a run checks the loss; more copies might not fit. `profile` always checks."""


class TrainingEngine(Engine):
    """Trains one stage: runs forward and backward passes, and updates the weights once per group of minibatches.

    A subclass supplies the passes, and the mean of a group's gradients.
    """

    begun_s = 0.0
    """Time at which the all-reduce of the latest group began, by `time.perf_counter`; 0 if unknown."""

    def __init__(
        self,
        place: StageContext,
        transport: AnyTransport,
        recorder: Recorder,
        passes: Mapping[ActionKind, ActionHandler],
        group: dist.ProcessGroup | None,
        optimiser: StageOptimizer,
        hooks: Mapping[str, Mapping[int, GradientHook]] | None = None,
    ) -> None:
        """`passes`: the handlers of all actions but U. `group`: the replicas of this stage, None if there is only one.
        `hooks`: the user's hooks on gradients, by parameter name; by default the parameters' own hooks.

        Raises `LaunchError` for a job without a loss.
        """
        super().__init__(place, place.plan.schedule, transport, recorder, {**passes, ActionKind.UPDATE: self._update})
        if place.is_last and place.job.loss is None:
            raise LaunchError(f"{place.plan.model_ref!r} has no loss to train with: return Job(model, loss=...)")
        self._optimiser = optimiser
        self.shards, self.updated = optimiser.shards, optimiser.updated
        self.correction = optimiser.correction
        self.divided: DividedState | None = optimiser.shards
        """The state that is divided among the replicas; None if every replica has all of it."""
        self.trained, self.optimizer = optimiser.trained, optimiser.optimizer
        self.rates = optimiser.rates
        self._versions = optimiser.versions
        self._hooks = parameter_hooks(self.trained) if hooks is None else hooks
        self._group = group
        self._group_size = self.schedule.group_size(self.shapes[place.stage])
        self._fresh = False
        """Whether no gradient of the present segment is old, although the plan's schedule has old gradients."""
        self._updates_before = 0
        """Updates made before the segment."""
        self._timeline_offset = 0
        """Offset from a number of updates to the timeline's group number."""
        self._checks_loss = place.is_last and place.replica == 0 and place.is_traced
        """Whether the next call of the loss also checks that the loss has no state that training would miss."""
        self._weights: dict[int, float] = {}
        """The weights of minibatches whose gradients are not collected yet, by the job's `loss_weight`."""

    def share(self, groups: Mapping[tuple[int, ...], dist.ProcessGroup]) -> None:
        """Sum the gradients of parameters that several stages share.

        `groups` has a process group for every set of stages that share parameters, also for sets without this stage.
        """

    def begin_timeline(self, epoch: int, first: int, count: int, met_s: float) -> None:
        """Start an epoch, and its timeline. Segments of the epoch may end with short groups."""
        self.timeline.begin(epoch, first, count, met_s)
        self._timeline_offset = group_count(self._group_size, first) - self._versions.number

    def agree_on_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Give all replicas the mean of these buffers, at the end of a segment."""
        if self._group is not None:
            with self._replica_loss_explained("buffers"):
                average_buffers(buffers, self._group)

    def _weigh(self, index: int, target: Any) -> float:
        """The weight of a minibatch's loss in means. With a weight of 0 the loss counts nowhere."""
        loss_weight = self.place.job.loss_weight
        if loss_weight is None:
            return 1.0
        with self.calling("the job's loss_weight", index):
            self._weights[index] = weight = weight_of(loss_weight, target)
        return weight

    def _loss(
        self, index: int, weights: Mapping[str, Tensor], output: Any, target: Any, received: Sequence[Tensor] = ()
    ) -> Tensor:
        """The job's loss, called with its own tensors from `weights`. `received`: the tensors from the stage before."""
        place = self.place
        assert place.job.loss is not None
        with self.calling(loss_text(place.job.loss), index), autocast(place.job.autocast, place.device):
            if self._checks_loss and bytes_of_tensors(output) <= MOST_CHECKED_BYTES:
                names = {id(one): name for name, one in place.program.parameters_by_name().items()}
                with preserved_random_state(place.device):
                    check_loss(place.job.loss, place.loss_state, output, target, names)
            self._checks_loss = False
            loss = checked_loss(place.job.loss, place.loss(weights, output, target))
        if not loss.requires_grad and (self.trained or any(one.requires_grad for one in received)):
            raise LaunchError(constant_loss_message(place.job.loss))
        return loss

    def _update(self, group: int) -> None:
        update_stages([self], group)

    def averaged_gradients(self) -> dict[str, Tensor]:
        """Wait for the mean of the present group's gradients; returns it by parameter name."""
        raise NotImplementedError

    def wait_for_gradients(self, group: int, lap: Stopwatch) -> dict[str, Tensor]:
        """Wait for a group's all-reduce. Returns the averaged gradients by parameter name, as the parameters' hooks
        return them.
        """
        with self._replica_loss_explained(f"gradients of group {group}"):
            averaged = self.averaged_gradients()
        synchronised = lap()
        self._note_allreduce(group, lap)
        own = self._own_members(group)
        if own:
            self.step_of(own[-1]).sync_s += synchronised
        with self.calling("a hook on a parameter", own[-1] if own else group * self._group_size):
            return hooked_gradients(averaged, self._hooks) if self._hooks else averaged

    def clip(self, averaged: Mapping[str, Tensor]) -> None:
        """Clip the gradients of an update in place, for all stages of this worker."""
        with peer_loss_explained(
            f"stage {self.place.stage} (rank {self.place.rank}) could not learn the gradients' norm"
        ):
            self._optimiser.clip(averaged)

    def make_step(self, averaged: Mapping[str, Tensor], group: int, lap: Stopwatch) -> None:
        """Update the weights, and finish the group's last minibatch."""
        own = self._own_members(group)
        with self.calling("the optimizer's step", own[-1] if own else group * self._group_size):
            self._optimiser.step(averaged, fresh=self._fresh)
        updated = lap()
        number, first = self._timeline_numbers(group)
        self.timeline.note(UPDATE, number, lap, first=first)
        if own:
            self.step_of(own[-1]).update_s += updated
            self.finish_step(own[-1])
        if self.rates is not None:
            self.rates.after_update(len(group_members(group, self._group_size, self.count)))

    def _note_allreduce(self, group: int, lap: Stopwatch) -> None:
        """Record that the stopwatch's last lap was a wait for a group's all-reduce, which has finished."""
        number, first = self._timeline_numbers(group)
        self.timeline.note(WAIT, number, lap, first=first, keep_brief=False)
        if self.begun_s:
            self.timeline.note(ALL_REDUCE, number, lap, first=first, since_s=self.begun_s)

    def _timeline_numbers(self, group: int) -> tuple[int, int]:
        """(number of a group in the timeline, number of its first minibatch in the epoch)."""
        return self._timeline_offset + self._updates_before + group, self.segment.number(group * self._group_size)

    def _update_group(self, group: int) -> UpdateGroup:
        """The group in the reducer's form. All replicas get the same value, even if some do not know yet that the
        segment ends early.
        """
        size, count, sizes = self._group_size, self.segment.count, self.segment.batches.sizes
        earlier = self.segment.epoch * group_count(size, sizes.count) + group_count(size, self.segment.first)
        total = sum(self._sample_share(index) for index in group_members(group, size, count))
        return UpdateGroup(total, earlier + group, ends_segment=group == group_count(size, count) - 1)

    def _share(self, index: int) -> float:
        """Weight of a minibatch in the mean of its group. Known after the minibatch's gradients have arrived."""
        share = self._sample_share(index)
        return share if self._group_size == 1 else self._weights.get(index, share)

    def _sample_share(self, index: int) -> float:
        """Samples of a minibatch as a share of a whole minibatch: 1, or less for a short last minibatch."""
        sizes = self.segment.batches.sizes
        return sizes.real_samples(self.segment.number(index)) / sizes.minibatch

    def _own_members(self, group: int) -> range:
        """This replica's minibatches of a group; empty if a short last group has none for it."""
        return own_members(
            group, self._group_size, self.place.replica, self.place.replicas, self.count, self.place.shares
        )

    def _finish_backward(self, index: int) -> None:
        if index != self._own_members(index // self._group_size)[-1]:
            self.finish_step(index)  # the update finishes the group's last minibatch

    def _replica_loss_explained(self, what: str) -> AbstractContextManager[None]:
        place = self.place
        stages = {place.stage}.union(*place.program.shared.values())
        workers = [worker for stage in sorted(stages) for worker in place.plan.pipeline[stage].workers]
        peers = [worker for worker in workers if worker != place.rank]
        return peer_loss_explained(
            f"stage {place.stage} (rank {place.rank}) could not average the {what} with ranks {peers}", *peers
        )


def update_stages(engines: Sequence[TrainingEngine], group: int) -> None:
    """Update the weights of all stages of a worker, given their engines."""
    lap = Stopwatch()
    averaged = [engine.wait_for_gradients(group, lap) for engine in engines]
    engines[-1].clip({name: gradient for one in averaged for name, gradient in one.items()})
    for engine, gradients in zip(engines, averaged, strict=True):
        engine.make_step(gradients, group, lap)
