"""Every formula of the cost model, once. Every function accepts scalars or NumPy arrays that broadcast.

Times are seconds, sizes bytes, bandwidths bytes/s. A time "per minibatch" is a time of one copy of the pipeline in the
steady state. A quoted name below is a section of docs/cost-model.md. Both use the same symbols: r replicas, w parameter
bytes and depth d of a stage; T the step time, in seconds per minibatch; B and α the bandwidth and latency of a link; M
the minibatches per update.

Source of each formula that names none: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training,
SOSP 2019, §3.1 (stage and boundary times), §3.2 (depth), §3.3 (weight versions). docs/cost-model.md explains where
pipeplan's formulas differ from these, and by which measurement.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeplan.cluster_data.executor_costs import ExecutorCosts

ROUNDING = 1e-9
"""Rounding tolerance of `in_flight_depth`: a quotient that exceeds an integer by less counts as that integer."""


def compute_time(work_s: Any, replicas: Any, speed: Any) -> Any:
    """Compute time per minibatch of a stage: work / (replicas · speed), because the replicas take minibatches in turn.

    `work_s` is forward plus backward time of one minibatch on a device of speed 1. PipeDream §3.1; "The step time".
    """
    return work_s / (replicas * speed)


def ring_allreduce_time(members: Any, size: Any, bandwidth: Any, latency_s: Any) -> Any:
    """Time of one ring all-reduce of `size` bytes among m `members`: 2 (m-1)/m · size / B + 2 (m-1) · α.

    In 2 (m-1) steps each member sends and receives a chunk of size / m bytes. The time is 0 for one member.
    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009.
    """
    return 2 * (members - 1) / members * size / bandwidth + 2 * (members - 1) * latency_s


def overlapped(compute_s: Any, synchronisation_s: Any, overlap: float) -> Any:
    """Time of compute and synchronisation together: max(c, g) + (1-ω) · min(c, g), with ω the `overlap`.

    With ω = 1, PipeDream's assumption (§3.1), the shorter time hides behind the longer; with ω = 0 the times add up.
    "The step time".
    """
    return np.maximum(compute_s, synchronisation_s) + (1.0 - overlap) * np.minimum(compute_s, synchronisation_s)


def core_time(work_s: Any, replicas: Any, allreduce_s: Any, interval: Any, overlap: float) -> Any:
    """Core time of one replica of a stage per minibatch: work / replicas + (1-ω) · all-reduce / interval.

    The formula applies where workers share cores ("Shared cores"). The cores move the data of an all-reduce, so they
    are busy with the part that does not overlap with compute. There is one all-reduce for every `interval` minibatches.
    """
    return work_s / replicas + (1.0 - overlap) * allreduce_s / interval


def executor_time(
    costs: ExecutorCosts, passes: int, boundaries: Any, crossing_bytes: Any, versioned_bytes: Any, steps: float
) -> Any:
    """The executor's own work at one stage for one minibatch, in seconds on a device of speed 1.

    passes · (pass + boundaries · message) + crossing · message_byte + versioned · version_byte + steps · step, and in
    addition sample + read at the first and the last stage. `passes` is 2 in training and 1 in inference. `boundaries`
    is the number of neighbouring stages (0 to 2), `crossing_bytes` the bytes that cross both boundaries in both
    directions. `versioned_bytes` are the parameters that updates copy, and `steps` the optimiser's steps, both per
    minibatch. "The executor's own work".
    """
    messages = passes * (costs.pass_s + boundaries * costs.message_s) + steps * costs.step_s
    messages = messages + np.less(boundaries, 2) * costs.samples_s
    return messages + crossing_bytes * costs.message_byte_s + versioned_bytes * costs.version_byte_s


def backward_time(forward_s: Any, backward_s: Any, recompute: Any) -> Any:
    """Backward time of a stage: b + f where the stage recomputes its forward pass, otherwise b. "Recomputation"."""
    return backward_s + np.where(recompute, forward_s, 0.0)


def boundary_time(size: Any, bandwidth: Any, links: Any = 1) -> Any:
    """Busy time of a boundary in one direction, per minibatch: size / (bandwidth · links).

    `links` is 1, or under `Options.boundary` "parallel" the smaller of the two stages' replicas in one copy. PipeDream
    §3.1 charges 2 a / B, both directions on one link; here links are full duplex. "The step time" and "Boundary".
    """
    return size / (bandwidth * links)


def transfer_time(size: Any, bandwidth: Any, latency_s: Any) -> Any:
    """Time of one message from one stage to the next: size / bandwidth + latency. "The step time", symbol x."""
    return size / bandwidth + latency_s


def in_flight_depth(behind: Any, wait: Any, transfer_s: Any, step_time_s: float, replicas: Any) -> Any:
    """Depth: the minibatches that each replica of a stage keeps in flight so that the pipeline sustains `step_time_s`.

    d = 1 + ceil((behind + wait + 2 · transfer / step time) / replicas), with `behind` from `in_flight_behind` of the
    next stage and `wait` from `group_wait` of this stage. The last stage needs depth 1. PipeDream's warm-up count
    (§3.2) is a lower bound, because it ignores transfers and waits: the number of workers from this stage on, divided
    by the stage's replicas. "In-flight depth".
    """
    return 1 + np.ceil((behind + wait + 2 * transfer_s / step_time_s) / replicas - ROUNDING)


def in_flight_behind(depth: Any, replicas: Any, wait: Any) -> Any:
    """Minibatches that the previous stage must cover: d · r in flight at this stage, plus its `group_wait`."""
    return depth * replicas + wait


def group_wait(allreduce_s: Any, step_time_s: float, replicas: Any, copies: int = 1) -> Any:
    """Minibatches that pass while the replicas of a stage wait for the all-reduce of their group: max(0, G / T - 1).

    The minibatches of a group start within r - 1 step times. The all-reduce then takes G (`allreduce_s`). The update is
    due r step times after the group started. G is at most r step times unless synchronisation limits the step time, so
    the wait is at most r - 1. With m copies of the pipeline, the result is an upper bound: r - 1/m minibatches of one
    copy. "In-flight depth".
    """
    if copies > 1:
        return replicas - 1.0 / copies
    return np.maximum(0.0, allreduce_s / step_time_s - 1.0)


def depth_limited_step_time(
    depth: int, replicas: int, following: float, transfer_s: float, waits: Sequence[float]
) -> float:
    """Step time that a depth sustains; infinite where the depth is too small.

    This is `in_flight_depth` solved for the step time.

    `following` is the number of minibatches in flight at the next stage, d′ · r′; `waits` are the all-reduce times of
    this stage and of the next. With slack = (d - 1) r - d′ r′ the condition is slack · T ≥ 2 · transfer + Σ max(0, wait
    - T), which gives one lower bound on T for every subset of the waits.
    """
    slack = (depth - 1 + ROUNDING) * replicas - following
    if slack <= 0:
        return float("inf")
    subsets = [subset for count in range(len(waits) + 1) for subset in itertools.combinations(waits, count)]
    return max((2 * transfer_s + sum(subset)) / (slack + len(subset)) for subset in subsets)


def buffered_synchronisation(allreduce_s: Any, accumulate: int) -> Any:
    """Gradient synchronisation per minibatch under 2BW: one all-reduce for every `accumulate` minibatches. "2BW".

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021.
    """
    return allreduce_s / accumulate


def buffered_step_time(depth: int, replicas: int, allreduce_s: float, minibatches: int, copies: int = 1) -> float:
    """Smallest step time T at which two weight versions suffice: d · r + max(0, G / T - 1/m) ≤ minibatches, solved for
    T.

    The second term is the wait of 2BW: minibatches of one of m copies between the last backward pass of a group and the
    group's update. The update is ready before the first forward pass that needs it, so the pipeline never waits.
    `minibatches` is the number of minibatches per update in one copy, accumulate // copies. The result is infinite
    if more than `minibatches` minibatches are in flight. "2BW".
    """
    spare = minibatches - depth * replicas
    return float("inf") if spare < 0 else allreduce_s / (spare + 1.0 / copies)


def rounds(minibatches: Any, servers: Any) -> Any:
    """Minibatches on the busiest of `servers` replicas or links that take them in turn: ceil(minibatches / servers)."""
    # For whole numbers of this size, / is exact enough for ceil, and much faster over arrays than //.
    return np.ceil(minibatches / servers) if isinstance(servers, np.ndarray) else -(-minibatches // servers)


def flush_busy(pass_s: Any, minibatches: Any, servers: Any) -> Any:
    """Time for which the minibatches of an update keep one resource busy: ceil(M / r) · pass, in seconds.

    `servers` (r) is the number of replicas of a stage or of links of a boundary, `pass_s` the time of one minibatch on
    one of them. "Flush schedules".
    """
    return rounds(minibatches, servers) * pass_s


def flush_exposed(allreduce_s: Any, backward_s: Any, hidden_share: float) -> Any:
    """Lower bound on the exposed all-reduce time of a stage under a flush, in seconds per update.

    Buckets of gradients leave during the stage's last backward pass, which takes `backward_s` seconds. The pass hides
    at most the share `hidden_share` of the communication that it overlaps with. "Flush schedules".
    """
    return allreduce_s - hidden_share * np.minimum(allreduce_s, backward_s)


def flush_depth(behind: Any, minibatches: Any, replicas: Any) -> Any:
    """Depth of a stage under a flush: min(ceil(M / r), 1 + ceil(behind / r)), with `behind` from the next stage.

    This depth covers the minibatches in flight at the next stage without waiting for the first of them to return.
    "Flush schedules".
    """
    return np.minimum(rounds(minibatches, replicas), 1 + np.ceil(behind / replicas - ROUNDING))


def shared_weight_time(size: Any, bandwidth: Any, latency_s: Any, workers: Any) -> Any:
    """The charge of one stage for the gradients of weights of which it has a shared copy: size / B + D · α.

    B, α and D are the bandwidth, the latency and the number of workers of the whole cluster. At least two stages hold a
    copy, on K workers together. So the sum of their charges is at least the time of one ring all-reduce among the K
    workers, which takes at most 2 · size / B + 2 (K-1) · α. "Shared weights".
    """
    return size / bandwidth + workers * latency_s


def deferred_memory(deferred: Any, minibatch: Any) -> Any:
    """Memory of deferred gradients of weights, in bytes: (2 · deferred + 1) · minibatch; 0 if none is deferred.

    A deferred minibatch keeps its activations and the gradients of the outputs of layers with parameters. These
    gradients take at most as much memory as the activations. The stage also frees nothing of the minibatch whose
    backward pass runs. "Zero bubble".
    """
    return np.where(np.greater(deferred, 0), (2 * deferred + 1) * minibatch, 0)


def fixed_memory(parameters: Any, buffers: Any, boundary: Any, optimizer_ratio: float, training: bool) -> Any:
    """Memory of one worker that does not grow with the depth, in bytes.

    In training it counts one gradient and the optimiser's state for all parameters, the module buffers, and
    communication buffers for one minibatch in both directions at both boundaries (`boundary` bytes). In inference it
    counts the weights instead of gradient and state. `optimizer_ratio` is bytes of optimiser state per byte of
    parameters (`Problem.state_ratio`). "Memory of one worker".
    """
    per_parameter = 1.0 + optimizer_ratio if training else 1.0
    return parameters * per_parameter + buffers + boundary


def replica_memory(parameters: Any, replicas: Any, lag: Any = 0) -> Any:
    """Memory that replication adds in training, in bytes.

    The sum counts flat buckets for the all-reduce of gradients and `lag` more copies of the weights, for further weight
    versions."""
    return parameters * (np.greater(replicas, 1) + lag)


def divided_state(parameters: Any, replicas: Any, optimizer_ratio: float) -> Any:
    """Bytes of the optimiser's state that a worker saves where replicas divide the state: ratio · w · (1 - 1/r).

    Source: Rajbhandari et al., ZeRO, SC 2020, stage 1. "Memory of one worker".
    """
    return parameters * optimizer_ratio * (1.0 - 1.0 / replicas)


def version_memory(parameters: Any, versions: Any, copies: int = 1) -> Any:
    """Memory of `versions` versions of the weights, in bytes, with `copies` copies of the weights for each version.

    A version needs two copies (`Options.copies_per_version`) where a correction keeps steps of the optimiser.
    "Corrected updates".
    """
    return parameters * versions * copies


def recompute_memory(saved: Any, sent: Any, recompute: Any) -> Any:
    """Memory that a stage needs once if it recomputes, in bytes: the activations of the minibatch whose backward pass
    runs."""
    return np.where(recompute, saved + sent, 0)


def memory_per_depth(saved: Any, received: Any, sent: Any, *, recompute: Any = False) -> Any:
    """Memory in training for each minibatch in flight, in bytes, without weight versions.

    The sum counts the activations saved for backward, and the stage's input (`received`) and output (`sent`). A stage
    that recomputes keeps only its input.

    Tensors that cross a boundary are held by both stages until the backward pass. A profile counts each of these
    tensors once, with the first layer that saves it. Here both stages at a boundary are charged for the tensor, so one
    stage may count it twice. "Memory of one worker".
    """
    return received + np.where(recompute, 0, saved + sent)
