"""Remarks in a profile on a job that cannot be trained, and on a model that is not all in its layers, whose layers do
not add up, or that has ties."""

from __future__ import annotations

from collections import defaultdict

from pipeplan.profile_data.layers import Size
from pipeplan.profile_data.ties import APART, held_layers
from pipeplan.profile_data.training_needs import lacking_text
from pipeplan.profiler.outcome import has_batch_norm, tied_weights, training_lacks
from pipeplan_launch.job.job import Job
from pipeplan_launch.tracing.eval_mode import evaluation_refusal
from pipeplan_launch.tracing.trace import TracedModel

MAX_SUM_DEVIATION = 0.1
"""Relative difference between the sum of the layers and the whole model above which a remark is made."""
MAX_NAMED_PARAMETERS = 3


def lacking_remarks(job: Job) -> list[str]:
    """At most one sentence, if the job lacks what training needs."""
    lacks = training_lacks(job)
    return [lacking_text(lacks)] if lacks else []


def unread_parameter_remarks(traced: TracedModel) -> list[str]:
    """At most one sentence, on the parameters that no output depends on: no stage holds them, and none trains them."""
    read = {name for info in traced.layers for name in info.parameters}
    unread = [name for name, _ in traced.model.named_parameters() if name not in read]
    if not unread:
        return []
    more = f" and {len(unread) - MAX_NAMED_PARAMETERS} more" if len(unread) > MAX_NAMED_PARAMETERS else ""
    names = ", ".join(unread[:MAX_NAMED_PARAMETERS])
    return [f"no output depends on these parameters, which are in no layer: {names}{more}"]


def evaluation_remarks(job: Job, traced: TracedModel) -> list[str]:
    """At most one sentence, if a run would evaluate the model, which its stages cannot do."""
    if traced.evaluation_problem is None or job.data is None or job.datasets.test is None:
        return []
    return [f"a run would refuse this job: {evaluation_refusal(traced.evaluation_problem)}"]


def layer_sum_remarks(size: Size) -> list[str]:
    """At most one sentence, if the times of the layers do not add up to that of the model run as a whole."""
    sums = {
        "forward": (sum(layer.forward_s for layer in size.layers), size.whole_forward_s),
        "backward": (sum(layer.backward_s for layer in size.layers), size.whole_backward_s),
    }
    deviations = [
        f"{total / whole:.2f} of it {way}"
        for way, (total, whole) in sums.items()
        if whole is not None and whole > 0 and abs(total / whole - 1) > MAX_SUM_DEVIATION
    ]
    if not deviations:
        return []
    why = "very short layers cost more by themselves, and a busy machine slows some passes more than others"
    return [f"the layers do not add up to the whole model, {' and '.join(deviations)}: {why}"]


def batch_norm_remarks(traced: TracedModel, sizes: int) -> list[str]:
    """At most one sentence, if the model has BatchNorm and plans may choose among several minibatch sizes."""
    if sizes == 1 or not has_batch_norm(traced):
        return []
    return ["BatchNorm normalises over one microbatch, so over fewer samples in a plan of smaller microbatches"]


def tie_remarks(traced: TracedModel) -> list[str]:
    """A sentence for each group of layers that share weights, and for those that share memory and hold others between
    them."""
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, first in traced.state_names.items():
        names_of[first].append(name)
    names = [layer.name for layer in traced.layers]
    arrows = [(spec.producer, consumer) for spec in traced.tensors for consumer in spec.consumers]
    remarks = []
    for tie in tied_weights(traced):
        (held,) = held_layers(names, arrows, [tie.layers])
        more = f" and {len(tie.weights) - MAX_NAMED_PARAMETERS} more" if len(tie.weights) > MAX_NAMED_PARAMETERS else ""
        tied = ", ".join(tie.weights[:MAX_NAMED_PARAMETERS])
        remarks.append(f"{held.text(f'the weights {tied}{more}')}; {APART}")
    for held in held_layers(names, arrows, traced.together):
        readers = [set(layer.parameters) for layer in traced.layers if layer.name in held.group]
        shared = [name for name in names_of if sum(name in read for read in readers) > 1]
        if shared:
            tied = ", ".join(" = ".join(names_of[name]) for name in shared[:MAX_NAMED_PARAMETERS])
            more = f" and {len(shared) - MAX_NAMED_PARAMETERS} more" if len(shared) > MAX_NAMED_PARAMETERS else ""
            remarks.append(held.text(f"the weights {tied}{more}"))
        elif held.between:
            remarks.append(held.text())
    return remarks
