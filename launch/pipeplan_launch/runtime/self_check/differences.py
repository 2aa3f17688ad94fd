"""The differences between plain training and the pipeline, and the line that reports them."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan_launch.runtime.self_check.kept_values import Kept, Unknown, is_users_class
from pipeplan_launch.runtime.self_check.training_state import MODEL, AttributeName, TrainedModules, same_bits

# Whether two results are the same except for rounding.
#
# Most models give the same bits in stages as in one piece. Some operators differ in the last bits: sums run in another
# order, and attention picks its kernel by the layout of its operands. Three rules decide, each if the previous one does
# not:
#
# 1. Equal bits are equal.
# 2. A difference below `RELATIVE` of the largest element is rounding. If a tensor is changed, its change is compared
#    too, because a lost write may be far smaller than the tensor's values.
# 3. Sums that cancel, such as the gradient of a bias before BatchNorm, consist only of rounding. So the model itself
#    runs again, with every parameter changed in its last bit. A difference of up to `MARGIN` times the resulting change
#    (`noise`) is rounding.

RELATIVE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.complex64: 1e-4, torch.complex128: 1e-9}
"""Largest difference that counts as rounding, relative to the largest element, by type."""
RELATIVE_LOW = 2e-2
"""The same for 16-bit types, and under autocast."""
MARGIN = 30.0
LAST_BITS = 8.0
"""Units in the last place of a tensor's largest element, below which its change is not compared."""


@dataclass(frozen=True)
class Tolerance:
    """The differences that count as rounding in one model."""

    low: bool
    """Whether some part of the model computes in 16 bits."""
    noise: Mapping[str, float] = field(default_factory=dict)
    """Largest change of each result, by name, when every parameter changes in its last bit."""

    def close(self, one: Tensor, other: Tensor, name: str = "", before: Tensor | None = None) -> bool:
        """Whether two tensors are equal except for rounding. With `before`, their changes since then must be equal too.

        A tensor that changed on one side alone is not close.
        """
        if same_bits(one, other):
            return True
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        if before is not None and before.shape == one.shape and same_bits(one, before) != same_bits(other, before):
            return False
        one, other = dense(one), dense(other)
        if not (one.is_floating_point() or one.is_complex()):
            return False
        finite = one.isfinite() & other.isfinite()
        if not bool((finite | (one == other) | (one.isnan() & other.isnan())).all()):
            return False
        difference = _largest((one - other)[finite])
        allowed = self._relative(other) * _largest(other[finite])
        if before is not None and before.shape == other.shape:
            unit = torch.finfo(other.dtype).eps * LAST_BITS * _largest(other[finite])
            allowed = min(allowed, self._relative(other) * _largest((other - dense(before))[finite]) + unit)
        return bool(difference <= max(allowed, MARGIN * self.noise.get(name, 0.0)))

    def _relative(self, tensor: Tensor) -> float:
        return RELATIVE_LOW if self.low else RELATIVE.get(tensor.dtype, RELATIVE_LOW)

    def same_value(self, one: Kept | None, other: Kept | None) -> bool:
        """Whether two kept values are equal. Numbers and tensors may differ by rounding."""
        if one is None or other is None:
            return one is other
        return self._same(one.content, other.content)

    def _same(self, one: Any, other: Any) -> bool:
        if isinstance(one, Unknown) or isinstance(other, Unknown):
            return type(one) is type(other)
        if type(one) is not type(other):
            return False
        if isinstance(one, Kept):
            return self._same(one.content, other.content)
        if isinstance(one, Tensor):
            return self.close(one, other)
        if isinstance(one, list):
            return len(one) == len(other) and all(map(self._same, one, other))
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(self._same(one[key], other[key]) for key in one)
        if isinstance(one, float):
            return math.isclose(one, other, rel_tol=RELATIVE[torch.float32]) or (one != one and other != other)
        return bool(one == other)


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself, or the dense form of a sparse one."""
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Largest difference of two tensors' elements; infinite if they cannot be compared."""
    one, other = dense(one), dense(other)
    if one.shape != other.shape:
        return float("inf")
    difference = (one.to(torch.float64) - other.to(torch.float64)) if not one.is_complex() else one - other
    return _largest(difference.nan_to_num(0.0, 0.0, 0.0) if not one.is_complex() else difference)


def last_bit_changed(parameter: Tensor, low: bool) -> Tensor:
    """A parameter with every element changed by about one unit in the last place, by fixed random signs."""
    if not parameter.is_floating_point():
        return parameter
    generator = torch.Generator().manual_seed(parameter.numel())
    signs = torch.randint(0, 2, parameter.shape, generator=generator, dtype=torch.int8).to(parameter.dtype) * 2 - 1
    unit = torch.finfo(torch.bfloat16 if low else parameter.dtype).eps
    return parameter * (1 + unit * signs)


OPTION = "--no-self-check"
LEAVE_OUT = f"or leave the check out with {OPTION} if that does no harm"


@dataclass(frozen=True)
class Difference:
    """One result in which the pipeline differs from plain training."""

    what: str
    """The result with its module, its class and the place in the user's file, as text for people."""
    how: str
    """The two values, or what happened to the write."""
    when: str
    remedy: str
    path: str | None = None
    """Path of a module: taking it whole may remove the difference. None if that cannot help."""

    def text(self) -> str:
        """One line for the user."""
        return (
            f"self-check: {self.what} {self.how} {self.when}, so that the pipeline would not train as the model alone "
            f"does: {self.remedy}, {LEAVE_OUT}"
        )


def tensor_difference(
    kind: str, name: str, modules: TrainedModules, values: tuple[Tensor, Tensor], before: Tensor, when: str
) -> Difference:
    """Reports that the pipeline changes a buffer or parameter in another way. `values`: (in plain training,
    in the pipeline).
    """
    plain, piped = values
    unchanged = (same(plain, before), same(piped, before))
    if unchanged == (False, True):
        how = "is written by forward() alone: the pipeline loses the write"
    elif unchanged == (True, False):
        how = "is written by the pipeline, and not by the model"
    else:
        how = f"differs by {largest_difference(plain, piped):.3g}"
    owner, _, local = name.rpartition(".")
    remedy = "move the code that writes it into a submodule of its own, which is then taken whole"
    module = modules.modules[owner]
    path = owner.partition(".")[2] if owner.partition(".")[0] == MODEL else ""
    return Difference(
        f"the {kind} {local!r} of {owner_text(owner, type(module), local)}", how, when, remedy, path or None
    )


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape and values."""
    return largest_difference(one, other) == 0.0


def attribute_difference(attribute: AttributeName, when: str, *, piped_only: bool = False) -> Difference:
    """Reports that an attribute does not change as in plain training."""
    how = (
        "changes in the pipeline, and not in the model,"
        if piped_only
        else "changes from minibatch to minibatch, and keeps its value in the pipeline"
    )
    remedy = (
        f"keep it in a buffer, as in self.register_buffer({attribute.name!r}, torch.zeros(())), and write it in place"
        if attribute.kind is not None and issubclass(attribute.kind, nn.Module)
        else "keep it in a buffer of the module that uses it, and write it in place"
    )
    what = f"the attribute {attribute.name!r} of {owner_text(attribute.owner, attribute.kind, attribute.name)}"
    return Difference(what, how, when, remedy)


def loss_difference(plain: float, piped: float, when: str) -> Difference:
    """Reports that the losses of a minibatch differ."""
    remedy = "make what the model computes follow from its inputs, parameters and buffers alone"
    return Difference("the loss", f"is {plain:.9g} in the model and {piped:.9g} in the pipeline", when, remedy)


def gradient_difference(
    name: str, modules: TrainedModules, plain: Tensor | None, piped: Tensor | None, when: str
) -> Difference:
    """Reports that the gradients of a parameter differ."""
    if plain is None or piped is None:
        how = "is there in the model alone" if piped is None else "is there in the pipeline alone"
    else:
        how = f"differs by {largest_difference(plain, piped):.3g}"
    owner, _, local = name.rpartition(".")
    what = f"the gradient of the parameter {local!r} of {owner_text(owner, type(modules.modules[owner]), None)}"
    remedy = "leave .data out of forward(), and parameters of the model out of the loss"
    return Difference(what, how, when, remedy)


def output_difference(plain: object, piped: object, when: str) -> Difference:
    """Reports that the model's outputs in evaluation differ."""
    pair = [one for one in (plain, piped) if isinstance(one, Tensor)]
    how = f"differs by {largest_difference(*pair):.3g}" if len(pair) == 2 else "differs"
    return Difference("the model's output in evaluation mode", how, when, "make forward() the same code in both modes")


def owner_text(owner: str, kind: type | None, name: str | None) -> str:
    """The owner of a tensor or attribute for people: `module 'norm' (Norm, job.py:12)`."""
    root, _, path = owner.partition(".")
    if kind is None or owner.startswith(("class ", "file ")):
        return f"the {owner}"
    place = place_of_write(kind, name or "")
    inside = f"{kind.__name__}{f', {place}' if place else ''}"
    return f"{f'module {path!r}' if path else f'the {root}'} ({inside})"


# Where the user's code writes a buffer or an attribute, and whether anything reads it, found in the source.


def place_of_write(kind: type, name: str) -> str | None:
    """`file:line` where a class writes its attribute `name`, else of its `forward`; None if its source is not the
    user's.
    """
    for one in kind.__mro__:
        if not is_users_class(one) or (parsed := _parsed(one)) is None:
            continue
        tree, file, first = parsed
        writes = [node for method in _methods(tree) for node in ast.walk(method) if _writes(node, name)]
        lines = [node.lineno for node in writes if isinstance(node, (ast.stmt, ast.expr))] or [
            method.lineno for method in _methods(tree) if method.name == "forward"
        ]
        if lines:
            return f"{file}:{first + lines[0] - 1}"
    return None


def is_read(name: str, files: Iterable[ModuleType]) -> bool:
    """Whether some code in these files reads an attribute or variable.

    `self.calls += 1` alone does not count as reading, and neither does a method of that name. True for a file without
    source.
    """
    for file in files:
        try:
            tree = ast.parse(inspect.getsource(file))
        except (OSError, TypeError, SyntaxError):
            return True
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        if any(_reads(node, name) for node in ast.walk(tree) if id(node) not in called):
            return True
    return False


@cache
def _parsed(kind: type) -> tuple[ast.AST, str, int] | None:
    """(syntax tree of a class, its file, its first line)."""
    try:
        lines, first = inspect.getsourcelines(kind)
        return ast.parse(textwrap.dedent("".join(lines))), inspect.getsourcefile(kind) or "", first
    except (OSError, TypeError, SyntaxError):
        return None


def _methods(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """The methods of a class except `__init__`, `forward` first."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    yield from sorted(found, key=lambda node: node.name != "forward")


def _writes(node: ast.AST, name: str) -> bool:
    """Whether a statement assigns to an attribute, or calls one of its methods that write in place."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_writer(node.func.attr):
        targets = [node.func.value]
    return any(_is_name(inner, name) for target in targets for inner in ast.walk(target))


def _is_writer(method: str) -> bool:
    """Whether a method of this name writes in place: `copy_`, `append`."""
    return method.endswith("_") or method in ("append", "extend", "update", "add", "pop")


def _reads(node: ast.AST, name: str) -> bool:
    """Whether a node loads the attribute or variable of that name, also for a call of one of its methods."""
    return _is_name(node, name) and isinstance(getattr(node, "ctx", None), ast.Load)


def _is_name(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name)
