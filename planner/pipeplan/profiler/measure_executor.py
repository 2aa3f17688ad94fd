"""Measures the costs of the executor on this machine: runs trials in a separate process, and fits the costs to them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pipeplan.cluster_data.executor_costs import DISTURBED, ExecutorCosts
from pipeplan.cluster_data.machine_costs import IdleCores, MachineCosts
from pipeplan.errors import InputError
from pipeplan_measure.overhead import LARGE_BYTES, SMALL_BYTES, VERSION_BYTES

LIMIT_S = 120.0
OTHERS = 0.25
"""The machine counts as disturbed if other programs use more cores than this during the trials."""
LEAST_OURS = 0.25
"""The trials are assumed to have at least this share of the cores, whatever other programs use."""
ALLOCATOR_SHARE, ACTIVATION_SHARE = 0.12, 0.4
"""Memory that the C library's allocator takes in addition, as a share of the memory in use, and a further share of the
activations. Measured with five models, not with the trials: docs/evidence/performance.md, "Memory"."""


class ExecutorTrials:
    """Context with the process that runs the executor's trials.

    The process imports torch as soon as it is started, which takes longer than the trials. Meanwhile this process can
    do other work that needs no quiet machine.
    """

    def __enter__(self) -> ExecutorTrials:
        self._folder = tempfile.TemporaryDirectory(prefix="pipeplan-trials-", ignore_cleanup_errors=True)
        folder = self._folder.name
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pipeplan_measure.overhead", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR", "TMPDIR": folder},
        )
        self._ready = False
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def wait_until_ready(self) -> None:
        """Wait until the process has imported torch, and uses no core. `measure` reports errors."""
        if not self._ready and self._process.stdout is not None:
            self._process.stdout.readline()
            self._ready = True

    def measure(self) -> MachineCosts:
        """Run the trials, which takes a few seconds, and return the costs. Raises `InputError` if they fail."""
        self.wait_until_ready()
        try:
            out, complaint = self._process.communicate("go\n", timeout=LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise InputError(f"its trials took longer than {LIMIT_S:.0f} s") from error
        if self._process.returncode:
            last = (complaint.strip().splitlines() or ["no message"])[-1]
            raise InputError(f"its trials failed: {last}")
        return fitted(json.loads(out.strip().splitlines()[-1]), datetime.now(UTC))


def fitted(found: dict[str, Any], now: datetime) -> MachineCosts:
    """The executor's costs, computed from the output of the trials."""
    when = now.isoformat(timespec="seconds").replace("+00:00", "Z")
    trials, cores = found["trials"], len(os.sched_getaffinity(0))
    others = max(trial["others"] for trial in trials)
    costs, disturbed = costs_of(trials, when), others > OTHERS
    if disturbed:
        costs = replace(costs, source=costs.source + DISTURBED)
    return MachineCosts(
        costs, throughput_of(trials, cores), when, disturbed, alone_pass_s(trials, costs), idle_cores_of(trials, cores)
    )


def costs_of(trials: Sequence[dict[str, Any]], when: str) -> ExecutorCosts:
    """The executor's costs from the trials without compute, for workers that run beside others.

    A single stage runs two passes of a minibatch, handles its samples and computes a loss. The last of two stages also
    receives a message and sends one. The first of two stages does all of this except for the samples. Larger messages
    increase the cost of the last stage. Larger weights increase the cost of the first stage: because its gradients are
    old, it keeps another version and corrects its updates. In small trials, nearly all memory of a worker is that of
    the executor. Reading samples is left out, because a profile has this time for the job's own data.
    """
    by_name = {trial["name"]: trial for trial in trials}
    worker_bytes = max(trial["peak_bytes"] for trial in trials if trial["name"] in ("pass", "message"))
    small, large = by_name["message"]["cpu_s"], by_name["large"]["cpu_s"]
    more = [max(0.0, one - other) for one, other in zip(large, small, strict=True)]
    corrected_s = by_name["corrected"]["cpu_s"][0] - large[0]
    alone, last = _own_s(by_name["pass"]), _own_s(by_name["message"])
    sample_s = min(alone, max(0.0, last - small[0]))
    return ExecutorCosts(
        pass_s=(alone - sample_s) / 2,
        message_s=max(0.0, last - alone) / 2,
        message_byte_s=more[1] / (2 * (LARGE_BYTES - SMALL_BYTES)),
        version_byte_s=max(0.0, more[0] - more[1]) / VERSION_BYTES,
        source=f"measured on this machine at {when}",
        worker_bytes=worker_bytes,
        allocator_share=ALLOCATOR_SHARE,
        activation_share=ACTIVATION_SHARE,
        sample_s=sample_s,
        correction_byte_s=max(0.0, corrected_s) / VERSION_BYTES,
    )


def _own_s(trial: dict[str, Any]) -> float:
    """Processor time of a minibatch on the last worker of a trial, without reading the samples."""
    return max(0.0, float(trial["cpu_s"][-1] - trial["load_s"][-1]))


def alone_pass_s(trials: Sequence[dict[str, Any]], costs: ExecutorCosts) -> float:
    """Time of a pass on a worker that runs alone; at most the time beside another worker."""
    found = [_own_s(trial) for trial in trials if trial["name"] == "alone"]
    return min(costs.pass_s, max(0.0, found[0] - costs.sample_s) / 2) if found else costs.pass_s


def throughput_of(trials: Sequence[dict[str, Any]], cores: int) -> dict[int, float]:
    """Throughput of k busy workers relative to one worker, by k, from trials of pipelines with k equal stages.

    C(k) is the processor time of a stage for a minibatch, without messages, as the mean over the stages. C(k) exceeds
    C(1), because workers share caches, memory bandwidth and clock frequency. The throughput of k workers is
    min(k, cores) · C(1) / C(k). Processor time excludes the load of other programs.
    """
    busy = {trial["workers"]: trial for trial in trials if trial["products"]}
    message_s = 2 * costs_of(trials, "").message_s
    (alone_s,) = busy[1]["cpu_s"]
    found = {}
    for count, trial in sorted(busy.items()):
        messages_s = 2 * (count - 1) * message_s
        together = min(count, cores) * alone_s * count / (sum(trial["cpu_s"]) - messages_s)
        found[count] = min(count, cores, max(1.0, together))
    return found


def idle_cores_of(trials: Sequence[dict[str, Any]], cores: int) -> IdleCores | None:
    """The idle cores of the trial with one worker more than cores; None if there is no such trial.

    Cores are sometimes idle although there are more workers than cores, because the worker that could continue has no
    core. Cores that other programs use do not count.
    """
    for trial in trials:
        if trial["products"] and trial["workers"] > cores:
            ours = cores * max(LEAST_OURS, 1 - trial["others"] / cores)
            return IdleCores(cores, max(0.0, 1 - trial["cores_in_use"] / ours), statistics.fmean(trial["cpu_s"]))
    return None
