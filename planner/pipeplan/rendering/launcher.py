"""A kind of file that starts a plan somewhere: its options, and what every template is told of the plan.

docs/launch.md lists what templates are told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pipeplan import cluster_json
from pipeplan._version import __version__
from pipeplan.errors import InputError
from pipeplan.files import Node
from pipeplan.plan import INFERENCE, Plan
from pipeplan.suggest import did_you_mean
from pipeplan.text import one_line


@dataclass(frozen=True)
class Context:
    """What every template is told, by these names. Text is as the user's files have it: quote what a shell reads."""

    title: str
    """What the plan is, on one line and without control characters: for comments."""
    model: str
    """Name of the model."""
    model_ref: str
    """What the executor loads the model by; empty where the plan does not say."""
    cluster: str
    """Name of the cluster."""
    config: str
    """The plan as people write it, `15-1`."""
    schedule: str
    minibatch: int
    """Samples in one minibatch."""
    inference: bool
    servers: int
    server_sizes: tuple[int, ...]
    """Workers on every server, idle ones included, in the order of their numbers."""
    uneven: bool
    """Whether servers differ in the number of their workers."""
    workers: int
    """On all servers."""
    workers_per_server: int
    """On the largest."""
    device: str
    """`cuda` or `cpu`."""
    device_name: str
    threads: int
    """Of a worker (OMP_NUM_THREADS): as many as the profile was measured with, so that the prediction is for what
    runs."""
    python: str
    """The interpreter that has pipeplan here: it may be another where the file runs."""
    version: str
    """Of pipeplan."""
    command: str
    """What wrote the file, on one line: for comments."""
    digest: str
    """Of the plan, its profile and its cluster: as `plan` in the stage files."""
    folder: str
    """The plan folder, absolute, where the file is written to another one. Empty where it is written into the plan
    folder, which may then be moved as a whole."""
    plan_folder: str
    """The plan folder, absolute, as it is now; empty where it is not known yet."""

    @classmethod
    def of(
        cls,
        root: Node,
        *,
        command: str = "pipeplan solve",
        plan_folder: str = "",
        beside: bool = True,
    ) -> Context:
        """What plan.json says. Raises `InputError`."""
        plan, cluster = Plan.from_json(root["plan"]), cluster_json.from_json(root["cluster"])
        model, sizes = root["profile"]["model"].text(), cluster.server_sizes
        reference, threads = root["profile"].get("ref"), root["profile"].get("threads")
        return cls(
            title=" ".join(one_line(f"{model} as {plan.config} on {cluster.name}").split()),
            model=model,
            model_ref=reference.text() if reference else "",
            cluster=cluster.name,
            config=plan.config,
            schedule=INFERENCE if plan.inference else plan.schedule,
            minibatch=root["profile"]["minibatch"].integer(minimum=1),
            inference=plan.inference,
            servers=cluster.servers,
            server_sizes=sizes,
            uneven=len(set(sizes)) > 1,
            workers=sum(sizes),
            workers_per_server=cluster.workers_per_server,
            device=cluster.device.kind,
            device_name=cluster.device.name,
            threads=max(1, threads.integer()) if threads else 1,
            python=sys.executable,
            version=__version__,
            command=" ".join(one_line(command).split()),
            digest=plan.digest(root["profile"]["digest"].text(), root["cluster"]["digest"].text()),
            folder="" if beside else plan_folder,
            plan_folder=plan_folder,
        )

    def variables(self) -> dict[str, Any]:
        """By name, for a template."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True)
class Setting:
    """An option of one kind: `--its-name` on the command line, `its_name` in Python and in the template."""

    name: str
    help: str
    type: Literal["text", "count", "flag"] = "text"
    """A count is a whole number of at least 1."""
    default: str | int | bool | None = None
    many: bool = False
    """Whether it may be given more than once; the template then gets a tuple."""
    metavar: str | None = None

    def checked(self, value: Any) -> Any:
        """A value that Python code gave, as the template gets it. Raises `InputError`."""
        if self.many:
            values = () if value is None else (value,) if isinstance(value, str) else tuple(value)
            return tuple(self._one(single) for single in values)
        return self.default if value is None else self._one(value)

    def _one(self, value: Any) -> Any:
        right = {
            "text": isinstance(value, str),
            "count": isinstance(value, int) and not isinstance(value, bool) and value >= 1,
            "flag": isinstance(value, bool),
        }[self.type]
        if not right:
            expected = {"text": "text", "count": "a whole number of at least 1", "flag": "true or false"}[self.type]
            raise InputError(f"{self.name} must be {expected}, not {value!r}")
        if isinstance(value, str) and not value.isprintable():
            raise InputError(f"{self.name} must be on one line, without control characters: {value!r}")
        return value


def _nothing_more(_context: Context, _settings: Mapping[str, Any]) -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True)
class Launcher:
    """One kind of file that starts a plan."""

    name: str
    """As on the command line: `slurm`."""
    title: str
    """What it is, in a line of `--list`."""
    file_name: str
    """In the plan folder, unless the user says otherwise."""
    template: str
    """In the bundled folder of templates."""
    mode: int = 0o644
    settings: tuple[Setting, ...] = ()
    more: Callable[[Context, Mapping[str, Any]], Mapping[str, Any]] = field(default=_nothing_more)
    """Further variables of the template, worked out from the plan and the settings; raises `InputError` for a plan, or
    settings, that cannot be rendered."""

    def variables(self, context: Context, settings: Mapping[str, Any]) -> dict[str, Any]:
        """All that the template is told. Raises `InputError` for settings that this kind does not have."""
        known = {setting.name: setting for setting in self.settings}
        for name in settings:
            if name not in known:
                near = did_you_mean(name, known) if known else "it has none"
                raise InputError(f"{self.name} has no option {name!r}; {near}")
        checked = {name: setting.checked(settings.get(name)) for name, setting in known.items()}
        told = context.variables()
        # A setting may be of something that the context knows, unless it is said.
        told |= {name: value for name, value in checked.items() if value is not None or name not in told}
        return told | dict(self.more(context, checked))
