"""Checks for common mistakes in a job. Each error says what to write instead.

The most common mistake is to pass an object where the job takes a function that makes one.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from numbers import Integral
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.optim import Optimizer, SparseAdam
from torch.utils.data import DataLoader, IterableDataset

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.callbacks import Callback

_EXPECTED = {
    "inputs": "a function of the number of samples: write inputs=lambda n: torch.randn(n, 3, 224, 224)",
    "loss": "a function: write loss=torch.nn.functional.cross_entropy, or your own loss(output, target)",
    "data": "a function that returns pipeplan_launch.Data: write data=lambda: Data(train=...)",
    "optimizer": "a function of parameters: write optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
    "scheduler": "a function of an optimiser: write scheduler=lambda optimizer: "
    "torch.optim.lr_scheduler.StepLR(optimizer, 10)",
    "loss_weight": "a function of the target: write loss_weight=lambda target: (target != -100).sum()",
    "metric": "a function: write metric=lambda output, target: (output.argmax(1) == target).sum()",
}


def check_model(model: Any) -> None:
    """Raises `LaunchError` unless the model is a `torch.nn.Module`."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        name = model.__name__
        raise LaunchError(f"a job's model must be a torch.nn.Module, not its class {name}: write model={name}(...)")
    if not isinstance(model, nn.Module):
        call = f": write model={model.__name__}()" if callable(model) and hasattr(model, "__name__") else ""
        raise LaunchError(f"a job's model must be a torch.nn.Module, not {type(model).__name__}{call}")


def check_job_functions(job: Any) -> None:
    """Raises `LaunchError` if a field of a `Job` that should be a function is not callable."""
    for name, expected in _EXPECTED.items():
        value = getattr(job, name)
        if value is not None and not callable(value):
            raise LaunchError(
                f"a job's {name} must be {_advice(name, value) or expected}; it is {_describe_type(value)}"
            )
    if isinstance(job.loss, type) and issubclass(job.loss, nn.Module):
        name = job.loss.__name__
        raise LaunchError(f"a job's loss must be a function or a module, not its class {name}: write loss={name}()")
    if not hasattr(job.metrics, "items"):
        raise LaunchError("a job's metrics must be a dictionary: write metrics={'name': function}")
    for name, value in job.metrics.items():
        if not callable(value):
            raise LaunchError(
                f"a job's metrics must be functions (output, target); {name!r} is {_describe_type(value)}"
            )


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises `LaunchError` for an optimiser that a stage cannot step."""
    name = type(optimizer).__name__
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise LaunchError(
            f"a job's optimizer cannot be {name}, whose step calls a closure that computes the loss again: a stage has "
            "no whole loss to compute; take one that steps from gradients, such as torch.optim.AdamW"
        )
    if isinstance(optimizer, SparseAdam):
        raise LaunchError(
            "a job's optimizer cannot be SparseAdam, because gradients between replicas are dense: build the layers "
            "with sparse=False, and take torch.optim.Adam"
        )


def check_whole_number(name: str, value: Any, least: int) -> None:
    """Raises `LaunchError` unless a field of a job is a whole number of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise LaunchError(f"a job's {name} must be a whole number of at least {least}, not {value!r}")


def check_callbacks(callbacks: Any) -> None:
    """Raises `LaunchError` unless the callbacks are an iterable of `Callback` objects."""
    if not isinstance(callbacks, Iterable):
        raise LaunchError(f"a job's callbacks must be a list: write callbacks=[...]; it is {_describe_type(callbacks)}")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise LaunchError(
                f"a job's callbacks must be objects of a class derived from pipeplan_launch.Callback, not "
                f"{type(callback).__name__}"
            )


def check_data_set(name: str, samples: Any) -> None:
    """Raises `LaunchError` if a data set is a `DataLoader` or bare tensors, has no length, or cannot be indexed."""
    if isinstance(samples, DataLoader):
        raise LaunchError(
            f"the data's `{name}` is a DataLoader: give its data set, {name}=loader.dataset; the number of samples in "
            "a minibatch is Job(..., minibatch=N)"
        )
    if isinstance(samples, IterableDataset) or (samples is not None and not hasattr(type(samples), "__getitem__")):
        raise LaunchError(
            f"the data's `{name}` can only be read from its start, as it is {_describe_type(samples)}, and stages read "
            f"samples by their numbers: write {name}=list(samples) if they fit in memory, or a data set with __len__ "
            "and __getitem__"
        )
    if samples is not None and not hasattr(type(samples), "__len__"):
        raise LaunchError(
            f"the data's `{name}` has no length, as it is {_describe_type(samples)}: give its class a __len__ that "
            "returns the number of samples"
        )
    if isinstance(samples, tuple | Tensor) and all(isinstance(tensor, Tensor) for tensor in samples):
        raise LaunchError(
            f"the data's `{name}` must be a data set of pairs: write {name}=torch.utils.data.TensorDataset(inputs, "
            f"targets); it is {_describe_type(samples)}"
        )


def check_data_functions(data: Any) -> None:
    """Raises `LaunchError` if `collate` or `order` of a `Data` is not callable."""
    for name, argument in (("collate", "a list of samples"), ("order", "the epoch")):
        value = getattr(data, name)
        if value is not None and not callable(value):
            raise LaunchError(f"the data's `{name}` must be a function of {argument}; it is {_describe_type(value)}")


def _advice(name: str, value: Any) -> str:
    """A hint on what to write instead of this value; empty if there is none."""
    if name == "data" and type(value).__name__ == "Data":
        return "a function that returns it, without parentheses: write data=spirals, not data=spirals()"
    if name == "optimizer" and isinstance(value, Optimizer):
        rate = value.defaults.get("lr")
        more = f", lr={rate:g}" if isinstance(rate, float) else ""
        call = f"torch.optim.{type(value).__name__}(parameters{more})"
        return f"a function of parameters, as every stage has its own: write optimizer=lambda parameters: {call}"
    if name == "inputs" and isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
        shape = ", ".join(["n", *map(str, value.shape[1:])])
        return f"a function of the number of samples: write inputs=lambda n: torch.randn({shape})"
    return ""


def _describe_type(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


# Models in one of torch's wrappers. If the wrapper changes nothing, the model inside is used; else it is refused.


OPTIMIZED = "OptimizedModule"
DATA_PARALLEL = "DataParallel"
INNER = {OPTIMIZED: "_orig_mod", DATA_PARALLEL: "module"}
"""Wrappers that are removed, with the attribute that holds the model inside."""
GIVE_INSIDE = "give the module inside it: pipeplan divides the work among the workers, and averages gradients, itself"
REFUSED = {
    "DistributedDataParallel": GIVE_INSIDE,
    "FullyShardedDataParallel": GIVE_INSIDE,
    "FSDPModule": "leave out fully_shard(): pipeplan divides the work among the workers itself",
    "ScriptModule": "TorchScript has no Python code to trace: give the module that it was made from",
}
"""Wrappers that a model must not contain anywhere, with the remedy."""
AVERAGED = "AveragedModel"


def unwrapped(model: nn.Module) -> nn.Module:
    """The model without torch.compile and DataParallel around it. Raises `LaunchError` for other wrappers."""
    while (kind := _wrapper(model)) in INNER:
        model = getattr(model, INNER[kind])
    if kind == AVERAGED:
        raise LaunchError("a job's model is an AveragedModel, which does not train: give the model that it averages")
    for path, module in model.named_modules():
        kind = _wrapper(module)
        if kind in REFUSED:
            what = f"holds a {kind} at {path!r}" if path else f"is a {kind}"
            raise LaunchError(f"a job's model {what}: {REFUSED[kind]}")
        if kind == DATA_PARALLEL:
            module.device_ids = []  # so that it only calls the module inside
        _hold_plain_tensors(module)
    return model


def _hold_plain_tensors(module: nn.Module) -> None:
    """Replace a module's frozen weights of tensor subclasses, such as quantised ones, by the plain tensors inside.

    A parametrization builds the subclass from the plain tensors in every pass. Plain tensors can be traced, moved to a
    device, saved and divided, and have the size of the stored data. Raises `LaunchError` if torch has no such
    parametrization.
    """
    for name, tensor in list(module.named_parameters(recurse=False)):
        if hasattr(type(tensor), "__tensor_flatten__") and not tensor.requires_grad:
            try:
                from torch._functorch._aot_autograd.subclass_parametrization import UnwrapTensorSubclass
            except ImportError as error:
                kind = type(tensor).__name__
                raise LaunchError(f"this torch cannot take the weight {name!r} apart, a {kind}: {error}") from error
            register_parametrization(module, name, UnwrapTensorSubclass())


def _wrapper(module: nn.Module) -> str:
    """The name of torch's wrapper class that a module is an instance of; empty for none.

    Classes are compared by name, because some exist only in builds of torch with torch.distributed.
    """
    known = {*INNER, *REFUSED, AVERAGED}
    names = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")]
    return next((name for name in names if name in known), "")
