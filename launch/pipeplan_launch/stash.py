"""Weight versions: a minibatch's backward must see the weights that its forward saw, though updates came in between.

The optimiser owns the parameters. A version is a set of leaves, one a parameter, made by `.data`: a leaf shares the
parameter's memory but not its version counter, so that autograd does not mistake an update for a corruption of the
leaf's. That is only right if no update ever writes into memory that a minibatch in flight still reads: before an
update, every parameter about to change is moved to other memory, if (and only if) such a minibatch exists. Autograd
cannot check this (fused optimisers bypass it), the tests do.

Which version a minibatch is owed is the schedule's business: the newest, or one that all stages have in common. So a
version is held while a minibatch in flight uses it, and before that while a coming one will.

Memory of versions that are no longer held is used again, so a steady pipeline allocates nothing.
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
    """(id of the parameter, memory it left while this was the newest version held)."""


class WeightVersions:
    """The current weights of a stage, and the older ones that minibatches in flight, or still to come, need."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """`parameters`: name -> parameter; a tied parameter may appear under several names."""
        self._names: dict[str, Tensor] = dict(parameters)
        self._name_of = {id(parameter): name for name, parameter in self._names.items()}
        self._users: dict[int, _Version] = {}
        self._held: list[_Version] = []  # oldest first; the current one only while minibatches use it
        self._next: int | None = None
        self._spare: dict[int, list[Tensor]] = {}
        self._current = _Version(0, self._new_leaves({}))

    @property
    def number(self) -> int:
        """Updates made so far."""
        return self._current.number

    @property
    def live(self) -> int:
        """Versions held now: the current one and older ones in use or to be used."""
        return len(self._held) + (self._current not in self._held)

    def acquire(self, minibatch: int, number: int | None = None, following: int | None = None) -> Mapping[str, Tensor]:
        """The weights after `number` updates, by default the newest, for this minibatch's forward.

        They stay as they are until `release`. `following`: the number that the next minibatch will ask for, at least
        this one, and maybe one that is still to be made. None: the newest, whatever that will be.
        """
        version = self._find(self._current.number if number is None else number)
        if version not in self._held:
            self._held.append(version)
        version.in_flight += 1
        self._users[minibatch] = version
        self._expect(following)
        return version.leaves

    def _expect(self, following: int | None) -> None:
        """Say which version the next minibatch will ask for, as in `acquire`; hold what it needs and no more."""
        self._next = following
        for version in list(self._held):
            self._retire_if_done(version)

    def leaves_of(self, minibatch: int) -> Mapping[str, Tensor]:
        """The weights that this minibatch's forward used."""
        return self._users[minibatch].leaves

    def release(self, minibatch: int) -> dict[str, Tensor]:
        """The minibatch's backward is done: take its gradients, by parameter name, and let go of its version."""
        version = self._users.pop(minibatch)
        gradients = _take_gradients(version.leaves)
        version.in_flight -= 1
        self._retire_if_done(version)
        return gradients

    def update(self, changed: Sequence[nn.Parameter], step: Callable[[], object]) -> None:
        """Run `step`, which writes into the parameters in `changed`, and make the result the current version."""
        if self._current not in self._held and self._is_to_come(self._current):
            self._held.append(self._current)
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

    def _find(self, number: int) -> _Version:
        if number == self._current.number:
            return self._current
        found = next((version for version in self._held if version.number == number), None)
        assert found is not None, f"version {number} is not held: {[one.number for one in self._held]}"
        return found

    def _is_to_come(self, version: _Version) -> bool:
        """Whether a minibatch that has not begun will use a version that exists."""
        return self._next is not None and self._next <= version.number

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
        """Whether a version that is held has its values in the memory that the parameter is in now."""
        name = self._name_of[id(parameter)]
        return any(version.leaves[name].data_ptr() == parameter.data_ptr() for version in self._held)

    def _move_away(self, parameter: nn.Parameter) -> None:
        spare = self._spare.get(id(parameter))
        old = parameter.data
        parameter.data = spare.pop().copy_(old) if spare else old.clone()
        self._held[-1].displaced.append((id(parameter), old))

    def _retire_if_done(self, version: _Version) -> None:
        """Free what was displaced while this was the newest version held, or leave it to an older one."""
        if version.in_flight or (version is not self._current and self._is_to_come(version)):
            return
        self._held.remove(version)
        older = [other for other in self._held if other.number < version.number]
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
