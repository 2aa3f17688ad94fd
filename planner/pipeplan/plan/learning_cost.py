"""The measured cost of learning from old gradients: samples to a goal, relative to the samples of one process.

docs/evidence/learning.md has the figures, and says how they were measured. The figures come from small models, and may
not hold for others. A plan shows the nearest measured case by optimiser, correction and delay, or says that no case was
measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from statistics import fmean

from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import CORRECTIONS, DOUBLE_BUFFERED, VERTICAL

SOURCE = "docs/evidence/learning.md, by tests/benchmarks/delays.py"
ADAMW, MOMENTUM, NADAM, MUON = "AdamW", "SGD with momentum", "NAdam", "Muon"
FALLING, UNIFORM, REPLICATED = "falling to the last stage", "the same at every stage", "with replicated stages"
"""Spreads of the delays over the stages: in a pipeline without replicas under 1f1b-stashing, in 2bw and vertical sync,
and in pipelines with replicated stages."""


CORRECTED_DELAY = 2
"""Largest delay, in updates, at which the correction helps. With longer delays it costs memory and gains little."""


def is_helped(optimizer: str, state_ratio: float) -> bool:
    """Whether measurements show that the correction `ef` helps an optimiser, named as for `known_learning`.

    The correction harms SGD without momentum, and slows NAdam down. Other optimisers were not measured.
    """
    return _measured_name(optimizer, state_ratio) in (ADAMW, MOMENTUM, MUON)


def _measured_name(optimizer: str, state_ratio: float) -> str:
    """The name under which an optimiser was measured, or its own name. Adam counts as AdamW."""
    return {"Adam": ADAMW, "MuonWithAdamW": MUON, "SGD": MOMENTUM if state_ratio else "SGD without momentum"}.get(
        optimizer, optimizer
    )


@dataclass(frozen=True)
class Epochs:
    """Epochs until a goal is reached: mean and standard deviation over the seeds that reach the goal."""

    mean: float
    deviation: float


@dataclass(frozen=True)
class LearningCase:
    """One measured training setup, compared with one process at the same optimiser, learning rate and goal."""

    task: str
    optimizer: str
    spread: str
    delay: int
    """The age of the oldest gradients of any stage, in updates."""
    correction: str
    reached: int
    """Number of seeds that reach the goal."""
    seeds: int
    epochs: Epochs | None
    """Epochs to the goal; None if no seed reaches the goal, or if the epochs are not recorded."""
    alone: Epochs | None
    """Epochs to the goal with one process; None if they are not recorded."""

    @property
    def ratio(self) -> tuple[float, float] | None:
        """(samples to the goal relative to one process, standard deviation); None unless all seeds reach the goal."""
        if self.epochs is None or self.alone is None or self.reached < self.seeds:
            return None
        ratio = self.epochs.mean / self.alone.mean
        return ratio, ratio * sqrt(sum((one.deviation / one.mean) ** 2 for one in (self.epochs, self.alone)))


_Outcome = tuple[int, int, float, float]
"""(seeds that reach the goal, seeds, epochs, deviation); epochs are 0 if they are not recorded."""


def _cases(
    task: str, optimizer: str, alone: Epochs | None, *rows: tuple[str, int, _Outcome, _Outcome]
) -> Iterator[LearningCase]:
    """The cases of a task. A row is (spread, delay, outcome without a correction, outcome with error feedback)."""
    for spread, delay, *outcomes in rows:
        for correction, (reached, seeds, mean, deviation) in zip(CORRECTIONS, outcomes, strict=True):
            epochs = Epochs(mean, deviation) if mean else None
            yield LearningCase(task, optimizer, spread, delay, correction, reached, seeds, epochs, alone)


CASES: tuple[LearningCase, ...] = (
    *_cases(
        *("digits", ADAMW, Epochs(4.35, 1.29)),
        (UNIFORM, 1, (5, 5, 5.32, 2.24), (5, 5, 5.13, 2.02)),
        (UNIFORM, 2, (4, 5, 6.68, 0.86), (5, 5, 6.33, 0.42)),
        (UNIFORM, 4, (0, 5, 0, 0), (0, 5, 0, 0)),
        (UNIFORM, 8, (0, 5, 0, 0), (0, 5, 0, 0)),
        (FALLING, 2, (5, 5, 5.14, 1.81), (5, 5, 5.87, 2.44)),
        (REPLICATED, 2, (3, 5, 6.69, 1.16), (5, 5, 7.02, 0.92)),
    ),
    *_cases(
        *("text", ADAMW, Epochs(10.5, 1.5)),
        (UNIFORM, 1, (2, 4, 10.8, 1.0), (4, 4, 11.1, 1.4)),
        (UNIFORM, 2, (0, 2, 0, 0), (0, 2, 0, 0)),
        (UNIFORM, 8, (0, 2, 0, 0), (0, 2, 0, 0)),
        (FALLING, 2, (3, 4, 11.9, 1.3), (4, 4, 10.5, 0.6)),
    ),
    *_cases(
        *("ResNet", ADAMW, Epochs(2.00, 0.66)),
        (UNIFORM, 1, (5, 5, 2.65, 0.67), (5, 5, 1.95, 0.42)),
        (UNIFORM, 2, (5, 5, 2.88, 0.72), (5, 5, 2.07, 0.36)),
        (UNIFORM, 4, (5, 5, 3.99, 0.54), (5, 5, 2.99, 0.16)),
        (UNIFORM, 8, (5, 5, 6.28, 1.48), (5, 5, 5.79, 0.61)),
    ),
    *_cases(
        *("LSTM", ADAMW, Epochs(10.63, 1.69)),
        (UNIFORM, 1, (3, 5, 10.12, 0.38), (5, 5, 10.11, 1.33)),
        (UNIFORM, 2, (1, 5, 11.48, 0), (4, 5, 10.27, 1.16)),
        (UNIFORM, 4, (0, 5, 0, 0), (0, 5, 0, 0)),
        (UNIFORM, 8, (0, 5, 0, 0), (0, 5, 0, 0)),
    ),
    *_cases(
        *("digits", MOMENTUM, None),
        (UNIFORM, 1, (0, 5, 0, 0), (2, 5, 0, 0)),
        (UNIFORM, 2, (0, 5, 0, 0), (0, 4, 0, 0)),
        (UNIFORM, 8, (0, 5, 0, 0), (0, 5, 0, 0)),
        (FALLING, 2, (3, 5, 0, 0), (4, 5, 0, 0)),
        (REPLICATED, 2, (0, 5, 0, 0), (0, 5, 0, 0)),
    ),
    *_cases(
        *("ResNet", MOMENTUM, Epochs(4.50, 1.89)),
        (UNIFORM, 1, (5, 5, 4.07, 0.85), (4, 5, 4.73, 1.37)),
        (UNIFORM, 2, (3, 5, 6.51, 0.59), (5, 5, 5.54, 1.69)),
        (UNIFORM, 4, (0, 5, 0, 0), (1, 5, 7.60, 0)),
        (UNIFORM, 8, (0, 5, 0, 0), (0, 5, 0, 0)),
    ),
    *_cases(
        *("ResNet", NADAM, Epochs(1.74, 0.39)),
        (UNIFORM, 1, (5, 5, 2.18, 0.75), (5, 5, 2.07, 0.29)),
        (UNIFORM, 2, (5, 5, 2.16, 0.28), (5, 5, 2.42, 0.45)),
        (UNIFORM, 4, (5, 5, 2.92, 0.24), (5, 5, 3.50, 0.83)),
        (UNIFORM, 8, (5, 5, 4.13, 0.98), (5, 5, 5.15, 0.95)),
    ),
    *_cases(
        *("digits", MUON, Epochs(3.70, 1.45)),
        (UNIFORM, 1, (5, 5, 3.63, 0.90), (5, 5, 2.69, 0.78)),
        (UNIFORM, 2, (5, 5, 5.12, 1.47), (5, 5, 4.02, 1.59)),
        (UNIFORM, 4, (5, 5, 6.75, 0.91), (4, 5, 4.75, 1.38)),
        (UNIFORM, 8, (1, 5, 9.60, 0), (4, 5, 9.26, 0.44)),
        (FALLING, 2, (5, 5, 3.71, 0.64), (5, 5, 3.75, 0.93)),
        (REPLICATED, 2, (5, 5, 5.65, 1.23), (5, 5, 4.32, 1.08)),
    ),
)
"""All cases of docs/evidence/learning.md that record how many seeds reach the goal."""


@dataclass(frozen=True)
class KnownLearning:
    """The measured cost of learning for an asynchronous plan."""

    optimizer: str
    """The name under which the optimiser was measured, or its name in the profile."""
    correction: str
    delay: int
    """Age of the plan's oldest gradients, in updates."""
    spread: str
    measured: bool
    """Whether the optimiser was measured."""
    cases: tuple[LearningCase, ...]
    """The nearest case of each task: the smallest measured delay that is at least the plan's delay."""

    @property
    def cost(self) -> float | None:
        """Samples to the goal relative to one process, as a mean over tasks; None unless all seeds reach the goal."""
        ratios = [case.ratio for case in self.cases]
        known = [ratio[0] for ratio in ratios if ratio is not None]
        return fmean(known) if known and len(known) == len(ratios) else None

    def to_json(self) -> dict[str, object]:
        """The fields that plan.json holds under `learning`."""
        return {
            "optimizer": self.optimizer,
            "correction": self.correction,
            "delay": self.delay,
            "delays": self.spread,
            "samples_ratio": self.cost,
            "source": SOURCE,
            "cases": [
                {
                    "task": case.task,
                    "delay": case.delay,
                    "seeds": case.seeds,
                    "reached": case.reached,
                    "samples_ratio": None if case.ratio is None else case.ratio[0],
                    "deviation": None if case.ratio is None else case.ratio[1],
                }
                for case in self.cases
            ],
        }


def known_learning(plan: Plan, optimizer: str, state_ratio: float, correction: str) -> KnownLearning | None:
    """The measured cost of learning for a training plan; None if the plan uses no old gradients.

    `optimizer` is the optimiser's name and `state_ratio` its bytes of state per byte of parameters, as in the profile.
    Adam counts as AdamW, and SGD with state as SGD with momentum.
    """
    delays = [plan.versions(index) - 1 for index in range(len(plan.stages))]
    if plan.inference or not any(delays):
        return None
    name = _measured_name(optimizer, state_ratio)
    spread = _spread(plan, delays)
    like = [case for case in CASES if (case.optimizer, case.correction) == (name, correction)]
    fitting = [case for case in like if case.spread == spread and case.delay >= max(delays)]
    tasks = dict.fromkeys(case.task for case in fitting)
    nearest = (min((case for case in fitting if case.task == task), key=lambda case: case.delay) for task in tasks)
    measured = any(case.optimizer == name for case in CASES)
    return KnownLearning(name, correction, max(delays), spread, measured, tuple(nearest))


def _spread(plan: Plan, delays: list[int]) -> str:
    # Under 2BW all stages update after the same number of minibatches, for any number of replicas.
    if plan.schedule != DOUBLE_BUFFERED and any(stage.replicas > 1 for stage in plan.stages):
        return REPLICATED
    return UNIFORM if plan.schedule == VERTICAL or len(set(delays)) == 1 else FALLING
