"""Torch's wrappers around the user's module: DDP, or FSDP2 over a mesh of the workers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipeplan_launch.comm import buckets
from pipeplan_launch.data_parallel.blocks import repeated_blocks, return_own_memory
from pipeplan_launch.data_parallel.module_program import ModuleProgram
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.hooks import parameter_hooks, refuse_accumulation_hooks


class Wrapper(Protocol):
    """A module around the user's own one, which averages gradients among the replicas."""

    @property
    def module(self) -> nn.Module:
        """Takes a function of the model, and runs it."""

    def exchanging(self, last: bool) -> AbstractContextManager[None]:
        """Context of a forward or a backward pass. `last`: whether its backward pass averages the gradients of it and
        of the passes before it among all replicas.
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

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        """`group`: the replicas, which have the same weights."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch 2.8 does not know the new name of an option
            self.module = self._ddp = DistributedDataParallel(
                module,
                process_group=group,
                broadcast_buffers=False,  # replicas average them at the end of a segment
                init_sync=False,  # the weights have been compared
                gradient_as_bucket_view=True,
                find_unused_parameters=True,  # a parameter that no replica has used is not updated
                bucket_cap_mb=buckets.BUCKET_BYTES // 2**20,
            )

    @contextmanager
    def exchanging(self, last: bool) -> Iterator[None]:
        """Context of a forward or a backward pass; see `Wrapper`."""
        if last:
            yield
        else:
            with self._ddp.no_sync():
                yield


class Sharded:
    """FSDP2: every worker holds its parts of the weights, and gathers those of one unit for its passes."""

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
        self._root.set_requires_all_reduce(last)  # every backward pass ends with gradients divided inside a server
        yield


def refuse_indivisible(program: ModuleProgram) -> None:
    """Raise `LaunchError` for a parameter that cannot be in parts."""
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
                else ("has no dimensions", "give it one, as in torch.ones(1)")
            )
            raise LaunchError(f"the parameter {name!r} {what}, which FSDP cannot divide: {remedy}")
