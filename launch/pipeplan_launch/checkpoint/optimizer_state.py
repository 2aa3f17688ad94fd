"""Conversion of optimiser state to plain data by parameter name, and back into the optimisers of any stages.

Every stage builds its optimiser for its own parameters. Under another cut of the model a stage's parameters may come
from several stages' optimisers. The state then follows the parameter, and a parameter group takes the settings that its
members had.

A checkpoint holds no code. Values that JSON has are encoded as themselves. Other values are objects with one key:
`tensor` (the name under which the tensor is saved), `tuple`, `dict`, or `float` (for a number that is not finite).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeplan_launch.checkpoint.manifest import OptimizerFields
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.user_code import user_code_errors

TensorLoader = Callable[[Iterable[str]], dict[str, Tensor]]
"""Loads saved tensors by name."""


def optimizer_state(
    optimizer: Optimizer | None, parameters: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(`groups` and `state` as JSON, the tensors that they name). `parameters`: the parameters that the optimiser
    trains, by name.

    Raises `LaunchError` for state that can only be saved as code.
    """
    content: dict[str, Any] = {"groups": [], "state": {}}
    tensors: dict[str, Tensor] = {}
    if optimizer is None:
        return content, tensors
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        names = [name_of[id(parameter)] for parameter in group["params"]]
        settings = {
            key: _encode(value, key, f"optim.groups.{names[0] if names else ''}.{key}", tensors)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        content["groups"].append({"kind": _kind(optimizer), "names": names, "settings": settings})
    for parameter, values in optimizer.state.items():
        name = name_of.get(id(parameter))
        if name is None:
            raise LaunchError(
                f"the optimiser {_kind(optimizer)} keeps state that belongs to no parameter, which a checkpoint "
                "cannot hold"
            )
        content["state"][name] = {
            key: _encode(value, key, f"optim.state.{name}.{key}", tensors) for key, value in values.items()
        }
    return content, tensors


def load_optimizer(
    optimizer: Optimizer | None,
    parameters: Mapping[str, nn.Parameter],
    saved: Mapping[str, Any],
    load: TensorLoader,
    where: str,
    own: Collection[str] = (),
) -> None:
    """Load the saved state and settings of an optimiser's parameters. Stages of any plan may have saved them.

    `own`: settings that are not loaded. Raises `LaunchError` if the saved groups do not fit this optimiser.
    """
    if optimizer is None:
        return
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    group_of = {name: group for group in saved["groups"] for name in group["names"]}
    state = {name: values for name in parameters if (values := saved["state"].get(name)) is not None}
    own_names = [[name_of[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    wanted = [
        *state.values(),
        *(group_of[name]["settings"] for names in own_names for name in names if name in group_of),
    ]
    tensors = load(
        {tensor: None for values in wanted for encoded in values.values() for tensor in tensor_names_in(encoded)}
    )
    numbers = {name: index for index, name in enumerate(name for names in own_names for name in names)}
    groups = []
    for names, group in zip(own_names, optimizer.param_groups, strict=True):
        settings = {key: value for key, value in group.items() if key != "params"}
        settings |= _settings(names, group_of, _kind(optimizer), tensors, where, own)
        groups.append({**settings, "params": [numbers[name] for name in names]})
    decoded = {name: _decode(values, tensors, where) for name, values in state.items()}
    with user_code_errors("the job's optimizer, which takes its saved state,"):
        optimizer.load_state_dict(
            {"state": {numbers[name]: values for name, values in decoded.items()}, "param_groups": groups}
        )
    _keep_dtypes(optimizer, parameters, decoded)


def merge_optimizer_states(parts: Iterable[OptimizerFields]) -> OptimizerFields:
    """The optimiser states of all stages as one state. A parameter that several stages share is in it once."""
    merged: OptimizerFields = {"groups": [], "state": {}}
    seen: set[str] = set()
    for part in parts:
        for group in part["groups"]:
            names = [name for name in group["names"] if name not in seen]
            if names or not group["names"]:
                merged["groups"].append({**group, "names": names})
        seen.update(name for group in part["groups"] for name in group["names"])
        merged["state"] |= part["state"]
        if part.get("correction"):
            merged["correction"] = merged.get("correction", {}) | part["correction"]
    return merged


def optimizer_tensors(optimizer: Optimizer | None) -> list[Tensor]:
    """The tensors in an optimiser's state."""
    states = optimizer.state.values() if optimizer is not None else ()
    return [value for state in states for value in state.values() if isinstance(value, Tensor)]


def _settings(
    names: list[str],
    group_of: Mapping[str, Any],
    kind: str,
    tensors: Mapping[str, Tensor],
    where: str,
    own: Collection[str],
) -> dict[str, Any]:
    """The saved settings of a group, without the settings in `own`. All members must have the same settings."""
    common: dict[str, Any] | None = None
    first = ""
    for name in names:
        group = group_of.get(name)
        if group is None:
            raise LaunchError(f"{where}: it has no optimiser settings for {name!r}, which its run did not train")
        if group["kind"] != kind:
            raise LaunchError(f"{where} was saved with the optimiser {group['kind']}, and the job's is {kind} now")
        settings = {key: value for key, value in _decode(group["settings"], tensors, where).items() if key not in own}
        if common is None:
            common, first = settings, name
        for key in common.keys() | settings.keys():
            if not _equal(common.get(key), settings.get(key)):
                raise LaunchError(
                    f"{where}: the job's optimiser puts {first!r} and {name!r} into one group, and they were saved "
                    f"with {key!r} {_short(common.get(key))} and {_short(settings.get(key))}: resume with a plan that "
                    "has them in different stages, as the saved one had"
                )
    return common or {}


def _keep_dtypes(
    optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], decoded: Mapping[str, Mapping[str, Any]]
) -> None:
    """Restore saved dtypes. `load_state_dict` casts state to its parameter's dtype, for example float32 moments to
    bfloat16.
    """
    for name, values in decoded.items():
        state = optimizer.state[parameters[name]]
        for key, value in values.items():
            if isinstance(value, Tensor) and key in state and state[key].dtype != value.dtype:
                state[key] = value.to(state[key].device)


def _encode(value: Any, key: str, name: str, tensors: dict[str, Tensor]) -> Any:
    try:
        return encode_value(value, name, tensors)
    except NotEncodable as error:
        raise LaunchError(f"the optimiser's {key!r} is a {error}, which a checkpoint cannot hold") from error


def _decode(values: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> dict[str, Any]:
    try:
        return {key: decode_value(value, tensors) for key, value in values.items()}
    except NotEncodable as error:
        raise LaunchError(f"{where}: the optimiser's state is damaged: {error}") from error


def _kind(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, list | tuple) and type(first) is type(second) and len(first) == len(second):
        return all(_equal(*pair) for pair in zip(first, second, strict=True))
    return type(first) is type(second) and bool(first == second or (first != first and second != second))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:50]}…"


class NotEncodable(Exception):
    """A value that cannot be saved without code; the argument describes it."""


def encode_value(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """`value` as JSON. Its tensors are added to `tensors`, under names that start with `name`. Raises
    `NotEncodable`.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, list | tuple):
        inner = [encode_value(member, f"{name}.{index}", tensors) for index, member in enumerate(value)]
        return {"tuple": inner} if isinstance(value, tuple) else inner
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode_value(member, f"{name}.{key}", tensors) for key, member in value.items()}}
    raise NotEncodable(type(value).__name__)


def tensor_names_in(encoded: Any) -> Iterator[str]:
    """The names of the tensors in an encoded value."""
    if isinstance(encoded, list):
        for member in encoded:
            yield from tensor_names_in(member)
    elif isinstance(encoded, dict):
        for kind, inner in encoded.items():
            if kind == "tensor" and isinstance(inner, str):
                yield inner
            elif kind == "dict" and isinstance(inner, dict):
                yield from tensor_names_in(list(inner.values()))
            else:
                yield from tensor_names_in(inner)


def decode_value(encoded: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `encode_value`. Raises `NotEncodable` for input that `encode_value` never writes."""
    if isinstance(encoded, list):
        return [decode_value(member, tensors) for member in encoded]
    if not isinstance(encoded, dict):
        return encoded
    match list(encoded.items()):
        case [("tensor", str(name))] if name in tensors:
            return tensors[name]
        case [("tuple", list(inner))]:
            return tuple(decode_value(member, tensors) for member in inner)
        case [("dict", dict(inner))]:
            return {key: decode_value(member, tensors) for key, member in inner.items()}
        case [("float", "nan" | "inf" | "-inf" as text)]:
            return float(text)
    raise NotEncodable(f"an object with {', '.join(encoded) or 'nothing'} in it")
