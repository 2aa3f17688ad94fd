"""trainjob.yaml: starts a plan on Kubernetes, as a TrainJob of Kubeflow Trainer 2.3 or newer, with a pod a server.

All pods of a TrainJob are alike (`numNodes` times `resourcesPerNode`). A plan for servers of different sizes therefore
needs a pod for each worker.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from pipeplan.errors import InputError
from pipeplan.rendering.launcher import Launcher, LauncherSetting, TemplateContext
from pipeplan.util.text import one_line

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?", re.ASCII)
_QUALIFIED = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_WORD = re.compile(r"\S+")
_LONGEST = {_LABEL: 63, _SUBDOMAIN: 253}
"""Most characters of a DNS label and of a DNS subdomain."""


def _slug(text: str, longest: int) -> str:
    """A DNS label (RFC 1035, as JobSet wants it) that resembles `text`."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not label[:1].isalpha():
        label = f"plan-{label}".strip("-")
    return label[:longest].strip("-")


def _escaped(text: str) -> str:
    """Escape a text for commands and variables, where Kubernetes expands `$(NAME)` and replaces `$$` by `$`."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _kubernetes_variables(context: TemplateContext, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Further variables of the template, and its function `q`, which quotes a value. Raises `InputError`."""
    each = bool(settings["pod_per_worker"])
    if context.uneven and not each:
        sizes = ", ".join(map(str, context.server_sizes))
        raise InputError(
            f"the pods of a TrainJob are all alike, and the servers of this plan have {sizes} workers: add "
            "--pod-per-worker for one pod for each, or plan for servers of one size"
        )
    devices = list(dict.fromkeys(context.server_devices))
    if context.device == "cuda" and len(devices) > 1:
        raise InputError(
            "the pods of a TrainJob are all alike, and the servers of this plan have different devices, "
            f"{one_line(' and '.join(devices))}: plan for servers of one kind, or start this plan by ssh or SLURM"
        )
    pods, per_pod = (context.workers, 1) if each else (context.servers, context.workers_per_server)
    name = _name(context, settings["name"], pods)
    folder = f"{_mount(settings)}/{_inside(settings['folder'])}"
    return {
        "q": lambda text: json.dumps(text, ensure_ascii=False),  # YAML reads strings of JSON
        "name": name,
        "namespace": _matching(settings, "namespace", _LABEL, _NAME),
        "image": _matching(settings, "image", _WORD, "must be one word"),
        **{name: _matching(settings, name, _SUBDOMAIN, _NAME) for name in ("runtime", "claim", "config_map")},
        "mount": _mount(settings),
        "pods": pods,
        "per_pod": per_pod,
        "each": each,
        "resources": _resources(context, settings, per_pod),
        "environment": [(key, _escaped(value)) for key, value in _environment(settings["env"], each)],
        "selector": _pairs("node-selector", settings["node_selector"], _QUALIFIED),
        "stages": context.config.count("-") + 1,
        "plan": _escaped("/etc/pipeplan/plan" if settings["config_map"] else folder),
        "run": _escaped(f"{_mount(settings)}/runs/{name}"),
        "options": [_escaped(word) for word in _options(settings["options"])],
    }


def _name(context: TemplateContext, name: str | None, pods: int) -> str:
    """The name of the TrainJob. JobSet wants the name of a pod, `NAME-node-0-INDEX-abcde`, to be a DNS label."""
    longest = _LONGEST[_LABEL] - len(f"-node-0-{pods - 1}-abcde")
    if name is None:
        return _slug(f"{context.model} {context.config}", longest)
    if not _LABEL.fullmatch(name) or len(name) > longest:
        raise InputError(
            f"--name {name!r} cannot be the name of a TrainJob: up to {longest} small letters, digits and -, the "
            f"first a letter, the last no -; such as {_slug(name, longest)}"
        )
    return name


_NAME = "is no name that Kubernetes takes: small letters, digits and - only"
_AMOUNT = "is no quantity: a number with a unit, such as 8, 500m or 64Gi"


def _matching(settings: Mapping[str, Any], name: str, pattern: re.Pattern[str], wrong: str) -> str | None:
    """The value of a setting, or None. Raises `InputError` unless it matches a pattern; `wrong` says what it is not."""
    value: str | None = settings[name]
    if value is not None and (not pattern.fullmatch(value) or len(value) > _LONGEST.get(pattern, len(value))):
        raise InputError(f"--{name.replace('_', '-')} {value!r} {wrong}")
    return value


def _mount(settings: Mapping[str, Any]) -> str:
    path: str = settings["mount"].rstrip("/")
    if not path.startswith("/") or ":" in path or ".." in path.split("/"):
        raise InputError(f"--mount must be an absolute path without : and .., not {settings['mount']!r}")
    return path


def _inside(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/") or not path.strip("/"):
        raise InputError(f"--folder must be a path inside the claim, not {path!r}")
    return path.strip("/")


def _resources(context: TemplateContext, settings: Mapping[str, Any], per_pod: int) -> list[tuple[str, str]]:
    """Resources of one pod, as (name, quantity)."""
    cores = str(per_pod * context.threads) if context.device == "cpu" else None
    resources = [("cpu", _matching(settings, "cpu", _QUANTITY, _AMOUNT) or cores)]
    resources.append(("memory", _matching(settings, "memory", _QUANTITY, _AMOUNT)))
    if context.device == "cuda":
        resource = _matching(settings, "gpu_resource", _QUALIFIED, "is no resource, such as nvidia.com/gpu")
        resources.insert(0, (str(resource), str(per_pod)))
    return [(name, quantity) for name, quantity in resources if quantity is not None]


def _environment(assignments: tuple[str, ...], each: bool) -> list[tuple[str, str]]:
    reserved = {"NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
    reserved |= {"WORKERS", "PIPEPLAN_SERVER"} if each else set()
    pairs = _pairs("env", assignments, _VARIABLE)
    for name, _ in pairs:
        if name.startswith("PET_"):
            raise InputError(f"--env {name}: Kubeflow Trainer sets that itself")
        if name in reserved:
            raise InputError(f"--env {name}: the TrainJob sets that itself")
    return pairs


def _pairs(option: str, assignments: tuple[str, ...], pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    pairs: dict[str, str] = {}
    for text in assignments:
        name, equals, value = text.partition("=")
        if not equals or not pattern.fullmatch(name):
            raise InputError(f"--{option} takes NAME=VALUE, not {text!r}")
        pairs[name] = value
    return list(pairs.items())


def _options(text: str | None) -> list[str]:
    try:
        words = shlex.split(text or "")
    except ValueError as error:
        raise InputError(f"--options {text!r}: {error}") from None
    for word in words:
        if word.partition("=")[0] in ("--resume", "--run-dir"):
            raise InputError(f"--options: {word} is chosen by the job itself, which goes on from its last checkpoint")
    return words


KUBERNETES = Launcher(
    "kubernetes",
    "a TrainJob of Kubeflow Trainer, a pod for each server",
    "trainjob.yaml",
    "kubernetes.yaml.j2",
    settings=(
        LauncherSetting(
            "image", "Run this image, which has pipeplan, torch and your model.", default="pipeplan:latest"
        ),
        LauncherSetting(
            "claim", "Keep plan and runs in this PersistentVolumeClaim, to which all pods write.", default="pipeplan"
        ),
        LauncherSetting("folder", "Read the plan from this folder inside the claim.", default="plan", metavar="PATH"),
        LauncherSetting(
            "config_map", "Take the plan from this ConfigMap of at most 1 MiB, not from the claim.", metavar="NAME"
        ),
        LauncherSetting("mount", "Mount the claim at this path.", default="/mnt/pipeplan", metavar="PATH"),
        LauncherSetting("name", "Give the TrainJob this name  [default: made of the model's name and the plan]"),
        LauncherSetting("namespace", "Create the TrainJob in this namespace  [default: that of kubectl]"),
        LauncherSetting("runtime", "Use this ClusterTrainingRuntime.", default="torch-distributed", metavar="NAME"),
        LauncherSetting(
            "gpu_resource", "Ask for GPUs by this resource name.", default="nvidia.com/gpu", metavar="NAME"
        ),
        LauncherSetting(
            "cpu",
            "Give a pod this number of processor cores  [default on CPUs: the threads of its workers]",
            metavar="QUANTITY",
        ),
        LauncherSetting("memory", "Give a pod this memory, such as 64Gi.", metavar="QUANTITY"),
        LauncherSetting(
            "env", "Set an environment variable of the workers; can be repeated.", many=True, metavar="NAME=VALUE"
        ),
        LauncherSetting(
            "node_selector", "Use only nodes with this label; can be repeated.", many=True, metavar="KEY=VALUE"
        ),
        LauncherSetting("options", "Pass on these options of launch.sh, such as '--epochs 90'.", metavar="TEXT"),
        LauncherSetting(
            "grace", "Wait this long for a checkpoint when a pod is ended.", "count", default=300, metavar="SECONDS"
        ),
        LauncherSetting("pod_per_worker", "Start a pod for each worker, not for each server.", "flag", default=False),
    ),
    more=_kubernetes_variables,
)
