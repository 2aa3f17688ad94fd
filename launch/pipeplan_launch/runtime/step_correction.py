"""Error feedback on the updates of a stage whose gradients are some updates old.

Let d(t) be the change of the weights by the optimiser's t-th step, learning rate included, and let τ be the delay of
the stage (`plan.run_options.update_delay`). With the correction the weights change by

    d(t) + d(t) − d(t − τ)

and by d(t) alone in the first τ updates. The difference d(t) − d(t − τ) estimates how the step would change if its
gradient were taken τ updates later. The correction works with any optimiser and has no setting of its own.

Source: Zmushko et al., ICML 2026 (arXiv 2606.30634), for τ = 1, which 2BW has. τ > 1 is an extension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from pipeplan_launch.checkpoint.optimizer_state import TensorLoader
from pipeplan_launch.errors import LaunchError


class StepCorrection:
    """Corrects the steps of one stage, and keeps the last τ steps."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], delay: int) -> None:
        """`parameters`: the stage's trained parameters, by name. `delay`: τ, at least 1."""
        self._parameters, self.delay = parameters, delay
        self.steps: dict[str, list[Tensor]] = {name: [] for name in parameters}
        """The last steps of each parameter, the oldest first: at most τ."""

    @torch.no_grad()
    def around(self, step: Callable[[], object], names: list[str], before: Callable[[str], Tensor | None]) -> None:
        """Run `step`, which changes the parameters with these names, and correct its changes.

        `before` returns a parameter's values before the step, in a tensor that nobody writes to; None if there is none.
        """
        kept = {name: before(name) for name in names}
        old = {
            name: self._parameters[name].detach().clone() if values is None else values.detach()
            for name, values in kept.items()
        }
        step()
        for name, values in old.items():
            self._correct(self.steps[name], self._parameters[name].detach(), values)

    def _correct(self, steps: list[Tensor], parameter: Tensor, old: Tensor) -> None:
        if len(steps) < self.delay:
            steps.append(parameter - old)
            return
        change = parameter - old
        oldest = steps.pop(0)
        torch.sub(change, oldest, out=oldest)  # the memory of the oldest step may be reused
        steps.append(change)
        parameter.add_(oldest)

    def saved(self) -> tuple[dict[str, int], dict[str, Tensor]]:
        """(number of steps kept for each parameter, the steps under their names in a checkpoint)."""
        kept = {name: steps for name, steps in self.steps.items() if steps}
        tensors = {
            _tensor_name(name, age): step for name, steps in kept.items() for age, step in enumerate(reversed(steps))
        }
        return {name: len(steps) for name, steps in kept.items()}, tensors

    def restore(self, counts: Mapping[str, Any], load: TensorLoader, where: str) -> None:
        """Restore the newest τ steps from a checkpoint, which may come from stages with other delays. If the checkpoint
        has fewer steps, the first updates are not corrected.
        """
        for name in self._parameters:
            count = counts.get(name, 0)
            if type(count) is not int or count < 0:
                raise LaunchError(f"{where}: the number of steps of {name!r} is damaged")
            ages = range(min(count, self.delay))
            tensors = load([_tensor_name(name, age) for age in ages]) if ages else {}
            self.steps[name] = [
                tensors[_tensor_name(name, age)].to(self._parameters[name].device) for age in reversed(ages)
            ]


def _tensor_name(name: str, age: int) -> str:
    """Name of a step in a checkpoint. `age`: 0 for the newest step."""
    return f"correction.{name}.{age}"


def is_harmed(optimizer: Optimizer | None) -> bool:
    """Whether the correction lowers the optimiser's largest stable learning rate. True for SGD without momentum."""
    return isinstance(optimizer, SGD) and not any(group["momentum"] for group in optimizer.param_groups)


def make_correction(
    kind: str,
    parameters: Mapping[str, nn.Parameter],
    optimizer: Optimizer | None,
    delay: int,
    *,
    asked: bool,
    force: bool,
) -> StepCorrection | None:
    """The correction `kind` of a stage, or None if there is nothing to correct. Raises `LaunchError`.

    An optimiser that the correction harms is corrected only with `force`. Without it, a correction that the user
    `asked` for is an error, and a correction that only the plan names is left out.
    """
    if kind == "none" or not delay or not parameters:
        return None
    if is_harmed(optimizer) and not force:
        if not asked:
            return None
        raise LaunchError(
            "--correction ef lowers the largest stable rate of SGD without momentum (to 0.62 of it where gradients are "
            "one update old): run with --correction none, give the optimizer momentum, or add --force-correction"
        )
    return StepCorrection(parameters, delay)
