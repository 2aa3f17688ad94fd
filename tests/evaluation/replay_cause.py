"""One sentence on the main cause of the difference between a replay and the prediction.

The cause is found by the executor's what-if (`pipeplan_launch.telemetry.pace_model`). The resources are the stages,
with computing and all-reduces as terms, the shaped links, and the order of passes and messages, whose pace the
simulation gives.
"""

from __future__ import annotations

from dataclasses import dataclass

from replay_measure import LinkUse, ReplayedStage, ReplayResult

from pipeplan.util.units import show_time
from pipeplan_launch.telemetry.pace_model import AS_PREDICTED, Terms, attribute, busiest_s

SATURATED = 0.9
"""Share of the time of this machine's cores above which workers wait for them."""
MOST_SPREAD = 0.5
"""Share of the difference above which the spread of the measurement hides its cause."""
COMPUTING, SYNC, CARRYING, ORDER = "computing", "sync", "carrying", "order"


@dataclass(frozen=True)
class _Resource:
    """A resource of the replay with its busy times, in seconds per minibatch of one of its replicas."""

    predicted: Terms
    measured: Terms
    subject: str
    """The resource and its activity, for a sentence on a faster replay."""
    explanations: dict[str, str]
    """A sentence on a slower replay, by term."""
    replicas: int = 1


def replay_cause(replayed: ReplayResult) -> str:
    """The sentence that ends the output of a replay."""
    error = replayed.error
    if abs(error) <= AS_PREDICTED:
        return f"As predicted, within {AS_PREDICTED:.0%}."
    if replayed.cores_busy is not None and replayed.cores_busy > SATURATED:
        return (
            f"The cores of this machine were at work {replayed.cores_busy:.0%} of the time, so that workers waited for "
            "them. This does not show how good the plan is: replay it when less else runs on this machine."
        )
    if 2 * replayed.spread > MOST_SPREAD * abs(error):
        return (
            f"Parts of the replay differ by as much (± {replayed.spread:.1%}): replay it for longer, with --seconds, "
            "or when less else runs on this machine."
        )
    resources = [_stage(number, stage) for number, stage in enumerate(replayed.stages, 1)]
    resources += [_link(link, replayed) for link in replayed.links]
    if error > 0 and replayed.simulated_s is not None:
        resources.append(_order(replayed.predicted_s, replayed.simulated_s))
    replicas = [resource.replicas for resource in resources]
    cause = attribute(
        [resource.predicted for resource in resources],
        [resource.measured for resource in resources],
        lambda terms: busiest_s(terms, replicas),
        replayed.predicted_s,
        replayed.measured_s,
    )
    if cause.resource is None:
        return _waiting(replayed) if error > 0 else _unknown_bound()
    resource = resources[cause.resource]
    if error > 0:
        return f"{resource.explanations[cause.term]}; that explains {cause.share:.0%} of the difference."
    before, after = (
        show_time(terms[cause.term] / resource.replicas) for terms in (resource.predicted, resource.measured)
    )
    return (
        f"The resource that sets the pace took less time than predicted: {resource.subject} for {after} a minibatch, "
        f"not {before}."
    )


def _stage(number: int, stage: ReplayedStage) -> _Resource:
    return _Resource(
        predicted={COMPUTING: stage.predicted_s, SYNC: 0.0},
        measured={COMPUTING: stage.computing_s, SYNC: stage.sync_s},
        subject=f"stage {number} computed",
        explanations={
            COMPUTING: (
                f"Stage {number} took {show_time(stage.computing_s)} to compute a minibatch, not the "
                f"{show_time(stage.predicted_s)} that it was asked to sleep"
            ),
            SYNC: f"Stage {number} was held up by its all-reduces for {show_time(stage.sync_s)} of every minibatch",
        },
        replicas=stage.replicas,
    )


def _link(link: LinkUse, replayed: ReplayResult) -> _Resource:
    predicted_s, measured_s = link.predicted_busy * replayed.predicted_s, link.busy * replayed.measured_s
    text = (
        f"The link of {link.name} was busy {show_time(measured_s)} a minibatch ({link.direction}), where "
        f"{show_time(predicted_s)} was predicted"
    )
    subject = f"the link of {link.name} was busy"
    return _Resource({CARRYING: predicted_s}, {CARRYING: measured_s}, subject, {CARRYING: text})


def _order(predicted_s: float, simulated_s: float) -> _Resource:
    text = f"The order of passes and messages alone gives {show_time(simulated_s)}, according to `pipeplan simulate`"
    return _Resource({ORDER: predicted_s}, {ORDER: simulated_s}, "", {ORDER: text})


def _waiting(replayed: ReplayResult) -> str:
    number, stage = max(enumerate(replayed.stages, 1), key=lambda entry: entry[1].busy(replayed.measured_s))
    busiest = (
        f"stage {number}, the busiest, computes {stage.busy(replayed.measured_s):.0%} of the time and waits "
        f"{show_time(stage.wait_s)} a minibatch for messages, {show_time(stage.sync_s)} for all-reduces"
    )
    parts = ["Nothing is busy all the time: stages wait for each other", busiest]
    if replayed.links:
        link = max(replayed.links, key=lambda link: link.busy)
        parts.append(f"the busiest link, of {link.name}, carries {link.busy:.0%} of its capacity ({link.direction})")
    return "; ".join(parts) + "."


def _unknown_bound() -> str:
    return (
        "By the plan neither a stage's computing nor a shaped link sets the pace, and the resource that does took less "
        "time in the replay than predicted."
    )
