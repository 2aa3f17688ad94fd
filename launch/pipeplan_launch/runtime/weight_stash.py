"""Weight versions: a minibatch's backward must see the weights that its forward saw, even if updates came in between.

The optimiser owns the parameters. A version is a set of leaves, one for each parameter, made by `.data`: a leaf
shares the parameter's memory but not its version counter, so that autograd does not mistake an update for a
corruption of the leaf's values. This is correct only if no update writes into memory that a minibatch in flight still
reads. So if such a minibatch exists, every parameter that an update will change first moves to other memory, with a
copy of its values. Autograd cannot check this, because fused optimisers bypass its counters; the tests check it.

The schedule decides which version a minibatch uses: the newest version, or a version that all stages have in common.
So a version is kept while a minibatch in flight uses it or a coming minibatch will use it.

Memory of released versions is reused, so a steady pipeline allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan_launch.job.nested_tensors import tensors_in
from pipeplan_launch.runtime.backward_passes import ForwardConditions

# State that a stage keeps for a minibatch between its forward and its backward pass.


@dataclass(eq=False)
class InFlightMinibatch:
    """Inputs and outputs of a minibatch's forward pass, which its backward pass needs."""

    received: Sequence[Tensor]
    """Activations from the previous stage."""
    inputs: Sequence[Tensor]
    """Model inputs read from the data set."""
    target: Any
    outputs: Sequence[Tensor] = ()
    """The outputs; empty if the stage recomputes."""
    conditions: ForwardConditions | None = None
    """The conditions of the forward pass, if the stage recomputes."""
    is_read_again: bool = False
    """Whether the forward pass wrote to data that was read for it. If so, the data is read again instead of kept."""

    @property
    def write_counts(self) -> list[int]:
        """Number of writes to each tensor that was read from the data."""
        return [tensor._version for tensor in tensors_in((self.inputs, self.target))]


@dataclass(eq=False)
class _Version:
    """One weight version of a stage."""

    number: int
    """Updates made when this version became current."""
    leaves: dict[str, Tensor]
    in_flight: int = 0
    """Minibatches in flight that use this version."""
    displaced: list[tuple[int, Tensor]] = field(default_factory=list)
    """(id of the parameter, memory that it left while this was the newest version kept)."""


class WeightVersions:
    """The current weights of a stage, and the older versions that minibatches in flight or still to come need."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """`parameters`: parameters by name; a tied parameter may appear under several names."""
        self._names: dict[str, Tensor] = dict(parameters)
        self._name_of = {id(parameter): name for name, parameter in self._names.items()}
        self._users: dict[int, _Version] = {}
        self._kept: list[_Version] = []  # oldest first; includes the current one only while minibatches use it
        self._next: int | None = None
        self._spare: dict[int, list[Tensor]] = {}
        self._moved: set[int] = set()  # during an update: ids of the parameters that got other memory
        self._current = _Version(0, self._new_leaves({}))

    @property
    def number(self) -> int:
        """Updates made so far."""
        return self._current.number

    @property
    def live(self) -> int:
        """Number of versions kept now: the current version, and older versions in use or to be used."""
        return len(self._kept) + (self._current not in self._kept)

    def acquire(self, minibatch: int, number: int | None = None, following: int | None = None) -> Mapping[str, Tensor]:
        """The weights after `number` updates, by default the newest, for this minibatch's forward.

        The weights stay unchanged until `release`. `following`: the version that the next minibatch will ask for, not
        older than this version. It may not exist yet. None means the newest version at that time.
        """
        version = self._find(self._current.number if number is None else number)
        if version not in self._kept:
            self._kept.append(version)
        version.in_flight += 1
        self._users[minibatch] = version
        self._next = following
        for kept in list(self._kept):
            self._retire_if_done(kept)
        return version.leaves

    def leaves_of(self, minibatch: int) -> Mapping[str, Tensor]:
        """The weights that this minibatch's forward used."""
        return self._users[minibatch].leaves

    def release(self, minibatch: int) -> dict[str, Tensor]:
        """End a minibatch after its backward: return its gradients by parameter name, and release its version."""
        version = self._users.pop(minibatch)
        gradients = {name: leaf.grad for name, leaf in version.leaves.items() if leaf.grad is not None}
        for leaf in version.leaves.values():
            leaf.grad = None
        version.in_flight -= 1
        self._retire_if_done(version)
        return gradients

    def update(self, changed: Sequence[nn.Parameter], step: Callable[[], object]) -> None:
        """Run `step`, which writes into the parameters in `changed`, and make the result the current version."""
        if self._current not in self._kept and self._is_to_come(self._current):
            self._kept.append(self._current)
        for parameter in [one for one in changed if self._needed(one)]:
            self._moved.add(id(parameter))
            parameter.data = self._memory_for(parameter).copy_(parameter.data)
        step()
        leaves = self._current.leaves
        if self._moved:
            leaves = self._new_leaves(
                {name: leaf for name, leaf in leaves.items() if id(self._names[name]) not in self._moved}
            )
        self._moved.clear()
        self._current = _Version(self._current.number + 1, leaves)

    def values_before(self, parameter: nn.Parameter) -> Tensor | None:
        """During `update`: the parameter's values before the update, if the parameter got other memory; else None.

        Versions that are kept read that memory, so nobody may write to it.
        """
        return self._current.leaves[self._name_of[id(parameter)]] if id(parameter) in self._moved else None

    def _find(self, number: int) -> _Version:
        if number == self._current.number:
            return self._current
        kept = next((version for version in self._kept if version.number == number), None)
        assert kept is not None, f"version {number} is not kept: {[version.number for version in self._kept]}"
        return kept

    def _is_to_come(self, version: _Version) -> bool:
        """Whether a minibatch that has not started will use a version that exists."""
        return self._next is not None and self._next <= version.number

    def _new_leaves(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A leaf for each parameter: its leaf in `kept`, else a new leaf that shares the parameter's present memory."""
        by_parameter: dict[int, Tensor] = {}
        leaves: dict[str, Tensor] = {}
        for name, parameter in self._names.items():
            leaf = kept.get(name, by_parameter.get(id(parameter)))
            if leaf is None:
                leaf = parameter.data.requires_grad_(parameter.requires_grad)
            by_parameter[id(parameter)] = leaves[name] = leaf
        return leaves

    def _needed(self, parameter: nn.Parameter) -> bool:
        """Whether a kept version has its values in the memory that the parameter uses now."""
        name = self._name_of[id(parameter)]
        return any(version.leaves[name].data_ptr() == parameter.data_ptr() for version in self._kept)

    def _memory_for(self, parameter: nn.Parameter) -> Tensor:
        """Other memory for a parameter, with any content. The present memory goes to the newest kept version."""
        spare = self._spare.get(id(parameter))
        self._kept[-1].displaced.append((id(parameter), parameter.data))
        return spare.pop() if spare else torch.empty_like(parameter.data)

    def _retire_if_done(self, version: _Version) -> None:
        """Drop a version that nobody needs. Memory that was displaced during this version becomes spare, or goes to an
        older kept version.
        """
        if version.in_flight or (version is not self._current and self._is_to_come(version)):
            return
        self._kept.remove(version)
        older = [other for other in self._kept if other.number < version.number]
        if older:
            older[-1].displaced.extend(version.displaced)
        else:
            for parameter, memory in version.displaced:
                self._spare.setdefault(parameter, []).append(memory)
        version.displaced = []
