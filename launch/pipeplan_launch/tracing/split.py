"""Cut a traced model into the stages of a pipeline, each an nn.Module that holds only its own parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from pipeplan_launch.errors import LaunchError, nearest
from pipeplan_launch.job.loss import LossState
from pipeplan_launch.job.pass_conditions import autocast
from pipeplan_launch.tracing.compiled import check_compiler, compiled_function
from pipeplan_launch.tracing.eval_mode import evaluation_refusal
from pipeplan_launch.tracing.layers import LOSS_LAYER
from pipeplan_launch.tracing.regions import attribute_at
from pipeplan_launch.tracing.subgraph import cut_subgraph
from pipeplan_launch.tracing.trace import TensorSpec, TracedModel, check_input_shape


def build_stage_program(
    traced: TracedModel,
    pipeline_layers: Sequence[Sequence[str]],
    stage: int,
    device: torch.device | str | None = None,
) -> StageProgram:
    """The program of one stage of a pipeline, given the names of the layers of every stage.

    The parameters are the model's own objects, moved to `device` if one is given. Raises `LaunchError` if the stages
    do not hold every layer once, if a tensor would run backwards, or if layers that must stay together are in
    different stages.
    """
    stage_of = _stages(traced, pipeline_layers)
    return StageProgram(traced, pipeline_layers, stage_of, stage, None if device is None else torch.device(device))


def _stages(traced: TracedModel, pipeline_layers: Sequence[Sequence[str]]) -> dict[str, int]:
    """The stage of every layer. Raises `LaunchError` if the stages are not a valid pipeline of the model."""
    known = [layer.name for layer in traced.layers]
    stage_of: dict[str, int] = {}
    for stage, names in enumerate(pipeline_layers):
        for name in names:
            if name not in known:
                raise LaunchError(
                    f"stage {stage} names a layer that the model does not have, {name!r}: {nearest(name, known)}"
                )
            if name in stage_of:
                raise LaunchError(f"layer {name!r} is in stage {stage_of[name]} and again in stage {stage}")
            stage_of[name] = stage
    missing = [name for name in known if name not in stage_of]
    if missing:
        raise LaunchError(f"no stage holds layer {missing[0]!r} ({len(missing)} missing in all)")
    if stage_of[LOSS_LAYER] != len(pipeline_layers) - 1:
        raise LaunchError(f"the layer {LOSS_LAYER!r} must be in the last stage, not in stage {stage_of[LOSS_LAYER]}")
    for tensor in traced.tensors:
        for consumer in tensor.consumers:
            if stage_of[consumer] < stage_of[tensor.producer]:
                raise LaunchError(
                    f"layer {consumer!r} in stage {stage_of[consumer]} reads the output of layer {tensor.producer!r} "
                    f"in a later stage, {stage_of[tensor.producer]}"
                )
    for group in traced.together:
        for name in group[1:]:
            if stage_of[name] != stage_of[group[0]]:
                raise LaunchError(
                    f"layers {group[0]!r} and {name!r} share memory and must be in one stage, "
                    f"not in {stage_of[group[0]]} and {stage_of[name]}"
                )
    return stage_of


class StageProgram(nn.Module):
    """One stage. Its parameters and buffers have the names that they have in the model."""

    receives: tuple[TensorSpec, ...]
    """Tensors from the previous stage, in wire order, including relayed tensors that only later stages need."""
    sends: tuple[TensorSpec, ...]
    """Tensors for the next stage, in wire order; empty at the last stage."""
    model_inputs: tuple[int, ...]
    """Indices of the model's inputs that this stage reads from the data."""
    naming: StateDictNames
    """Names in the model's state_dict for the tensors of the stages."""
    shared: Mapping[str, tuple[int, ...]]
    """For every parameter that other stages have too: all stages that have it, in order."""
    loss_state: LossState | None
    """Parameters and buffers of the job's loss, at the last stage; None elsewhere, and if there are none."""

    def __init__(
        self,
        traced: TracedModel,
        pipeline_layers: Sequence[Sequence[str]],
        stage_of: Mapping[str, int],
        stage: int,
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.is_last = stage == len(pipeline_layers) - 1
        self.receives = _crossing(traced, stage_of, stage)
        self.sends = _crossing(traced, stage_of, stage + 1)
        received, sent = [tensor.name for tensor in self.receives], [tensor.name for tensor in self.sends]
        layers = pipeline_layers[stage]
        self._train = cut_subgraph(traced, layers, received, sent, training=True, device=device)
        self._eval = cut_subgraph(traced, layers, received, sent, training=False, device=device)
        self.model_inputs = tuple(sorted({*self._train.inputs, *self._eval.inputs}))
        self.output_spec = output_spec(traced)
        self._hold(traced, device)
        self.shared = shared_parameters(traced, stage_of, stage)
        self.loss_state = traced.loss_state if self.is_last else None
        if device is not None and self.loss_state is not None:
            self.loss_state.to(device)
        self.naming = state_dict_names(traced, keep_unread=stage == 0)
        self._evaluation_problem = traced.evaluation_problem
        self._input_dimensions = {index: traced.input_dimensions(index) for index in self.model_inputs}
        self._seen_shapes: set[tuple[int, int, torch.Size]] = set()
        """(input, samples, shape) of inputs that have the traced shape."""
        self._run = {True: self._train.run.forward, False: self._eval.run.forward}
        """The functions for training and for evaluation. GraphModule.__call__ would print errors a second time."""
        self._autocast, self._device = traced.autocast, torch.device("cpu") if device is None else device

    def _hold(self, traced: TracedModel, device: torch.device | None) -> None:
        """Take over the parameters, buffers and constants that the stage reads."""
        parameters, buffers = dict(traced.model.named_parameters()), dict(traced.model.named_buffers())
        kept = set(traced.model.state_dict(keep_vars=True))
        constants = {}
        for name in dict.fromkeys((*self._train.state, *self._eval.state)):
            # Writes to the dictionaries of nn.Module, whose methods refuse a name with a dot.
            if name in parameters:
                self._parameters[name] = parameters[name]
            elif name in buffers:
                self._buffers[name] = buffers[name]
                if name not in kept:
                    self._non_persistent_buffers_set.add(name)
            else:
                constants[name] = attribute_at(traced.graph_module, name)
        if device is not None:
            self.to(device)
            constants = {name: constant.to(device) for name, constant in constants.items()}
        self._constants: dict[str, Tensor] = constants

    def compile_with(self, backend: str) -> None:
        """Have torch.compile compile the stage. Raises `LaunchError` if that is not possible on this device."""
        check_compiler(backend, self._device)
        self._run = {mode: compiled_function(run, backend) for mode, run in self._run.items()}

    def train(self, mode: bool = True) -> StageProgram:
        """Set training or evaluation mode. Raises `LaunchError` if the model's own code branches on its mode."""
        if not mode and self._evaluation_problem is not None:
            raise LaunchError(evaluation_refusal(self._evaluation_problem))
        return super().train(mode)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """The parameters of this stage and of the loss, by their names in the model."""
        of_loss = {} if self.loss_state is None else self.loss_state.parameters()
        return {name: one for name, one in (*self._parameters.items(), *of_loss.items()) if one is not None}

    def buffers_by_name(self) -> dict[str, Tensor]:
        """The buffers of this stage and of the loss, by their names in the model. A buffer that is never written may be
        in several stages.
        """
        of_loss = {} if self.loss_state is None else self.loss_state.buffers()
        return {name: one for name, one in (*self._buffers.items(), *of_loss.items()) if one is not None}

    def changing_state(self) -> dict[str, Tensor]:
        """Buffers, constants and frozen parameters that a forward in training mode or the loss may write, by name.

        Trained parameters are left out, because they have weight versions.
        """
        tensors = {name: self._state(name, self.parameters_by_name()) for name in self._train.changing}
        of_loss = {} if self.loss_state is None else self.loss_state.buffers()
        return {name: tensor for name, tensor in tensors.items() if not tensor.requires_grad} | of_loss

    def call(
        self,
        parameters: Mapping[str, Tensor],
        received: Sequence[Tensor],
        inputs: Sequence[Tensor],
        batch: int,
    ) -> Any:
        """Run the stage with these parameters, and possibly buffers, by name, in place of its own.

        `received` follows `receives`, `inputs` follows `model_inputs`, and `batch` is the number of samples. Returns
        the tuple of tensors of `sends`, or the model's own output at the last stage. Buffers are updated in place.
        """
        self._check(inputs, batch)
        segment = self._train if self.training else self._eval
        state = [self._state(name, parameters) for name in segment.state]
        data = [inputs[self.model_inputs.index(index)] for index in segment.inputs]
        with autocast(self._autocast, self._device):
            outputs = self._run[self.training](*state, *received, *data, batch)
            if self.is_last:
                return tree_unflatten(outputs, self.output_spec)
            if self._autocast is None:
                return outputs
            # A GPU's autocast keeps more tensors in float32 than the CPU's, under which the model was traced.
            return tuple(tensor.to(spec.dtype) for tensor, spec in zip(outputs, self.sends, strict=True))

    def _check(self, inputs: Sequence[Tensor], batch: int) -> None:
        """Raises `LaunchError` for an input that does not have the traced shape."""
        for index, tensor in zip(self.model_inputs, inputs, strict=True):
            key = index, batch, tensor.shape
            if key in self._seen_shapes:
                continue
            check_input_shape(index, tensor.shape, self._input_dimensions[index], batch)
            self._seen_shapes.add(key)

    def forward(self, received: Sequence[Tensor], inputs: Sequence[Tensor], batch: int) -> Any:
        """`call` with the stage's own parameters."""
        return self.call(self.parameters_by_name(), received, inputs, batch)

    def _state(self, name: str, parameters: Mapping[str, Tensor]) -> Tensor:
        """The tensor with this name: one of `parameters`, or the stage's own buffer or constant."""
        tensor = parameters.get(name)
        if tensor is None:
            tensor = self._buffers.get(name)
        return self._constants[name] if tensor is None else tensor


def _crossing(traced: TracedModel, stage_of: Mapping[str, int], stage: int) -> tuple[TensorSpec, ...]:
    """The tensors that cross the boundary before a stage: made before it, and read at or after it."""
    return tuple(
        tensor
        for tensor in traced.tensors
        if stage_of[tensor.producer] < stage and any(stage_of[consumer] >= stage for consumer in tensor.consumers)
    )


def shared_parameters(traced: TracedModel, stage_of: Mapping[str, int], stage: int) -> dict[str, tuple[int, ...]]:
    """For every parameter of a stage that layers in other stages read too: all stages that read it, in order."""
    shared: dict[str, tuple[int, ...]] = {}
    for tie in traced.tied:
        stages = tuple(sorted({stage_of[layer] for layer in tie.layers}))
        if len(stages) > 1 and stage in stages:
            shared |= dict.fromkeys(tie.names, stages)
    return shared


def output_spec(traced: TracedModel) -> Any:
    """The structure of the model's own output (a tensor, a tuple, a dictionary) over the graph's flat outputs."""
    codegen: Any = traced.graph_module.graph._codegen
    spec = codegen.pytree_info.out_spec
    output = traced.graph_module.graph.output_node()
    leaves, flat = tree_flatten(output.args[0], is_leaf=lambda leaf: isinstance(leaf, fx.Node) or leaf is None)
    assert len(leaves) == (spec.num_leaves if spec is not None else len(leaves))
    return flat if spec is None else spec


@dataclass(frozen=True)
class StateDictNames:
    """The names in the state_dict of the user's own module. A checkpoint uses these names for its tensors."""

    state_dict: Mapping[str, str] = field(default_factory=dict)
    """For every name in the state_dict, in order: the first name of that parameter or buffer. Tied parameters have
    several names."""
    unread: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of the state_dict that no layer reads, by first name. They never change, and only the first stage keeps
    them."""


def state_dict_names(traced: TracedModel, *, keep_unread: bool) -> StateDictNames:
    """The naming of a traced model. Entries of the state_dict that are neither parameters nor buffers are left out."""
    model = traced.model
    owned = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    first = {id(tensor): traced.state_names[name] for name, tensor in owned}
    kept = {key: value for key, value in model.state_dict(keep_vars=True).items() if id(value) in first}
    read = {name for layer in traced.layers for name in (*layer.parameters, *layer.buffers)}
    unread = {first[id(value)]: value.detach() for value in kept.values() if first[id(value)] not in read}
    return StateDictNames({key: first[id(value)] for key, value in kept.items()}, unread if keep_unread else {})
