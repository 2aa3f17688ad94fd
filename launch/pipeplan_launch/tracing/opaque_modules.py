"""Opaque modules: submodules that torch.export cannot trace. Each is one layer, and runs as ordinary Python.

Messages say that such a module is "taken whole". The shapes of its outputs cannot be derived, so they are observed: the
unchanged model runs on minibatches of two sizes, and every size in the outputs must be constant or linear in the
minibatch size. The stages rely on these sizes. If a module later returns other sizes, the run ends with an error that
says so.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Job
from pipeplan_launch.job.kept_values import replaced_attribute
from pipeplan_launch.job.pass_conditions import autocast, module_mode
from pipeplan_launch.tracing.opaque_calls import OpaqueCall, ValueStructure, record_call
from pipeplan_launch.tracing.opaque_interface import (
    CallOutput,
    ObservedCall,
    OutputsByModule,
    buffer_places,
    infer_outputs,
    observed_forward,
)
from pipeplan_launch.tracing.python_state import restored_state


class OpaqueModuleCall(OpaqueCall):
    """The call of an opaque module. Its operands are the module's parameters, its buffers, and then its arguments."""

    def __init__(self, path: str, module: nn.Module, arguments: ValueStructure, returns: CallOutput) -> None:
        super().__init__("whole", type(module).__name__)
        self.path, self.returns, self._module, self._arguments = path, returns, module, arguments
        self._modes = [(submodule, submodule.training) for submodule in module.modules()]
        self._slots, self._parameters, self._state = _state_slots(module)
        places = buffer_places(module)
        self._replaced = {(id(places[index][0]), places[index][1]) for index in returns.replaced}

    def evaluated(self) -> OpaqueModuleCall:
        """A copy of this call in evaluation mode."""
        changed = copy.copy(self)
        changed._modes = [(submodule, False) for submodule, _ in self._modes]
        return changed

    def __call__(self, *operands: Any) -> list[Tensor]:
        state, arguments = operands[: self._state], operands[self._state :]
        if any(
            isinstance(operand, FakeTensor) or operand.is_meta for operand in operands if isinstance(operand, Tensor)
        ):
            return self._shapes_only(operands, arguments)
        args, kwargs = self._arguments.filled(arguments)
        for module, training in self._modes:
            module.training = training
        with self._replaced_state(state), python_state_in_buffers(self._module):
            return self._checked(own_call(self._module)(*args, **kwargs), operands, arguments)

    @contextmanager
    def _replaced_state(self, state: Sequence[Tensor]) -> Iterator[None]:
        """Context in which these tensors replace the module's state. New tensors that the module assigns to buffers are
        copied into the buffers.
        """
        own = [tensors[name] for tensors, name, _ in self._slots]
        for tensors, name, index in self._slots:
            # The backward pass may need the value of a buffer that is replaced.
            is_replaced = (id(tensors), name) in self._replaced
            tensors[name] = state[index].clone() if is_replaced else state[index]
        try:
            yield
        finally:
            after = [tensors[name] for tensors, name, _ in self._slots]
            for (tensors, name, _), tensor in zip(self._slots, own, strict=True):
                tensors[name] = tensor
        with torch.no_grad():
            for (_, _, index), tensor in zip(self._slots, after, strict=True):
                if tensor is not state[index] and index >= self._parameters:
                    state[index].copy_(tensor)

    def _checked(self, value: Any, operands: Sequence[Any], arguments: Sequence[Any]) -> list[Tensor]:
        """The tensors in the module's output. Raises `LaunchError` if their shapes are not the observed shapes."""
        _, tensors, _ = ValueStructure.of(value)
        samples = self.returns.minibatch(arguments)
        shapes = [tuple(size.at(samples) for size in result.shape) for result in self.returns.results]
        returned = [tuple(tensor.shape) for tensor in tensors]
        if returned != shapes:
            raise LaunchError(
                f"the module {self.path!r}, which is taken whole, returned {_shapes_text(returned)} where it returned "
                f"{_shapes_text(shapes)} when the model was traced: sizes may depend only on the number of samples"
            )
        operand_storages = {tensor.untyped_storage()._cdata for tensor in operands if isinstance(tensor, Tensor)}
        # The graph around the call was traced with fresh, contiguous tensors.
        return [
            tensor.clone() if tensor.untyped_storage()._cdata in operand_storages else tensor.contiguous()
            for tensor in tensors
        ]

    def _shapes_only(self, operands: Sequence[Any], arguments: Sequence[Any]) -> list[Tensor]:
        """Empty tensors with the shapes of the output, for a run on fake tensors."""
        tensors = [tensor for tensor in operands if isinstance(tensor, Tensor)]
        for index, tensor in enumerate(tensors):
            if self._parameters <= index < self._state or index - self._state in self.returns.written:
                torch.autograd.graph.increment_version(tensor)
        return list(_Shapes.apply(self.returns, self.returns.minibatch(arguments), *tensors))  # type: ignore[no-untyped-call]


def own_call(module: nn.Module) -> Callable[..., Any]:
    """The function that an opaque layer runs: forward(), because the module's hooks are in the graph around the layer.
    If all hooks are torch's own and only compute parameters, as for spectral_norm, the layer runs the hooks too.
    """
    return module._call_impl if _has_torch_hooks_only(module) else module.forward


def _has_torch_hooks_only(module: nn.Module) -> bool:
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    return bool(hooks) and all(type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks)


PYTHON_STATE = "_pipeplan_state"
"""The attribute of a module that lists the Python state (`forward_state.py`) that its buffers keep."""


@contextmanager
def python_state_in_buffers(module: nn.Module) -> Iterator[None]:
    """Context in which the Python state of a module and its submodules starts from the values in the buffers.
    Afterwards the buffers have the new values.
    """
    with ExitStack() as stack:
        for one in module.modules():
            for kept in vars(one).get(PYTHON_STATE, ()):
                stack.enter_context(kept.present())
        yield


def module_state(module: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """(parameters, buffers) of a module, each once, in the order in which its call takes them."""
    return list(module.parameters()), list(module.buffers())


StateReference = tuple[dict[str, Any], str, int]
"""A place where a module refers to a tensor of its state: (the module's dictionary, the name in it, the index of the
tensor)."""


def _state_slots(module: nn.Module) -> tuple[list[StateReference], int, int]:
    """(all references to the module's state, the number of parameters, the number of parameters and buffers)."""
    parameters, buffers = module_state(module)
    number = {id(tensor): index for index, tensor in enumerate((*parameters, *buffers))}
    slots: list[StateReference] = []
    for submodule in module.modules():
        for tensors in (submodule._parameters, submodule._buffers):
            slots += [(tensors, name, number[id(tensor)]) for name, tensor in tensors.items() if tensor is not None]
    return slots, len(parameters), len(parameters) + len(buffers)


class _Shapes(torch.autograd.Function):
    """Makes tensors without data. Their gradients depend on the operands, as the outputs of the call would."""

    @staticmethod
    def forward(ctx: Any, returns: CallOutput, samples: Any, *operands: Tensor) -> tuple[Tensor, ...]:
        device = operands[-1].device if operands else torch.device("cpu")
        outputs = tuple(
            torch.empty([size.at(samples) for size in result.shape], dtype=result.dtype, device=device)
            for result in returns.results
        )
        ctx.mark_non_differentiable(
            *(tensor for tensor, result in zip(outputs, returns.results, strict=True) if not result.requires_grad)
        )
        ctx.operands = [(operand.shape, operand.dtype, operand.device) for operand in operands]
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        gradient_tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.operands]
        return (None, None, *(tensor if tensor.is_floating_point() else None for tensor in gradient_tensors))


def shape_text(shape: Sequence[int]) -> str:
    """A shape as text, such as `2×3`."""
    return "×".join(map(str, shape)) or "a single number"


def _shapes_text(shapes: Sequence[Sequence[int]]) -> str:
    return ", ".join(map(shape_text, shapes)) or "no tensor"


def observe_calls(job: Job, paths: Sequence[str], minibatches: Sequence[int]) -> OutputsByModule:
    """Run the job's model at these minibatch sizes, and observe what these modules return. Raises `CannotBeOpaque` for
    a module that cannot be opaque.
    """
    if not paths:
        return {}
    seen: dict[str, list[list[ObservedCall]]] = {path: [] for path in paths}
    with restored_state(job.model), module_mode(job.model, train=True), autocast(job.autocast, torch.device("cpu")):
        for samples in minibatches:
            forwards = {}
            for path, module in ((path, job.model.get_submodule(path)) for path in paths):
                seen[path].append([])
                forwards[path] = observed_forward(path, module, own_call(module), samples, seen[path][-1])
            with replaced_forwards(job.model, forwards):
                job.example(samples).call(job.model)
    return {path: infer_outputs(path, runs) for path, runs in seen.items()}


def recording_forwards(model: nn.Module, calls: OutputsByModule) -> dict[str, Callable[..., Any]]:
    """For every opaque module: a forward() that records its call in the graph under export."""
    return {path: _as_one_call(path, model.get_submodule(path), returns) for path, returns in calls.items()}


def _as_one_call(path: str, module: nn.Module, returns: tuple[CallOutput, ...]) -> Callable[..., Any]:
    count = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        # Export may run the model more than once: each run makes the same calls.
        expected = returns[count % len(returns)]
        count += 1
        arguments, tensors, sizes = ValueStructure.of((args, kwargs))
        parameters, buffers = module_state(module)
        outputs = record_call(
            OpaqueModuleCall(path, module, arguments, expected), [*parameters, *buffers, *tensors], sizes
        )
        return expected.structure.filled(outputs)

    return forward


@contextmanager
def replaced_forwards(model: nn.Module, replacements: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Context in which some submodules have other forward() methods; see `own_call`."""
    with ExitStack() as stack:
        for path, forward in replacements.items():
            module = model.get_submodule(path)
            # Torch calls `_compiled_call_impl` in place of hooks and forward(), and `forward` between the hooks.
            name = "_compiled_call_impl" if _has_torch_hooks_only(module) else "forward"
            stack.enter_context(replaced_attribute(module, name, forward))
        yield
