"""Which submodule is it that torch.export cannot look into?"""

from __future__ import annotations

from types import TracebackType

from torch import fx, nn


def module_of_error(model: nn.Module, error: BaseException) -> str | None:
    """The path of the innermost submodule whose code was running when an error was raised; None for the model's own."""
    paths = {id(module): path for path, module in model.named_modules()}
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        found = _innermost(paths, one.__traceback__)
        if found:
            return found
        waiting += [one.__context__, one.__cause__]
    return None


def _innermost(paths: dict[int, str], trace: TracebackType | None) -> str | None:
    found = None
    while trace is not None:
        found = paths.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found


def module_of_node(model: nn.Module, node: fx.Node) -> str | None:
    """The path of the innermost submodule in whose call a node was made; None for the model itself."""
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    known = {path for path, _ in model.named_modules()}
    return next((path for path in reversed(stack) if path in known and path), None)


def around(model: nn.Module, path: str) -> str | None:
    """The path of the nearest module around one that has a forward() of its own; None for the model itself."""
    while path := path.rpartition(".")[0]:
        if type(model.get_submodule(path)).forward is not nn.Module.forward:
            return path
    return None


def alike(model: nn.Module, path: str) -> list[str]:
    """The paths of all submodules of the class of this one that do not lie inside another of them."""
    kind = type(model.get_submodule(path))
    found: list[str] = []
    for other, module in model.named_modules():
        if other and type(module) is kind and not any(inside(other, one) for one in found):
            found.append(other)
    return found


def inside(path: str, other: str) -> bool:
    """Whether a module is another one, or lies inside it."""
    return path == other or path.startswith(other + ".")
