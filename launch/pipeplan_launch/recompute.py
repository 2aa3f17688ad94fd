"""Recomputation: a forward pass that keeps nothing but what went in, and the same once more when backward needs it.

The idea is Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016. Both passes are the same, bit by bit:

    weights         kept anyway until backward (weight stashing)
    random numbers  the generators are put back to where they were, and afterwards to where they are now
    autocast        as it was
    buffers         the first pass writes them; the second reads and writes a copy from before the first
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan_launch.program import Program
from pipeplan_launch.seeds import RandomState


def awaits_gradient(minibatch: int, latest: int, replicas: int, depth: int) -> bool:
    """Whether a replica that has sent the activations of minibatch `latest` has by then posted a receive for the
    gradient of `minibatch`, which it runs too.

    One that recomputes posts the first with its first forward, and each of the others when it takes the one before, so
    that no more than one takes memory. Its n-th forward comes after its backward number n - depth.
    """
    return minibatch // replicas <= max(latest // replicas - depth, -1) + 1


def keeping_nothing() -> AbstractContextManager[object]:
    """Inside, autograd saves no tensor for backward.

    Gradients stay on, unlike with `no_grad`: some operators choose their kernel by that, and the second pass must give
    what the first one gave.
    """
    return torch.autograd.graph.saved_tensors_hooks(_drop, _missed)


def _drop(_: Tensor) -> None:
    return None


def _missed(_: None) -> Tensor:
    raise RuntimeError(
        "the forward pass differentiates inside itself, which a stage that recomputes cannot do: "
        "solve again with --no-recompute"
    )


@dataclass(frozen=True)
class Conditions:
    """What a forward pass depends on besides its weights and what it is given."""

    random: RandomState
    autocast: tuple[torch.autocast, ...]
    state: dict[str, Tensor]
    """Copies of the buffers that the pass may write, by name."""

    @staticmethod
    def now(program: Program, device: torch.device) -> Conditions:
        """Those of a forward pass that starts now."""
        kinds = dict.fromkeys(("cpu", device.type))
        state = {name: tensor.detach().clone() for name, tensor in program.changing_state().items()}
        return Conditions(RandomState.now(device), tuple(map(_autocast, kinds)), state)

    @contextmanager
    def restored(self) -> Iterator[Mapping[str, Tensor]]:
        """Inside, a forward pass sees what it would have seen then, given the state that this yields. Once only."""
        with ExitStack() as stack:
            for autocast in self.autocast:
                stack.enter_context(autocast)
            self.random.restore()
            yield self.state


@contextmanager
def unchanged_random_numbers(device: torch.device) -> Iterator[None]:
    """What is drawn inside does not change what is drawn after."""
    present = RandomState.now(device)
    try:
        yield
    finally:
        present.restore()


def _autocast(kind: str) -> torch.autocast:
    """A context with the autocast settings of now for one type of device."""
    return torch.autocast(
        kind,
        dtype=torch.get_autocast_dtype(kind),
        enabled=torch.is_autocast_enabled(kind),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )
