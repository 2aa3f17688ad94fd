"""Options of a planning problem: choices of the cost model, and constraints on the plan."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import (
    ACCUMULATING,
    CORRECTED,
    CORRECTIONS,
    FLUSH,
    FLUSHING,
    INTERLEAVED,
    SCHEDULES,
    STASHING,
    update_share,
)
from pipeplan.util.text import did_you_mean
from pipeplan.util.typed import Amount, Positive, settle_numbers

BOUNDARIES = ("single", "parallel")
"""Models of the traffic between two stages (`Options.boundary`)."""


class Sharding(StrEnum):
    """Kinds of state that the replicas of a stage divide among them, the simplest first."""

    NONE = "none"
    OPTIMIZER = "zero1"
    """The optimiser's state (ZeRO stage 1)."""
    FULL = "fsdp"
    """The optimiser's state, gradients and weights; every pass gathers the weights unit by unit (FSDP)."""
    HYBRID = "hsdp"
    """FSDP inside each server; the servers are replicas of each other (HSDP)."""

    @property
    def divides_weights(self) -> bool:
        """Whether the weights are divided. A plan then has one stage."""
        return self in (Sharding.FULL, Sharding.HYBRID)


@dataclass(frozen=True)
class Options:
    """Choices of the cost model and constraints on the plan. Raises an `InputError` if options are inconsistent."""

    inference: bool = False
    """Whether the plan is for inference: no backward passes, no gradients, no weight versions."""
    overlap: Amount = 1.0
    """Share of gradient synchronisation that hides behind compute: with 1 all of it, with 0 none."""
    memory: bool = True
    """Whether the device's memory limits the plan."""
    stages: Positive | None = None
    """Exact number of stages."""
    max_replicas: Positive | None = None
    """Largest number of replicas of a stage in one copy of the pipeline; 1 asks for an unreplicated pipeline."""
    allow_copies: bool = True
    """Whether whole pipelines may be replicated across the components of the cluster."""
    schedule: str = STASHING
    """Schedule of training, one of `SCHEDULES`. Inference always has the schedule `forward-only`."""
    accumulate: Positive | None = None
    """Minibatches per update, for schedules that need this number: 2bw and the flush schedules. Under other schedules
    each replica of a stage computes one minibatch per update."""
    virtual_stages: Positive | None = None
    """Stages of each worker under interleaved-1f1b; None for the best number. Under zb-v each worker has two stages."""
    correction: str = "none"
    """The correction of old gradients, one of `CORRECTIONS`. With `ef` every stage keeps the last steps of its
    optimiser, one for each weight version except the newest."""
    recompute: bool = True
    """Whether a stage may drop its activations, and run forward again before backward, to save memory."""
    sharding: Sharding = Sharding.NONE
    """State that the replicas of a stage divide among them."""
    unequal_shares: bool = False
    """Whether the workers of plain data parallelism divide the microbatches of an update in proportion to their
    speed."""
    contention: bool = True
    """Whether contention counts. If so, the cost model adds up all traffic over a network card, and all work on shared
    cores, and charges plain data parallelism for the wait for its all-reduce. Otherwise each use of a resource is
    charged as if there were no other use."""
    boundary: str = "single"
    """Model of the traffic between two stages. `single` uses one link at a time. `parallel` uses as many links as the
    stage with fewer replicas has replicas."""
    max_stages: Positive | None = None
    """Largest number of stages."""
    max_workers: Positive | None = None
    """Largest number of busy workers."""
    pins: tuple[tuple[str, Positive], ...] = ()
    """Pairs (layer, stage): each layer must be in its stage, counted from 1."""
    together: tuple[tuple[str, ...], ...] = ()
    """Groups of layers that must share a stage, in addition to the groups of the profile."""
    no_cut_after: tuple[str, ...] = ()
    """Layers whose output no boundary may cross: they share a stage with all layers that read it."""
    grid: bool = False
    """Whether the plan must be a uniform grid (docs/choice.md): every stage has the same number r of replicas, stage s
    (from 0) is on workers s r … s r + r - 1, and the pipeline has no copies. The grid covers whole servers, or any
    number of workers inside one server. Under schedules with a common number of minibatches per update, r divides that
    number."""

    def __post_init__(self) -> None:
        settle_numbers(self)
        if not 0 <= self.overlap <= 1:
            raise InputError(f"the overlap must lie between 0 and 1, not {self.overlap:g}")
        for what, value in (
            ("number of stages", self.stages),
            ("maximum of replicas", self.max_replicas),
            ("maximum of stages", self.max_stages),
            ("maximum of workers", self.max_workers),
            ("number of minibatches per update", self.accumulate),
        ):
            if value is not None and value < 1:
                raise InputError(f"the {what} must be at least 1, not {value}")
        if self.stages is not None and self.max_stages is not None and self.stages > self.max_stages:
            raise InputError(f"{self.stages} stages asked for, and at most {self.max_stages}")
        if self.schedule not in SCHEDULES:
            raise InputError(f"there is no schedule {self.schedule!r}; {did_you_mean(self.schedule, SCHEDULES)}")
        if self.schedule in ACCUMULATING and self.accumulate is None and not self.inference:
            raise InputError(
                f"the schedule {self.schedule} needs a number of minibatches per update, which --batch sets"
            )
        if self.virtual_stages is not None and (self.schedule != INTERLEAVED or self.inference):
            raise InputError(
                f"virtual stages are those of a worker under {INTERLEAVED}, and the schedule is {self.schedule}"
            )
        if self.virtual_stages is not None and self.virtual_stages < 2:
            raise InputError(f"a worker has at least 2 virtual stages under {INTERLEAVED}, not {self.virtual_stages}")
        if self.correction not in CORRECTIONS:
            raise InputError(
                f"there is no correction {self.correction!r}; {did_you_mean(self.correction, CORRECTIONS)}"
            )
        if self.correction != "none" and (self.inference or self.schedule not in CORRECTED):
            used = "inference" if self.inference else self.schedule
            raise InputError(f"a plan corrects old gradients under {' and '.join(CORRECTED)} only, not for {used}")
        if self.sharding != Sharding.NONE and self.inference:
            raise InputError("inference has no optimiser whose state could be divided")
        if self.sharding.divides_weights and (self.stages != 1 or self.schedule != FLUSH):
            raise InputError(f"{self.sharding} is for plans of one stage under {FLUSH}")
        if self.unequal_shares and (self.stages != 1 or self.schedule != FLUSH or self.sharding != Sharding.NONE):
            raise InputError(f"unequal shares are for plain data parallelism under {FLUSH}")
        if self.boundary not in BOUNDARIES:
            raise InputError(f"there is no boundary model {self.boundary!r}; {did_you_mean(self.boundary, BOUNDARIES)}")

    def data_parallel(self, plan: Plan) -> str:
        """The executor's kind of data parallelism for a plan of one stage: `ddp`, `zero1`, `fsdp` or `hsdp`; else
        empty."""
        if plan.inference or len(plan.stages) > 1 or plan.schedule != FLUSH or plan.busy == 1:
            return ""
        return "ddp" if self.sharding == Sharding.NONE else str(self.sharding)

    @property
    def is_listed(self) -> bool:
        """Whether so few plans exist that they are listed instead of searched.

        Plans are listed if they have one stage whose workers divide the weights or take unequal shares of a batch."""
        return self.sharding.divides_weights or self.unequal_shares

    @property
    def flushes(self) -> bool:
        """Whether the pipeline drains before every update, so that training is synchronous."""
        return not self.inference and self.schedule in FLUSHING

    @property
    def shard_optimizer(self) -> bool:
        """Whether replicas divide only the optimiser's state, and each keeps whole weights."""
        return self.sharding == Sharding.OPTIMIZER

    @property
    def copies_per_version(self) -> int:
        """Copies of the weights for each weight version: 2 if old gradients are corrected, otherwise 1.

        A corrected stage keeps an optimiser step for each version except the newest. `Problem.state_ratio` subtracts
        the charge for the newest version.
        """
        return 1 if self.correction == "none" else 2

    @property
    def update_share(self) -> float:
        """Share of an optimiser step that is charged to each minibatch of a worker (`schedules.update_share`)."""
        return 0.0 if self.inference else update_share(self.accumulate if self.schedule in ACCUMULATING else None)
