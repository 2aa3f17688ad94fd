"""An optimiser whose state and work are divided among the replicas of a stage (ZeRO stage 1).

Every replica still holds all weights and averages all gradients. Each parameter is flattened and cut into equal parts,
one for each replica. The job's own optimiser gets this replica's parts in place of the parameters, so it keeps state
for these parts only. After its step the replicas gather the new weights of all parts.

torch's `ZeroRedundancyOptimizer` assigns whole parameters, so one large parameter stays on one replica. It gathers the
state on one rank, and makes the optimiser itself, in one group. Here groups, schedulers and hooks stay as the job made
them.

Parameters may be cut only if the optimiser's step treats every element by itself. torch's optimisers in `ELEMENTWISE`
do so.

Gradients are all-reduced, not reduce-scattered: Gloo computes a reduce-scatter by an all-reduce, and clipping,
compression and late updates work on whole gradients. An update thus sends one and a half times the bytes of an
all-reduce. Source: Rajbhandari et al., ZeRO, SC 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from pipeplan_launch.checkpoint.optimizer_state import TensorLoader
from pipeplan_launch.comm import buckets
from pipeplan_launch.errors import LaunchError

LARGE_BYTES = 1 << 20
"""Parameters of at least this size are gathered in place, one by one. Smaller parameters share a buffer."""
ELEMENTWISE: tuple[type[Optimizer], ...] = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax),
    *(optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.ASGD, optim.Rprop),
)
"""The optimisers whose step on an element depends on no other element."""


class DividedState(Protocol):
    """Access to divided tensors of a checkpoint: each replica holds only a part of such a tensor."""

    def divided_state(self, optimizer: Optimizer) -> dict[int, str]:
        """Maps the `id` of each part in the optimiser's state to its parameter's name. Leaves out parts that are known
        by their type.
        """

    def is_divided(self, tensor: Tensor, divided: Mapping[int, str]) -> bool:
        """Whether a tensor is a part, so that `whole_tensors` puts it together. `divided`: from `divided_state`."""

    def batches(
        self, tensors: Mapping[str, Tensor], divided: Mapping[int, str], most_bytes: int
    ) -> Iterator[dict[str, Tensor]]:
        """Divided tensors in batches. A replica puts together about `most_bytes` of each batch."""

    def whole_tensors(
        self, tensors: Mapping[str, Tensor], divided: Mapping[int, str], turn: int = 0
    ) -> dict[str, Tensor]:
        """This replica's share of a batch, put together. All replicas call this."""

    def fill(self, part: Tensor, whole: Tensor) -> None:
        """Write this replica's part of a whole tensor of the model."""

    def loader(self, load: TensorLoader) -> TensorLoader:
        """A loader of saved tensors that keeps only this replica's part of each tensor."""


class OptimizerShards:
    """This replica's parts of a stage's parameters. The stage's optimiser has the parts in place of the parameters."""

    def __init__(self, trained: Mapping[str, nn.Parameter], optimizer: Optimizer, group: dist.ProcessGroup) -> None:
        """`trained`: the parameters by name. `optimizer`: the job's optimiser, which gets the parts. `group`: the
        stage's replicas. Raises `LaunchError` for an optimiser whose parameters must stay whole.
        """
        check_elementwise(optimizer)
        self._trained, self._group = trained, group
        self._index, self._count = dist.get_rank(group), dist.get_world_size(group)
        self.parameters: dict[str, nn.Parameter] = {
            name: nn.Parameter(self._own_part(parameter.detach())) if parameter.ndim else parameter
            for name, parameter in trained.items()
        }
        """Tensors that the optimiser changes, by name: parts, and parameters without dimensions, which stay whole."""
        self._divided = {name for name, parameter in trained.items() if parameter.ndim}
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        """Memory in which weights are gathered, kept for the next update."""
        name_of = {id(parameter): name for name, parameter in trained.items()}
        for param_group in optimizer.param_groups:
            param_group["params"] = [self.parameters[name_of[id(one)]] for one in param_group["params"]]
        for name, parameter in trained.items():  # Adagrad makes its state before the first step
            if name in self._divided and parameter in optimizer.state:
                state = optimizer.state.pop(parameter)
                optimizer.state[self.parameters[name]] = {
                    key: self._own_part(value).clone() if _is_like(value, parameter) else value
                    for key, value in state.items()
                }

    def take(self, averaged: Mapping[str, Tensor]) -> None:
        """Give the optimiser the present values and the gradients of its parts, from whole gradients by name."""
        for name, gradient in averaged.items():
            part = self.parameters[name]
            part.data = self.own_part(name, self._trained[name].detach())
            part.grad = self.own_part(name, gradient)

    def own_part(self, name: str, whole: Tensor) -> Tensor:
        """This replica's part of a parameter's values, or of its gradient."""
        return self._own_part(whole) if name in self._divided else whole

    @torch.no_grad()
    def gather(self, names: Collection[str]) -> None:
        """Write the new weights of all parts of these parameters into the parameters of every replica.

        All replicas call this with the same names in the same order. The gradients of the parts are dropped.
        """
        divided = [name for name in names if name in self._divided]
        large = [name for name in divided if self._is_gathered_in_place(self._trained[name])]
        self._gather_in_place(large)
        small = [name for name in divided if name not in large]
        for bucket in _runs(small, lambda name: self._trained[name].nbytes, buckets.BUCKET_BYTES, self._kind):
            self._gather_bucket(bucket)
        for name in names:
            self.parameters[name].grad = None

    def is_divided(self, tensor: Tensor, divided: Mapping[int, str]) -> bool:
        """Whether a tensor holds the elements of a part, so that `whole_tensors` puts it together."""
        return divided.get(id(tensor)) in self._divided

    def batches(
        self, tensors: Mapping[str, Tensor], divided: Mapping[int, str], most_bytes: int
    ) -> Iterator[dict[str, Tensor]]:
        """Divided tensors in batches. The parts of a batch on one replica have at most `most_bytes`.

        A larger part has a batch of its own. The batches are the same on all replicas.
        """

        def part_bytes(name: str) -> int:
            return self._length(self._trained[divided[id(tensors[name])]]) * tensors[name].element_size()

        for batch in _runs(sorted(tensors), part_bytes, most_bytes):
            yield {name: tensors[name] for name in batch}

    def whole_tensors(
        self, tensors: Mapping[str, Tensor], divided: Mapping[int, str], turn: int = 0
    ) -> dict[str, Tensor]:
        """Put divided tensors together for a checkpoint. Returns whole tensors by their names in the checkpoint.

        `divided` has parameter names by the `id` of each tensor. Each whole tensor goes to one replica, so no replica
        ever holds all tensors. Replica number `turn` gets the first tensor. All replicas call this together.
        """
        kept = {}
        for number, name in enumerate(sorted(tensors)):
            whole = self._gathered(tensors[name], self._trained[divided[id(tensors[name])]])
            if (number + turn) % self._count == self._index:
                kept[name] = whole
        return kept

    def fill(self, part: Tensor, whole: Tensor) -> None:
        """Write a tensor of the model, which every replica holds whole."""
        part.copy_(whole)

    def divided_state(self, optimizer: Optimizer) -> dict[int, str]:
        """Maps the `id` of each state tensor that has the shape of its part to the parameter's name."""
        name_of = {id(self.parameters[name]): name for name in self._divided}
        return {
            id(value): name_of[id(part)]
            for part, state in optimizer.state.items()
            if id(part) in name_of
            for value in state.values()
            if _is_like(value, part)
        }

    def loader(self, load: TensorLoader) -> TensorLoader:
        """A loader of saved tensors. It keeps only this replica's parts, and holds one whole tensor at a time."""

        def load_parts(names: Iterable[str]) -> dict[str, Tensor]:
            return {name: self._part_of_saved(name, load([name])[name]) for name in names}

        return load_parts

    def _part_of_saved(self, name: str, tensor: Tensor) -> Tensor:
        """This replica's part of `optim.state.PARAMETER.KEY` or `correction.PARAMETER.AGE`; others stay whole."""
        for prefix in ("optim.state.", "correction."):
            parameter = name.removeprefix(prefix).rpartition(".")[0]
            if name.startswith(prefix) and parameter in self._divided and _is_like(tensor, self._trained[parameter]):
                return self._own_part(tensor).clone()
        return tensor

    def _own_part(self, whole: Tensor) -> Tensor:
        """This replica's elements in row-major order. The result is a view if the memory has that order."""
        length = self._length(whole)
        return whole.reshape(-1)[self._index * length : (self._index + 1) * length]

    def _length(self, whole: Tensor) -> int:
        """Number of elements of every part. The last parts may have fewer, or none."""
        return -(-whole.numel() // self._count)

    def _kind(self, name: str) -> tuple[torch.dtype, torch.device]:
        return self._trained[name].dtype, self._trained[name].device

    def _is_gathered_in_place(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is large and contiguous, and has a part for every replica."""
        parts = -(-parameter.numel() // max(1, self._length(parameter)))
        return parameter.nbytes >= LARGE_BYTES and parameter.is_contiguous() and parts == self._count

    def _gather_in_place(self, names: list[str]) -> None:
        """Every replica sends its parts to the others, from and into the memory of the parameters."""
        for name in names:
            values = self._trained[name].detach().view(-1)
            parts = torch.split(values, self._length(values))
            sent = [
                dist.broadcast(part, dist.get_global_rank(self._group, replica), self._group, async_op=True)
                for replica, part in enumerate(parts)
            ]
            for work in sent:
                assert work is not None
                work.wait()

    def _gather_bucket(self, names: list[str]) -> None:
        lengths = [self._length(self._trained[name]) for name in names]
        width, first = sum(lengths), self._trained[names[0]]
        kind, elements = self._kind(names[0]), width * (self._count + 1)
        if kind not in self._buffers or self._buffers[kind].numel() < elements:
            self._buffers[kind] = first.new_zeros(elements)
        own, everyone = torch.split(self._buffers[kind][:elements], [width, width * self._count])
        for name, place in zip(names, torch.split(own, lengths), strict=True):
            part = self.parameters[name].detach()
            place[: part.numel()].copy_(part)
        if width:
            _all_gather(everyone, own, self._group)
        for name, columns in zip(names, torch.split(everyone.view(self._count, width), lengths, dim=1), strict=True):
            parameter = self._trained[name]
            parameter.data.copy_(columns.reshape(-1)[: parameter.numel()].view(parameter.shape))

    def _gathered(self, part: Tensor, parameter: Tensor) -> Tensor:
        length = self._length(parameter)
        own = torch.zeros(length, dtype=part.dtype, device=part.device)
        own[: part.numel()].copy_(part)
        everyone = torch.empty(length * self._count, dtype=part.dtype, device=part.device)
        if length:
            _all_gather(everyone, own, self._group)
        return everyone[: parameter.numel()].view(parameter.shape)


def _all_gather(everyone: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    """`all_gather_into_tensor`, also for complex tensors, which torch refuses."""
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name from torch 2.13 on
    gather(buckets.as_real(everyone), buckets.as_real(own), group=group)


def _runs(
    names: Iterable[str],
    bytes_of: Callable[[str], int],
    most_bytes: int,
    kind_of: Callable[[str], object] = lambda _name: None,
) -> Iterator[list[str]]:
    """Split names into lists. The names of a list have one kind and at most `most_bytes`; a larger one is alone."""
    run: list[str] = []
    for name in names:
        if run and (kind_of(name) != kind_of(run[0]) or sum(map(bytes_of, run)) + bytes_of(name) > most_bytes):
            yield run
            run = []
        run.append(name)
    if run:
        yield run


def check_elementwise(optimizer: Optimizer) -> None:
    """Raise `LaunchError` for an optimiser whose parameters must not be cut."""
    if type(optimizer) not in ELEMENTWISE:
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise LaunchError(
            "--shard-optimizer cuts parameters into parts, which is right only where a step treats every element by "
            f"itself: the job's optimiser is {type(optimizer).__name__}, and it takes torch's {known}"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise LaunchError(
            "--shard-optimizer gives the job's optimiser parts of parameters, which its step hooks would meet in place "
            "of whole ones: leave out the hooks, or run without it"
        )


def _is_like(value: object, whole: Tensor) -> bool:
    """Whether a value of an optimiser's state has one element for every element of a tensor."""
    return isinstance(value, Tensor) and value.shape == whole.shape
