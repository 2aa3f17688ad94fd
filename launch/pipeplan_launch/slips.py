"""What people give a job in place of what it takes, a thing in place of a function that makes it before all: each is
told what to write."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from pipeplan_launch.callbacks import Callback
from pipeplan_launch.errors import LaunchError

_TAKES = {
    "inputs": "a function of the number of samples: write inputs=lambda n: torch.randn(n, 3, 224, 224)",
    "loss": "a function: write loss=torch.nn.functional.cross_entropy, or your own loss(output, target)",
    "data": "a function that returns pipeplan_launch.Data: write data=lambda: Data(train=...)",
    "optimizer": "a function of parameters: write optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)",
    "scheduler": "a function of an optimiser: write scheduler=lambda optimizer: "
    "torch.optim.lr_scheduler.StepLR(optimizer, 10)",
    "metric": "a function: write metric=lambda output, target: (output.argmax(1) == target).sum()",
}


def check_model(model: Any) -> None:
    """Raises `LaunchError` unless it is a module."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        name = model.__name__
        raise LaunchError(f"a job's model must be a torch.nn.Module, not its class {name}: write model={name}(...)")
    if not isinstance(model, nn.Module):
        call = f": write model={model.__name__}()" if callable(model) and hasattr(model, "__name__") else ""
        raise LaunchError(f"a job's model must be a torch.nn.Module, not {type(model).__name__}{call}")


def check_functions(job: Any) -> None:
    """Raises `LaunchError` where something in a `Job` should be a function and is none."""
    for name, takes in _TAKES.items():
        given = getattr(job, name)
        if given is not None and not callable(given):
            raise LaunchError(f"a job's {name} must be {_told(name, given) or takes}; it is {_kind(given)}")
    if isinstance(job.loss, type) and issubclass(job.loss, nn.Module):
        name = job.loss.__name__
        raise LaunchError(f"a job's loss must be a function or a module, not its class {name}: write loss={name}()")
    if not hasattr(job.metrics, "items"):
        raise LaunchError("a job's metrics go by name: write metrics={'name': function}")
    for name, given in job.metrics.items():
        if not callable(given):
            raise LaunchError(f"a job's metrics must be functions (output, target); {name!r} is {_kind(given)}")


def check_minibatch(samples: Any) -> None:
    """Raises `LaunchError` unless it is a number of samples."""
    if not isinstance(samples, Integral) or samples < 1:
        raise LaunchError(f"a job's minibatch must be a whole number of at least 1, not {samples!r}")


def check_callbacks(callbacks: Any) -> None:
    """Raises `LaunchError` unless they are several, each of a class of its own."""
    if not isinstance(callbacks, Iterable):
        raise LaunchError(f"a job's callbacks must be a list: write callbacks=[...]; it is {_kind(callbacks)}")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise LaunchError(
                f"a job's callbacks must be objects of a class derived from pipeplan_launch.Callback, not "
                f"{type(callback).__name__}"
            )


def check_samples(name: str, samples: Any) -> None:
    """Raises `LaunchError` for a data set that is a loader, or the tensors of one."""
    if isinstance(samples, DataLoader):
        raise LaunchError(
            f"the data's `{name}` is a DataLoader: give its data set, {name}=loader.dataset; how many samples are a "
            "minibatch says Job(..., minibatch=N)"
        )
    if isinstance(samples, tuple | Tensor) and all(isinstance(one, Tensor) for one in samples):
        raise LaunchError(
            f"the data's `{name}` must be a data set of pairs: write {name}=torch.utils.data.TensorDataset(inputs, "
            f"targets); it is {_kind(samples)}"
        )


def check_collation(data: Any) -> None:
    """Raises `LaunchError` where something in a `Data` should be a function and is none."""
    for name, takes in (("collate", "a list of samples"), ("order", "the epoch")):
        given = getattr(data, name)
        if given is not None and not callable(given):
            raise LaunchError(f"the data's `{name}` must be a function of {takes}; it is {_kind(given)}")


def _told(name: str, given: Any) -> str:
    """What to write, where what was given says it."""
    if name == "data" and type(given).__name__ == "Data":
        return "a function that returns it, without parentheses: write data=spirals, not data=spirals()"
    if name == "optimizer" and isinstance(given, Optimizer):
        rate = given.defaults.get("lr")
        more = f", lr={rate:g}" if isinstance(rate, float) else ""
        made = f"torch.optim.{type(given).__name__}(parameters{more})"
        return f"a function of parameters, as every stage has its own: write optimizer=lambda parameters: {made}"
    if name == "inputs" and isinstance(given, Tensor) and given.is_floating_point() and given.ndim:
        shape = ", ".join(["n", *map(str, given.shape[1:])])
        return f"a function of the number of samples: write inputs=lambda n: torch.randn({shape})"
    return ""


def _kind(given: Any) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"of type {type(given).__name__}"
