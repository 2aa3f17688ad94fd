"""Models in one of torch's wrappers: the model inside is taken where the wrapper changes nothing, or it is refused."""

from __future__ import annotations

from torch import nn
from torch._functorch._aot_autograd.subclass_parametrization import UnwrapTensorSubclass
from torch.nn.utils.parametrize import register_parametrization
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from pipeplan_launch.errors import LaunchError

OPTIMIZED = "OptimizedModule"
DATA_PARALLEL = "DataParallel"
INNER = {OPTIMIZED: "_orig_mod", DATA_PARALLEL: "module"}
"""Wrappers that are taken off, with the attribute that holds the model inside."""
GIVE_INSIDE = "give the module inside it: pipeplan divides the work among the workers, and averages gradients, itself"
REFUSED = {
    "DistributedDataParallel": GIVE_INSIDE,
    "FullyShardedDataParallel": GIVE_INSIDE,
    "FSDPModule": "leave out fully_shard(): pipeplan divides the work among the workers itself",
    "ScriptModule": "TorchScript has no Python code to trace: give the module that it was made from",
}
"""Wrappers that a model may not have anywhere, with the remedy."""
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
            module.device_ids = []  # then it only calls the module inside
        _hold_plain_tensors(module)
    return model


def _hold_plain_tensors(module: nn.Module) -> None:
    """Replace a module's frozen weights of tensor subclasses, such as quantised ones, by the plain tensors inside.

    A parametrization makes the subclass from them for every pass. Plain tensors can be traced, moved to a device, saved
    and divided, and have the size of what is stored.
    """
    for name, tensor in list(module.named_parameters(recurse=False)):
        if is_traceable_wrapper_subclass(tensor) and not tensor.requires_grad:
            register_parametrization(module, name, UnwrapTensorSubclass())


def _wrapper(module: nn.Module) -> str:
    """The name of torch's wrapper class that a module is an instance of; empty for none.

    Classes are compared by name, because some exist only in builds of torch with torch.distributed.
    """
    known = {*INNER, *REFUSED, AVERAGED}
    names = [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch.")]
    return next((name for name in names if name in known), "")
