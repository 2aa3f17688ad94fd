"""Presets: optimisers and schedulers that a job file may use.

`muon` updates matrices by torch's Muon (Jordan et al., 2024), and everything else by AdamW. The others are for training
with old gradients: `nesterov_for_stashing` is the recipe of Ajanthan et al., ICML 2025 (arXiv 2505.01099),
`rate_by_delay` is the first technique of PipeMare (Yang et al., MLSys 2021, arXiv 1910.05124). docs/learning.md has
measurements of both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from torch import nn, optim
from torch.optim import AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import StageInfo


def nesterov_for_stashing(lr: float = 3e-4, weight_decay: float = 0.0) -> Callable[[list[nn.Parameter]], Optimizer]:
    """The optimiser of a job: NAdam with long momentum, whose look-ahead compensates for old gradients."""

    def build(parameters: list[nn.Parameter]) -> Optimizer:
        betas, decay = (0.99, 0.999), 0.004
        return NAdam(
            parameters, lr, betas, weight_decay=weight_decay, momentum_decay=decay, decoupled_weight_decay=True
        )

    return build


class MuonWithAdamW(Optimizer):
    """Muon for matrices and AdamW for all other parameters, as one optimiser with a group for each."""

    def __init__(self, matrices: list[nn.Parameter], others: list[nn.Parameter], lr: float, weight_decay: float):
        """`lr`: the learning rate of both. Muon's rate is scaled so that its steps are as long as AdamW's (Moonshot,
        2025).
        """
        self._parts: list[Optimizer] = []
        if matrices:
            self._parts.append(optim.Muon(matrices, lr, weight_decay, adjust_lr_fn="match_rms_adamw"))
        if others:
            self._parts.append(AdamW(others, lr, weight_decay=weight_decay))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            # Loading a checkpoint replaces the groups and the state of this optimiser.
            part.param_groups, part.state = [group], self.state
            part.step()


def muon(lr: float = 1e-3, weight_decay: float = 0.1, adamw_names: Collection[str] = ()) -> Callable[..., Optimizer]:
    """The optimiser of a job: Muon for the matrices, AdamW with the same rate for everything else.

    `adamw_names`: parts of the names of matrices that AdamW updates too, which is usual for embeddings and the output
    layer: `("embed", "head")`. Raises `LaunchError` if torch has no Muon.
    """
    if not hasattr(optim, "Muon"):
        raise LaunchError("muon needs torch 2.9 or newer")
    if isinstance(adamw_names, str):
        raise LaunchError(f"adamw_names is a list of parts of names, such as ['embed'], not {adamw_names!r}")

    def build(parameters: list[nn.Parameter], stage: StageInfo | None = None) -> Optimizer:
        name_of = {id(parameter): name for name, parameter in (stage.named_parameters if stage else ())}
        if adamw_names and not name_of.keys() >= {id(parameter) for parameter in parameters}:
            raise LaunchError("muon with adamw_names needs the names of parameters: StageInfo(named_parameters=…)")

        def is_matrix(parameter: nn.Parameter) -> bool:
            return parameter.ndim == 2 and not any(part in name_of[id(parameter)] for part in adamw_names)

        matrices = [parameter for parameter in parameters if is_matrix(parameter)]
        others = [parameter for parameter in parameters if not is_matrix(parameter)]
        return MuonWithAdamW(matrices, others, lr, weight_decay)

    return build


def rate_by_delay(steps: int) -> Callable[[Optimizer, StageInfo], LambdaLR]:
    """The scheduler of a job: the rate of a stage is divided by its delay at first, and rises to the full rate.

    After t of `steps` the rate of a stage whose gradients are τ updates old is lr / τ^(1 − t / steps). A step is a
    minibatch or an epoch, as `scheduler_interval` says. About a quarter of the training is usual.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise LaunchError(f"rate_by_delay needs a number of steps of at least 1, not {steps!r}")

    def build(optimizer: Optimizer, stage: StageInfo) -> LambdaLR:
        delay = max(1, stage.delay)
        return LambdaLR(optimizer, lambda step: float(delay ** (min(step / steps, 1.0) - 1.0)))

    return build
