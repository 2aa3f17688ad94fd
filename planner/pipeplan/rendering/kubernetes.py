"""trainjob.yaml: starts a plan on Kubernetes, as a TrainJob of Kubeflow Trainer 2.3 or newer, with one pod per server.

All pods of a TrainJob are equal (`numNodes` times `resourcesPerNode`). A plan for servers of different sizes therefore
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

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)
_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?", re.ASCII)
LONGEST_LABEL = 63
"""Largest number of characters of a DNS label."""


def _slug(text: str, longest: int) -> str:
    """A DNS label (RFC 1035, as JobSet requires) that resembles `text`."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not label[:1].isalpha():
        label = f"plan-{label}".strip("-")
    return label[:longest].strip("-")


def _escaped(text: str) -> str:
    """Escape a text for commands and variables, in which Kubernetes expands `$(NAME)` and replaces `$$` by `$`."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def _kubernetes_variables(context: TemplateContext, settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Further variables of the template, and its function `q`, which quotes a value. Raises `InputError`."""
    each = bool(settings["pod_per_worker"])
    if len(set(context.server_sizes)) > 1 and not each:
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
    pods, per_pod = (sum(context.server_sizes), 1) if each else (context.servers, max(context.server_sizes))
    for option in ("claim", "namespace"):
        if settings[option] is not None and not _NAME.fullmatch(settings[option]):
            raise InputError(f"--{option} {settings[option]!r} is no name: small letters, digits and - only")
    name, mount = _name(context, settings["name"], pods), _mount(settings["mount"])
    return {
        "q": lambda text: json.dumps(text, ensure_ascii=False),  # a JSON string is valid YAML
        "name": name,
        "mount": mount,
        "pods": pods,
        "per_pod": per_pod,
        "each": each,
        "resource": "nvidia.com/gpu" if context.device == "cuda" else "cpu",
        "quantity": str(per_pod if context.device == "cuda" else per_pod * context.threads),
        "plan": _escaped(f"{mount}/plan"),
        "run": _escaped(f"{mount}/runs/{name}"),
        "options": [_escaped(word) for word in _options(settings["options"])],
    }


def _name(context: TemplateContext, name: str | None, pods: int) -> str:
    """The name of the TrainJob. JobSet requires that the name of a pod, `NAME-node-0-INDEX-abcde`, is a DNS label."""
    longest = LONGEST_LABEL - len(f"-node-0-{pods - 1}-abcde")
    if name is None:
        return _slug(f"{context.model} {context.config}", longest)
    if not _LABEL.fullmatch(name) or len(name) > longest:
        raise InputError(
            f"--name {name!r} cannot be the name of a TrainJob: up to {longest} small letters, digits and -, the "
            f"first a letter, the last no -; such as {_slug(name, longest)}"
        )
    return name


def _mount(text: str) -> str:
    path = text.rstrip("/")
    if not path.startswith("/") or ":" in path or ".." in path.split("/"):
        raise InputError(f"--mount must be an absolute path without : and .., not {text!r}")
    return path


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
            "claim",
            "Keep the plan, in its folder plan, and runs in this PersistentVolumeClaim, to which all pods write.",
            default="pipeplan",
        ),
        LauncherSetting("mount", "Mount the claim at this path.", default="/mnt/pipeplan", metavar="PATH"),
        LauncherSetting("name", "Give the TrainJob this name  [default: made of the model's name and the plan]"),
        LauncherSetting("namespace", "Create the TrainJob in this namespace  [default: that of kubectl]"),
        LauncherSetting("options", "Pass on these options of launch.sh, such as '--epochs 90'.", metavar="TEXT"),
        LauncherSetting("pod_per_worker", "Start a pod for each worker, not for each server.", "flag", default=False),
    ),
    more=_kubernetes_variables,
)
