"""A job: a model as its author wrote it, with the data, loss and optimiser to train it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset, default_collate

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job import validation
from pipeplan_launch.job.callbacks import Callback
from pipeplan_launch.job.pass_conditions import check_autocast_type
from pipeplan_launch.job.user_code import user_code_errors
from pipeplan_launch.job.validation import unwrapped

PADDING_REMEDY = "pad the samples to one length, in the data's `collate`"


@dataclass(frozen=True)
class Data:
    """The samples of a job: map-style data sets whose samples are `(input, target)`.

    The input is a tensor, a tuple of tensors, or a dictionary of tensors that the model takes as keyword arguments. A
    sample that is itself such a dictionary is both input and target.
    """

    train: Dataset[Any]
    test: Dataset[Any] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    """collate(samples): makes a minibatch from a list of samples, as a pair `(input, target)` or as one dictionary
    that is both; by default torch's `default_collate`."""
    order: Callable[[int], Sequence[int]] | None = None
    """order(epoch): indices of the training samples to use in that epoch, the same number in every epoch; by default
    all of them, shuffled."""
    processes: int = 0
    """Number of prefetch processes for each worker that reads data. With 0 a worker reads its samples when it needs
    them."""

    def __post_init__(self) -> None:
        validation.check_data_set("train", self.train)
        validation.check_data_set("test", self.test)
        validation.check_data_functions(self)
        if not isinstance(self.processes, int) or self.processes < 0:
            raise LaunchError(f"the data's `processes` must be a whole number, not {self.processes!r}")


@dataclass(frozen=True)
class Batch:
    """One minibatch: the model's inputs, in order, and the target (None if the job has no data)."""

    inputs: tuple[Tensor, ...]
    target: Any
    names: tuple[str, ...] = ()
    """The keywords of the inputs, in the same order; empty if the model takes them by position."""

    def call(self, model: nn.Module) -> Any:
        """The model's output for this minibatch."""
        return call_model(model, self.inputs, self.names)


def call_model(model: nn.Module, inputs: Sequence[Tensor], names: Sequence[str] = ()) -> Any:
    """Run a model on inputs, as keyword arguments if they have names."""
    return model(**dict(zip(names, inputs, strict=True))) if names else model(*inputs)


@dataclass(frozen=True)
class StageInfo:
    """Facts about one stage that its optimiser and scheduler may depend on."""

    stage: int = 0
    stages: int = 1
    replicas: int = 1
    minibatch: int = 1
    """Samples in a minibatch."""
    minibatches_per_update: int = 1
    """Minibatches of the pipeline whose gradients are averaged for one update of this stage."""
    schedule: str = "1f1b-stashing"
    delay: int = 0
    """Largest number of updates by which the gradients of this stage are late; 0 if the pipeline drains before every
    update."""
    named_parameters: tuple[tuple[str, nn.Parameter], ...] = ()
    """The trainable parameters of the stage, by their names in the model."""

    @property
    def samples_per_update(self) -> int:
        """The effective batch size of the stage."""
        return self.minibatch * self.minibatches_per_update


@dataclass(frozen=True)
class Job:
    """A model and how to train it. Profiling and planning need only `model`, and one of `inputs` and `data`."""

    model: nn.Module
    """The unmodified model. A wrapper by torch.compile or DataParallel is removed."""
    inputs: Callable[[int], Tensor | tuple[Tensor, ...] | Mapping[str, Tensor]] | None = None
    """Makes example inputs for a minibatch of n samples, as a dictionary if the model takes keyword arguments; by
    default the first n samples of `data.train`."""
    loss: Callable[[Any, Any], Tensor] | None = None
    """loss(output, target): a scalar, the mean over the minibatch. It may be a module with parameters and buffers,
    which the last stage trains and saves."""
    data: Callable[[], Data] | None = None
    """Builds the data sets; see `datasets`."""
    optimizer: Callable[..., Optimizer] | None = None
    """Builds the optimiser for some of the model's parameters, as optimizer(parameters) or optimizer(parameters,
    stage) with a `StageInfo`; by default SGD with rate 0.01 and momentum 0.9."""
    scale_lr: Literal["linear", "sqrt"] | None = None
    """Multiplies each stage's learning rate by its minibatches per update, or by the square root of that number."""
    scheduler: Callable[..., LRScheduler] | None = None
    """Builds a torch scheduler for a stage's optimiser, as scheduler(optimizer) or scheduler(optimizer, stage)."""
    scheduler_interval: Literal["epoch", "minibatch"] = "epoch"
    """When the scheduler steps: after every epoch, or for every minibatch of the pipeline."""
    clip_norm: float | None = None
    """Largest norm of the gradients of an update. Larger gradients are scaled down: over all stages together if the
    schedule flushes, otherwise each stage by itself."""
    callbacks: Sequence[Callback] = ()
    """Callbacks that follow the run, called in one process only."""
    metric: Callable[[Any, Any], Tensor] | None = None
    """metric(output, target): number of right samples in the minibatch; by default judged by argmax of class scores."""
    autocast: torch.dtype | None = None
    """`torch.bfloat16` runs the model and the loss under torch's autocast; parameters keep their own type."""
    metrics: Mapping[str, Callable[[Any, Any], Tensor | float]] = field(default_factory=dict)
    """Further metrics by name: metric(output, target) is a mean over the minibatch, which is averaged over the test
    samples."""
    name: str = ""
    minibatch: int = 32
    """Samples in a minibatch, unless the command line overrides it."""
    tokens_per_sample: int = 0
    """Tokens in a sample, so that predictions are in tokens per second as well; 0 if samples have no tokens."""
    loss_weight: Callable[[Any], Tensor | float] | None = None
    """loss_weight(target): the weight of a minibatch's loss in the mean over minibatches, such as the number of valid
    targets if the loss is a mean over these; by default the number of samples."""

    def __post_init__(self) -> None:
        validation.check_model(self.model)
        object.__setattr__(self, "model", unwrapped(self.model))
        validation.check_job_functions(self)
        validation.check_callbacks(self.callbacks)
        check_autocast_type(self.autocast)
        self._check_training()
        validation.check_whole_number("minibatch", self.minibatch, 1)
        validation.check_whole_number("tokens_per_sample", self.tokens_per_sample, 0)
        if self.inputs is None and self.data is None:
            raise LaunchError(
                "a job needs example inputs or data, as in Job(model, inputs=lambda n: torch.randn(n, 3, 224, 224))"
            )

    def _check_training(self) -> None:
        if self.scale_lr not in (None, "linear", "sqrt"):
            raise LaunchError(f"a job's scale_lr must be 'linear', 'sqrt' or None, not {self.scale_lr!r}")
        if self.scheduler_interval not in ("epoch", "minibatch"):
            raise LaunchError(
                f"a job's scheduler_interval must be 'epoch' or 'minibatch', not {self.scheduler_interval!r}"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise LaunchError(f"a job's clip_norm must be above 0, not {self.clip_norm}")

    @cached_property
    def datasets(self) -> Data:
        """The job's data sets, built on first access."""
        if self.data is None:
            raise LaunchError(f"the job {self.name!r} has no data: give it a `data` that returns pipeplan_launch.Data")
        data = self.data()
        if not isinstance(data, Data):
            raise LaunchError(f"the job's `data` must return pipeplan_launch.Data, not {type(data).__name__}")
        return data

    @cached_property
    def input_names(self) -> tuple[str, ...]:
        """The keywords of the model's inputs, in wire order; empty if the model takes them by position."""
        with torch.random.fork_rng(devices=[]):
            return self.example(1).names

    def check_names(self, batch: Batch) -> None:
        """Raises `LaunchError` if a minibatch does not have the inputs that the model was traced with."""
        if batch.names and batch.names != self.input_names:
            raise LaunchError(
                f"a minibatch has the inputs {', '.join(batch.names)}, and the model was traced with "
                f"{', '.join(self.input_names) or 'inputs without names'}: all must have the same"
            )

    def example_inputs(self, minibatch: int) -> tuple[Tensor, ...]:
        """Example inputs of the model, for a minibatch of this many samples."""
        return self.example(minibatch).inputs

    def example(self, minibatch: int) -> Batch:
        """A minibatch of example inputs with this many samples; its target may be None."""
        if self.inputs is None:
            return self.example_batch(minibatch)
        with user_code_errors("the job's inputs"):
            value = self.inputs(minibatch)
        inputs, names = _as_inputs(value, "the job's `inputs`")
        return Batch(inputs, None, names)

    def example_batch(self, minibatch: int) -> Batch:
        """A minibatch of the first training samples, repeated if there are too few; only example inputs if there is no
        data.
        """
        if self.data is None:
            return self.example(minibatch)
        with user_code_errors("the job's data"):
            train: Any = self.datasets.train
            if len(train) == 0:
                raise LaunchError("the job's training data is empty")
            return collate_samples([train[index % len(train)] for index in range(minibatch)], self.datasets.collate)

    def make_optimizer(self, parameters: list[nn.Parameter], stage: StageInfo = StageInfo()) -> Optimizer:
        """The job's optimiser for the parameters of a stage, with its learning rates scaled as `scale_lr` says."""
        if self.optimizer is None:
            optimizer: Optimizer = SGD(parameters, lr=0.01, momentum=0.9)
        else:
            optimizer = _call(self.optimizer, parameters, stage)
        if not isinstance(optimizer, Optimizer):
            raise LaunchError(f"the job's `optimizer` must return a torch optimiser, not {type(optimizer).__name__}")
        validation.check_optimizer(optimizer)
        if self.scale_lr is not None:
            factor = stage.minibatches_per_update ** (1.0 if self.scale_lr == "linear" else 0.5)
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor
        return optimizer

    def make_scheduler(self, optimizer: Optimizer, stage: StageInfo) -> LRScheduler | None:
        """The job's scheduler for a stage's learning rate, or None."""
        if self.scheduler is None:
            return None
        scheduler = _call(self.scheduler, optimizer, stage)
        if not isinstance(scheduler, LRScheduler):
            raise LaunchError(
                "the job's `scheduler` must return a scheduler of torch.optim.lr_scheduler, not "
                f"{type(scheduler).__name__}"
            )
        return scheduler

    @property
    def rate_depends_on_stage(self) -> bool:
        """Whether another plan may give other learning rates."""
        return self.scale_lr is not None or (self.optimizer is not None and _takes_stage(self.optimizer))

    def correct(self, output: Any, target: Any) -> Tensor | None:
        """The number of samples of the minibatch that are right, or None if no metric applies."""
        if self.metric is not None:
            return self.metric(output, target)
        if not (isinstance(output, Tensor) and isinstance(target, Tensor)):
            return None
        if target.is_floating_point() or not target.ndim or output.ndim != target.ndim + 1:
            return None
        if output.shape[:1] + output.shape[2:] != target.shape:
            return None  # dimension 1 does not hold the classes, as in a language model
        if output.shape[1] == 1:
            return None  # one number for each sample: a regression, or the logit of one class
        return (output.argmax(dim=1) == target).reshape(len(target), -1).all(dim=1).sum()


def _takes_stage(build: Callable[..., Any]) -> bool:
    """Whether a function's second positional parameter is for the stage: it has no default, or is called `stage`.

    Other second parameters do not count, because torch's own optimisers take a learning rate there.
    """
    try:
        parameters = list(inspect.signature(build).parameters.values())
    except (TypeError, ValueError):
        return False
    positional = [
        parameter
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return len(positional) > 1 and (positional[1].default is inspect.Parameter.empty or positional[1].name == "stage")


def _call(build: Callable[..., Any], argument: Any, stage: StageInfo) -> Any:
    return build(argument, stage) if _takes_stage(build) else build(argument)


def collate_samples(samples: Sequence[Any], stack: Callable[[list[Any]], Any] | None = None) -> Batch:
    """Stack samples `(input, target)` into a minibatch, with `stack` if it is given.

    If stacking gives one dictionary instead, as the collators of Hugging Face do, it is both the input and the
    target.
    """
    stacked = stack(list(samples)) if stack is not None else _stack(list(samples))
    if isinstance(stacked, Mapping):
        stacked = (stacked, dict(stacked))
    if not isinstance(stacked, list | tuple) or len(stacked) != 2:
        what = "a sample of the job's data must be" if stack is None else "the data's `collate` must return"
        raise LaunchError(f"{what} a pair (input, target), or a dictionary of tensors")
    inputs, names = _as_inputs(stacked[0], "the input of a sample of the job's data")
    return Batch(inputs, stacked[1], names)


def _stack(samples: list[Any]) -> Any:
    """The samples stacked as torch does. Raises `LaunchError` with the remedy if their shapes differ."""
    try:
        return default_collate(samples)
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        leaves = [[leaf.shape for leaf in tree_leaves(sample) if isinstance(leaf, Tensor)] for sample in samples]
        other = next((shapes for shapes in leaves if shapes != leaves[0]), leaves[0])
        pairs = [(one, two) for one, two in zip(leaves[0], other, strict=False) if one != two]
        found = f", {tuple(pairs[0][0])} and {tuple(pairs[0][1])}" if pairs else ""
        raise LaunchError(f"the samples of a minibatch differ in shape{found}: {PADDING_REMEDY}") from error


def _as_inputs(value: Any, source: str) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """The input tensors and their names. A dictionary is sorted by name, because workers must agree on the order."""
    names: tuple[str, ...] = ()
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        names = tuple(sorted(value))
        inputs: Any = [value[name] for name in names]
    else:
        inputs = (value,) if isinstance(value, Tensor) else value
    if not isinstance(inputs, list | tuple) or not inputs or not all(isinstance(tensor, Tensor) for tensor in inputs):
        raise LaunchError(
            f"{source} must be a tensor, a tuple of tensors or a dictionary of tensors, not {_describe_type(value)}"
        )
    return tuple(inputs), names


def _describe_type(value: Any) -> str:
    if isinstance(value, Mapping):
        wrong = next(
            (f"{name!r} {type(entry).__name__}" for name, entry in value.items() if not isinstance(entry, Tensor)), ""
        )
        return f"a dictionary with {wrong}" if wrong else "an empty dictionary"
    return type(value).__name__


def repeat_samples(example: Tensor, minibatch: int) -> Tensor:
    """A minibatch made by repeating the samples of an example along dimension 0."""
    return example[torch.arange(minibatch) % len(example)]
