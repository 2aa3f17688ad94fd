"""A kind of file that starts a plan: its options, and the variables that every template gets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pipeplan._version import __version__
from pipeplan.errors import InputError
from pipeplan.plan.updates import Updates
from pipeplan.problem.plan_file import PlanFile
from pipeplan.rendering.templates import load_template
from pipeplan.util.files import Node
from pipeplan.util.text import did_you_mean, one_line
from pipeplan_launch.job_reference import located_reference


@dataclass(frozen=True)
class TemplateContext:
    """The variables of every template.

    Texts are unquoted, as in the user's files. A template must quote all that a shell reads.
    """

    title: str
    """Description of the plan for comments, on one line and without control characters."""
    model: str
    """Name of the model."""
    model_ref: str
    """The executor loads the model by this reference; empty if the plan has none. A file's path is absolute if the plan
    folder is known."""
    config: str
    """The plan in short: the replicas of every stage, such as `15-1`."""
    updates: str
    """One sentence on the age of gradients and on the samples of an update; empty for inference."""
    inference: bool
    servers: int
    """Number of servers up to the last server with a busy worker. Nothing is started on later servers."""
    idle_servers: int
    """Number of the remaining servers of the cluster."""
    server_sizes: tuple[int, ...]
    """Number of workers on every server, including idle workers, in the order of the servers."""
    server_devices: tuple[str, ...]
    """The name of the devices of every server, in the order of the servers."""
    server_list: tuple[str, ...]
    """A one-line description of every server; empty if all servers are the same."""
    device: str
    """Kind of device: `cuda` or `cpu`."""
    threads: int
    """Number of threads of a worker (OMP_NUM_THREADS), the same as in the profile, so that predictions hold."""
    python: str
    """The interpreter that runs pipeplan now. The machine that runs the file may have another interpreter."""
    version: str
    """Version of pipeplan."""
    command: str
    """The command that wrote the file, on one line, for comments."""
    digest: str
    """Digest of the plan, its profile and its cluster, as in the field `plan` of stage files."""
    folder: str
    """Absolute path of the plan folder if the file is written to another folder. The path is empty if the file is
    written into the plan folder, so that the folder can be moved."""

    @classmethod
    def of(
        cls, root: Node, *, command: str = "pipeplan solve", plan_folder: str = "", in_folder: bool = True
    ) -> TemplateContext:
        """Read the variables from a plan.json. Raises `InputError`.

        `plan_folder` is the absolute path of the plan folder, empty if it is not known yet. `in_folder` says whether
        the file is written into the plan folder.
        """
        stated = PlanFile.of(root)
        plan, profile, cluster = stated.plan, stated.profile, stated.to_cluster()
        model, busy = profile.model, [worker for stage in plan.stages for worker in stage.workers]
        sizes = cluster.server_sizes[: cluster.servers_up_to(busy)]
        devices = cluster.server_devices[: len(sizes)]
        names = [machines[0].name for machines in cluster.server_machines[: len(sizes)]]
        return cls(
            title=" ".join(one_line(f"{model} as {plan.config} on {cluster.name}").split()),
            model=model,
            model_ref=located_reference(profile.ref, profile.file, Path(plan_folder)) if plan_folder else profile.ref,
            config=plan.config,
            updates="" if plan.inference else Updates.of(plan, profile.minibatch).text,
            inference=plan.inference,
            servers=len(sizes),
            idle_servers=cluster.servers - len(sizes),
            server_sizes=sizes,
            server_devices=devices,
            server_list=tuple(map(_described, sizes, devices, names)) if cluster.machines else (),
            device=cluster.device.kind,
            threads=max(1, profile.threads),
            python=sys.executable,
            version=__version__,
            command=" ".join(one_line(command).split()),
            digest=plan.digest(profile.digest, stated.cluster.digest),
            folder="" if in_folder else plan_folder,
        )


def _described(size: int, devices: str, name: str) -> str:
    """The name, number and kind of a server's devices, for a comment."""
    counted = devices.strip("()") if devices.startswith("(") else f"{size} x {devices}"
    return " ".join(one_line(f"{name}: {counted}" if name else counted).split())


@dataclass(frozen=True)
class LauncherSetting:
    """An option of a launcher: `--some-name` on the command line, `some_name` in Python and in the template."""

    name: str
    help: str
    type: Literal["text", "count", "flag"] = "text"
    """Type of the value. A `count` is a whole number of at least 1."""
    default: str | int | bool | None = None
    many: bool = False
    """Whether the option may be given more than once, so that the template gets a tuple of values."""
    metavar: str | None = None

    def checked(self, value: Any) -> Any:
        """Check a value from Python code, and return it in the form for the template. Raises `InputError`."""
        if self.many:
            values = () if value is None else (value,) if isinstance(value, str) else tuple(value)
            return tuple(self._one(single) for single in values)
        return self.default if value is None else self._one(value)

    def _one(self, value: Any) -> Any:
        valid, expected = {
            "text": (isinstance(value, str), "text"),
            "count": (type(value) is int and value >= 1, "a whole number of at least 1"),
            "flag": (isinstance(value, bool), "true or false"),
        }[self.type]
        if not valid:
            raise InputError(f"{self.name} must be {expected}, not {value!r}")
        if isinstance(value, str) and not value.isprintable():
            raise InputError(f"{self.name} must be on one line, without control characters: {value!r}")
        return value


@dataclass(frozen=True)
class Launcher:
    """One kind of file that starts a plan."""

    name: str
    """Name on the command line, such as `slurm`."""
    title: str
    """Description in the help of `pipeplan export`."""
    file_name: str
    """Name of the file in the plan folder if the user gives no other path."""
    template: str
    """Name of the template in the bundled folder of templates."""
    mode: int = 0o644
    settings: tuple[LauncherSetting, ...] = ()
    more: Callable[[TemplateContext, Mapping[str, Any]], Mapping[str, Any]] = lambda context, settings: {}
    """Function that derives further variables of the template from the plan and the settings. The function raises
    `InputError` if the plan or the settings cannot be rendered."""

    def text(self, context: TemplateContext, settings: Mapping[str, Any]) -> str:
        """The text of the file. Raises `InputError` for settings that this launcher does not have."""
        known = {setting.name: setting for setting in self.settings}
        for name in settings:
            if name not in known:
                near = did_you_mean(name, known) if known else "it has none"
                raise InputError(f"{self.name} has no option {name!r}; {near}")
        checked = {name: setting.checked(settings.get(name)) for name, setting in known.items()}
        more = self.more(context, checked)
        return load_template(self.template).render(vars(context) | checked | dict(more))
