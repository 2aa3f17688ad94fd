"""The differences between plain training and the pipeline, and the line that reports them."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor, nn

from pipeplan_launch.job.kept_values import UNKNOWN, Attribute, Kept, same_bits
from pipeplan_launch.job.user_code import is_user_code
from pipeplan_launch.runtime.self_check.training_state import MODEL, TrainedModules

# Whether two results are the same except for rounding.
#
# Most models give the same bits in stages as in one piece. Some operators differ in the last bits: sums run in another
# order, and attention picks its kernel by the layout of its operands. Three rules decide. Each rule applies if the
# previous rules do not decide:
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
"""Changes below this number of units in the last place of a tensor's largest element are not compared."""


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
        """Whether two kept values are equal. Numbers and tensors may differ by rounding, and values that are not copied
        count as equal.
        """
        if one is None or other is None:
            return one is other
        return one.same(other, self._same_leaf)

    def _same_leaf(self, one: Kept, other: Kept) -> bool:
        if one.content is UNKNOWN or other.content is UNKNOWN:
            return one.content is other.content
        if isinstance(one.content, Tensor):
            return self.close(one.content, other.content)
        if isinstance(one.content, float):
            return math.isclose(one.content, other.content, rel_tol=RELATIVE[torch.float32]) or one.same(other)
        return bool(one.content == other.content)


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself, or the dense form of a sparse tensor."""
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


GRADIENT, OUTPUT = "gradient ", "output "
"""Prefixes of result names."""
OPTION = "--no-self-check"
LEAVE_OUT = f"or leave the check out with {OPTION} if that does no harm"


@dataclass(frozen=True)
class Difference:
    """One result in which the pipeline differs from plain training."""

    what: str
    """Text that names the result, its module, its class and the place in the user's file."""
    how: str
    """Text with the two values, or with what happened to a write."""
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


def result_difference(
    name: str, modules: TrainedModules, plain: Tensor | None, piped: Tensor | None, when: str
) -> Difference:
    """The report of a result that differs between plain training and the pipeline, or exists in only one of them.

    `name`: `loss`, a name with the prefix `GRADIENT` or `OUTPUT`, or a parameter or buffer that a pass has written.
    """
    how = "" if plain is None or piped is None else f"differs by {largest_difference(plain, piped):.3g}"
    if name == "loss":
        how = f"is {plain:.9g} in the model and {piped:.9g} in the pipeline"
        remedy = "make what the model computes follow from its inputs, parameters and buffers alone"
        return Difference("the loss", how, when, remedy)
    if name.startswith(OUTPUT):
        remedy = "make forward() the same code in both modes"
        return Difference("the model's output in evaluation mode", how or "differs", when, remedy)
    owner, _, local = name.removeprefix(GRADIENT).rpartition(".")
    if name.startswith(GRADIENT):
        how = how or f"is there in the {'model' if piped is None else 'pipeline'} alone"
        remedy = "leave .data out of forward(), and parameters of the model out of the loss"
        what = f"the gradient of the parameter {local!r} of {module_text(owner, modules)}"
        return Difference(what, how, when, remedy)
    lost, added = "by forward() alone: the pipeline loses the write", "by the pipeline, and not by the model"
    how = how or f"is written {lost if piped is None else added}"
    what = f"the {'parameter' if name in modules.parameters else 'buffer'} {local!r} of "
    what += module_text(owner, modules, local)
    remedy = "move the code that writes it into a submodule of its own, which is then taken whole"
    path = owner.partition(".")[2] if owner.partition(".")[0] == MODEL else ""
    return Difference(what, how, when, remedy, path or None)


def attribute_difference(attribute: Attribute, modules: TrainedModules, when: str, *, lost: bool = True) -> Difference:
    """The report of an attribute whose change is lost in the pipeline, or (not `lost`) changes in the pipeline only."""
    how = (
        "changes from minibatch to minibatch, and keeps its value in the pipeline"
        if lost
        else "changes in the pipeline, and not in the model,"
    )
    remedy = (
        f"keep it in a buffer, as in self.register_buffer({attribute.name!r}, torch.zeros(())), and write it in place"
        if isinstance(attribute.owner, nn.Module)
        else "keep it in a buffer of the module that uses it, and write it in place"
    )
    return Difference(attribute_text(attribute, modules), how, when, remedy)


def attribute_text(attribute: Attribute, modules: TrainedModules) -> str:
    """Text that names an attribute and its owner."""
    owner = attribute.owner
    if isinstance(owner, ModuleType):
        place = f"the file {owner.__name__}"
    elif isinstance(owner, type):
        place = f"the class {owner.__name__}"
    else:
        path = next(path for path, module in modules.modules.items() if module is owner)
        place = module_text(path, modules, attribute.name)
    return f"the attribute {attribute.name!r} of {place}"


def module_text(path: str, modules: TrainedModules, name: str = "") -> str:
    """Text that names a module and its class, such as `module 'norm' (Norm, job.py:12)`. The line is the first line of
    forward() that mentions the attribute `name`, else the line where forward() begins.
    """
    root, _, inner = path.partition(".")
    kind = type(modules.modules[path])
    place = ""
    with suppress(OSError, TypeError):  # there is no source
        file, (lines, first) = inspect.getsourcefile(kind.forward) or "", inspect.getsourcelines(kind.forward)
        mentions = [number for number, line in enumerate(lines) if name and re.search(rf"\b{re.escape(name)}\b", line)]
        place = f", {file}:{first + (mentions or [0])[0]}" if is_user_code(file) else ""
    return f"{f'module {inner!r}' if inner else f'the {root}'} ({kind.__name__}{place})"


def is_read(name: str, files: Iterable[ModuleType]) -> bool:
    """Whether some code in these files reads an attribute or variable.

    `self.calls += 1` alone does not count as reading, and neither does a call of a method of that name. True for a file
    without source.
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


def _reads(node: ast.AST, name: str) -> bool:
    """Whether a node loads the attribute or variable of that name, also to call one of its methods."""
    return _is_name(node, name) and isinstance(getattr(node, "ctx", None), ast.Load)


def _is_name(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name)
