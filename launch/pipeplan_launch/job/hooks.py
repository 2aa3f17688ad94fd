"""The user's hooks on parameters and modules. A hook runs if its result is the same as in one process; else it is
refused.

A hook that `register_hook` puts on a parameter gets the mean gradient of an update, as in one process that takes the
whole batch at once. Forward hooks are traced together with their modules. Hooks on the backward pass of a module are
not in a trace, so they are refused. So are hooks after accumulation, which may write to weights that minibatches in
flight still read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from pipeplan_launch.errors import LaunchError

GradientHook = Callable[[Tensor], Tensor | None]
"""A hook on a gradient: returns another gradient in its place, or None."""
_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


def refuse_module_hooks(model: nn.Module) -> None:
    """Raise `LaunchError` for a hook on the backward pass of one of the model's modules."""
    hooked = [path for path, one in model.named_modules() if any(vars(one).get(kind) for kind in _BACKWARD)]
    if any(vars(torch_module).get(f"_global{kind}") for kind in _BACKWARD):
        hooked.append("*")
    if hooked:
        name = {"": "the model", "*": "every module"}.get(hooked[0], f"the module {hooked[0]!r}")
        raise LaunchError(
            f"{name} has a hook on its backward pass (register_full_backward_hook), which a traced model does not "
            "call: call register_hook on a tensor in the forward() of a submodule, or on a parameter"
        )


def refuse_accumulation_hooks(parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise `LaunchError` for a parameter with a hook that is called after its gradient has been accumulated."""
    name = next((name for name, one in parameters.items() if getattr(one, "_post_accumulate_grad_hooks", None)), None)
    if name is not None:
        raise LaunchError(
            f"the parameter {name!r} has a hook of register_post_accumulate_grad_hook, which would run before the "
            "gradients of an update are averaged: change gradients in register_hook, and weights in the job's optimizer"
        )


def parameter_hooks(parameters: Mapping[str, Tensor]) -> dict[str, Mapping[int, GradientHook]]:
    """The hooks that `register_hook` has put on parameters, for each parameter with hooks."""
    return {name: hooks for name, one in parameters.items() if (hooks := getattr(one, "_backward_hooks", None))}


def take_hooks(parameters: Mapping[str, Tensor]) -> dict[str, Mapping[int, GradientHook]]:
    """Remove the hooks from parameters, so that backward passes do not call them. Returns them as `parameter_hooks`
    does.

    A hook that its owner removes later is removed from the result.
    """
    taken = parameter_hooks(parameters)
    for name in taken:
        parameters[name]._backward_hooks = None
    return taken


@torch.no_grad()
def hooked_gradients(
    gradients: Mapping[str, Tensor], hooks: Mapping[str, Mapping[int, GradientHook]]
) -> dict[str, Tensor]:
    """The gradients of an update, by name, as the hooks of their parameters return them."""
    result = dict(gradients)
    for name in gradients.keys() & hooks.keys():
        for hook in list(hooks[name].values()):
            changed = hook(result[name])
            result[name] = result[name] if changed is None else changed
    return result
