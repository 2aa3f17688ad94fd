"""Training by one process that applies each weight semantics' formula word for word, with a copy of every version.

With ν the learning rate, f the loss, w_s(v) the weights of stage s after v updates, r and d a stage's replicas and
depth, and M the minibatches per update, minibatch i, in a segment that starts with nothing in flight, is owed

    1f1b-stashing   w_s(max(0, ⌊i/r⌋ − d + 1)); one older where several replicas in a pipeline of several stages await
                    their all-reduce only after the next backward
    vertical-sync   at every stage the newest version without a minibatch that the input stage's version lacks
    2bw             w(t+1) = w(t) − ν ∇f(w(t−1)): the updates of all groups of M but the last before its own
    gpipe,          w(t+1) = w(t) − ν ∇f(w(t)): the updates of all groups of M before its own
    1f1b-flush,
    zb-h1, zb-v,
    interleaved-1f1b

and an update is made from the mean over the samples of its group: r minibatches, or M. Where gradients are clipped,
that mean is, as torch's clip_grad_norm_ does: by the norm of the whole model with a flush, else by the stage's own.

In the first `flush_epochs` epochs the weights are those of a flush, at every semantics, and an update has M
minibatches, or as many as the replicas of every stage divide.

With the correction `ef` a stage keeps what each step d(t) of its optimiser has added to the weights, and adds
d(t) − d(t − τ) to them as well, from the update t = τ on (Zmushko et al., ICML 2026). τ is the number of updates
between the weights of a gradient and its update, the most that occurs once the pipeline is full. Updates in epochs with
a flush neither count nor are corrected.

Sources: Harlap et al., PipeDream, SOSP 2019 (stashing, vertical sync); Narayanan et al., Memory-Efficient
Pipeline-Parallel DNN Training, ICML 2021 (2BW); Huang et al., GPipe, NeurIPS 2019.

The model is run as its author wrote it: neither tracer, nor splitter, nor schedule, nor engine is used. Two facts that
the executor documents are: in which order samples come, and from which seed a stage draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from pipeplan_launch.job.pass_conditions import mix_seed, seed_forward

State = dict[str, Tensor]


@dataclass(frozen=True)
class Recipe:
    """How a pipeline trains."""

    semantics: str
    replicas: tuple[int, ...]
    depths: tuple[int, ...]
    accumulate: int
    """Minibatches per update, where the semantics has a number of its own."""
    minibatch: int
    epochs: int
    seed: int = 0
    clip: float | None = None
    """The largest norm of an update's gradients."""
    correction: str = "none"
    flush_epochs: int = 0
    deferred: tuple[int, ...] = ()
    """Of each stage, the most minibatches whose gradients of weights are put off, where they come apart."""
    drops_last: bool = False
    """Whether a last minibatch that is short is left out."""

    def of_epoch(self, epoch: int) -> Recipe:
        """The recipe that holds in an epoch."""
        if epoch >= self.flush_epochs:
            return self
        per_update = self.accumulate if self.semantics == "2bw" else lcm(*self.replicas)
        return replace(self, semantics="1f1b-flush", accumulate=per_update, correction="none")

    def delay(self, stage: int) -> int:
        """Updates of a stage between the weights of a gradient and its update, where that is most, if it is full."""
        late = range(1000 * lcm(*self.replicas) * self.accumulate, 1001 * lcm(*self.replicas) * self.accumulate)
        return max(self.group_of(stage, index) - self.version(stage, index) for index in late)

    @property
    def asynchronous(self) -> bool:
        """Whether a stage updates its weights for every round of its own replicas."""
        return self.semantics in ("1f1b-stashing", "vertical-sync")

    def group_of(self, stage: int, minibatch: int) -> int:
        """The update that a minibatch's gradients go into, counted from 0."""
        return minibatch // (self.replicas[stage] if self.asynchronous else self.accumulate)

    def version(self, stage: int, minibatch: int) -> int:
        """Updates in the weights that a minibatch is owed, since the segment began."""
        match self.semantics:
            case "1f1b-stashing":
                return self._stashed(stage, minibatch)
            case "vertical-sync":
                minibatches = self._stashed(0, minibatch) * self.replicas[0]
                return minibatches // self.replicas[stage]
            case "2bw":
                return max(0, minibatch // self.accumulate - 1)
            case "gpipe" | "1f1b-flush" | "zb-h1" | "interleaved-1f1b" | "zb-v":
                return minibatch // self.accumulate
        raise ValueError(self.semantics)

    def _stashed(self, stage: int, minibatch: int) -> int:
        late = 1 if len(self.replicas) > 1 and self.replicas[stage] > 1 else 0
        return max(0, minibatch // self.replicas[stage] - self.depths[stage] + 1 - late)


@dataclass
class _Stage:
    live: dict[str, nn.Parameter]
    optimizer: Optimizer
    buffers: list[State]
    """Of each replica."""
    versions: list[State] = field(default_factory=list)
    """A copy of the weights after each number of updates."""
    gathered: list[tuple[float, State]] = field(default_factory=list)
    """(samples or weight, gradients) of the minibatches of the group being collected; none for an unused parameter."""
    steps: list[State] = field(default_factory=list)
    """What each corrected step of the optimiser added."""

    def copy(self) -> State:
        return {name: parameter.detach().clone() for name, parameter in self.live.items()}

    def mean(self) -> State:
        """The mean over the samples of the group, which ends, or over their weights; nothing if these are all 0."""
        samples, gathered = sum(count for count, _ in self.gathered), self.gathered
        self.gathered = []
        if not samples:
            return {}
        return {
            name: sum((count * one[name] for count, one in gathered if name in one), torch.zeros_like(live)) / samples
            for name, live in self.live.items()
            if any(name in one for _, one in gathered)
        }

    def update(self, gradients: State, corrected_for: int) -> None:
        """One update, corrected for gradients that are so many updates old."""
        before = self.copy()
        for name, parameter in self.live.items():
            parameter.grad = gradients.get(name)
        self.optimizer.step()
        if corrected_for:
            after = self.copy()
            self.steps.append({name: after[name] - before[name] for name in before})
            if len(self.steps) > corrected_for:
                now, then = self.steps[-1], self.steps[-1 - corrected_for]
                with torch.no_grad():
                    for name, parameter in self.live.items():
                        parameter += now[name] - then[name]
        self.versions.append(self.copy())


@dataclass(frozen=True)
class Trained:
    """What is left in the end, by stage."""

    parameters: list[State]
    buffers: list[State]
    updates: list[int]

    def whole(self) -> State:
        """Every parameter and buffer of the model."""
        return {name: value for state in (*self.parameters, *self.buffers) for name, value in state.items()}


def train(
    model: nn.Module,
    cuts: Sequence[str],
    data: Dataset[Any],
    loss: Callable[[Any, Any], Tensor],
    optimizer: Callable[[list[nn.Parameter]], Optimizer],
    whole: Recipe,
    weight: Callable[[Any], float] | None = None,
) -> Trained:
    """Train by the formula. `cuts` are the names of the modules that the second and later stages begin with; `weight`
    takes a minibatch's target and returns its weight, else its samples are.
    """
    assert len(cuts) + 1 == len(whole.replicas) == len(whole.depths)
    stage_of = _stages(model, cuts, _read(data, [0])[0])
    stages = [
        _stage(model, {name for name, at in stage_of.items() if at == stage}, replicas, optimizer)
        for stage, replicas in enumerate(whole.replicas)
    ]
    model.train()
    for epoch in range(whole.epochs):
        begun, recipe = [len(stage.versions) - 1 for stage in stages], whole.of_epoch(epoch)
        minibatches = list(_minibatches(data, recipe, epoch))
        for index, chosen in enumerate(minibatches):
            owed = [stage.versions[begun[s] + recipe.version(s, index)] for s, stage in enumerate(stages)]
            batch = _read(data, chosen)
            counts = len(chosen) if weight is None else float(weight(batch[1]))
            gradients = _gradients(model, cuts, stages, owed, batch, loss, (recipe, epoch, index))
            for stage in stages if counts else ():
                stage.gathered.append((counts, {name: one for name, one in gradients.items() if name in stage.live}))
            last = index == len(minibatches) - 1
            _update(
                [
                    (stage, recipe.delay(s) if recipe.correction == "ef" else 0)
                    for s, stage in enumerate(stages)
                    if last or recipe.group_of(s, index) != recipe.group_of(s, index + 1)
                ],
                whole,
            )
        for stage in stages:
            agree(stage.buffers)
    return Trained(
        [stage.copy() for stage in stages],
        [stage.buffers[0] for stage in stages],
        [len(stage.versions) - 1 for stage in stages],
    )


def _update(stages: Sequence[tuple[_Stage, int]], recipe: Recipe) -> None:
    """An update of the stages whose group has ended, with the delays to correct for; with a flush these are all."""
    means = [stage.mean() for stage, _ in stages]
    together = recipe.semantics in ("gpipe", "1f1b-flush", "zb-h1", "interleaved-1f1b", "zb-v")
    if recipe.clip is not None and means:
        for over in [means] if together else [[one] for one in means]:
            gradients = [gradient for one in over for gradient in one.values()]
            norm = torch.cat([gradient.flatten() for gradient in gradients]).square().sum().sqrt()
            for gradient in gradients:
                gradient *= min(1.0, recipe.clip / (float(norm) + 1e-6))
    for (stage, delay), mean in zip(stages, means, strict=True):
        stage.update(mean, delay)


def train_on_whole_batches(
    model: nn.Module,
    data: Dataset[Any],
    loss: Callable[[Any, Any], Tensor],
    optimizer: Callable[[list[nn.Parameter]], Optimizer],
    recipe: Recipe,
) -> State:
    """What a flush stands for: one process, one forward and one backward of all samples of an update.

    That is only the same where samples do not depend on each other, as with BatchNorm, nor on their minibatch, as with
    dropout.
    """
    model.train()
    made = optimizer(list(model.parameters()))
    for epoch in range(recipe.epochs):
        minibatches = list(_minibatches(data, recipe, epoch))
        for start in range(0, len(minibatches), recipe.accumulate):
            chosen = [index for one in minibatches[start : start + recipe.accumulate] for index in one]
            inputs, target = _read(data, chosen)
            made.zero_grad()
            loss(model(*inputs), target).backward()
            if recipe.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            made.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _minibatches(data: Any, recipe: Recipe, epoch: int) -> Iterator[list[int]]:
    """The samples of each minibatch; the last may have fewer."""
    generator = torch.Generator().manual_seed(mix_seed("order", recipe.seed, epoch))
    order = torch.randperm(len(data), generator=generator).tolist()
    end = len(order) - len(order) % recipe.minibatch if recipe.drops_last else len(order)
    for start in range(0, end, recipe.minibatch):
        yield order[start : start + recipe.minibatch]


def _read(data: Any, chosen: Sequence[int]) -> tuple[tuple[Tensor, ...], Any]:
    inputs, target = default_collate([data[index] for index in chosen])
    return (inputs,) if isinstance(inputs, Tensor) else tuple(inputs), target


def _gradients(
    model: nn.Module,
    cuts: Sequence[str],
    stages: Sequence[_Stage],
    owed: Sequence[State],
    batch: tuple[tuple[Tensor, ...], Any],
    loss: Callable[[Any, Any], Tensor],
    at: tuple[Recipe, int, int],
) -> State:
    """∇f at the weights owed to one minibatch, by name. Each stage writes the buffers of its replica for it."""
    recipe, epoch, index = at
    weights = {name: value.clone().requires_grad_() for state in owed for name, value in state.items()}
    buffers: State = {}
    for stage in stages:
        buffers |= stage.buffers[index % len(stage.buffers)]
    inputs, target = batch
    with _at_cuts(model, cuts, lambda stage: seed_forward(recipe.seed, epoch, index, stage)):
        seed_forward(recipe.seed, epoch, index, 0)
        output = functional_call(model, {**weights, **buffers}, inputs)
    found = torch.autograd.grad(loss(output, target), list(weights.values()), allow_unused=True)
    return {name: one for name, one in zip(weights, found, strict=True) if one is not None}


@contextmanager
def _at_cuts(model: nn.Module, cuts: Sequence[str], call: Callable[[int], None]) -> Iterator[None]:
    """Call with the number of a stage just before its first module runs."""
    modules = dict(model.named_modules())
    hooks = [
        modules[name].register_forward_pre_hook(lambda _module, _inputs, stage=stage: call(stage))
        for stage, name in enumerate(cuts, start=1)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _stages(
    model: nn.Module, cuts: Sequence[str], batch: tuple[tuple[Tensor, ...], Any] | tuple[Tensor, ...]
) -> Mapping[str, int]:
    """The stage of every parameter and buffer: where the module that has it runs, as an ordinary run shows."""
    found: dict[str, int] = {}
    now = 0

    def enter(stage: int) -> None:
        nonlocal now
        now = stage

    def note(name: str) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, _inputs: Any) -> None:
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            for key, _ in own:
                full = f"{name}.{key}" if name else key
                assert found.setdefault(full, now) == now, f"{full} is read in two stages"

        return hook

    kept = {name: value.clone() for name, value in model.named_buffers()}
    with _at_cuts(model, cuts, enter):
        hooks = [module.register_forward_pre_hook(note(name)) for name, module in model.named_modules()]
        with torch.no_grad():
            model.eval()(*batch)
        for hook in hooks:
            hook.remove()
    assert all(torch.equal(value, kept[name]) for name, value in model.named_buffers())
    wanted = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - wanted
    assert wanted <= found.keys() <= wanted | tied
    return {name: found[name] for name in wanted}


def _stage(
    model: nn.Module,
    names: set[str],
    replicas: int,
    optimizer: Callable[[list[nn.Parameter]], Optimizer],
) -> _Stage:
    live = {
        name: nn.Parameter(value.detach().clone(), requires_grad=value.requires_grad)
        for name, value in model.named_parameters()
        if name in names
    }
    buffers = [{name: one.clone() for name, one in model.named_buffers() if name in names} for _ in range(replicas)]
    stage = _Stage(live, optimizer(list(live.values())), buffers)
    stage.versions.append(stage.copy())
    return stage


def agree(replicas: list[State]) -> None:
    """When a segment has ended, running statistics are averaged over a stage's replicas; counters take the largest."""
    for name in replicas[0]:
        values = torch.stack([buffers[name] for buffers in replicas])
        together = values.mean(0) if values.is_floating_point() else values.amax(0)
        for buffers in replicas:
            buffers[name] = together.clone()
