"""Checks the claims of plan.json that are not figures of the formulas: step time, run, cause, bound and gap.

The simulation itself is not checked: `pipeplan simulate` runs it again. Sentences, rival plans and the solvers' work
are not checked either; no command prints them as checked results.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeplan.checker.certificates.certificate import CertifiedBound
from pipeplan.checker.document import FLUSH, WHOLE, CheckedStage, PlanDocument
from pipeplan.checker.figures import weight_versions
from pipeplan.checker.model import CheckedModel
from pipeplan.checker.shared_cards import shared_cores_bound_s
from pipeplan.checker.virtual_stages import check_bound
from pipeplan.cluster_data.devices import bundled_model_of, device_mismatch
from pipeplan.profile_data.profile import Profile
from pipeplan.util.files import Node
from pipeplan.util.units import show_time
from pipeplan_launch.job_reference import portable_reference

CLOSE = 1e-9
"""Relative tolerance of figures. A different order of addition changes a sum by much less. A wrong figure differs by
much more."""
TOLERANCE = 1e-6
"""Relative tolerance of a proof: times that differ by less count as equal."""
RELAXATION = "relaxation"
"""The solver that bounds simulated times. All other solvers bound times by the formulas."""
NOT_SHOWN = "stated, not shown"
WRITTEN_BY = re.compile(r"[0-9]+(\.[0-9]+){1,3}([-+.]?[a-z0-9]{1,16}){0,4}", re.ASCII)
"""Pattern of the version of pipeplan in plan.json."""


def same(stated: Node, computed: float) -> None:
    """Raise an `InputError` unless a stated figure equals the computed one, up to rounding."""
    value = stated.number()
    if not abs(value - computed) <= CLOSE * max(abs(computed), abs(value)):
        stated.fail(f"stated {value!r}, found {computed!r}")


def equal(stated: Node, *found: object) -> None:
    """Raise an `InputError` unless a stated value is one of the found values."""
    # Compared as text, because 1 equals True and 1.0 in Python.
    if repr(stated.value) not in map(repr, found):
        stated.fail(f"stated {stated.value!r}, found {' or '.join(map(repr, found))}")


def check_step_time(document: PlanDocument) -> str:
    """Check that the step time is the simulated step time, and at least the step time by the formulas. Return it in
    words.
    """
    stated, simulation = document.root["stated"], document.root["simulation"]
    simulated = simulation.get("minibatch_s")
    step_s = document.step_time_s
    if simulated is not None:
        same(simulation["ratio"], simulated.number() / document.step_time_s)
        step_s = max(step_s, simulated.number())
    same(stated["minibatch_s"], step_s)
    same(stated["minibatches_per_s"], 1.0 / step_s)
    equal(stated["simulated"], simulated is not None)
    words = f"{show_time(step_s)} for each minibatch"
    return f"{words}, simulated; `pipeplan simulate` does it again" if simulated else f"{words}, by the formulas"


def check_description(document: PlanDocument, profile: Profile, causes: Iterable[str]) -> str:
    """Check the profile's name and kind, the configuration, and the cause: the resource that limits the step time.

    `causes`: the possible causes, which are equal up to rounding. Returns configuration and cause in words.
    """
    origin, stated = profile.provenance, document.root["profile"]
    if not WRITTEN_BY.fullmatch(document.root["pipeplan"].text()):
        document.root["pipeplan"].fail("it is no version of pipeplan")
    for key, found in (
        ("model", profile.model_name),
        ("kind", origin.kind),
        ("how", origin.how),
        ("minibatch", profile.minibatch),
        ("threads", origin.threads),
    ):
        equal(stated[key], found)
    # A job's file is identified by its content, which the profile's digest covers, so its folder may differ.
    reference = portable_reference if profile.model_file is not None else str
    if reference(stated["ref"].text()) != reference(profile.model_ref):
        stated["ref"].fail(f"stated {stated['ref'].value!r}, found {profile.model_ref!r}")
    if document.options.inference != document.inference or document.options.accumulate != document.accumulate:
        document.root["options"].fail("`inference` or `accumulate` is not that of the plan")
    # The options of a plan for inference keep the default schedule of training, which has no effect.
    if not document.inference and document.options.schedule != document.schedule:
        document.root["options"].fail("`schedule` is not that of the plan")
    if (engine := document.root.get("data_parallel")) is not None:
        equal(engine, _data_parallel(document))
    config, cause = document.root["plan"]["config"], document.prediction["bound_by"]
    equal(config, configuration(document.stages, document.copies))
    equal(cause, *sorted(causes))
    if (document.prediction.get("batch") is None) is document.flushes:
        document.prediction.fail(f"the parts of a batch, `batch`, do not go with the schedule {document.schedule}")
    return f"{config.text()}, bound by {cause.text()}"


def _data_parallel(document: PlanDocument) -> str:
    """Name of the data parallelism that the executor uses for a plan of one stage; empty for other plans."""
    if len(document.stages) > 1 or len(document.stages[0].workers) == 1 or document.schedule != FLUSH:
        return ""
    return "ddp" if document.options.sharding == WHOLE else document.options.sharding


def configuration(stages: Sequence[CheckedStage], copies: int) -> str:
    """Replica counts from input to output, such as `15-1`, or `4×(1-1)` for four copies of a pipeline.

    Unequal shares of data parallelism are written as `5:3`. If workers run several stages, the counts are for devices:
    `8-8 × 2 stages`.
    """
    if stages[0].shares:
        return ":".join(map(str, stages[0].shares))
    devices = tuple(dict.fromkeys(stage.workers for stage in stages))
    if len(devices) < len(stages):  # workers run several stages each
        return f"{'-'.join(str(len(workers)) for workers in devices)} × {len(stages) // len(devices)} stages"
    counts = "-".join(str(len(stage.workers) // copies) for stage in stages)
    return counts if copies == 1 else f"{copies}×({counts})"


@dataclass(frozen=True)
class ShownBound:
    """The bound that a certificate shows for a plan whose cost was checked. Times are in seconds per minibatch."""

    step_s: float
    """The step time of the plan."""
    bound_s: float
    """Lower bound on the step time of every plan of the searched space, with everything charged."""

    @property
    def gap(self) -> float:
        """Upper bound on the advantage of any other plan of the searched space: step time / bound − 1."""
        return max(0.0, self.step_s / self.bound_s - 1.0) if self.bound_s > 0 else math.inf

    @property
    def optimal(self) -> bool:
        """Whether no plan of the searched space is faster by more than `TOLERANCE`."""
        return self.gap <= TOLERANCE

    @property
    def text(self) -> str:
        """The bound that the certificate shows, as a clause."""
        if self.optimal:
            return "no plan of the searched space is faster"
        share = f"{self.gap:.1%}" if self.gap >= 1e-3 else f"{self.gap * 100:.1g}%"
        least = show_time(self.bound_s)
        return f"no plan of the searched space takes less than {least}, so none is more than {share} faster"


def check_claims(document: PlanDocument, model: CheckedModel, shown: CertifiedBound | None = None) -> str | None:
    """Check the status, the gap and the bound of plan.json. A bound may be called proven only if a solver found it.

    `shown`: the bound of a certificate. Returns a summary, or None if nothing shows the bound.
    """
    root = document.root
    stated = ShownBound(document.step_s, root["bound_s"].number())
    if stated.bound_s > stated.step_s * (1 + TOLERANCE):
        root["bound_s"].fail(f"stated {stated.bound_s!r}, but this plan takes {stated.step_s!r}")
    gap = root.get("gap")
    gap_is = math.inf if gap is None else gap.number()
    if gap_is != stated.gap and not abs(gap_is - stated.gap) <= CLOSE:
        root["gap"].fail(f"stated {root['gap'].value!r}, found {stated.gap!r}")
    equal(root["status"], "optimal" if stated.optimal else "feasible")
    equal(root["verdict"]["agree"], True)
    if document.virtual:
        check_bound(document, model, stated.bound_s)
        equal(root["verdict"]["proven"], False)
        return f"no plan of {document.schedule} is more than {stated.gap:.1%} faster, by the work alone"
    _check_record(document, model, stated)
    if shown is None or stated.bound_s > shown.bound_s * (1 + TOLERANCE):
        return None
    return f"{root['status'].text()}, gap {stated.gap:.2%}; what each solver found is {NOT_SHOWN}"


def _check_record(document: PlanDocument, model: CheckedModel, stated: ShownBound) -> None:
    """Raise an `InputError` unless the bound comes from a solver or from the shared cores.

    A bound is proven if two solvers or the cores give it. No solver's bound may exclude the plan.
    """
    root, reaches = document.root, stated.bound_s * (1 - TOLERANCE)
    cores_s, found = shared_cores_bound_s(document, model), set[str]()
    for solver in root["verdict"]["solvers"].items():
        takes_s = document.step_s if solver["solver"].text() == RELAXATION else document.step_time_s
        if (bound_s := solver["bound_s"].number()) > takes_s * (1 + TOLERANCE):
            solver.fail(f"its bound is {bound_s!r} s, but there is a plan that takes less")
        if bound_s >= reaches:
            found.add(solver["solver"].text())
    if not found and cores_s < reaches:
        root["bound_s"].fail(f"stated {stated.bound_s!r}, and no solver's bound is as high")
    equal(root["verdict"]["proven"], stated.bound_s > 0 and (len(found) > 1 or cores_s >= reaches))


def check_run_figures(document: PlanDocument, profile: Profile) -> str | None:
    """Check the fields `throughput` and `updates`, and return a summary; None if plan.json has neither.

    The user's own figures are not checked: epochs, samples of an epoch, and tokens of a sample if they differ from the
    profile's.
    """
    throughput, updates = document.root.get("throughput"), document.root.get("updates")
    if updates is not None:
        _check_updates(document, updates)
    if throughput is None:
        return None if updates is None else "ages of gradients and samples of an update"
    rate, hourly = document.minibatch / document.step_s, document.cluster.price_per_hour

    def own(key: str) -> int | None:
        stated = throughput.get(key)
        return None if stated is None else stated.integer(minimum=1)

    def paid(seconds: float | None) -> float | None:
        return None if hourly is None or seconds is None else hourly * (seconds / 3600)

    tokens, samples, epochs = own("tokens_per_sample"), own("dataset_size"), own("epochs")
    tokens = tokens or profile.work.tokens_per_sample
    share, devices = _peak_share(document, profile, rate)
    epoch_s = None if samples is None else samples / rate
    run_s = None if epochs is None or epoch_s is None else epochs * epoch_s
    for key, computed in (
        ("samples_per_s", rate),
        ("tokens_per_s", rate * tokens if tokens else None),
        ("peak_share", share),
        ("epoch_s", epoch_s),
        ("run_s", run_s),
        ("price_per_million_samples", paid(1e6 / rate)),
        ("price_per_epoch", paid(epoch_s)),
        ("run_price", paid(run_s)),
    ):
        stated = throughput.get(key)
        if stated is not None and computed is None:
            stated.fail(f"stated {stated.value!r}, and nothing shows it")
        if computed is not None:
            same(throughput[key], computed)
    equal(throughput["peak_device"], devices)
    return f"{rate:.4g} samples/s, and what follows from it"


def _peak_share(document: PlanDocument, profile: Profile, rate: float) -> tuple[float | None, str]:
    """(share of the busy workers' peak FLOP/s that the model's FLOPs use at this rate, the devices' names)."""
    if not profile.work.flops or device_mismatch(profile, document.cluster):
        return None, ""
    peaks, names = [], set[str]()
    for worker in (worker for stage in document.stages for worker in stage.workers):
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
    """Check the largest age of each stage's gradients, in updates, and the number of samples in its updates."""
    ages = [weight_versions(document, index) - 1 for index in range(len(document.stages))]
    minibatches = document.minibatches if document.accumulates else None
    samples = [(minibatches or len(stage.workers)) * document.minibatch for stage in document.stages]
    equal(updates["stale_by"], ages)
    equal(updates["samples"], samples)
    equal(updates["synchronous"], not any(ages))
