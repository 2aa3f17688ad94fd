"""torch.export of an unmodified module, in training mode."""

from __future__ import annotations

import inspect
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pipeplan_launch import evalmode, opaque
from pipeplan_launch.aliasing import Behaviour, DependsOnData, observe, operator_name
from pipeplan_launch.hazards import watched
from pipeplan_launch.job import Batch, Job
from pipeplan_launch.learning import learn
from pipeplan_launch.loading import describe
from pipeplan_launch.outputs import plain_outputs
from pipeplan_launch.precision import autocast
from pipeplan_launch.returns import Calls
from pipeplan_launch.whole import forwards, recorders

DynamicShapes = tuple[dict[int, object], ...]
"""For each input the dimensions that are dynamic."""


@dataclass(frozen=True)
class Exported:
    """A flat graph of ATen operators whose `get_attr` nodes name the model's own parameters and buffers."""

    graph_module: fx.GraphModule
    """Its placeholders follow the order of the job's inputs."""
    behaviour: Behaviour
    """What a run of the graph on tensors without data showed."""
    dynamic_batch: bool
    """Whether the graph holds for any minibatch size, or only for the one it was traced at."""
    minibatch: int
    """Samples in the minibatch that it was traced at."""
    batch: Batch
    """The inputs that it was traced with."""
    evaluation_problem: str | None
    """Why the graph cannot stand for the model in evaluation mode, or None."""
    left_out: tuple[str, ...]
    """Classes of objects that the model returns and the graph does not."""


def export(job: Job, minibatch: int, whole: Sequence[str] = ()) -> Exported:
    """Export the job's model at this minibatch size, with a dynamic one where the model allows it.

    `whole` are the paths of submodules to take whole. Raises whatever torch.export does, `Refused`, or `DependsOnData`.
    """
    # A dimension of size 1 is always taken as a constant, and so would make the graph static.
    traced_at = max(2, minibatch)
    batch = job.example(traced_at)
    dynamic = _batch_dimensions(batch.inputs, job.example_inputs(traced_at + 1), traced_at)
    if any(dynamic):
        try:
            # Sizes that depend on the data are not likely to agree with a line through them four times.
            calls = _learn(job, whole, (traced_at, traced_at + 1, traced_at + 2, traced_at))
            made = _Attempt(job, batch, traced_at, dynamic, calls).run()
        except Exception as error:
            if depends_on_data(error):
                raise
            # What is really wrong shows again below, where nothing is dynamic.
            made = None
        if made is not None and _is_dynamic(made.graph_module, dynamic):
            return made
    if traced_at != minibatch:
        batch = job.example(minibatch)
    static: DynamicShapes = tuple({} for _ in batch.inputs)
    return _Attempt(job, batch, minibatch, static, _learn(job, whole, (minibatch, minibatch))).run()


def depends_on_data(error: BaseException) -> bool:
    """Whether an error says that what the model does depends on its data."""
    kind = type(error).__name__
    return "data-dependent" in str(error).lower() or "DataDependent" in kind or isinstance(error, DependsOnData)


def _learn(job: Job, whole: Sequence[str], minibatches: Sequence[int]) -> Calls:
    def run(minibatch: int) -> None:
        with mode(job.model, train=True), autocast(job.autocast, torch.device("cpu")):
            job.example(minibatch).call(job.model)

    return learn(job.model, whole, run, minibatches) if whole else {}


@dataclass(frozen=True)
class _Attempt:
    """To export a model, with some dimensions dynamic and some submodules taken whole."""

    job: Job
    batch: Batch
    samples: int
    dynamic: DynamicShapes
    calls: Calls

    def run(self) -> Exported:
        """Export, in training mode, and in evaluation mode where that might give another graph."""
        graph_module, left_out = self._export()
        with mode(self.job.model, train=True), autocast(self.job.autocast, torch.device("cpu")):
            behaviour = observe(graph_module, self.batch.inputs)
        problem = self._evaluation_problem(graph_module)
        return Exported(graph_module, behaviour, any(self.dynamic), self.samples, self.batch, problem, tuple(left_out))

    def _export(self, *, train: bool = True) -> tuple[fx.GraphModule, dict[str, None]]:
        job = self.job
        args: tuple[Tensor, ...] = self.batch.inputs
        kwargs: dict[str, Any] = {}
        dynamic: Any = self.dynamic
        if self.batch.names:
            args, kwargs = (), dict(zip(self.batch.names, self.batch.inputs, strict=True))
            dynamic = dict(zip(self.batch.names, self.dynamic, strict=True))
        with ExitStack() as stack:
            for one in (mode(job.model, train), autocast(job.autocast, torch.device("cpu")), _quiet(), watched()):
                stack.enter_context(one)
            stack.enter_context(forwards(job.model, recorders(job.model, self.calls)))
            left_out = stack.enter_context(plain_outputs(job.model))
            # Export warns of what an LSTM does to itself while it is traced, which has no effect afterwards.
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
            stack.callback(opaque.forget)
            exported = torch.export.export(job.model, args, kwargs, dynamic_shapes=dynamic, strict=False)
            module = exported.module(check_guards=False)
            assert isinstance(module, fx.GraphModule)
            opaque.put_in_place(module)
        if self.batch.names:
            _order(module.graph, list(exported.call_spec.in_spec.child(1).context), self.batch.names)
        return _cleaned(module), left_out

    def _evaluation_problem(self, trained: fx.GraphModule) -> str | None:
        """Why the graph cannot stand for the model in evaluation mode, or None.

        Operators carry their mode and are changed, but a branch of the user's own on `self.training` is not in the
        graph. Only where the user's code mentions it is the model exported in evaluation mode as well, and compared.
        """
        traced = [
            type(module)
            for path, module in self.job.model.named_modules()
            if not any(path == one or path.startswith(f"{one}.") for one in self.calls)
        ]
        suspects = sorted({kind.__name__ for kind in dict.fromkeys(traced) if _mentions_mode(kind)})
        if not suspects:
            return None
        problem = f"{', '.join(suspects)} does other work in evaluation mode than in training mode (self.training)"
        try:
            evaluated, _ = self._export(train=False)
        except Exception as error:
            return f"{problem}, and cannot be traced in evaluation mode: {describe(error)}"
        return None if _operators(trained) == _operators(evaluated) else problem


@contextmanager
def mode(model: nn.Module, train: bool) -> Iterator[None]:
    """Training or evaluation mode for a while; every submodule gets its own mode back."""
    modes = {module: module.training for module in model.modules()}
    model.train(train)
    try:
        yield
    finally:
        for module, was in modes.items():
            module.training = was


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch logs and prints about a failure, which is reported once, in our own words."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()) as printed:
            yield
        sys.stderr.write(printed.getvalue())
    finally:
        logging.disable(before)


def _batch_dimensions(some: tuple[Tensor, ...], more: tuple[Tensor, ...], minibatch: int) -> DynamicShapes:
    """For each input, the dimensions that follow the minibatch size, as `torch.export` wants them."""
    return tuple(
        {
            dimension: torch.export.Dim.AUTO
            for dimension, sizes in enumerate(zip(one.shape, other.shape, strict=False))
            if sizes == (minibatch, minibatch + 1)
        }
        for one, other in zip(some, more, strict=False)
    )


def _is_dynamic(graph_module: fx.GraphModule, dynamic: DynamicShapes) -> bool:
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
    graph_module.graph.eliminate_dead_code(opaque.is_impure)
    return graph_module


def _order(graph: fx.Graph, given: Sequence[str], wanted: Sequence[str]) -> None:
    """Put placeholders, which export may have put in the order of forward()'s parameters, into the wanted order."""
    by_name = dict(zip(given, graph.find_nodes(op="placeholder"), strict=True))
    start = next(iter(graph.nodes))
    for name in wanted:
        if by_name[name] is not start:
            start.prepend(by_name[name])
        else:
            start = start.next


def _mentions_mode(kind: type) -> bool:
    if kind.__module__.startswith("torch.nn."):
        return False
    try:
        return ".training" in inspect.getsource(kind)
    except (OSError, TypeError):
        return False


def _operators(graph_module: fx.GraphModule) -> list[str]:
    calls = [node for node in graph_module.graph.nodes if node.op == "call_function"]
    # Attention lays its result out in memory by whether there is dropout: what is then contiguous needs no copy.
    kept = [one for one in calls if not evalmode.is_training_only(one) and operator_name(one) != "contiguous"]
    return [operator(node) for node in kept]


def operator(node: fx.Node) -> str:
    """A name of what a node does that is the same in every process: an overload's own, where there is one."""
    # A plain function would print its address.
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else operator_name(node)
