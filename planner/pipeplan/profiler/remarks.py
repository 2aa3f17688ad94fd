"""Remarks in a profile: properties that a pipeline needs but the job lacks, and time that no layer accounts for.

A pipeline updates with the mean gradient of its minibatches. This update equals the update of one process with the
whole batch under two conditions. The loss must be a mean over samples, or over the units that the job's `loss_weight`
counts. The optimiser must change every parameter independently of the others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeplan.profile_data.layers import Size
from pipeplan.profile_data.profile_document import lacking_text
from pipeplan.profile_data.ties import APART, held_layers
from pipeplan.profiler.outcome import all_names, has_batch_norm, tied_weights, training_lacks
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.hidden_state import check_loss, refuse_hidden_state, trained_leaves
from pipeplan_launch.job.job import Batch, Job, StageInfo
from pipeplan_launch.job.loss import LossState, weight_of
from pipeplan_launch.job.pass_conditions import autocast
from pipeplan_launch.job.user_code import describe_error
from pipeplan_launch.tracing.eval_mode import evaluation_refusal
from pipeplan_launch.tracing.python_state import restored_state
from pipeplan_launch.tracing.trace import TracedModel

TOLERANCE = 1e-3
"""Relative difference below which two losses count as equal, because reduced precision rounds."""
PROBE_STEPS = 3
"""Number of optimiser steps in the test for separate treatment of every parameter."""
MAX_SUM_DEVIATION = 0.1
"""A remark is made if the sum of the layers differs from the whole model by more than this share."""
MAX_NAMED = 3
"""Largest number of parameters that a remark names."""


def promise_remarks(job: Job, traced: TracedModel, batch: Batch) -> list[str]:
    """Remarks if a pipeline may train the job differently from one process.

    The model runs forward once. Raises `LaunchError` for state that a pipeline would neither train nor save.
    """
    if job.loss is None or batch.target is None:
        return coupling_remarks(job)
    state, device = traced.loss_state, batch.inputs[0].device
    seen = _MeansOverSome()
    with restored_state(job.model), autocast(job.autocast, device):
        with torch.random.fork_rng(devices=[]), seen:
            output = batch.call(job.model)
        names = {id(one): name for name, one in job.model.named_parameters()}
        leaves = {id(leaf): leaf for value in tree_leaves(output) for leaf in trained_leaves(value)}
        unregistered = [leaf for key, leaf in leaves.items() if key not in names]
        output = tree_map_only(
            Tensor, lambda one: one.detach().requires_grad_(one.requires_grad), output
        )  # frees memory
        check_loss(job.loss, state, output, batch.target, names)
        with torch.no_grad(), seen:
            means = _difference_from_mean(job, state, output, batch)
        remarks = _metric_remarks(job, output, batch.target)
    if unregistered:
        shapes = _listed(["×".join(map(str, one.shape)) or "1" for one in unregistered])
        remedy = "keep modules in an nn.ModuleList or nn.ModuleDict, and tensors as nn.Parameter attributes"
        what = "the model uses parameters that it does not have by name, which are never trained"
        remarks.append(f"{what} (shapes {shapes}): {remedy}")
    if trained := [name for name, one in ({} if state is None else state.parameters()).items() if one.requires_grad]:
        what = "the last stage trains the loss's parameters, unless requires_grad_(False) freezes them"
        remarks.append(f"{what}: {_listed(trained)}")
    return [*remarks, *_mean_remarks(job, means, seen.reasons), *coupling_remarks(job)]


@torch.no_grad()
def _metric_remarks(job: Job, output: Any, target: Any) -> list[str]:
    """A sentence for each metric that fails. Raises `LaunchError` for a metric that changes state."""
    remarks = []
    named = [(f"the job's metric {name!r}", metric) for name, metric in job.metrics.items()]
    for name, metric in [*([("the job's metric", job.metric)] if job.metric else []), *named]:
        try:
            refuse_hidden_state(name, metric, partial(metric, output, target), "compute it from its arguments")
        except LaunchError:
            raise
        except Exception as error:  # the model can be trained without the metric, and evaluation has other samples
            remarks.append(f"{name} fails on a minibatch of the training data: {describe_error(error)}")
    return remarks


def _listed(names: Sequence[str]) -> str:
    """The first `MAX_NAMED` names, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{', '.join(names[:MAX_NAMED])}{more}"


class _MeansOverSome(TorchFunctionMode):
    """Notes losses of torch that take a mean over valid or weighted targets instead of all targets."""

    def __init__(self) -> None:
        super().__init__()
        self.reasons: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        if func in (functional.cross_entropy, functional.nll_loss):
            self._look(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _look(
        self, _output: Any, target: Any, weight: Any = None, *_: Any, ignore_index: int = -100, **more: Any
    ) -> None:
        if more.get("reduction", "mean") != "mean" or not isinstance(target, Tensor):
            return
        if weight is not None:
            self.reasons["classes have weights"] = None
        if not target.is_floating_point() and bool((target == ignore_index).any()):
            self.reasons[f"targets of {ignore_index} are ignored"] = None


def _difference_from_mean(job: Job, state: LossState | None, output: Any, batch: Batch) -> tuple[float, float] | None:
    """(loss of a minibatch, mean loss of its two parts) if these differ; None if not, or if there are no samples."""
    target, count = batch.target, len(batch.inputs[0])
    tensors = [leaf for leaf in tree_leaves((output, target)) if isinstance(leaf, Tensor)]
    if count < 2 or not all(tensor.ndim and len(tensor) == count for tensor in tensors):
        return None

    def loss(first: int, end: int) -> float:
        part = tree_map_only(Tensor, lambda tensor: tensor[first:end].clone(), (output, target))
        with torch.random.fork_rng(devices=[]):
            assert job.loss is not None
            return float(job.loss(*part) if state is None else state.evaluate(*part))

    whole = loss(0, count)
    if not _differ(whole, loss(0, count)):
        for cut in sorted({1, count // 2}):
            weights = [_weight(job, target, first, end) for first, end in ((0, cut), (cut, count))]
            parts = [(w, loss(*ends)) for w, ends in zip(weights, ((0, cut), (cut, count)), strict=True) if w]
            mean = sum(w * value for w, value in parts) / sum(weights) if sum(weights) else whole
            if _differ(whole, mean):
                return whole, mean
    return None


def _weight(job: Job, target: Any, first: int, end: int) -> float:
    if job.loss_weight is None:
        return float(end - first)
    return weight_of(job.loss_weight, tree_map_only(Tensor, lambda tensor: tensor[first:end], target))


def _differ(one: float, other: float) -> bool:
    return not abs(one - other) <= TOLERANCE * max(abs(one), abs(other), 1e-12)


def _mean_remarks(job: Job, losses: tuple[float, float] | None, reasons: Collection[str]) -> list[str]:
    if losses is None and (job.loss_weight is not None or not reasons):
        return []
    over, remedy = "what loss_weight counts", ""
    if job.loss_weight is None:
        over = "the samples"
        remedy = "; if it divides by the number of valid targets, return that number from the job's loss_weight(target)"
    why = f", as {' and '.join(reasons)}" if reasons else ""
    found = ""
    if losses is not None:
        of_parts = f"that of two parts {losses[1]:.4g}" if isfinite(losses[1]) else "that of a part no number"
        found = f" (the loss of a minibatch is {losses[0]:.4g}, {of_parts})"
    remark = (
        f"the loss is not a mean over {over}{why}: an update from several minibatches differs from that of one process "
        f"with the whole batch{found}{remedy}"
    )
    return [remark]


def coupling_remarks(job: Job) -> list[str]:
    """At most one sentence: a warning if the optimiser's step on a parameter depends on other parameters."""
    together = _stepped(job, (0, 1))
    alone = [_stepped(job, (number,)) for number in (0, 1)]
    if together is None or None in alone:
        return []
    parts = [one[0] for one in alone if one is not None]
    if all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(together, parts, strict=True)):
        return []
    remark = (
        "the optimizer's step on a parameter depends on other parameters, as with a norm over all gradients: every "
        "stage has its own optimizer, so a plan of several stages trains differently from one process"
    )
    return [remark]


def _stepped(job: Job, chosen: Sequence[int]) -> list[Tensor] | None:
    """The chosen stand-in parameters (0, 1) after steps of an optimiser for them; None without such an optimiser."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(8, 8, generator=generator), 10 * torch.randn(8, 8, generator=generator)]
    gradients = [torch.randn(8, 8, generator=generator), 10 * torch.randn(8, 8, generator=generator)]
    names = [name for name, one in job.model.named_parameters() if one.ndim > 1][:2]
    names = names if len(names) == 2 else ["first.weight", "second.weight"]
    parameters = [nn.Parameter(values[number]) for number in chosen]
    named = tuple((names[number], one) for number, one in zip(chosen, parameters, strict=True))
    try:
        optimizer = job.make_optimizer(list(parameters), StageInfo(minibatch=job.minibatch, named_parameters=named))
        for step in range(PROBE_STEPS):
            for number, parameter in zip(chosen, parameters, strict=True):
                parameter.grad = gradients[number] / (step + 1)
            optimizer.step()
    except Exception:
        return None  # for example an optimiser that looks for parameters of the model by name
    return [parameter.detach() for parameter in parameters]


def lacking_remarks(job: Job) -> list[str]:
    """At most one sentence, if the job lacks what training needs."""
    lacks = training_lacks(job)
    return [lacking_text(lacks)] if lacks else []


def unread_parameter_remarks(traced: TracedModel) -> list[str]:
    """At most one sentence on the parameters that no output depends on. No stage holds or trains them."""
    read = {name for info in traced.layers for name in info.parameters}
    unread = [name for name, _ in traced.model.named_parameters() if name not in read]
    return [f"no output depends on these parameters, which are in no layer: {_listed(unread)}"] if unread else []


def evaluation_remarks(job: Job, traced: TracedModel) -> list[str]:
    """At most one sentence, if a run would evaluate the model, which its stages cannot do."""
    if traced.evaluation_problem is None or job.data is None or job.datasets.test is None:
        return []
    return [f"a run would refuse this job: {evaluation_refusal(traced.evaluation_problem)}"]


def layer_sum_remarks(size: Size) -> list[str]:
    """At most one sentence, if the layers' times do not add up to the time of the whole model."""
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
    why = "very short layers take longer when they run alone, and a busy machine slows some passes more than others"
    return [f"the layers do not add up to the whole model, {' and '.join(deviations)}: {why}"]


def batch_norm_remarks(traced: TracedModel, sizes: int) -> list[str]:
    """At most one sentence, if the model has BatchNorm and plans may choose among several minibatch sizes."""
    if sizes == 1 or not has_batch_norm(traced):
        return []
    return ["BatchNorm normalises over one microbatch, so over fewer samples in a plan of smaller microbatches"]


def tie_remarks(traced: TracedModel) -> list[str]:
    """A sentence for each group of layers that share weights, or share memory with other layers between them."""
    names_of = all_names(traced)
    names = [layer.name for layer in traced.layers]
    arrows = [(spec.producer, consumer) for spec in traced.tensors for consumer in spec.consumers]
    remarks = []
    for tie in tied_weights(traced):
        (held,) = held_layers(names, arrows, [tie.layers])
        remarks.append(f"{held.text(f'the weights {_listed(tie.weights)}')}; {APART}")
    for held in held_layers(names, arrows, traced.together):
        readers = [set(layer.parameters) for layer in traced.layers if layer.name in held.group]
        shared = [name for name in names_of if sum(name in read for read in readers) > 1]
        if shared:
            tied = _listed([" = ".join(names_of[name]) for name in shared])
            remarks.append(held.text(f"the weights {tied}"))
        elif held.between:
            remarks.append(held.text())
    return remarks
