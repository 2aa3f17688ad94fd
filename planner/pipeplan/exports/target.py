"""The interface of a trainer that plans are exported to, shared refusals, and the writer of the files."""

from __future__ import annotations

import importlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from pipeplan._version import __version__
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.exports import TARGET_NAMES
from pipeplan.plan.plan import Plan
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.profile_data.ties import TiedWeights
from pipeplan.util.files import write_together
from pipeplan.util.text import did_you_mean, one_line


@dataclass(frozen=True)
class ExportFile:
    """A file that gives the plan to a trainer."""

    text: str
    about: str
    """Description in a few words."""


class ExportTarget(ABC):
    """A trainer, in the exact version that its export was written for."""

    name: ClassVar[str]
    """Name on the command line, such as `megatron`."""
    title: ClassVar[str]
    """Name in messages, with the version, such as `Megatron-LM core_v0.16.1`."""
    orders_devices: ClassVar[bool] = False
    """Whether the files fix the order of the devices, so that the planner may choose the order."""
    virtual: ClassVar[bool] = False
    """Whether the trainer has schedules whose workers run several stages each."""
    divides: ClassVar[bool] = False
    """Whether the replicas of a stage may divide the weights."""
    recomputes: ClassVar[bool] = False
    """Whether some stages may recompute and others not."""
    unknown: ClassVar[tuple[str, ...]] = ()
    """Synchronous schedules that the trainer does not have."""

    @abstractmethod
    def restrict(self, profile: Profile, options: Options) -> Options:
        """The options, restricted so that the target can express every plan; for `solve --for`.

        Raises `InputError` if the target can express no plan for the profile and the user's options.
        """

    @abstractmethod
    def refuse(self, problem: Problem, plan: Plan) -> None:
        """Raise `InputError` if the target cannot express a plan.

        The error, which `refusal` makes, names the reason and the command that finds a plan for the target.
        """

    @abstractmethod
    def files(self, problem: Problem, plan: Plan) -> Mapping[str, ExportFile]:
        """The files for a plan that `refuse` has accepted, by name."""

    @abstractmethod
    def next_step(self, problem: Problem, plan: Plan, folder: str) -> str:
        """One line on how to use the files in `folder`."""


def export_target(name: str) -> ExportTarget:
    """The target of that name. Raises `InputError`."""
    if name not in TARGET_NAMES:
        raise InputError(f"there is no export for {name!r}; {did_you_mean(name, TARGET_NAMES)}")
    target_module: ExportTarget = importlib.import_module(f"pipeplan.exports.{name.replace('-', '_')}").TARGET
    return target_module


def refusal(target: ExportTarget, plan: Plan, reason: str) -> InputError:
    """The error for a plan that a target cannot express: `reason` is a clause without a full stop."""
    # `solve --for` needs the global batch.
    batch = "" if plan.accumulate else " --batch SAMPLES"
    return InputError(
        f"{target.title} cannot express the plan {plan.config}: {reason}; "
        f"`pipeplan solve … --for {target.name}{batch}` finds the best plan that it can"
    )


def export_files(target: ExportTarget, problem: Problem, plan: Plan) -> Mapping[str, ExportFile]:
    """The files of a target by name. Raises `InputError` for a plan that the target cannot express."""
    target.refuse(problem, plan)
    return target.files(problem, plan)


def write_export(folder: Path, files: Mapping[str, ExportFile], *, force: bool = False) -> None:
    """Write all files into a folder, or none. With `force` they replace existing files. Raises `InputError`."""
    write_together(folder, {name: (file.text, 0o644) for name, file in files.items()}, force=force)


def export_lines(
    target: ExportTarget, folder: Path, files: Mapping[str, ExportFile], problem: Problem, plan: Plan
) -> list[str]:
    """A line for each written file, and a line on the next step."""
    lines = [f"written: {folder / name}  {file.about}" for name, file in files.items()]
    return [*lines, f"next: {target.next_step(problem, plan, str(folder))}"]


def keep_ties(profile: Profile, options: Options) -> Options:
    """The options, restricted so that layers that share weights are in one stage."""
    return replace(options, together=(*options.together, *(tie.layers for tie in profile.tied)))


def refuse_split_ties(target: ExportTarget, ties: Iterable[TiedWeights], plan: Plan) -> None:
    """Raise `InputError` if several stages share one of these weights, because trainers do not sum the gradients."""
    stage_of = {name: number for number, stage in enumerate(plan.stages, start=1) for name in stage.layers}
    for tie in ties:
        stages = sorted({stage_of[name] for name in tie.layers})
        if len(stages) > 1:
            where = f"stages {', '.join(map(str, stages[:-1]))} and {stages[-1]}"
            raise refusal(target, plan, f"{where} share {tie.weights[0]}, whose gradients this export does not sum")


def stage_line(index: int, workers: Sequence[int], parts: Sequence[str], between: str = "to", devices: str = "") -> str:
    """A comment line on a stage: its ranks, such as `ranks 0-3`, its first part and its last part."""
    ranks = f"rank {workers[0]}" if len(workers) == 1 else f"ranks {workers[0]}-{workers[-1]}"
    content = parts[0] if len(parts) == 1 else f"{parts[0]} {between} {parts[-1]}"
    return one_line(f"stage {index}, {ranks}{devices}: {content}")


WIDTH = 88
"""Default line width of Python formatters."""


def header_lines(target: ExportTarget, problem: Problem, plan: Plan) -> list[str]:
    """Lines for a comment. Control characters in names are replaced."""
    model, cluster = problem.profile.model_name or "a model without a name", problem.cluster.name
    accumulate = f", {plan.accumulate} minibatches per update" if plan.accumulate else ""
    settings = f"minibatch {problem.profile.minibatch}, schedule {plan.schedule}{accumulate}"
    return [
        one_line(f"Made by pipeplan {__version__} for {target.title}."),
        one_line(f"The plan {plan.config} of {model} on {cluster}: {settings}."),
    ]


def python_literal(value: object) -> str:
    """A Python expression for a string, a number or a list of these, in the style of formatters."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(python_literal, value))}]"
    text = repr(value)
    if not isinstance(value, str) or '"' in text:
        return text
    return f'"{text[1:-1]}"'


def python_number_list(values: list[int] | tuple[int, ...], indent: int = 4) -> str:
    """A list of numbers inside another list, on one line if it fits, else with one number per line."""
    line = python_literal(values)
    if indent + len(line) + 1 <= WIDTH:
        return line
    inner = " " * (indent + 4)
    return "[\n" + "".join(f"{inner}{value},\n" for value in values) + " " * indent + "]"


def workers_per_used_server(cluster: Cluster, count: int) -> list[int]:
    """Number of the first `count` workers on each server. Servers without such workers are left out."""
    starts = itertools.accumulate((0, *cluster.server_sizes[:-1]))
    return [min(size, count - start) for start, size in zip(starts, cluster.server_sizes, strict=True) if start < count]


def torchrun_commands(cluster: Cluster, workers: int, script: str, *, before: str = "") -> list[str]:
    """The commands that start a script on workers 0, 1, … of a cluster, one for each size of server.

    `script` is already quoted for the shell. `before`: text before the command, such as `NAME=value`.
    """
    sizes = workers_per_used_server(cluster, workers)
    start = f"{before} torchrun".strip()
    if len(sizes) == 1:
        return [f"{start} --standalone --nproc-per-node {sizes[0]} {script}"]
    rest = "--node-rank RANK --master-addr HOST --master-port 29500"
    lines = []
    for size in dict.fromkeys(sizes):
        numbers = [str(index) for index, other_size in enumerate(sizes) if other_size == size]
        who = "every server" if len(numbers) == len(sizes) else f"server {', '.join(numbers)}"
        run = f"{start} --nnodes {len(sizes)} --nproc-per-node {size} {rest} {script}"
        lines.append(f"on {who} (RANK is its number from 0, HOST the first): {run}")
    return lines
