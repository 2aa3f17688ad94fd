"""torch.export of an unmodified module, in training mode, and what to say when it cannot be done."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job import Job
from pipeplan_launch.loading import describe


@dataclass(frozen=True)
class Exported:
    """A flat graph of ATen operators whose `get_attr` nodes name the model's own parameters and buffers."""

    graph_module: fx.GraphModule
    dynamic_batch: bool
    """Whether the graph holds for any minibatch size, or only for the one it was traced at."""
    minibatch: int
    """Samples in the minibatch that it was traced at."""


def export(job: Job, minibatch: int) -> Exported:
    """Export the job's model at this minibatch size, with a dynamic one where the model allows it."""
    # A dimension of size 1 is always taken as a constant, and so would make the graph static.
    traced_at = max(2, minibatch)
    inputs = job.example_inputs(traced_at)
    dynamic = _batch_dimensions(inputs, job.example_inputs(traced_at + 1), traced_at)
    if any(dynamic):
        try:
            graph_module = _export(job, inputs, dynamic)
        except Exception:
            # What is really wrong shows again below, where nothing is dynamic.
            graph_module = None
        if graph_module is not None and _is_dynamic(graph_module, dynamic):
            return Exported(_cleaned(graph_module), True, traced_at)
    if traced_at != minibatch:
        inputs = job.example_inputs(minibatch)
    try:
        graph_module = _export(job, inputs, tuple({} for _ in inputs))
    except Exception as error:
        raise LaunchError(_why(job, inputs, error)) from error
    return Exported(_cleaned(graph_module), False, minibatch)


def _export(job: Job, inputs: tuple[Tensor, ...], dynamic: tuple[dict[int, object], ...]) -> fx.GraphModule:
    with training(job.model), warnings.catch_warnings():
        # Export warns of what an LSTM does to itself while it is traced, which has no effect afterwards.
        warnings.simplefilter("ignore")
        exported = torch.export.export(job.model, inputs, dynamic_shapes=dynamic, strict=False)
        module = exported.module(check_guards=False)
    assert isinstance(module, fx.GraphModule)
    return module


@contextmanager
def training(model: torch.nn.Module) -> Iterator[None]:
    """Training mode for a while; every submodule gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _batch_dimensions(
    some: tuple[Tensor, ...], more: tuple[Tensor, ...], minibatch: int
) -> tuple[dict[int, object], ...]:
    """For each input, the dimensions that follow the minibatch size, as `torch.export` wants them."""
    return tuple(
        {
            dimension: torch.export.Dim.AUTO
            for dimension, sizes in enumerate(zip(one.shape, other.shape, strict=False))
            if sizes == (minibatch, minibatch + 1)
        }
        for one, other in zip(some, more, strict=False)
    )


def _is_dynamic(graph_module: fx.GraphModule, dynamic: tuple[dict[int, object], ...]) -> bool:
    """Whether every dimension that was asked to be dynamic is: AUTO quietly gives in where the model fixes it."""
    values = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    return all(
        isinstance(value.shape[dimension], torch.SymInt) and value.shape[dimension].node.maybe_as_int() is None
        for value, dimensions in zip(values, dynamic, strict=True)
        for dimension in dimensions
    )


def _cleaned(graph_module: fx.GraphModule) -> fx.GraphModule:
    """Without the checks that export leaves behind and without dead code; mutations and random numbers stay."""
    for node in reversed(graph_module.graph.nodes):
        if node.op == "call_function" and not node.users and "_assert" in str(node.target):
            graph_module.graph.erase_node(node)
    graph_module.graph.eliminate_dead_code()
    return graph_module


def _why(job: Job, inputs: tuple[Tensor, ...], error: Exception) -> str:
    """One line: whether the model itself fails on its inputs, or only cannot be traced."""
    try:
        with training(job.model), torch.no_grad():
            job.model(*(one[:2] for one in inputs))
    except Exception as own:
        shapes = ", ".join("×".join(map(str, one.shape)) for one in inputs)
        return f"model {job.name!r} fails on its example inputs ({shapes}): {describe(own)}"
    text = describe(error, longest=300)
    if "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__:
        return (
            f"model {job.name!r} cannot be traced, because what it does depends on the data: {text}; "
            "write it with torch.where or torch.cond, or move it out of forward()"
        )
    return f"model {job.name!r} cannot be traced by torch.export: {text}; change that line, or move it out of forward()"
