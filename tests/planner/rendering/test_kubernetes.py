"""trainjob.yaml: its contents, whatever names contain, and the behaviour of its script in a pod."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from decoders import decoder, grid

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.rendering.kubernetes import KUBERNETES
from pipeplan.rendering.launcher import TemplateContext
from pipeplan.util.files import Node

PROFILE = decoder(2)
PLAN = grid(PROFILE, ["h.1.ln"], replicas=4)
SIZES = ("send_bytes", "receive_gradient_bytes", "parameter_bytes", "minibatch_bytes", "memory_bytes")
STAGES = [dict.fromkeys(("forward_s", "backward_s", "sync_s", *SIZES), 0)] * 2
EVIL = "x: \"'{#}\\&*!|>%@` \u00e9\U0001f600$(HOME) $$1"


def cluster(servers: int = 2, devices: int = 4, kind: str = "cuda", name: str = "lab") -> Cluster:
    return Cluster(name, Device("A100", kind, 2**30), (Level("server", devices, 1e9), Level("cluster", servers, 1e9)))


def rendered(where: Cluster | None = None, plan: Plan = PLAN, model: str = "decoder", **settings: object) -> str:
    where = where or cluster()
    document = {
        "profile": {"model": model, "ref": "job.py:make", "digest": "sha256:0", "minibatch": 4, "threads": 2},
        "cluster": where.to_json() | {"digest": "sha256:1"},
        "options": {},
        "plan": plan.to_json(),
        "prediction": {"minibatch_s": 1.0, "bound_by": "", "copies_synchronisation_s": 0.0, "stages": STAGES},
    }
    context = TemplateContext.of(Node(document, "plan.json"))
    return KUBERNETES.text(context, settings)


def job(*arguments: Any, **settings: Any) -> dict[str, Any]:
    (manifest,) = yaml.safe_load_all(rendered(*arguments, **settings))
    assert isinstance(manifest, dict)
    return manifest


def pod(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The spec of the pods in the patch of the runtime."""
    (patch,) = manifest["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    assert node["name"] == "node", "the runtime torch-distributed gives them this name"
    spec: dict[str, Any] = node["template"]["spec"]["template"]["spec"]
    return spec


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """Expand an argument as Kubernetes does: `$$` is `$`, and `$(NAME)` the variable NAME if it exists."""

    def value(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else variables.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", value, text)


def test_a_pod_for_each_server_gets_its_devices_or_cores() -> None:
    manifest = job()
    assert (manifest["apiVersion"], manifest["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert manifest["metadata"]["name"] == "decoder-4-4"
    trainer = manifest["spec"]["trainer"]
    assert manifest["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "4"}
    assert [volume["name"] for volume in pod(manifest)["volumes"]] == ["pipeplan", "shared-memory"]
    manifest = job(cluster(kind="cpu"))
    assert manifest["spec"]["trainer"]["resourcesPerNode"]["requests"] == {"cpu": "8"}
    assert [volume["name"] for volume in pod(manifest)["volumes"]] == ["pipeplan"]


def test_servers_of_different_sizes_need_a_pod_for_each_worker() -> None:
    machines = [Server(Device("A100", "cuda", 2**30), Level("server", count, 1e9)) for count in (4, 2)]
    uneven, plan = Cluster.of_servers("lab", machines, (Level("cluster", 2, 1e9),)), grid(PROFILE, ["h.1.ln"], 3)
    with pytest.raises(InputError, match=r"servers of this plan have 4, 2 workers: add --pod-per-worker"):
        rendered(uneven, plan)
    trainer = job(uneven, plan, pod_per_worker=True)["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (6, 1)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "1"}
    environment = {one["name"]: one for one in trainer["env"]}
    assert environment["WORKERS"]["value"] == "1"
    assert environment["PIPEPLAN_SERVER"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"


def test_values_that_kubernetes_refuses_are_refused() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"name": "My_Job"}, "such as my-job"),
        ({"name": "a" * 60}, "up to 48 small letters"),
        ({"name": "9a"}, "such as plan-9a"),
        ({"claim": "My Claim"}, "--claim 'My Claim' is no name"),
        ({"namespace": "a_b"}, "--namespace 'a_b' is no name"),
        ({"mount": "data"}, "--mount must be an absolute path"),
        ({"options": "--epochs '9"}, "--options"),
        ({"options": "--resume"}, "goes on from its last checkpoint"),
    ]
    for settings, reason in cases:
        with pytest.raises(InputError, match=reason) as error:
            rendered(**settings)
        assert "\n" not in str(error.value)


def test_names_and_values_cannot_break_the_manifest() -> None:
    for model in (EVIL, "---\nkind: Pod", "", "9", "-", "A" * 300):
        name = job(cluster(name=model), PLAN, model)["metadata"]["name"]
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
        assert len(f"{name}-node-0-1-abcde") <= 63
    mount = f"/{EVIL}".replace(":", "")
    trainer = job(image=EVIL, mount=mount)["spec"]["trainer"]
    assert trainer["image"] == EVIL
    assert expanded(trainer["args"][2], {"HOME": "no"}) == f"{mount}/plan"


def run_pod(folder: Path, *, rank: int = 0, options: str = "") -> list[str]:
    """Run the script of a pod; the arguments of launch.sh, and then its variables."""
    (folder / "plan").mkdir(exist_ok=True)
    words = '"$@" "$NNODES" "$NODE_RANK" "$MASTER_ADDR" "$MASTER_PORT" "${PET_NNODES-unset}"'
    (folder / "plan" / "launch.sh").write_text(f"printf '%s\\n' {words}\n")
    trainer = job(mount=str(folder), options=options)["spec"]["trainer"]
    environment = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4", "PET_NODE_RANK": str(rank), "PATH": "/usr/bin:/bin"}
    environment |= {"PET_MASTER_ADDR": "decoder-4-4-node-0-0.decoder-4-4", "PET_MASTER_PORT": "29500"}
    command = [expanded(word, environment) for word in [*trainer["command"], *trainer["args"]]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_pod_tells_launch_sh_where_it_is_and_resumes_or_begins_again(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "decoder-4-4"
    words = ["--epochs", "9", "it's $(HOME) $$", "2", "1", "decoder-4-4-node-0-0.decoder-4-4", "29500", "unset"]
    assert run_pod(tmp_path, rank=1, options='--epochs 9 "it\'s $(HOME) $$"') == ["--run-dir", str(run), *words]
    (run / "metrics").mkdir(parents=True)
    run_pod(tmp_path, rank=1)
    assert run.exists(), "only the first pod decides"
    assert "--resume" not in run_pod(tmp_path)
    assert os.listdir(run.parent) == ["decoder-4-4.ended-1"]
    (run / "checkpoints" / "epoch-0001-sample-00000000").mkdir(parents=True)
    run_pod(tmp_path)
    assert sorted(os.listdir(run.parent)) == ["decoder-4-4.ended-1", "decoder-4-4.ended-2"]
    (run / "checkpoints" / "epoch-0001").mkdir(parents=True)
    (run / "checkpoints" / "epoch-0001" / "manifest.json").write_text("{}")
    for rank in (0, 1):
        assert run_pod(tmp_path, rank=rank)[:3] == ["--run-dir", str(run), "--resume"]
    begun = "--weights D --seed 3 --resume-from=E --resume-from F"
    assert run_pod(tmp_path, options=begun)[:5] == ["--run-dir", str(run), "--resume", "--seed", "3"]
    assert run.exists()
