"""The interface of a trainer that plans are exported to, and the list of these trainers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.problem import Options, Problem
from pipeplan.profile_data import Profile
from pipeplan.suggest import did_you_mean

# Name of a target: the module of its `TARGET`, which is imported on demand.
_MODULES: Mapping[str, str] = {
    "deepspeed": "deepspeed",
    "megatron": "megatron",
    "torch-pipelining": "torch_pipelining",
    "torchtitan": "torchtitan",
}

NAMES = tuple(_MODULES)


@dataclass(frozen=True)
class File:
    """One of the files by which a trainer gets the plan."""

    text: str
    about: str
    """Description in a few words."""
    mode: int = 0o644


class Target(Protocol):
    """One trainer, in the exact version that its export was written for."""

    @property
    def name(self) -> str:
        """Name on the command line, such as `megatron`."""

    @property
    def title(self) -> str:
        """Name in messages, with the version, such as `Megatron-LM core_v0.16.1`."""

    def restrict(self, profile: Profile, options: Options) -> Options:
        """The options under which the target can express every plan, for `solve --for`.

        Raises `InputError` if it can express no plan for the profile and the user's options.
        """

    def refuse(self, problem: Problem, plan: Plan) -> None:
        """Raise `InputError` if the target cannot express a plan.

        The error, which `refused` makes, names the reason and the command that finds a plan for the target.
        """

    def files(self, problem: Problem, plan: Plan) -> Mapping[str, File]:
        """The files for a plan that `refuse` has accepted, by name."""

    def next_step(self, problem: Problem, plan: Plan, folder: str) -> str:
        """One line on how to use the files in `folder`."""


def target(name: str) -> Target:
    """The target of that name. Raises `InputError`."""
    if name not in _MODULES:
        raise InputError(f"there is no export for {name!r}; {did_you_mean(name, NAMES)}")
    found: Target = importlib.import_module(f"pipeplan.exports.{_MODULES[name]}").TARGET
    return found


def refused(to: Target, plan: Plan, reason: str) -> InputError:
    """The error for a plan that a target cannot express: `reason` is a clause without a full stop."""
    # `solve --for` needs the number of minibatches per update.
    accumulate = "" if plan.accumulate else " --accumulate 32"
    return InputError(
        f"{to.title} cannot express the plan {plan.config}: {reason}; "
        f"`pipeplan solve … --for {to.name}{accumulate}` finds the best plan that it can"
    )
