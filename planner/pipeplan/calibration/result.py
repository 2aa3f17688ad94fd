"""The results of a calibration: a profile and a cluster with their provenance, and the JSON document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeplan._version import __version__
from pipeplan.calibration.calibrate import Calibrated
from pipeplan.calibration.measured_stages import ObservedRun
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.profile_data.profile import Profile
from pipeplan.util.text import utc_now

MARK = "calibrated: "
_NEW = 1e-9


@dataclass(frozen=True)
class CalibratedStage:
    """One stage of one run. Factors are measured times divided by old times; None if the old time was zero."""

    run: str
    stage: int
    """Index of the stage, from 0."""
    layers: tuple[str, ...]
    forward: float | None
    backward: float | None
    update: float | None
    own_s: float
    """Other busy seconds of a replica per minibatch: reading samples, messages, the executor, all-reduces."""
    cpu_share: float
    """Share of the measured times in which the workers computed, if they share cores; else 1."""


def calibrated_stages(runs: Sequence[ObservedRun], profile: Profile) -> list[CalibratedStage]:
    """The measured times of every stage of every run, relative to the old profile."""
    layers = {layer.name: layer for layer in profile.layers}
    made = []
    for run in runs:
        for index, (stage, busy, share) in enumerate(zip(run.plan.stages, run.stages, run.shares, strict=True)):
            own = [layers[name] for name in stage.layers]
            forward = sum(layer.forward_s for layer in own)
            backward = sum(layer.backward_s for layer in own) + (forward if stage.recompute else 0.0)
            update = sum(layer.update_s for layer in own) * run.options.update_share
            made.append(
                CalibratedStage(
                    run=run.name,
                    stage=index,
                    layers=stage.layers,
                    forward=_ratio(busy.forward_s, forward),
                    backward=_ratio(busy.backward_s, backward),
                    update=_ratio(busy.update_s, update),
                    own_s=busy.load_s + busy.own_s + busy.sync_s,
                    cpu_share=share,
                )
            )
    return made


def _ratio(measured: float, before: float) -> float | None:
    return measured / before if before > 0 else None


def profile_of(calibrated: Calibrated, runs: Sequence[ObservedRun], before: Profile) -> Profile:
    """The new profile, with the calibration in its provenance."""
    old = before.provenance
    notes = [note for note in old.notes if not note.startswith(MARK)]
    for row in calibrated_stages(runs, before):
        parts = (("forward", row.forward), ("backward", row.backward), ("update", row.update))
        factors = ", ".join(f"{name} × {value:.3g}" for name, value in parts if value is not None)
        also = f"; of the clock, {row.cpu_share:.0%} was computing" if row.cpu_share < 1 else ""
        notes.append(
            f"{MARK}run {row.run}, stage {row.stage} ({row.layers[0]} … {row.layers[-1]}): {factors or 'new'}, "
            f"and {row.own_s * 1e3:.3g} ms besides{also}"
        )
    notes.append(f"{MARK}all layers × {calibrated.slack:.4g}, for the time in which stages wait for each other")
    how = f"spread over the layers of each stage in proportion to a profile that was {old.kind}"
    how += f" ({old.how})" if old.how else ""
    provenance = replace(
        old,
        kind="calibrated",
        when=utc_now(),
        how=old.how if old.kind == "calibrated" else how,
        pipeplan=__version__,
        repeats=min(run.minibatches for run in runs),
        notes=tuple(notes),
    )
    return replace(calibrated.profile, provenance=provenance, step_s=0.0, read_s=0.0).without_load()


def cluster_of(calibrated: Calibrated, runs: Sequence[ObservedRun]) -> Cluster:
    """The new cluster. The field `source` of its levels names the fitted efficiencies."""
    levels = []
    for level in calibrated.cluster.levels:
        sources = [level.source.partition(MARK)[0].removesuffix("; ")]
        for fitted in calibrated.fitted:
            if fitted.level == level.name and abs(fitted.after - fitted.before) > _NEW:
                sources.append(f"{MARK}{fitted.operation} of run {runs[-1].name}, {fitted.why}")
        levels.append(replace(level, source="; ".join(part for part in sources if part)))
    return replace(calibrated.cluster, levels=tuple(levels))


def calibration_document(calibrated: Calibrated, runs: Sequence[ObservedRun], before: Profile) -> dict[str, Any]:
    """The document that `pipeplan calibrate --json` prints."""
    return {
        "format": "pipeplan-calibration",
        "version": 1,
        "runs": [
            {
                "run": run.name,
                "plan": run.plan.config,
                "minibatches": run.minibatches,
                "predicted_s": run.predicted_s,
                "measured_s": run.step_time_s,
                "calibrated_s": step_s,
            }
            for run, step_s in zip(runs, calibrated.step_times_s, strict=True)
        ],
        "stages": [vars(row) | {"layers": list(row.layers)} for row in calibrated_stages(runs, before)],
        "links": [vars(fitted) for fitted in calibrated.fitted],
        "slack": calibrated.slack,
        "unexplained": calibrated.unexplained,
    }
