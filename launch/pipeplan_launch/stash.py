"""Weight versions: a minibatch's backward must see the weights that its forward saw, though updates came in between.

The optimiser owns the parameters. A version is a set of leaves, one a parameter, made by `.data`: a leaf shares the
parameter's memory but not its version counter, so that autograd does not mistake an update for a corruption of the
leaf's. That is only right if no update ever writes into memory that a minibatch in flight still reads: before an
update, every parameter about to change is moved to other memory, if (and only if) such a minibatch exists. Autograd
cannot check this (fused optimisers bypass it), the tests do.

Memory of versions that are no longer in flight is used again, so a steady pipeline allocates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass(eq=False)
class _Version:
    number: int
    """Updates made when this version became current."""
    leaves: dict[str, Tensor]
    in_flight: int = 0
    displaced: list[tuple[int, Tensor]] = field(default_factory=list)
    """(id of the parameter, memory it left while this was the newest version in flight)."""


class WeightVersions:
    """The current weights of a stage, and the older ones that minibatches in flight still need."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """`parameters`: name -> parameter; a tied parameter may appear under several names."""
        self._names: dict[str, Tensor] = dict(parameters)
        self._name_of = {id(parameter): name for name, parameter in self._names.items()}
        self._users: dict[int, _Version] = {}
        self._alive: list[_Version] = []  # those with minibatches in flight, oldest first
        self._spare: dict[int, list[Tensor]] = {}
        self._current = _Version(0, self._new_leaves({}))

    @property
    def number(self) -> int:
        """Updates made so far."""
        return self._current.number

    @property
    def live(self) -> int:
        """Versions held now: the current one and the older ones in flight."""
        return len(self._alive) + (self._current.in_flight == 0)

    def acquire(self, minibatch: int) -> Mapping[str, Tensor]:
        """The weights for this minibatch's forward; they stay as they are until `release`."""
        version = self._current
        if version.in_flight == 0:
            self._alive.append(version)
        version.in_flight += 1
        self._users[minibatch] = version
        return version.leaves

    def leaves_of(self, minibatch: int) -> Mapping[str, Tensor]:
        """The weights that this minibatch's forward used."""
        return self._users[minibatch].leaves

    def release(self, minibatch: int) -> dict[str, Tensor]:
        """The minibatch's backward is done: take its gradients, by parameter name, and let go of its version."""
        version = self._users.pop(minibatch)
        gradients = _take_gradients(version.leaves)
        version.in_flight -= 1
        if version.in_flight == 0:
            self._retire(version)
        return gradients

    def update(self, changed: Sequence[nn.Parameter], step: Callable[[], object]) -> None:
        """Run `step`, which writes into the parameters in `changed`, and make the result the current version."""
        moved = {id(parameter) for parameter in changed if self._needed(parameter)}
        for parameter in changed:
            if id(parameter) in moved:
                self._move_away(parameter)
        step()
        leaves = self._current.leaves
        if moved:
            leaves = self._new_leaves(
                {name: leaf for name, leaf in leaves.items() if id(self._names[name]) not in moved}
            )
        self._current = _Version(self._current.number + 1, leaves)

    def _new_leaves(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        by_parameter: dict[int, Tensor] = {}
        leaves: dict[str, Tensor] = {}
        for name, parameter in self._names.items():
            leaf = kept.get(name, by_parameter.get(id(parameter)))
            if leaf is None:
                leaf = parameter.data.requires_grad_(parameter.requires_grad)
            by_parameter[id(parameter)] = leaves[name] = leaf
        return leaves

    def _needed(self, parameter: nn.Parameter) -> bool:
        """Whether a minibatch in flight reads the memory that the parameter is in now."""
        name = self._name_of[id(parameter)]
        return any(version.leaves[name].data_ptr() == parameter.data_ptr() for version in self._alive)

    def _move_away(self, parameter: nn.Parameter) -> None:
        spare = self._spare.get(id(parameter))
        old = parameter.data
        parameter.data = spare.pop().copy_(old) if spare else old.clone()
        self._alive[-1].displaced.append((id(parameter), old))

    def _retire(self, version: _Version) -> None:
        """Free what was displaced while this was the newest version in flight, or leave it to an older one."""
        self._alive.remove(version)
        older = [other for other in self._alive if other.number < version.number]
        if older:
            older[-1].displaced.extend(version.displaced)
        else:
            for parameter, memory in version.displaced:
                self._spare.setdefault(parameter, []).append(memory)
        version.displaced = []


def _take_gradients(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    gradients: dict[str, Tensor] = {}
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            gradients[name] = leaf.grad
    for leaf in leaves.values():
        leaf.grad = None
    return gradients
