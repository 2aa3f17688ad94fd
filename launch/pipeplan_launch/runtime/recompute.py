"""Recomputation: a forward pass that keeps only its inputs, and a second forward pass when backward needs the rest.

The idea is from Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016. Both passes are equal bit by bit:

    weights         kept until backward anyway (weight stashing)
    random numbers  the generators are set back to their earlier state, and afterwards to their present state
    autocast        set as in the first pass
    buffers         the first pass writes them; the second uses a copy made before the first
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan_launch.job.pass_conditions import RandomState
from pipeplan_launch.tracing.subgraph import Program


def gradient_receive_posted(minibatch: int, latest: int, replicas: int, depth: int) -> bool:
    """Whether a replica that has sent the activations of minibatch `latest` has posted a receive for the gradient of
    `minibatch`, which belongs to it too.

    A replica that recomputes posts the first receive with its first forward, and each further one when it takes the
    previous gradient, so that at most one receive takes memory. Its n-th forward comes after its backward number n -
    depth.
    """
    return minibatch // replicas <= max(latest // replicas - depth, -1) + 1


def saving_no_tensors() -> AbstractContextManager[object]:
    """Context in which autograd saves no tensor for backward.

    Gradients stay enabled, unlike with `no_grad`: some operators choose their kernel by that, and both passes must
    give the same result.
    """
    return torch.autograd.graph.saved_tensors_hooks(_drop_tensor, _fail_unpacking)


def _drop_tensor(_: Tensor) -> None:
    return None


def _fail_unpacking(_: None) -> Tensor:
    raise RuntimeError(
        "the forward pass differentiates inside itself, which a stage that recomputes cannot do: "
        "solve again with --no-recompute"
    )


@dataclass(frozen=True)
class ForwardConditions:
    """State that a forward pass depends on besides its weights and inputs."""

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
