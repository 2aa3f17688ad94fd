"""Two special backward passes: one after a second forward pass (recomputation), and one in two parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipeplan_launch.job.pass_conditions import RandomState
from pipeplan_launch.tracing.subgraph import Program

# Recomputation: a forward pass that keeps only its inputs, and a second forward pass when backward needs the rest.
#
# The idea is from Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016. Both passes are equal bit by bit:
#
#     weights         weight stashing keeps them until backward anyway
#     random numbers  the generators are set back to their earlier state, and afterwards to their present state
#     autocast        set as in the first pass
#     buffers         the first pass writes them; the second uses a copy made before the first


def gradient_receive_posted(minibatch: int, latest: int, replicas: int, depth: int) -> bool:
    """Whether a replica that has sent the activations of minibatch `latest` has posted a receive for the gradient of
    its own minibatch `minibatch`.

    A replica that recomputes posts the first receive with its first forward. It posts each further receive when it
    takes the previous gradient, so at most one receive takes memory. Forward n comes after backward n - depth.
    """
    return minibatch // replicas <= max(latest // replicas - depth, -1) + 1


def saving_no_tensors() -> AbstractContextManager[object]:
    """Context in which autograd saves no tensor for backward.

    Unlike with `no_grad`, gradients stay enabled. Some operators choose their kernel by this setting, and both passes
    must give the same result.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda _tensor: None, _fail_unpacking)


def _fail_unpacking(_: None) -> Tensor:
    raise RuntimeError(
        "the forward pass differentiates inside itself, which a stage that recomputes cannot do: "
        "solve again with --no-recompute"
    )


@dataclass(frozen=True)
class ForwardConditions:
    """State that a forward pass depends on, other than its weights and inputs."""

    random: RandomState
    autocast: tuple[torch.autocast, ...]
    state: dict[str, Tensor]
    """Copies of the buffers that the pass may write, by name."""

    @staticmethod
    def now(program: Program, device: torch.device) -> ForwardConditions:
        """The conditions of a forward pass that starts now."""
        kinds = dict.fromkeys(("cpu", device.type))
        state = {name: tensor.detach().clone() for name, tensor in program.changing_state().items()}
        return ForwardConditions(RandomState.now(device), tuple(map(_autocast, kinds)), state)

    @contextmanager
    def restored(self) -> Iterator[Mapping[str, Tensor]]:
        """Context in which a forward pass sees the earlier conditions, if it uses the buffers that this yields.
        Usable once.
        """
        with ExitStack() as stack:
            for autocast in self.autocast:
                stack.enter_context(autocast)
            self.random.restore()
            yield self.state


@contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Context that leaves the random generators as they were."""
    present = RandomState.now(device)
    try:
        yield
    finally:
        present.restore()


def _autocast(kind: str) -> torch.autocast:
    """A context with the present autocast settings for one type of device."""
    return torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )


# A backward pass in two parts: first the gradients of a stage's inputs, later the gradients of its weights.
#
# A node of the autograd graph is *inner* if a stage input can be reached from it. The first part executes the inner
# nodes. If a weight is attached to an inner node, the gradients that enter the node are kept. The second part starts at
# these nodes again, and computes only the gradients of the weights.
#
#     loss ── linear ── relu ── linear ── input          inner nodes: linear, relu, linear
#               │                 │
#             weight            weight                   entered again: both nodes of linear
#
# Two kinds of weights get their gradients in the first part: weights that are used several times, so that several inner
# nodes have them, and weights attached to a node written in Python, because its code may not allow a second call.
#
# torch has the same split for its own pipelines, in a private module (`torch.distributed.pipelining._backward`).


@dataclass
class DeferredWeights:
    """Weights that are attached to one inner node, and the gradients that entered the node."""

    node: Node
    leaves: list[Tensor]
    entered: Sequence[Tensor | None] = ()

    def backward(self) -> None:
        """Add the gradients of the weights to their `grad`."""
        edges = [GradientEdge(self.node, number) for number, one in enumerate(self.entered) if one is not None]
        given = [one for one in self.entered if one is not None]
        if not edges:
            return
        # The inner nodes behind this one are not executed, because none of these weights is attached to them.
        found = torch.autograd.grad(edges, self.leaves, given, retain_graph=True, allow_unused=True)
        accumulate(self.leaves, found)


def accumulate(leaves: Iterable[Tensor], gradients: Iterable[Tensor | None]) -> None:
    """Add gradients to the `grad` of their leaves."""
    for leaf, gradient in zip(leaves, gradients, strict=True):
        if gradient is not None:
            leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient


class SplitBackward:
    """The backward pass of one minibatch through a stage, in two parts."""

    def __init__(self, roots: Sequence[Tensor], inputs: Sequence[Tensor], leaves: Iterable[Tensor]) -> None:
        """`roots`: the tensors to differentiate. `inputs`: the stage's inputs that need a gradient. `leaves`: its
        weights.
        """
        self._roots, self._inputs = list(roots), list(inputs)
        trained = {id(leaf): leaf for leaf in leaves if leaf.requires_grad}
        self._deferred, self._at_once = _divide(self._roots, self._inputs, list(trained.values()))
        self._gradients: list[tuple[Tensor, Tensor]] = []

    def inputs(self, gradients: Sequence[Tensor]) -> None:
        """The first part: set the `grad` of the stage's inputs, given the gradients of the roots."""
        hooks = [
            one.node.register_prehook(lambda entered, one=one: setattr(one, "entered", entered))
            for one in self._deferred
        ]
        wanted = [*self._inputs, *self._at_once]
        try:
            found = torch.autograd.grad(
                self._roots, wanted, gradients, retain_graph=bool(self._deferred), allow_unused=True
            )
        finally:
            for hook in hooks:
                hook.remove()
        count = len(self._inputs)
        accumulate(self._inputs, found[:count])
        self._gradients = [
            (leaf, one) for leaf, one in zip(self._at_once, found[count:], strict=True) if one is not None
        ]
        self._roots, self._inputs, self._at_once = [], [], []

    def weights(self) -> None:
        """The second part: add the gradients of the weights to their `grad`, and release the graph."""
        for leaf, gradient in self._gradients:
            accumulate([leaf], [gradient])
        for one in self._deferred:
            one.backward()
        self._gradients, self._deferred = [], []


def _divide(
    roots: Sequence[Tensor], inputs: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[list[DeferredWeights], list[Tensor]]:
    """(weights whose gradients can wait, by inner node; the other weights)."""
    parents = _parents([root.grad_fn for root in roots if root.grad_fn is not None])
    inner = _above([get_gradient_edge(one).node for one in inputs], parents, set())
    deferred: dict[Node, DeferredWeights] = {}
    at_once = []
    for leaf in leaves:
        accumulates = get_gradient_edge(leaf).node
        if accumulates not in parents:
            continue  # the roots do not depend on it
        outside = _above([accumulates], parents, inner)
        entries = {parent for node in outside for parent in parents[node] if parent in inner}
        tops = any(not parents[node] for node in outside)  # a root that no input leads to
        node = next(iter(entries)) if len(entries) == 1 and not tops else None
        if node is None or isinstance(node, torch.autograd.function.BackwardCFunction):
            at_once.append(leaf)
        else:
            deferred.setdefault(node, DeferredWeights(node, [])).leaves.append(leaf)
    return list(deferred.values()), at_once


def _parents(roots: Iterable[Node]) -> dict[Node, list[Node]]:
    """For every node of the graph the nodes that pass gradients to it."""
    parents: dict[Node, list[Node]] = defaultdict(list)
    waiting = list(roots)
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        parents[node]
        for following, _ in node.next_functions:
            if following is not None:
                parents[following].append(node)
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
    return dict(parents)


def _above(nodes: Iterable[Node], parents: dict[Node, list[Node]], stop: set[Node]) -> set[Node]:
    """These nodes and all nodes that pass gradients to them, without the nodes in `stop`."""
    waiting = [node for node in nodes if node in parents and node not in stop]
    found = set(waiting)
    while waiting:
        for parent in parents[waiting.pop()]:
            if parent not in found and parent not in stop:
                found.add(parent)
                waiting.append(parent)
    return found
