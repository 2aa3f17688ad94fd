"""Weights and optimiser state that FSDP2 divides among workers, for checkpoints: whole tensors to parts, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from pipeplan_launch.checkpoint.optimizer_state import TensorLoader


class DividedWeights:
    """A `runtime.optimizer_shards.DividedState` in which every tensor knows its own division."""

    def __init__(self, trained: Mapping[str, nn.Parameter], index: int, count: int) -> None:
        """`trained`: the divided parameters by name. `index`: this worker's number among the `count` of the plan."""
        self._trained, self._index, self._count = trained, index, count

    def divided_state(self, _optimizer: Optimizer) -> dict[int, str]:
        """Nothing: parts are known by their type."""
        return {}

    def is_divided(self, tensor: Tensor, _divided: Mapping[int, str]) -> bool:
        """Whether a tensor is in parts."""
        return isinstance(tensor, DTensor)

    def batches(
        self, tensors: Mapping[str, Tensor], _divided: Mapping[int, str], most_bytes: int
    ) -> Iterator[dict[str, Tensor]]:
        """Divided tensors in batches of which each worker keeps about `most_bytes`, the same on all workers.

        A tensor with more has a batch for itself.
        """
        batch: dict[str, Tensor] = {}
        size = 0
        for name in sorted(tensors):
            whole = tensors[name].numel() * tensors[name].element_size()
            if batch and size + whole > most_bytes * self._count:
                yield batch
                batch, size = {}, 0
            batch[name], size = tensors[name], size + whole
        if batch:
            yield batch

    def whole_tensors(
        self, tensors: Mapping[str, Tensor], _divided: Mapping[int, str], turn: int = 0
    ) -> dict[str, Tensor]:
        """The whole tensors that this worker keeps. The workers take turns, from number `turn` on; all call this."""
        kept = {}
        for number, name in enumerate(sorted(tensors)):
            tensor = tensors[name]
            assert isinstance(tensor, DTensor)
            whole = tensor.full_tensor()
            if (number + turn) % self._count == self._index:
                kept[name] = whole
        return kept

    def fill(self, part: Tensor, whole: Tensor) -> None:
        """Write this worker's part of a whole tensor."""
        assert isinstance(part, DTensor)
        part.to_local().copy_(_divided_like(whole, part).to_local())

    def loader(self, load: TensorLoader) -> TensorLoader:
        """A loader of saved tensors of the optimiser that divides those with the shape of their parameter, one whole
        tensor at a time.
        """

        def load_parts(names: Iterable[str]) -> dict[str, Tensor]:
            return {name: self._part_of_saved(name, load([name])[name]) for name in names}

        return load_parts

    def _part_of_saved(self, name: str, tensor: Tensor) -> Tensor:
        """A saved tensor is `optim.state.PARAMETER.KEY`, or belongs to no parameter."""
        parameter = self._trained.get(name.removeprefix("optim.state.").rpartition(".")[0])
        if parameter is None or tensor.shape != parameter.shape:
            return tensor
        return _divided_like(tensor, parameter)


def _divided_like(whole: Tensor, part: Tensor) -> DTensor:
    """A whole tensor, which every worker has, divided as `part` is. Nothing is sent."""
    assert isinstance(part, DTensor)
    return distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None)
