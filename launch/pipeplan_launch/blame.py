"""Find the submodule that torch.export cannot trace."""

from __future__ import annotations

from types import TracebackType

from torch import fx, nn


def module_of_error(model: nn.Module, error: BaseException) -> str | None:
    """The path of the innermost submodule whose code was running when an error was raised; None for the model's own
    code.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        path = _innermost(paths, current.__traceback__)
        if path:
            return path
        waiting += [current.__context__, current.__cause__]
    return None


def _innermost(paths: dict[int, str], trace: TracebackType | None) -> str | None:
    path = None
    while trace is not None:
        path = paths.get(id(trace.tb_frame.f_locals.get("self")), path)
        trace = trace.tb_next
    return path


def module_of_node(model: nn.Module, node: fx.Node) -> str | None:
    """The path of the innermost submodule whose call made a node; None for the model itself."""
    stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    known = {path for path, _ in model.named_modules()}
    return next((path for path in reversed(stack) if path in known and path), None)


def around(model: nn.Module, path: str) -> str | None:
    """The path of the nearest enclosing module that has a forward() of its own; None for the model itself."""
    while path := path.rpartition(".")[0]:
        if type(model.get_submodule(path)).forward is not nn.Module.forward:
            return path
    return None


def alike(model: nn.Module, path: str) -> list[str]:
    """The paths of all submodules of the same class as this one that do not lie inside another of them."""
    kind = type(model.get_submodule(path))
    paths: list[str] = []
    for candidate, module in model.named_modules():
        if candidate and type(module) is kind and not any(inside(candidate, chosen) for chosen in paths):
            paths.append(candidate)
    return paths


def inside(path: str, other: str) -> bool:
    """Whether a module is another module, or lies inside it."""
    return path == other or path.startswith(other + ".")
