"""Process groups of a run: joining the other workers, exchanging small values, and agreeing on failures."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipeplan_launch.comm import worker_values
from pipeplan_launch.comm.ordered_transport import EdgeGroups, make_edge_groups
from pipeplan_launch.comm.p2p import peer_loss_explained
from pipeplan_launch.devices.backend import backend_of
from pipeplan_launch.elastic import rendezvous, restart_state
from pipeplan_launch.elastic.local_workers import stay_on_loopback
from pipeplan_launch.elastic.rendezvous import Attempt
from pipeplan_launch.elastic.signals import call_before_exit
from pipeplan_launch.errors import LaunchError, print_status
from pipeplan_launch.plan.launch_plan import SHARDED, LaunchPlan
from pipeplan_launch.plan.run_options import GLOO
from pipeplan_launch.rank_mapping.host_identity import machine_and_network
from pipeplan_launch.rank_mapping.rank_assignment import RankAssignment

T = TypeVar("T")

# An idle worker, and the first stages at the end of an epoch, wait as long as the other workers need. Waiting workers
# still notice the death of a peer at once, because its connection closes.
NO_TIMEOUT = timedelta(days=30)
FINAL_ERROR_S = 10.0
"""Time for process 0 to report an error of all workers: torchrun kills it as soon as another process ends."""
MAX_VALUE_BYTES = 2**30
"""Size above which a value from another worker is refused before memory is taken for it."""
_NO_VALUE = 2**62
_attempt: list[Attempt] = []
"""The attempt that this worker has joined; empty before."""
_device_number: list[int] = []
"""The number of this process's CUDA device among its visible devices; empty until ranks are assigned."""


class FailedElsewhere(Exception):
    """Another worker has reported an error, so this worker ends without a message."""


@dataclass(frozen=True)
class Groups:
    """The process groups of a run. Every worker creates all of them, whether or not it is a member."""

    everyone: dist.ProcessGroup
    active: dist.ProcessGroup
    """The workers that belong to a stage."""
    replicas: dist.ProcessGroup | None
    """The replicas of this worker's stage; None if the stage has one."""
    flush: dist.ProcessGroup | None
    """The workers that belong to a stage, if the schedule flushes and there are several stages, or if each worker holds
    parts of the weights; else None."""
    gradients: dist.ProcessGroup | None
    """All workers, connected a second time for gradients between stages; None if no messages cross a network.

    Gloo announces a receive to the sender on the connection that the message will take. If gradients used the
    connection of the activations, an announcement would wait behind the data of the other direction, and the link would
    be idle between messages.
    """
    attempt: Attempt
    assignment: RankAssignment
    """The assignment of processes to workers, servers and devices."""
    edges: EdgeGroups | None = None
    """The groups for messages in the common order; None in mode `gloo`."""
    backend: str = "gloo"
    """The backend for tensors on the workers' devices."""
    mesh: tuple[dist.ProcessGroup, ...] = ()
    """For `hsdp`: (the workers with this worker's number on all servers, the workers of its server)."""


def join_workers(plan: LaunchPlan, timeout_s: float, transport: str = GLOO) -> Groups:
    """Join the other workers, found through torchrun's environment. Assign ranks, and make the process groups.

    From then on, RANK in the environment is the worker's number in the plan. `transport`: how messages travel between
    stages, one of `run_options.MODES`. Raises `LaunchError` (`PeerLost` if some workers are missing) or `LaunchOver`.
    """
    size = os.environ.get("WORLD_SIZE")
    if size is None or "RANK" not in os.environ:
        raise LaunchError(
            "this command is one worker of a plan, which torchrun starts: run the launch.sh of the plan folder"
        )
    devices = backend_of(plan.device)
    attempt = rendezvous.join_attempt(timeout_s, devices.cards())
    attempt, assignment = _with_ranks(plan, attempt)
    timeout, rank = timedelta(seconds=timeout_s), attempt.rank
    _attempt[:] = [attempt]
    call_before_exit(lambda over: announce_end(over=over))
    rendezvous.watch_for_restart(attempt, _end_as_superseded)
    if assignment.is_one_network:
        stay_on_loopback(os.environ)
    backend = devices.process_groups(assignment.own_device_each())
    if plan.data_parallel in SHARDED and devices.copies_to_host and not assignment.own_device_each():
        raise LaunchError("FSDP needs a GPU for every worker, and here some share one: start fewer workers, or use DDP")
    own_device = None
    if transport != GLOO and devices.copies_to_host:
        if not assignment.own_device_each():
            raise LaunchError("NCCL needs a GPU for every worker, and here some share one: give --transport gloo")
        own_device = device_of(plan)  # NCCL then connects as soon as a group is made
    hosts = assignment.hosts_text(rank)
    with peer_loss_explained(f"rank {rank} could not connect to the other workers{hosts}"):
        dist.init_process_group(
            backend,
            store=attempt.torch_store,
            rank=rank,
            world_size=plan.world,
            timeout=timeout,
            device_id=own_device,
        )
        everyone = _group(list(range(plan.world)), "gloo", NO_TIMEOUT)
        active = _group(list(plan.active), "gloo", NO_TIMEOUT)
        flush = None
        if plan.schedule.flushes and (len(plan.pipeline) > 1 or plan.data_parallel in SHARDED):
            flush = _group(list(plan.active), "gloo", timeout)
        gradients = None
        if plan.schedule.trains and len(plan.pipeline) > 1 and transport == GLOO and not assignment.is_one_network:
            gradients = _group(list(range(plan.world)), "gloo", timeout)
        own_replicas = None
        for workers in plan.device_workers:
            if len(workers) > 1:
                group = _group(list(workers), backend, timeout)
                own_replicas = group if rank in workers else own_replicas
        mesh = _mesh_groups(plan, backend, timeout) if plan.data_parallel == "hsdp" else ()
        edges = None if transport == GLOO else make_edge_groups(plan, backend, timeout)
    return Groups(everyone, active, own_replicas, flush, gradients, attempt, assignment, edges, backend, mesh)


def _mesh_groups(plan: LaunchPlan, backend: str, timeout: timedelta) -> tuple[dist.ProcessGroup, ...]:
    """`Groups.mesh`. All workers call this."""
    rows = plan.workers_by_server(0)
    columns = [list(column) for column in zip(*rows, strict=True)]
    rank = dist.get_rank()
    made = [[(ranks, _group(ranks, backend, timeout)) for ranks in one] for one in (columns, rows)]
    return tuple(group for one in made for ranks, group in one if rank in ranks)


def shared_groups(
    plan: LaunchPlan, wanted: Collection[tuple[int, ...]], groups: Groups, timeout_s: float
) -> dict[tuple[int, ...], dist.ProcessGroup]:
    """For each tuple of stages: a group of the workers of these stages. All workers call this, with the same tuples."""
    rank = dist.get_rank()
    with peer_loss_explained(f"rank {rank} could not connect to the other workers"):
        return {
            stages: _group(
                [worker for stage in stages for worker in plan.pipeline[stage].workers],
                groups.backend,
                timedelta(seconds=timeout_s),
            )
            for stages in sorted(wanted)
        }


def run_in_all(group: dist.ProcessGroup, call: Callable[[], T]) -> T:
    """Run `call` in all workers of the group; returns its result in this worker.

    If it raises `LaunchError` in any worker, the failing worker with the lowest rank raises its error and all others
    raise `FailedElsewhere`.
    """
    error, result = None, None
    try:
        result = call()
    except LaunchError as caught:
        error = caught
    lowest = first_failure(error is not None, group)
    if lowest is not None:
        if error is not None and lowest == dist.get_rank():
            raise error
        raise FailedElsewhere
    return result  # type: ignore[return-value]


def device_of(plan: LaunchPlan) -> torch.device:
    """The device on which this worker computes. Raises `LaunchError` if a CUDA plan finds no CUDA device."""
    number = _device_number[0] if _device_number else int(os.environ.get("LOCAL_RANK", "0"))
    return backend_of(plan.device).select(number)


def _with_ranks(plan: LaunchPlan, attempt: Attempt) -> tuple[Attempt, RankAssignment]:
    """The attempt with this process's rank in the plan, and the rank assignment.

    If the number of processes differs from the plan's number of workers, process 0 raises `LaunchError` and the others
    raise `LaunchOver`.
    """
    sizes = [plan.workers_on(server) for server in range(plan.servers)]
    if attempt.world != plan.world:
        _attempt[:] = [attempt]
        if attempt.rank:
            attempt.await_end(FINAL_ERROR_S)
            raise rendezvous.LaunchOver
        started = RankAssignment.of([attempt.world], attempt.locations).started()
        on_servers = f" ({', '.join(map(str, sizes))} on its servers)" if len(sizes) > 1 else ""
        raise LaunchError(
            f"the plan has {plan.world} workers{on_servers}, and {attempt.world} were started, {started}: run its "
            "launch.sh on every server; WORKERS sets how many one launch starts"
        )
    assignment = RankAssignment.of(sizes, attempt.locations)
    process = attempt.rank
    _device_number[:] = [assignment.device(process, plan.device_names, backend_of(plan.device).names())]
    os.environ["RANK"] = str(assignment.workers[process])
    restart_state.remember_workers(assignment.workers)
    return replace(attempt, rank=assignment.workers[process]), assignment


def will_restart() -> bool:
    """Whether a fault now would restart all workers: attempts are left, and the launch is not over."""
    return restart_state.may_restart() and not (_attempt and _attempt[0].is_over())


def announce_end(fault: str | None = None, over: bool = False) -> None:
    """Announce to the next attempt that this worker ends in an orderly way.

    `fault`: the fault that this worker noticed. `over`: whether there will be no next attempt.
    """
    if fault is not None:
        restart_state.record_fault(fault)
    if _attempt:
        _attempt[0].leave(fault, over)


def end_as_hung(hung_s: float) -> None:
    """End this worker because its main thread hangs. Called in another thread."""
    _end_as_superseded(f"worker {os.environ.get('RANK', '0')} hung for {hung_s:.0f} s in one action")


def _end_as_superseded(reason: str) -> None:
    """End this worker because its attempt is over. Called in a thread, as the main thread may be blocked."""
    if will_restart():
        announce_end(fault=reason)
        os._exit(restart_state.STATUS_PEER_LOST)
    print_status(f"error: {reason}")
    restart_state.record_final_status(2)
    announce_end(over=True)
    os._exit(2)


def _group(ranks: list[int], backend: str, timeout: timedelta) -> Any:
    return dist.new_group(ranks, timeout=timeout, backend=backend)


def first_failure(failed: bool, group: dist.ProcessGroup) -> int | None:
    """The lowest rank of the group that failed, or None. All workers of the group call this."""
    return lowest_of(dist.get_rank() if failed else None, group)


def sum_over(values: list[float], group: dist.ProcessGroup) -> list[float]:
    """Sums of the values over the workers of a group, known to all of them."""
    total = torch.tensor(values, dtype=torch.float64)
    with _lost_peers():
        dist.all_reduce(total, group=group)
    result: list[float] = total.tolist()
    return result


def lowest_of(value: int | None, group: dist.ProcessGroup) -> int | None:
    """The lowest value among the workers of a group, known to all of them; None if no worker has a value."""
    lowest = torch.tensor([_NO_VALUE if value is None else value])
    with _lost_peers():
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN, group=group)
    return None if int(lowest) == _NO_VALUE else int(lowest)


def wait_for(group: dist.ProcessGroup) -> None:
    """Wait until all workers of the group have called this."""
    with _lost_peers():
        dist.barrier(group)


def synchronise_workers(group: dist.ProcessGroup) -> float:
    """Wait until all workers of the group have called this; returns the time, by this worker's `time.perf_counter`.

    Workers of one machine share its clock and get the same time. Workers of different machines may be released by the
    barrier at slightly different times.
    """
    wait_for(group)
    own = machine_and_network()[0], time.perf_counter()  # processes of one boot share a clock, even across containers
    gathered: list[tuple[str, float]] = gather_everywhere(own, group, tuple[str, float])
    return min(moment for machine, moment in gathered if machine == own[0])


def broadcast(value: Any, source: int, group: dist.ProcessGroup, kind: Any) -> Any:
    """Broadcast the value of rank `source`, which is of type `kind`, to all workers of the group; returns it.

    The other ranks' `value` is not used. Values travel as MessagePack (`worker_values`), which cannot run code. Raises
    `LaunchError` if the received value has another type.
    """
    is_source = dist.get_rank() == source
    data = worker_values.encode(value) if is_source else b""
    size = torch.tensor([len(data)])
    with _lost_peers():
        dist.broadcast(size, src=source, group=group)
        content = _bytes_tensor(data, _checked_size(int(size)))
        dist.broadcast(content, src=source, group=group)
    return value if is_source else worker_values.decode(_content(content, int(size)), kind)


def gather_everywhere(value: Any, group: dist.ProcessGroup, kind: Any) -> list[Any]:
    """Gather the values of all workers of a group at each of them, by rank. `kind`: the type of the values.

    Raises `LaunchError` if a received value has another type.
    """
    data = worker_values.encode(value)
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    with _lost_peers():
        dist.all_gather(counts, torch.tensor([len(data)]), group=group)
        sizes = [_checked_size(int(count)) for count in counts]
        parts = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        dist.all_gather(parts, _bytes_tensor(data, max(sizes)), group=group)
    return [worker_values.decode(_content(part, size), kind) for part, size in zip(parts, sizes, strict=True)]


def gather_at(value: Any, destination: int, group: dist.ProcessGroup, kind: Any) -> list[Any]:
    """`gather_everywhere` at rank `destination`; returns [] elsewhere."""
    gathered = gather_everywhere(value, group, kind)
    return gathered if dist.get_rank() == destination else []


def _checked_size(size: int) -> int:
    if not 0 < size <= MAX_VALUE_BYTES:
        raise LaunchError(f"another worker sent a value of {size} bytes: another program writes here")
    return size


def _bytes_tensor(data: bytes, size: int) -> torch.Tensor:
    """The bytes, padded to `size`."""
    return torch.frombuffer(bytearray(data.ljust(size, b" ")), dtype=torch.uint8)


def _content(tensor: torch.Tensor, size: int) -> bytes:
    return bytes(tensor[:size].numpy())


def _lost_peers() -> AbstractContextManager[None]:
    return peer_loss_explained(f"rank {dist.get_rank()} lost another worker")
