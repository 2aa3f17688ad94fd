"""The differences between plain training and the pipeline, and the line that reports them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from pipeplan_launch.runtime.self_check.source_places import place_of_write
from pipeplan_launch.runtime.self_check.tolerance import largest_difference
from pipeplan_launch.runtime.self_check.training_state import MODEL, AttributeName, TrainedModules

OPTION = "--no-self-check"
LEAVE_OUT = f"or leave the check out with {OPTION} if that does no harm"


@dataclass(frozen=True)
class Difference:
    """One result of the pipeline that is not what plain training gives."""

    what: str
    """The result with its module, its class and the place in the user's file, as text for people."""
    how: str
    """The two values, or what became of the write."""
    when: str
    remedy: str
    path: str | None = None
    """Path of the module to take whole, which may cure it; None where that cannot help."""

    def text(self) -> str:
        """One line for the user."""
        return (
            f"self-check: {self.what} {self.how} {self.when}, so that the pipeline would not train as the model alone "
            f"does: {self.remedy}, {LEAVE_OUT}"
        )


def tensor_difference(
    kind: str, name: str, modules: TrainedModules, values: tuple[Tensor, Tensor], before: Tensor, when: str
) -> Difference:
    """A buffer or parameter that a pass changes in another way. `values`: (in plain training, in the pipeline)."""
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
    """State in an attribute that does not change as in plain training."""
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
    """Another loss for the same minibatch."""
    remedy = "make what the model computes follow from its inputs, parameters and buffers alone"
    return Difference("the loss", f"is {plain:.9g} in the model and {piped:.9g} in the pipeline", when, remedy)


def gradient_difference(
    name: str, modules: TrainedModules, plain: Tensor | None, piped: Tensor | None, when: str
) -> Difference:
    """Another gradient of a parameter."""
    if plain is None or piped is None:
        how = "is there in the model alone" if piped is None else "is there in the pipeline alone"
    else:
        how = f"differs by {largest_difference(plain, piped):.3g}"
    owner, _, local = name.rpartition(".")
    what = f"the gradient of the parameter {local!r} of {owner_text(owner, type(modules.modules[owner]), None)}"
    remedy = "leave .data out of forward(), and parameters of the model out of the loss"
    return Difference(what, how, when, remedy)


def output_difference(plain: object, piped: object, when: str) -> Difference:
    """Another output in evaluation."""
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
