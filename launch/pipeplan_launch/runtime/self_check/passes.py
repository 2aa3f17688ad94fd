"""Runs one training pass or evaluation in one process, by the user's own module or by the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.hooks import hooked_gradients, parameter_hooks
from pipeplan_launch.job.job import Batch, Job, StageInfo, call_model
from pipeplan_launch.job.kept_values import put
from pipeplan_launch.job.loss import checked_loss, loss_text
from pipeplan_launch.job.pass_conditions import autocast, module_mode
from pipeplan_launch.job.user_code import user_code_errors
from pipeplan_launch.runtime.self_check.random_numbers import SameRandomNumbers
from pipeplan_launch.runtime.self_check.training_state import MODEL, TrainedModules
from pipeplan_launch.runtime.weight_stash import WeightVersions
from pipeplan_launch.tracing.model_outputs import without_unknown_objects
from pipeplan_launch.tracing.opaque_modules import python_state_in_buffers
from pipeplan_launch.tracing.split import build_stage_program
from pipeplan_launch.tracing.trace import TracedModel

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sample:
    """A minibatch and its number, which seeds its random numbers."""

    number: int
    batch: Batch
    size: int

    def fresh(self) -> tuple[list[Tensor], Any]:
        """Copies of (the inputs, the target), because a pass may write into them."""
        target = tree_map_only(Tensor, lambda tensor: tensor.clone(), self.batch.target)
        return [tensor.clone() for tensor in self.batch.inputs], target


@dataclass(frozen=True)
class Trained:
    """The result of a training pass."""

    loss: Tensor
    gradients: dict[str, Tensor]
    """The gradients that exist, by the parameter's first name with the prefix `model.` or `loss.`."""


class EagerModel:
    """The user's own module, as a plain training loop runs it."""

    def __init__(self, job: Job, modules: TrainedModules, seed: int) -> None:
        self._job, self._modules, self._seed = job, modules, seed
        self._model = modules.roots[MODEL]

    def train(self, sample: Sample) -> Trained:
        """Forward and backward."""
        take_gradients(self._modules.trained)
        with self._running(sample, train=True):
            inputs, target = sample.fresh()
            with autocast(self._job.autocast, CPU):
                output = call_model(self._model, inputs, sample.batch.names)
                loss = loss_of(self._job, without_unknown_objects(output, {}), target)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        return Trained(loss.detach().clone(), take_gradients(self._modules.trained))

    def evaluate(self, sample: Sample) -> list[Any]:
        """The members of the model's output in evaluation mode."""
        with self._running(sample, train=False), torch.no_grad(), autocast(self._job.autocast, CPU):
            output = call_model(self._model, sample.fresh()[0], sample.batch.names)
            return copied_leaves(without_unknown_objects(output, {}))

    @contextmanager
    def _running(self, sample: Sample, *, train: bool) -> Iterator[None]:
        """Context for a pass in training or evaluation mode, with the random numbers of the sample."""
        random_numbers = SameRandomNumbers(self._seed, sample.number)
        with module_mode(self._model, train), python_state_in_buffers(self._model), random_numbers:
            yield


class PipelineModel:
    """The stages of a pipeline, run one after the other, with the leaves and calls that the engine uses."""

    def __init__(
        self,
        job: Job,
        traced: TracedModel,
        layers: Sequence[Sequence[str]],
        trained: Mapping[str, nn.Parameter],
        seed: int,
    ) -> None:
        """`trained`: the trained parameters, named as in `Trained`. Raises `LaunchError` if the layers do not form a
        pipeline of the traced model.
        """
        self._job, self._traced, self._trained, self._seed = job, traced, trained, seed
        self.programs = [build_stage_program(traced, layers, stage) for stage in range(len(layers))]
        self.evaluates = traced.evaluation_problem is None
        # Constants of the graph are not part of the model's state, so nothing else restores them.
        self._constants = [
            (tensor, tensor.detach().clone()) for one in self.programs for tensor in one.changing_state().values()
        ]

    def restore(self) -> None:
        """Restore the tensors that only the stages hold."""
        with torch.no_grad():
            for tensor, value in self._constants:
                put(tensor, value)

    def train(self, sample: Sample) -> Trained:
        """Forward and backward through all stages."""
        job, (inputs, target) = self._job, sample.fresh()
        versions = [WeightVersions(program.parameters_by_name()) for program in self.programs]
        leaves = [one.acquire(0) for one in versions]
        for program in self.programs:
            program.train()
        with SameRandomNumbers(self._seed, sample.number):
            output, received, sent = self._forward(leaves, inputs, sample.size)
            with autocast(job.autocast, CPU):
                loss = loss_of(job, output, target, partial(self._loss, leaves[-1]))
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
            _backward(received, sent)
        gradients: dict[str, Tensor] = {}
        of_loss = {} if self._traced.loss_state is None else self._traced.loss_state.parameters()
        for version in versions:
            for name, gradient in version.release(0).items():
                name = self._traced.state_names.get(name, name)
                name = name if name in of_loss else f"{MODEL}.{name}"
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        return Trained(loss.detach().clone(), hooked_gradients(gradients, parameter_hooks(self._trained)))

    def _loss(self, leaves: Mapping[str, Tensor], output: Any, target: Any) -> Any:
        """The job's loss, with the last stage's leaves in place of the loss's own parameters."""
        state = self._traced.loss_state
        assert self._job.loss is not None
        return self._job.loss(output, target) if state is None else state.call(leaves, output, target)

    def evaluate(self, sample: Sample) -> list[Any]:
        """The members of the last stage's output in evaluation mode."""
        inputs, _ = sample.fresh()
        try:
            for program in self.programs:
                program.eval()
            with torch.no_grad(), SameRandomNumbers(self._seed, sample.number):
                weights = [program.parameters_by_name() for program in self.programs]
                output, _, _ = self._forward(weights, inputs, sample.size)
                return copied_leaves(output)
        finally:
            for program in self.programs:
                program.train()

    def _forward(
        self, weights: Sequence[Mapping[str, Tensor]], inputs: Sequence[Tensor], size: int
    ) -> tuple[Any, list[list[Tensor]], list[Sequence[Tensor]]]:
        """(the model's output, what each stage received, what each stage sent)."""
        received: list[list[Tensor]] = []
        sent: list[Sequence[Tensor]] = [()]
        for program, leaves in zip(self.programs, weights, strict=True):
            arriving = zip(sent[-1], program.receives, strict=True)
            received.append([_received(tensor, spec.requires_grad) for tensor, spec in arriving])
            own = [inputs[index] for index in program.model_inputs]
            sent.append(program.call(leaves, received[-1], own, size))
        return sent[-1], received, sent[1:-1]


def _received(tensor: Tensor, requires_grad: bool) -> Tensor:
    """A copy of a tensor as the next stage receives it: contiguous, and a leaf."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copy.requires_grad_(requires_grad and torch.is_grad_enabled())


def _backward(received: Sequence[Sequence[Tensor]], sent: Sequence[Sequence[Tensor]]) -> None:
    """Run the backward passes of all stages before the last stage, whose backward pass has run."""
    for outputs, arrived in reversed(list(zip(sent, received[1:], strict=True))):
        pairs = [
            (output, torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            for output, leaf in zip(outputs, arrived, strict=True)
            if leaf.requires_grad and output.requires_grad
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def loss_of(job: Job, output: Any, target: Any, called: Callable[[Any, Any], Any] | None = None) -> Tensor:
    """The job's loss. If the job has no loss or no targets: the mean square of the model's output.

    `called` computes the job's loss; by default the job's own function does.
    """
    if job.loss is not None and (job.data is not None or target is not None):
        with user_code_errors(loss_text(job.loss)):
            return checked_loss(job.loss, (called or job.loss)(output, target))
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not leaves:
        raise LaunchError("no output of the model has a gradient: nothing in it can be trained")
    return torch.stack([leaf.abs().float().square().mean() for leaf in leaves]).sum()


def take_gradients(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Take the gradients of these parameters, and leave the parameters without gradients."""
    gradients = {name: parameter.grad for name, parameter in parameters.items() if parameter.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return gradients


def copied_leaves(output: Any) -> list[Any]:
    """The members of an output, with tensors copied."""
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(output)]


class Updates:
    """The optimiser of a whole model, and the optimisers of a pipeline's stages for the same parameters."""

    def __init__(self, job: Job, trained: Mapping[str, nn.Parameter]) -> None:
        """Raises `LaunchError` if the job's function fails."""
        self._job, self._trained = job, trained
        self.whole = self._built(trained, StageInfo(named_parameters=_named(trained))) if trained else None

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """One update of all parameters by the optimiser of the whole model."""
        if self.whole is not None:
            self._step(self.whole, self._trained, gradients)

    def step_by_stages(self, pipeline: PipelineModel, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters after the first update by one optimiser per stage; {} if learning rates depend on the
        stage.
        """
        if self._job.rate_depends_on_stage:
            return {}
        name_of = {id(parameter): name for name, parameter in self._trained.items()}
        after: dict[str, Tensor] = {}
        for stage, program in enumerate(pipeline.programs):
            found = [name_of[id(one)] for one in program.parameters_by_name().values() if id(one) in name_of]
            own = {name: self._trained[name] for name in found if name not in after}
            if own:
                info = StageInfo(stage, len(pipeline.programs), named_parameters=_named(own))
                self._step(self._built(own, info), own, gradients)
            after |= {name: parameter.detach().clone() for name, parameter in own.items()}
        return after

    def _built(self, parameters: Mapping[str, nn.Parameter], info: StageInfo) -> Optimizer:
        with user_code_errors("the job's optimizer"):
            return self._job.make_optimizer(list(parameters.values()), info)

    @staticmethod
    def _step(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], gradients: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            parameter.grad = gradients[name].clone() if name in gradients else None
        with user_code_errors("the optimizer's step"):
            optimizer.step()
        for parameter in parameters.values():
            parameter.grad = None


def _named(parameters: Mapping[str, nn.Parameter]) -> tuple[tuple[str, nn.Parameter], ...]:
    return tuple((name.partition(".")[2], parameter) for name, parameter in parameters.items())
