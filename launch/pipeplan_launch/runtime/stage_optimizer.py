"""The stage optimiser: the job's optimiser on one stage, with weight versions, learning rates and gradient clipping."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pipeplan_launch.comm.p2p import peer_loss_explained
from pipeplan_launch.errors import LaunchError, print_status
from pipeplan_launch.job.hooks import refuse_accumulation_hooks
from pipeplan_launch.job.job import Job, StageInfo
from pipeplan_launch.job.nested_tensors import own_part
from pipeplan_launch.job.user_code import user_code_errors
from pipeplan_launch.plan.launch_plan import SHARDED
from pipeplan_launch.plan.run_options import AS_PLANNED, StalenessOptions, delays, update_delay
from pipeplan_launch.runtime.engine import StageContext
from pipeplan_launch.runtime.optimizer_shards import OptimizerShards
from pipeplan_launch.runtime.step_correction import is_harmed, make_correction
from pipeplan_launch.runtime.weight_stash import WeightVersions

_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class StageOptimizer:
    """Turns averaged gradients into the next version of a stage's weights."""

    def __init__(
        self,
        place: StageContext,
        flush: dist.ProcessGroup | None,
        staleness: StalenessOptions = AS_PLANNED,
        sharing: dist.ProcessGroup | None = None,
    ) -> None:
        """`flush`: all workers of all stages, if the schedule flushes. `sharing`: the stage's replicas, if they divide
        the optimiser among them. Raises `LaunchError`.
        """
        self._place = place
        parameters = place.program.parameters_by_name()
        self.trained: dict[str, nn.Parameter] = _trainable(parameters)
        self.optimizer: Optimizer | None = None
        """None if the stage trains nothing."""
        self.rates: LearningRates | None = None
        self.shards: OptimizerShards | None = None
        """None if the optimiser is not divided among replicas."""
        if self.trained:
            info = _stage_info(place, self.trained)
            with user_code_errors("the job's optimizer"):
                self.optimizer = place.job.make_optimizer(list(self.trained.values()), info)
            refuse_accumulation_hooks(self.trained)  # hooks of the loss, and hooks that the optimizer has registered
            if sharing is not None:
                self.shards = OptimizerShards(self.trained, self.optimizer, sharing)
            self.rates = LearningRates(place.job, self.optimizer, info)
        self.versions = WeightVersions(parameters)
        self._clipping = make_clipping(place, flush)
        self.correction = make_correction(
            staleness.correction_of(place.plan),
            self.updated,
            self.optimizer,
            update_delay(place.plan.schedule, place.plan.shapes, place.stage),
            asked=staleness.correction is not None,
            force=staleness.force,
        )
        """None if updates are not corrected."""

    @property
    def updated(self) -> Mapping[str, nn.Parameter]:
        """The tensors that the optimiser changes, by parameter name: this replica's parts if it is divided."""
        return self.trained if self.shards is None else self.shards.parameters

    def clip(self, averaged: Mapping[str, Tensor]) -> None:
        """Clip the gradients of an update in place, as the job asks."""
        if self._clipping is not None:
            # Among the stages that share a parameter, only the first counts its gradient.
            shared, stage = self._place.program.shared, self._place.stage
            counted = [one for name, one in averaged.items() if shared.get(name, (stage,))[0] == stage]
            self._clipping.clip([own_part(one) for one in averaged.values()], [own_part(one) for one in counted])

    def step(self, averaged: Mapping[str, Tensor], *, fresh: bool = False) -> None:
        """Make the next version of the weights from averaged gradients by name. `fresh`: whether none is stale."""
        # Stages that train nothing count updates too: minibatches ask for their weights by the number of updates.
        self.versions.update([self.trained[name] for name in averaged], lambda: self._step(averaged, fresh=fresh))

    def _step(self, averaged: Mapping[str, Tensor], *, fresh: bool) -> None:
        """Run the optimiser. Parameters whose old values are still needed have already moved to other memory."""
        shards = self.shards
        if self.optimizer is None:
            return
        if shards is None:
            for name, gradient in averaged.items():
                self.trained[name].grad = gradient
        else:
            shards.take(averaged)
        if self.correction is None or fresh:
            self.optimizer.step()
        else:
            self.correction.around(self.optimizer.step, list(averaged), self._values_before)
        if shards is None:
            for name in averaged:
                self.trained[name].grad = None
            return
        lost = f"stage {self._place.stage} (rank {self._place.rank}) could not gather the weights of its replicas"
        with peer_loss_explained(lost):
            shards.gather(averaged)

    def _values_before(self, name: str) -> Tensor | None:
        """The values, before the present step, of the tensor that the optimiser changes; None if they are not kept."""
        values = self.versions.values_before(self.trained[name])
        return values if values is None or self.shards is None else self.shards.own_part(name, values.detach())


def _stage_info(place: StageContext, trained: Mapping[str, nn.Parameter]) -> StageInfo:
    plan = place.plan
    return StageInfo(
        stage=place.stage,
        stages=len(plan.pipeline),
        replicas=place.replicas,
        minibatch=plan.minibatch,
        minibatches_per_update=plan.schedule.group_size(plan.shapes[place.stage]),
        schedule=plan.schedule.name,
        delay=delays(plan)[place.stage] if plan.mode == "training" else 0,
        named_parameters=tuple(trained.items()),
    )


def _trainable(parameters: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """The trainable parameters by name; a tied parameter only under its first name."""
    seen: set[int] = set()
    result: dict[str, nn.Parameter] = {}
    for name, parameter in parameters.items():
        if isinstance(parameter, nn.Parameter) and parameter.requires_grad and id(parameter) not in seen:
            seen.add(id(parameter))
            result[name] = parameter
    return result


class LearningRates:
    """Steps the job's scheduler, if it has one.

    Stages make different numbers of updates in an epoch, so a scheduler cannot step once per update. It steps per
    epoch, or per minibatch of the pipeline. After an update over k minibatches it steps k times, so all stages have the
    same rate for the same minibatch. The scheduler's state follows from the position in training, and for
    `ReduceLROnPlateau` also from the test losses. A checkpoint of any plan holds both, so it needs no scheduler state.
    """

    keys: frozenset[str]
    """Optimiser settings that follow from the job, the plan and the progress of training, and not from a checkpoint."""

    def __init__(self, job: Job, optimizer: Optimizer, stage: StageInfo) -> None:
        """`optimizer`: as the job built it. Raises `LaunchError` for a scheduler that cannot be stepped this way."""
        self._optimizer = optimizer
        self._by_minibatch = job.scheduler_interval == "minibatch"
        initial = [dict(group) for group in optimizer.param_groups]
        with user_code_errors("the job's scheduler"):
            self._scheduler = job.make_scheduler(optimizer, stage)
        if self.needs_test_loss and self._by_minibatch:
            raise LaunchError(
                "ReduceLROnPlateau follows the test loss, once an epoch: leave the job's scheduler_interval at 'epoch'"
            )
        changed = {
            key
            for group, settings in zip(optimizer.param_groups, initial, strict=True)
            for key in group
            if key not in settings or group[key] is not settings[key]
        }
        determined = self._scheduler is not None or job.rate_depends_on_stage
        self.keys = frozenset({"lr"} | changed if determined else ())

    @property
    def current(self) -> float:
        """The present rate of the first parameter group."""
        rate: float | Tensor = self._optimizer.param_groups[0]["lr"]
        return float(rate)

    @property
    def needs_test_loss(self) -> bool:
        """Whether the rate depends on the test loss."""
        return isinstance(self._scheduler, ReduceLROnPlateau)

    def after_update(self, minibatches: int) -> None:
        """Step for an update that averaged that many minibatches of the pipeline."""
        if self._scheduler is not None and self._by_minibatch:
            with user_code_errors("the job's scheduler"):
                for _ in range(minibatches):
                    self._scheduler.step()

    def after_epoch(self, test_loss: float | None) -> None:
        """Step for a finished epoch. `test_loss` is None if the epoch was not evaluated."""
        if self._scheduler is None or self._by_minibatch:
            return
        with user_code_errors("the job's scheduler"):
            if not isinstance(self._scheduler, ReduceLROnPlateau):
                self._scheduler.step()
            elif test_loss is not None and math.isfinite(test_loss):
                self._scheduler.step(test_loss)

    def catch_up(self, minibatches: int, test_losses: Sequence[float | None]) -> None:
        """Step from the start of training to a checkpoint: that many minibatches, and epochs with these test losses."""
        with warnings.catch_warnings():
            # Torch warns if a scheduler steps before its optimiser, which has stepped in an earlier process.
            warnings.simplefilter("ignore")
            self.after_update(minibatches)
            for loss in test_losses:
                self.after_epoch(loss)


class GradientClipping:
    """Scales the gradients of each update down to a largest norm, as `torch.nn.utils.clip_grad_norm_` does.

    If the schedule flushes, all stages update at the same point, and the norm covers the whole model. Otherwise each
    stage updates at its own time and uses its own norm, because waiting for the other stages would drain the pipeline.
    """

    def __init__(
        self, limit: float, group: dist.ProcessGroup | None, *, contributes: bool = True, warns: bool, where: str
    ) -> None:
        """`limit`: the largest norm. `group`: all workers of all stages, if the norm covers the whole model.
        `contributes`: whether this worker's gradients count in the norm; one replica of each stage counts. `warns`:
        whether this worker prints warnings. `where`: the place that a warning names, such as `of stage 1 `.
        """
        self._limit, self._group, self._contributes = limit, group, contributes
        self._warns, self._where = warns, where

    def clip(self, gradients: Collection[Tensor], counted: Collection[Tensor] | None = None) -> float:
        """Scale gradients in place. Returns the norm that the `counted` gradients, by default all, had before."""
        if any(gradient.layout is not torch.strided for gradient in gradients):
            raise LaunchError("sparse gradients cannot be clipped: build the layer with sparse=False")
        own = torch.nn.utils.get_total_norm(gradients if counted is None else counted)
        norm = float(own)
        if self._group is not None:
            squares = torch.tensor([norm * norm if self._contributes else 0.0], dtype=torch.float64)
            dist.all_reduce(squares, group=self._group)
            norm = math.sqrt(float(squares))
        if not math.isfinite(norm) and self._warns:
            print_status(f"warning: the norm of the gradients {self._where}became non-finite ({norm})")
            self._warns = False
        factor = self._limit / (norm + _EPSILON)
        if gradients and not factor >= 1.0:
            torch._foreach_mul_(list(gradients), factor)
        return norm


def make_clipping(place: StageContext, flush: dist.ProcessGroup | None) -> GradientClipping | None:
    """The clipping that a worker's job asks for, or None. `flush`: all workers, if the norm is summed over them. That
    is so if a schedule of several stages flushes, or if each worker holds parts of the gradients.
    """
    limit, schedule, stages = place.job.clip_norm, place.plan.schedule, len(place.plan.pipeline)
    if limit is None:
        return None
    is_first = place.replica == 0
    if place.plan.data_parallel in SHARDED and flush is not None:
        holders = place.plan.workers_by_server(0)[0] if place.plan.data_parallel == "hsdp" else place.plan.active
        return GradientClipping(limit, flush, contributes=place.rank in holders, warns=is_first, where="")
    if stages == 1 or not schedule.flushes:
        return GradientClipping(limit, None, warns=is_first, where="" if stages == 1 else f"of stage {place.stage} ")
    assert flush is not None
    return GradientClipping(
        limit, flush, contributes=is_first, warns=is_first and place.is_last, where="of all stages "
    )


def correction_note(place: StageContext, staleness: StalenessOptions, optimizer: Optimizer | None) -> str | None:
    """A note for the user if the run corrects updates and the plan does not, or the reverse; otherwise None."""
    if staleness.correction_of(place.plan) == place.plan.correction:
        if place.plan.correction == "ef" and is_harmed(optimizer) and not staleness.force:
            return "the plan's correction of old gradients is left out, as it harms SGD without momentum"
        return None
    if staleness.correction == "none":
        return "updates are not corrected for old gradients, although the plan says so"
    return (
        "updates are corrected for old gradients, which takes one copy of a stage's weights for each update of its "
        "delay; the plan's memory lacks that, unless it is solved with --correction ef"
    )


def clipping_note(place: StageContext) -> str | None:
    """A note for the user if clipping works stage by stage, otherwise None."""
    stages = len(place.plan.pipeline)
    if place.job.clip_norm is None or stages == 1 or place.plan.schedule.flushes:
        return None
    return (
        f"{place.plan.schedule.name} updates each stage at its own time, so clip_norm {place.job.clip_norm:g} "
        "limits the norm of each stage by itself"
    )
