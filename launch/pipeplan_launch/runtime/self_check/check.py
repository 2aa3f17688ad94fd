"""Compares plain training and the pipeline: two training steps, and evaluation before and after these steps.

Both sides start every step from the state of plain training, and both optimisers get the gradients of plain training.
So rounding does not grow from step to step. Otherwise Adam, whose first step divides a gradient by its own size, would
turn a rounding error into a whole step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Job
from pipeplan_launch.job.kept_values import Attributes, same_bits
from pipeplan_launch.job.pass_conditions import RandomState
from pipeplan_launch.runtime.self_check import differences
from pipeplan_launch.runtime.self_check.differences import (
    GRADIENT,
    OUTPUT,
    Difference,
    Tolerance,
    dense,
    is_read,
    largest_difference,
    last_bit_changed,
)
from pipeplan_launch.runtime.self_check.passes import CPU, EagerModel, PipelineModel, Sample, Trained, Updates
from pipeplan_launch.runtime.self_check.training_state import TrainedModules, TrainingState
from pipeplan_launch.tracing.trace import TracedModel

LONGEST_PASS_S = 60.0
"""A model whose passes take longer is not checked, because the check would take minutes."""


class DifferenceFound(LaunchError):
    """Training in the pipeline differs from training the model alone."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.text())
        self.difference = difference


class NotDeterministic(LaunchError):
    """The model alone gives different results in two equal training passes."""


class TooSlow(LaunchError):
    """The check would take too long."""


class Check:
    """The comparison of a job's plain training with one pipeline of its model."""

    def __init__(
        self, job: Job, traced: TracedModel, layers: Sequence[Sequence[str]], samples: Sequence[Sample], seed: int
    ) -> None:
        self._job, self._samples = job, samples
        self._modules = TrainedModules(traced, job.loss)
        self._eager = EagerModel(job, self._modules, seed)
        self._pipeline = PipelineModel(job, traced, layers, self._modules.trained, seed)
        types = {tensor.dtype for tensor in self._modules.tensors.values()} | {spec.dtype for spec in traced.tensors}
        self._tolerance = Tolerance(job.autocast is not None or bool(types & {torch.bfloat16, torch.float16}))
        self.remarks: dict[str, None] = {}

    def run(self, *, trains: bool) -> None:
        """Compare, and leave the job as it was. Raises `DifferenceFound` or `NotDeterministic`, and exceptions of the
        user's code.
        """
        random_state, start = RandomState.now(CPU), TrainingState(self._modules)
        try:
            trained = self._compare_training(start) if trains else None
            # Evaluation comes last, because the report of a difference in training says more.
            start.restore()
            self._compare_evaluation(start, "before training")
            if trained is not None:
                trained.restore()
                self._compare_evaluation(trained, f"after {len(self._samples)} minibatches")
        finally:
            self._pipeline.restore()
            start.restore()
            random_state.restore()

    def _compare_training(self, state: TrainingState) -> TrainingState:
        """Compare the steps of training. Returns the state after them."""
        updates = Updates(self._job, self._modules.trained)
        for step, sample in enumerate(self._samples):
            when = f"in minibatch {step}"
            begun = time.perf_counter()
            plain = self._eager.train(sample)
            if step == 0 and (took_s := time.perf_counter() - begun) > LONGEST_PASS_S:
                raise TooSlow(f"one pass over {sample.size} samples takes {took_s:.0f} s")
            changed, attributes = state.changed(), self._modules.attributes()
            state.restore()
            piped = self._pipeline.train(sample)
            kept = self._attribute_difference(state, attributes, when)
            if (found := self._difference(changed, state.changed(), state, sample, when)) is not None:
                self._refuse(found, state, sample)
            found = self._difference(_results_of(plain), _results_of(piped), state, sample, when)
            if found is None and step == len(self._samples) - 1:  # the first step may set up what later steps keep
                found = kept
            if found is not None:
                self._refuse(kept or found, state, sample)
            del piped
            self._update(updates, state, changed, plain, compare=step == 0)
            attributes.restore()
            state = TrainingState(self._modules)
        return state

    def _update(
        self, updates: Updates, state: TrainingState, changed: dict[str, Tensor], plain: Trained, *, compare: bool
    ) -> None:
        """Make the update of plain training. With `compare`, check that one optimiser per stage makes the same
        update.
        """
        state.restore()
        state.adopt(changed)
        by_stages = updates.step_by_stages(self._pipeline, plain.gradients) if compare else {}
        if by_stages:
            state.restore()
            state.adopt(changed)
        updates.step(plain.gradients)
        for name, value in by_stages.items():
            if not self._tolerance.close(value, self._modules.trained[name].detach(), before=state.tensors[name]):
                self.remarks[
                    f"{type(updates.whole).__name__} changes the parameter {name.partition('.')[2]!r} otherwise as the "
                    "optimiser of its stage than as that of the whole model: stages do not train as one process would"
                ] = None
                return

    def _difference(
        self, plain: Mapping[str, Tensor], piped: Mapping[str, Tensor], state: TrainingState, sample: Sample, when: str
    ) -> Difference | None:
        """The first result, by name, in which plain training and the pipeline differ.

        A parameter or buffer that one side lacks did not change on that side. A missing gradient is zero.
        """
        either = {**piped, **plain}
        for name in dict.fromkeys((*plain, *piped)):
            before = state.tensors.get(name)
            missing = torch.zeros_like(either[name]) if before is None else before
            pair = plain.get(name, missing), piped.get(name, missing)
            if not self._close(state, sample, name, pair, before):
                return differences.result_difference(name, self._modules, plain.get(name), piped.get(name), when)
        return None

    def _attribute_difference(self, state: TrainingState, plain: Attributes, when: str) -> Difference | None:
        """The first attribute that the model reads and that changes differently in the pipeline and in plain training.

        An attribute that was None until plain training filled it is a cache, and is ignored. An attribute that nothing
        reads makes only a remark.
        """
        piped, before = self._modules.attributes().values, state.attributes.values
        for name in dict.fromkeys((*plain.values, *piped)):
            if self._tolerance.same_value(piped.get(name), plain.values.get(name)):
                continue
            if name not in before or before[name].original is None:
                continue
            if is_read(name.name, self._files()):
                return differences.attribute_difference(name, self._modules, when)
            text = differences.attribute_text(name, self._modules)
            self.remarks[f"{text}, which nothing reads, stays as it is in training"] = None
        return None

    def _files(self) -> list[ModuleType]:
        """The files that define the classes of the model, except torch's files."""
        names = {kind.__module__ for module in self._modules.modules.values() for kind in type(module).__mro__}
        return [sys.modules[name] for name in sorted(names) if name.partition(".")[0] not in ("torch", "builtins")]

    def _compare_evaluation(self, state: TrainingState, when: str) -> None:
        """Compare outputs in evaluation mode, and the state after evaluation."""
        if not self._pipeline.evaluates:
            return
        sample, when = self._samples[0], f"in evaluation {when}"
        plain = self._eager.evaluate(sample)
        changed, attributes = state.changed(), self._modules.attributes().values
        state.restore()
        piped = self._pipeline.evaluate(sample)
        found = self._difference(changed, state.changed(), state, sample, when)
        present = self._modules.attributes().values
        for name, before in state.attributes.values.items():
            same = self._tolerance.same_value
            if found is None and same(attributes.get(name), before) and not same(present.get(name), before):
                found = differences.attribute_difference(name, self._modules, when, lost=False)
        self._pipeline.restore()
        state.restore()
        found = found or self._difference(_outputs(plain), _outputs(piped), state, sample, when)
        if found is not None:
            self._refuse(found, state, sample)

    def _close(
        self,
        state: TrainingState,
        sample: Sample,
        name: str,
        pair: tuple[Tensor, Tensor],
        before: Tensor | None = None,
    ) -> bool:
        """Whether a result of (plain training, the pipeline) is the same except for rounding.

        The effect of rounding on the model is measured only if the other rules do not decide.
        """
        plain, piped = pair
        if self._tolerance.close(piped, plain, name, before):
            return True
        if before is not None and same_bits(piped, before) != same_bits(plain, before):
            return False
        if not self._tolerance.noise:
            self._tolerance = replace(self._tolerance, noise=self._rounding(state, sample))
        return self._tolerance.close(piped, plain, name, before)

    def _rounding(self, state: TrainingState, sample: Sample) -> dict[str, float]:
        """Largest change of each result of the model when all parameters change in their last bit."""
        present = TrainingState(self._modules)
        try:
            exact = self._repeated_results(state, sample)
            shifted = {
                name: last_bit_changed(tensor, self._tolerance.low)
                for name, tensor in state.tensors.items()
                if name in self._modules.parameters
            }
            moved = self._results(state, sample, shifted)
        finally:
            present.restore()
        return {
            name: largest_difference(value, moved[name])
            for name, value in exact.items()
            if name in moved and name not in self._modules.parameters
        }

    def _results(
        self, state: TrainingState, sample: Sample, parameters: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        """All results of the model alone for a minibatch in this state, by name."""
        state.restore()
        state.adopt(parameters or {})
        trained = self._eager.train(sample)
        results = _results_of(trained)
        results |= {name: tensor.detach().clone() for name, tensor in self._modules.present().items()}
        state.restore()
        state.adopt(parameters or {})
        results |= _outputs(self._eager.evaluate(sample))
        state.restore()
        return results

    def _refuse(self, difference: Difference, state: TrainingState, sample: Sample) -> NoReturn:
        """Raise the error for a difference, or for a model that differs from itself."""
        self._repeated_results(state, sample)
        raise DifferenceFound(difference)

    def _repeated_results(self, state: TrainingState, sample: Sample) -> dict[str, Tensor]:
        """The results of the model alone for a minibatch. Raises `NotDeterministic` if two runs differ."""
        first, second = self._results(state, sample), self._results(state, sample)
        for name, value in first.items():
            if name not in second or not same_bits(value, second[name]):
                raise NotDeterministic(
                    f"self-check: the model alone gives two results ({name.replace('model.', '')}) for one minibatch "
                    "with the same weights and seeds, so that nothing can be compared with it: draw random numbers "
                    f"from torch's own generator, {differences.LEAVE_OUT}"
                )
        return first


def _results_of(trained: Trained) -> dict[str, Tensor]:
    """The loss, and the gradients from the last layer on: a fault makes the gradients of all earlier layers wrong."""
    gradients = reversed(trained.gradients.items())
    return {"loss": trained.loss, **{f"{GRADIENT}{name}": dense(gradient) for name, gradient in gradients}}


def _outputs(members: Sequence[Any]) -> dict[str, Tensor]:
    """The tensors among the members of a model's output, by name."""
    return {f"{OUTPUT}{number}": one for number, one in enumerate(members) if isinstance(one, Tensor)}
