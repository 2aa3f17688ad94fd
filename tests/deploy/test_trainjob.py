"""trainjob.yaml against the models of Kubeflow Trainer's API, and its script in processes that stand in for pods."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployed import checkpoints, free_ports, need, rendered, small_plan

VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "all": {"namespace": "team", "options": "--epochs 9", "pod_per_worker": True},
}


@pytest.fixture
def train_job() -> Any:
    """The model of a TrainJob that Kubeflow Trainer generates from its CustomResourceDefinition."""
    need("kubeflow-trainer-api", "2.3.0")
    from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

    return TrainerV1alpha1TrainJob


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    return small_plan(folder / "claim" / "plan", folder / "job" / "points.py")


def document(plan: Path, **settings: object) -> dict[str, Any]:
    path = rendered(plan, "kubernetes", **settings)
    text = path.read_text()
    path.unlink()
    manifest: dict[str, Any] = yaml.safe_load(text)
    return manifest


def fits(model: Any, manifest: dict[str, Any]) -> bool:
    """Whether the model reads a manifest and returns it unchanged. It drops fields that it does not know."""
    try:
        back = model.from_dict(manifest).to_dict()
    except (ValueError, TypeError, KeyError):
        return False
    return bool(back == manifest)


def mappings(content: object) -> Iterator[dict[str, Any]]:
    """All mappings of a manifest whose keys are fields. Labels and the like may have any keys."""
    if isinstance(content, list):
        for one in content:
            yield from mappings(one)
    if isinstance(content, dict):
        yield content
        for key, value in content.items():
            if key not in ("annotations", "limits", "requests"):
                yield from mappings(value)


@pytest.mark.deploy
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_api_knows_every_field_and_its_type(variant: str, plan: Path, train_job: Any) -> None:
    manifest = document(plan, **VARIANTS[variant])
    assert fits(train_job, manifest)
    for index in range(len(list(mappings(manifest)))):
        wrong = copy.deepcopy(manifest)
        list(mappings(wrong))[index]["nonsense"] = "1"
        assert not fits(train_job, wrong), "an unknown field is noticed"
    wrong = copy.deepcopy(manifest)
    wrong["spec"]["trainer"]["numProcPerNode"] = "one"
    assert not fits(train_job, wrong)
    del manifest["spec"]["runtimeRef"]
    assert not fits(train_job, manifest)


def pods(manifest: dict[str, Any], tmp_path: Path, count: int) -> list[tuple[int, str]]:
    """Run the containers of a TrainJob as processes; the status and the output of each."""
    trainer, (port,) = manifest["spec"]["trainer"], free_ports()
    from_manifest = {one["name"]: one.get("value", "node-7 of this cluster") for one in trainer.get("env", [])}
    started = []
    for rank in range(count):
        variables = os.environ | from_manifest | {"PYTHON": sys.executable, "PET_NODE_RANK": str(rank)}
        variables |= {"PET_NPROC_PER_NODE": "1", "PET_NNODES": str(count)}
        variables |= {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
        command = [*trainer["command"], *trainer["args"]]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=variables, cwd=tmp_path, **pipes))
    ended = []
    for one in started:
        output, _ = one.communicate(timeout=90)
        ended.append((one.returncode, output))
    return ended


@pytest.mark.deploy
def test_two_pods_train_and_resume(plan: Path, tmp_path: Path) -> None:
    settings = {"mount": str(plan.parent), "name": "small"}
    run = plan.parent / "runs" / "small"
    for epochs, resumed in ((1, False), (2, True)):
        ended = pods(document(plan, **settings, options=f"--epochs {epochs} --probe 0"), tmp_path, 2)
        assert [status for status, _ in ended] == [0, 0], ended
        assert ("resumed from" in "".join(output for _, output in ended)) is resumed
        assert len(checkpoints(run)) == epochs
    assert [path.name for path in run.parent.iterdir()] == ["small"]
