"""Torch's wrappers around the user's module: DDP, or FSDP2 over a mesh of the workers."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, is_grad_enabled, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointError, checkpoint

from pipeplan_launch.data_parallel.module_program import ModuleProgram
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.hooks import parameter_hooks, refuse_accumulation_hooks
from pipeplan_launch.job.nested_tensors import map_tensors

# The repeated blocks of a model: the units in which FSDP2 gathers weights, and in which activations are recomputed.


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a model: two or more children of one class in a ModuleList or Sequential. If several sets
    of children qualify, returns the set with the most parameter elements.

    Returns [] if there are none. A block that shares a parameter with the rest of the model is left out, because only
    one unit can hold the parameter.
    """
    alike: dict[tuple[nn.Module, type], list[nn.Module]] = {}
    for one in model.modules():
        for child in one.children() if isinstance(one, nn.ModuleList | nn.Sequential) else ():
            alike.setdefault((one, type(child)), []).append(child)
    several = [members for members in alike.values() if len(members) > 1]
    largest = max(several, key=lambda members: sum(map(_elements, members)), default=[])
    counts = Counter(id(one) for _, one in model.named_parameters(remove_duplicate=False))
    return [block for block in largest if _elements(block) and not _shares(block, counts)]


def _elements(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shares(block: nn.Module, counts: Mapping[int, int]) -> bool:
    """Whether a parameter of a block also has a name outside of the block."""
    own = Counter(id(one) for _, one in block.named_parameters(remove_duplicate=False))
    return any(counts[key] > count for key, count in own.items())


def recompute_blocks(model: nn.Module) -> None:
    """Make every repeated block keep only its inputs in training, and run forward again for its backward pass.

    A model without repeated blocks is one block.
    """
    for block in repeated_blocks(model) or [model]:
        _recompute(block)


@contextmanager
def recomputation_explained() -> Iterator[None]:
    """Context of a backward pass: raises `LaunchError` for a block whose second forward pass differs from its first."""
    try:
        yield
    except CheckpointError as error:
        raise LaunchError(
            "a repeated block of the model does other work when its forward pass runs a second time, such as one that "
            "fills a cache: solve with --no-recompute"
        ) from error


def return_own_memory(block: nn.Module) -> None:
    """Make a block return no views. FSDP2 puts hooks on outputs, and a write into a view silently drops the hooks."""
    forward = block.forward

    def copying_views(*arguments: Any, **named: Any) -> Any:
        return map_tensors(forward(*arguments, **named), lambda one: one.clone() if one._is_view() else one)

    block.forward = copying_views


def _recompute(block: nn.Module) -> None:
    forward = block.forward

    def keeping_inputs(*arguments: Any, **named: Any) -> Any:
        if not is_grad_enabled():
            return forward(*arguments, **named)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return nullcontext(), _buffers_replaced(_copied_buffers(block))

        return checkpoint(forward, *arguments, use_reentrant=False, context_fn=contexts, **named)

    block.forward = keeping_inputs


Buffers = list[tuple[nn.Module, str, Tensor]]
"""(module, name of a buffer, tensor)."""


def _copied_buffers(block: nn.Module) -> Buffers:
    """Copies of a block's buffers, as the first forward pass finds them."""
    return [
        (module, name, buffer.clone())
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


@contextmanager
def _buffers_replaced(copies: Buffers) -> Iterator[None]:
    """Context in which a block uses these buffers, because the second forward pass must not write the block's own
    buffers.
    """
    own = [(module, name, module._buffers[name]) for module, name, _ in copies]
    try:
        for module, name, copy in copies:
            module._buffers[name] = copy
        yield
    finally:
        for module, name, buffer in own:
            module._buffers[name] = buffer


class Wrapper(Protocol):
    """A module around the user's module that averages gradients among the replicas."""

    @property
    def module(self) -> nn.Module:
        """The wrapping module, which takes a function of the model and runs the function."""

    def exchanging(self, last: bool) -> AbstractContextManager[None]:
        """Context of a forward or a backward pass. `last`: whether its backward pass averages the gradients of all
        passes so far among all replicas.
        """


class Alone:
    """One worker, or a model without trained parameters: nothing is averaged."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @contextmanager
    def exchanging(self, last: bool) -> Iterator[None]:
        """Context of any pass."""
        yield


class Replicated:
    """DDP: every replica holds all weights."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, *, rounds: bool) -> None:
        """`group`: the replicas, which have the same weights. `rounds`: whether they send gradients as bfloat16.

        torch chooses the bucket sizes. DDP fills buckets from the first parameter on, and by default the first bucket
        closes at 1 MiB. Backward completes that bucket last, so little of the all-reduce is left after the pass.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.8 does not know the new name of an option
            self.module = self._ddp = DistributedDataParallel(
                module,
                process_group=group,
                broadcast_buffers=False,  # replicas average them at the end of a segment
                init_sync=False,  # the weights have been compared
                gradient_as_bucket_view=True,
                find_unused_parameters=True,  # a parameter that no replica has used is not updated
            )
        if rounds:
            self._ddp.register_comm_hook(group, _exchange_rounded)

    @contextmanager
    def exchanging(self, last: bool) -> Iterator[None]:
        """Context of a forward or a backward pass; see `Wrapper`."""
        if last:
            yield
        else:
            with self._ddp.no_sync():
                yield


# Without annotations and under a name of its own, because DDP refuses torch's hook on machines without GPUs.
def _exchange_rounded(group, bucket):  # type: ignore[no-untyped-def]
    """Average a bucket of gradients as bfloat16. Complex gradients are averaged as they are."""
    return (allreduce_hook if bucket.buffer().is_complex() else bf16_compress_hook)(group, bucket)


class Sharded:
    """FSDP2: every worker holds parts of the weights, and gathers the weights of one unit at a time for its passes."""

    def __init__(self, program: ModuleProgram, mesh: DeviceMesh) -> None:
        """Divides the parameters of `program` in place, and moves them to the mesh's devices one unit at a time.

        Raises `LaunchError` for parameters that FSDP2 cannot divide.
        """
        refuse_indivisible(program)
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": True}
        for block in repeated_blocks(program.model):
            return_own_memory(block)
            fully_shard(block, **options)
        self._root = fully_shard(program.whole, **options)
        self.module: nn.Module = program.whole

    @contextmanager
    def exchanging(self, last: bool) -> Iterator[None]:
        """Context of a forward or a backward pass; see `Wrapper`."""
        # Every backward pass leaves gradients divided among the workers of a server.
        self._root.set_requires_all_reduce(last)
        yield


def refuse_indivisible(program: ModuleProgram) -> None:
    """Raise `LaunchError` for a parameter that FSDP2 cannot divide."""
    parameters = program.parameters_by_name()
    refuse_accumulation_hooks(parameters)
    hooked = next(iter(parameter_hooks(parameters)), None)
    if hooked is not None:
        raise LaunchError(
            f"the parameter {hooked!r} has a hook (register_hook), which takes a whole gradient, and under FSDP each "
            "worker has a part: remove the hook, or solve for a plan without FSDP"
        )
    if any(getattr(module, "sparse", None) is True for module in program.whole.modules()):
        raise LaunchError("FSDP cannot divide sparse gradients: build the embedding with sparse=False")
    for name, parameter in parameters.items():
        if not parameter.ndim or parameter.is_complex():
            what, remedy = (
                ("is complex", "hold its parts as two real ones")
                if parameter.ndim
                else ("has no dimensions", "give it one, as in torch.ones(1), or solve for a plan without FSDP")
            )
            raise LaunchError(f"the parameter {name!r} {what}, which FSDP cannot divide: {remedy}")
