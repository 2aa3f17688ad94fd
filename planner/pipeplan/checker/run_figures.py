"""Checks what plan.json says of a run: its throughput, share of the peak, time and price, and the age of its gradients.

An independent implementation of docs/choice.md, "What a run takes", and of the number of samples of an update.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pipeplan.checker.document import ACCUMULATING, PlanDocument
from pipeplan.checker.figures import weight_versions
from pipeplan.cluster_data.devices import bundled_model_of, device_mismatch
from pipeplan.profile_data.profile import Profile
from pipeplan.util.files import Node

Same = Callable[[Node, float], None]
"""Raises an `InputError` unless a stated figure equals a computed one."""


def check_run_figures(document: PlanDocument, profile: Profile, same: Same) -> str | None:
    """Check the fields `throughput` and `updates`, and return a summary; None where plan.json has neither.

    The user's own figures are taken as they are: epochs, samples of an epoch, and tokens of a sample where they are not
    the profile's. Raises an `InputError` that names the first field that is wrong.
    """
    throughput, updates = document.root.get("throughput"), document.root.get("updates")
    if updates is not None:
        _check_updates(document, updates)
    if throughput is None:
        return None if updates is None else "ages of gradients and samples of an update"
    rate = document.minibatch / document.step_s
    same(throughput["samples_per_s"], rate)
    own, known = throughput.get("tokens_per_sample"), profile.work.tokens_per_sample
    tokens = own.integer(minimum=1) if own is not None else known
    _same_or_absent(throughput, "tokens_per_s", rate * tokens if tokens else None, same)
    share, devices = _peak_share(document, profile, rate)
    _same_or_absent(throughput, "peak_share", share, same)
    if throughput["peak_device"].text() != devices:
        throughput["peak_device"].fail(f"stated {throughput['peak_device'].value!r}, found {devices!r}")
    _check_cost(document, throughput, rate, same)
    return f"{rate:.4g} samples/s, and what follows from it"


def _check_cost(document: PlanDocument, throughput: Node, rate: float, same: Same) -> None:
    """Check the seconds and prices of an epoch and of a run. A price is for the whole cluster."""
    epochs, samples = throughput.get("epochs"), throughput.get("dataset_size")
    epoch_s = None if samples is None else samples.integer(minimum=1) / rate
    run_s = None if epochs is None or epoch_s is None else epochs.integer(minimum=1) * epoch_s
    hourly = document.cluster.price_per_hour
    for price, time, seconds in (
        ("price_per_million_samples", None, 1e6 / rate),
        ("price_per_epoch", "epoch_s", epoch_s),
        ("run_price", "run_s", run_s),
    ):
        paid = None if hourly is None or seconds is None else hourly * (seconds / 3600)
        _same_or_absent(throughput, price, paid, same)
        if time is not None:
            _same_or_absent(throughput, time, seconds, same)


def _same_or_absent(node: Node, key: str, computed: float | None, same: Same) -> None:
    stated = node.get(key)
    if stated is not None and computed is None:
        stated.fail(f"stated {stated.value!r}, and nothing shows it")
    if computed is not None:
        same(node[key], computed)


def _peak_share(document: PlanDocument, profile: Profile, rate: float) -> tuple[float | None, str]:
    """The share of the busy workers' peak that a sample's own FLOPs take at this rate, and the devices' names."""
    if not profile.work.flops or device_mismatch(profile, document.cluster):
        return None, ""
    peaks, names = [], set[str]()
    for stage in document.stages:
        for worker in stage.workers:
            model = bundled_model_of(document.cluster.device_of(worker).name)
            if model is None:
                return None, ""
            names.add(model.name)
            sample_s = 0.0
            for one in profile.work.flops:
                flops = one.forward + (0.0 if document.inference else one.backward)
                sample_s += flops / model.peaks[model.usable_arithmetic(one.kind, one.arithmetic)]
            peaks.append(1.0 / sample_s)
    return rate / math.fsum(peaks), ", ".join(sorted(names))


def _check_updates(document: PlanDocument, updates: Node) -> None:
    """Check the greatest age of each stage's gradients, in updates, and the samples that its updates average over."""
    ages, samples = [], []
    for index, stage in enumerate(document.stages):
        ages.append(weight_versions(document, index) - 1)
        minibatches = document.accumulate if document.schedule in ACCUMULATING else None
        samples.append((minibatches or len(stage.workers)) * document.minibatch)
    for key, found in (("stale_by", ages), ("samples", samples)):
        if [node.integer() for node in updates[key].items()] != found:
            updates[key].fail(f"stated {updates[key].value!r}, found {found!r}")
    if updates["synchronous"].boolean() is any(ages):
        updates["synchronous"].fail(f"stated {updates['synchronous'].value!r}, and gradients are {ages} updates old")
