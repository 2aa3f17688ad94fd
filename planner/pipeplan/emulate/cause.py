"""The first cause of the difference between a replay and the prediction, from what was measured.

What was busy for how long bounds the pace from below: a stage's replicas, their all-reduces, a link. Whatever of it
comes nearest to the measured pace, beyond what was predicted, explains that much of the difference. What nothing
explains is waiting.
"""

from __future__ import annotations

from pipeplan.emulate.outcome import LinkUse, Replayed, StageTimes
from pipeplan.units import show_time

AS_PREDICTED = 0.03
"""Relative: a smaller difference has no cause to look for."""
SATURATED = 0.9
"""Share of the time of this machine's cores, above which workers wait for them."""
MOST_SPREAD = 0.5
"""Of the difference: what a longer replay would show may be another one."""
LEAST = 0.25
"""Share of the difference that a cause has to explain."""
BOUND = 0.95
"""Share of the pace, of what is thought to set it."""


def first_cause(replayed: Replayed) -> str:
    """One sentence."""
    error = replayed.error
    if abs(error) <= AS_PREDICTED:
        return f"As predicted, within {AS_PREDICTED:.0%}."
    if replayed.cores_busy is not None and replayed.cores_busy > SATURATED:
        return (
            f"The cores of this machine were at work {replayed.cores_busy:.0%} of the time, so that workers waited for "
            "them: this says nothing of the plan; replay it when less else runs here."
        )
    if 2 * replayed.spread > MOST_SPREAD * abs(error):
        return (
            f"Parts of the replay differ by as much (± {replayed.spread:.1%}): replay it for longer, with --seconds, "
            "or when less else runs here."
        )
    return _of_slower(replayed) if error > 0 else _of_faster(replayed)


def _of_slower(replayed: Replayed) -> str:
    lost = replayed.measured_s - replayed.predicted_s
    found = [_of_simulation(replayed, lost)]
    for number, stage in enumerate(replayed.stages, 1):
        found += [_of_computing(number, stage, replayed, lost), _of_sync(number, stage, replayed, lost)]
    found += [_of_link(link, replayed, lost) for link in replayed.links]
    share, text = max(found)
    if share < LEAST:
        return _of_waiting(replayed)
    return f"{text}; that explains {min(1.0, share):.0%} of the difference."


def _of_simulation(replayed: Replayed, lost: float) -> tuple[float, str]:
    if replayed.simulated_s is None:
        return 0.0, ""
    text = f"The order of passes and messages alone brings {show_time(replayed.simulated_s)}, says `pipeplan simulate`"
    return (replayed.simulated_s - replayed.predicted_s) / lost, text


def _of_computing(number: int, stage: StageTimes, replayed: Replayed, lost: float) -> tuple[float, str]:
    text = (
        f"Stage {number} took {show_time(stage.computing_s)} to compute a minibatch, not the "
        f"{show_time(stage.predicted_s)} that it was asked to sleep"
    )
    least = max(replayed.predicted_s, stage.predicted_s / stage.replicas)
    return (stage.computing_s / stage.replicas - least) / lost, text


def _of_sync(number: int, stage: StageTimes, replayed: Replayed, lost: float) -> tuple[float, str]:
    text = f"Stage {number} was held up by its all-reduces for {show_time(stage.sync_s)} of every minibatch"
    both = (stage.computing_s + stage.sync_s) / stage.replicas
    # Of the two together, it is the one that adds more.
    return (both - max(replayed.predicted_s, stage.computing_s / stage.replicas)) / lost, text


def _of_link(link: LinkUse, replayed: Replayed, lost: float) -> tuple[float, str]:
    needed = link.busy * replayed.measured_s
    text = (
        f"The link of {link.name} was busy {show_time(needed)} a minibatch ({link.direction}), where "
        f"{show_time(link.predicted_busy * replayed.predicted_s)} was predicted"
    )
    return (needed - replayed.predicted_s) / lost, text


def _of_waiting(replayed: Replayed) -> str:
    number, stage = max(enumerate(replayed.stages, 1), key=lambda one: one[1].busy(replayed.measured_s))
    busiest = (
        f"stage {number}, the busiest, computes {stage.busy(replayed.measured_s):.0%} of the time and waits "
        f"{show_time(stage.wait_s)} a minibatch for messages, {show_time(stage.sync_s)} for all-reduces"
    )
    parts = ["Nothing is busy all the time: stages wait for each other", busiest]
    if replayed.links:
        link = max(replayed.links, key=lambda one: one.busy)
        parts.append(f"the busiest link, of {link.name}, carries {link.busy:.0%} of what it can ({link.direction})")
    return "; ".join(parts) + "."


def _of_faster(replayed: Replayed) -> str:
    bounds = [
        (link.predicted_busy, link.busy * replayed.measured_s, f"the link of {link.name} was busy")
        for link in replayed.links
    ] + [
        (stage.predicted_busy(replayed.predicted_s), stage.computing_s / stage.replicas, f"stage {number} computed")
        for number, stage in enumerate(replayed.stages, 1)
    ]
    share, needed, what = max(bounds)
    if share < BOUND:
        return (
            "What the plan expects to set its pace is no stage's computing and no shaped link: that held up less here."
        )
    predicted = show_time(share * replayed.predicted_s)
    return f"What sets the pace took less than predicted: {what} for {show_time(needed)} a minibatch, not {predicted}."
