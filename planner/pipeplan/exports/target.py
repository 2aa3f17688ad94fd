"""What a trainer that plans are exported to says of itself."""

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

# name: the module that has it as `TARGET`; imported when asked for.
_MODULES: Mapping[str, str] = {
    "deepspeed": "deepspeed",
    "megatron": "megatron",
    "torch-pipelining": "torch_pipelining",
    "torchtitan": "torchtitan",
}

NAMES = tuple(_MODULES)


@dataclass(frozen=True)
class File:
    """One of the files that tell a trainer the plan."""

    text: str
    about: str
    """What it is, in a few words."""
    mode: int = 0o644


class Target(Protocol):
    """One trainer, in the exact version that its export was written for."""

    @property
    def name(self) -> str:
        """As on the command line: `megatron`."""

    @property
    def title(self) -> str:
        """As its authors write it, with the version: `Megatron-LM core_v0.16.1`."""

    def restrict(self, profile: Profile, options: Options) -> Options:
        """The options under which every plan can be expressed, for `solve --for`.

        Raises `InputError` where nothing of the profile or of what the user asked for can be.
        """

    def refuse(self, problem: Problem, plan: Plan) -> None:
        """Raise an `InputError` that says what of this plan cannot be expressed, and how to get one that can.

        `refused` makes it.
        """

    def files(self, problem: Problem, plan: Plan) -> Mapping[str, File]:
        """The files that tell the trainer the plan, which `refuse` has let pass, by their names."""

    def next_step(self, problem: Problem, plan: Plan, folder: str) -> str:
        """One line: what the user does with the files, which are in `folder`."""


def target(name: str) -> Target:
    """The target of that name. Raises `InputError`."""
    if name not in _MODULES:
        raise InputError(f"there is no export for {name!r}; {did_you_mean(name, NAMES)}")
    found: Target = importlib.import_module(f"pipeplan.exports.{_MODULES[name]}").TARGET
    return found


def refused(to: Target, plan: Plan, reason: str) -> InputError:
    """The error for a plan that a target cannot express: `reason` is a clause without a full stop."""
    # Without a number of minibatches per update there is no synchronous plan to be found.
    accumulate = "" if plan.accumulate else " --accumulate 32"
    return InputError(
        f"{to.title} cannot express the plan {plan.config}: {reason}; "
        f"`pipeplan solve … --for {to.name}{accumulate}` finds the best plan that it can"
    )
