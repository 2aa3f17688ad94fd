"""The files that start a plan: launch.sh, launch.slurm and trainjob.yaml, whatever names contain."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from commandline import Run, check_refusals, refused
from decoders import decoder, grid
from repository import ROOT
from small_plans import NASTY, outcome

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cost.evaluate import evaluate
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan, Stage
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem import plan_file
from pipeplan.problem.problem import Problem
from pipeplan.rendering import plan_folder
from pipeplan.rendering.kubernetes import KUBERNETES
from pipeplan.rendering.launcher import TemplateContext
from pipeplan.rendering.launchers import LAUNCHERS
from pipeplan.rendering.plan_folder import write_plan
from pipeplan.util.files import Node
from pipeplan_launch.plan.stage_files import load_plan

SCRIPTS = (*(("local", "one"), ("local", "uneven"), ("ssh", "two"), ("slurm", "one"), ("slurm", "uneven")),)
DOCUMENT = ROOT / "docs" / "servers.md"


def clusters() -> dict[str, Cluster]:
    """Clusters of one server, of two equal servers, and of three servers of which one is smaller."""
    core = Device("d", "cpu", 10_000)
    gpu = Device(NASTY, "cuda", 10_000)
    server = Level("server", 2, 100.0)
    sized = [Server(gpu, Level("server", size, 100.0)) for size in (2, 2, 1)]
    return {
        "one": Cluster(NASTY, core, (server,)),
        "two": Cluster(NASTY, core, (server, Level("cluster", 2, 10.0))),
        "uneven": Cluster.of_servers(NASTY, sized, [Level("cluster", 3, 10.0)]),
    }


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plan folder for each cluster, with names that a shell must not interpret."""
    folder = tmp_path_factory.mktemp("plans $(touch pwned) 'x'")
    profile = replace(outcome(model=NASTY, layer=NASTY).problem.profile, model_ref=f"/{NASTY}.py:{NASTY}")
    made = {}
    for name, cluster in clusters().items():
        write_plan(solve(Problem(profile, cluster), Settings("dp", simulate=False)), folder / name)
        made[name] = folder / name
    return made


def _text(plan: Path, kind: str, **settings: object) -> str:
    return plan_folder.launch_file_text(plan, LAUNCHERS[kind], settings, command=f"pipeplan {NASTY}")


def test_scripts_are_clean_and_no_name_can_run_anything(
    plans: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", f"/no/{NASTY}")
    script = tmp_path / "script"
    for kind, cluster in SCRIPTS:
        script.write_text(_text(plans[cluster], kind))
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
        comments = [line for line in script.read_text().splitlines() if line.startswith("#")]
        assert all("\x1b" not in line for line in comments)
        assert any("Written by pipeplan" in line for line in comments)
        # Without the programs that it needs the script fails, and no command in a name has run.
        subprocess.run(["bash", script], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, check=False)
        assert not list(tmp_path.rglob("pwned"))
        if shutil.which("shellcheck"):
            done = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout


def test_a_job_asks_for_what_the_plan_needs(plans: dict[str, Path]) -> None:
    def sbatch_options(plan: str, **settings: object) -> list[str]:
        lines = _text(plans[plan], "slurm", **settings).splitlines()
        return [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]

    settings = {"partition": "gpu", "time": "1:00:00", "gpu_type": "v100", "cpus": 3, "sbatch": ("--exclusive",)}
    lines = sbatch_options("uneven", **settings)
    first, second = lines[: lines.index("hetjob")], lines[lines.index("hetjob") + 1 :]
    same = ["--partition=gpu", "--time=1:00:00", "--exclusive"]
    assert first[-7:] == ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=6", "--gres=gpu:v100:2", *same]
    assert second == ["--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=3", "--gres=gpu:v100:1", *same]
    plain = sbatch_options("two")
    assert plain[-3:] == ["--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2"]
    assert "--requeue" in plain
    assert "--no-requeue" in sbatch_options("two", no_requeue=True)


def two_kinds() -> Cluster:
    """Two servers of fast GPUs and one of slow ones."""
    kinds = [Device("A100 80GB", "cuda", 10_000), Device("V100", "cuda", 10_000)]
    servers = [Server(kinds[number], Level("server", 2, 100.0)) for number in (0, 0, 1)]
    return Cluster.of_servers("two kinds", servers, [Level("cluster", 3, 10.0)])


def planned(cluster: Cluster, busy: int, folder: Path) -> Path:
    """A plan of data parallelism on the first so many workers."""
    profile = replace(outcome().problem.profile, model_ref="m.py:make")
    names = tuple(layer.name for layer in profile.layers)
    plan = Plan((Stage(names, tuple(range(busy)), 1, 1),))
    found = solve(Problem(profile, cluster), Settings(solver="dp", certify=False, simulate=False))
    score = evaluate(plan, found.problem)
    write_plan(replace(found, plan=plan, evaluation=score), folder)
    return folder


def test_servers_that_the_plan_leaves_idle_at_the_end_are_not_asked_for(tmp_path: Path) -> None:
    plan = planned(two_kinds(), 4, tmp_path / "plan")
    text = _text(plan, "slurm", gpu_type="a100")
    for said in ("The plan leaves the last 1 server of its cluster idle", "--nodes=2", "--gres=gpu:a100:2"):
        assert said in text
    assert "hetjob" not in text
    assert "NODE_RANK=0 to 1" in _text(plan, "local")
    assert "numNodes: 2" in _text(plan, "kubernetes")
    loaded = load_plan(plan)
    assert (loaded.servers, loaded.server_sizes, loaded.device) == (2, (), "cuda")
    assert load_plan(planned(clusters()["two"], 1, tmp_path / "flat")).servers == 1
    assert load_plan(planned(clusters()["uneven"], 5, tmp_path / "all")).server_sizes == (2, 2, 1)


def test_each_component_asks_for_its_own_device(tmp_path: Path) -> None:
    plan = planned(two_kinds(), 6, tmp_path / "plan")
    text = _text(plan, "slurm", gpu_type=("A100 80GB=a100", "V100=v100"))
    assert text.index("--gres=gpu:a100:2") < text.index("#SBATCH hetjob") < text.index("--gres=gpu:v100:2")
    assert "# Component 1: servers of 2 workers, V100." in text
    assert "--gres=gpu:2" in _text(plan, "slurm", gpu_type=("A100 80GB=", "V100=v100"))
    for given in ((), "a100", ("A100 80GB=a100",), ("A100 80GB=a100", "V1000=v100")):
        with pytest.raises(InputError, match=r"name the type of each, --gpu-type .A100 80GB=TYPE. --gpu-type V100="):
            _text(plan, "slurm", gpu_type=given)
    with pytest.raises(InputError, match="have different devices, A100 80GB and V100"):
        _text(plan, "kubernetes")


def test_wrong_settings_are_refused(plans: dict[str, Path]) -> None:
    cases: list[tuple[str, dict[str, object], str]] = [
        ("slurm", {"partition": "a b"}, "--partition must be one word without quotes, not 'a b'"),
        ("slurm", {"time": "soon"}, "--time: expected a limit such as 12:00:00, 2-00:00:00 or minutes, found 'soon'"),
        ("slurm", {"gpu_type": ("a", "b")}, "all servers of this plan have the same devices: name one type"),
        ("slurm", {"time": "1#2"}, "--time must be one word"),
        ("slurm", {"sbatch": ("x",)}, "--sbatch takes an option of sbatch"),
        ("slurm", {"setup": ("a\nb",)}, "setup must be on one line"),
        ("slurm", {"cpus": 0}, "cpus must be a whole number of at least 1, not 0"),
        ("slurm", {"partitions": "gpu"}, "slurm has no option 'partitions'; did you mean 'partition'?"),
        ("ssh", {"hosts": "gpu1"}, "ssh has no option 'hosts'; it has none"),
    ]
    for kind, settings, said in cases:
        with pytest.raises(InputError, match=re.escape(said)):
            _text(plans["two"], kind, **settings)


def test_the_context_agrees_with_the_stage_files(plans: dict[str, Path]) -> None:
    stage = plan_file.read_document(plans["uneven"] / "stages" / "stage-0.json", "pipeplan-stage", 1)
    root = plan_file.read_plan_document(plans["uneven"])
    context = TemplateContext.of(root)
    assert (context.digest, context.model_ref) == (stage["plan"].text(), stage["model"]["ref"].text())
    assert list(context.server_sizes) == stage["server_sizes"].value
    assert (context.servers, context.server_sizes) == (3, (2, 2, 1))
    for name in ("ref", "threads"):  # which older versions did not write
        root.value["profile"].pop(name)
    assert (TemplateContext.of(root).model_ref, TemplateContext.of(root).threads) == ("", 1)


def test_the_document_lists_the_kinds() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in LAUNCHERS:
        assert f"`{name}`" in text


def test_export_writes_a_script_beside_the_plan_and_twice(plans: dict[str, Path], run: Run, tmp_path: Path) -> None:
    shutil.copytree(plans["two"], tmp_path / "plan")
    script = tmp_path / "plan" / "launch-ssh.sh"
    assert run("export", "ssh").code == 0
    before = script.read_bytes()
    assert (script.stat().st_mode & 0o111 > 0, b"pipeplan export ssh" in before) == (True, True)
    assert run("export", "ssh").code == 0, "the same file may be written again"
    assert script.read_bytes() == before
    script.write_text("edited")
    assert "launch-ssh.sh exists: give another file with -o, or --force" in refused(run, "export", "ssh")
    assert run("export", "ssh", "--force").code == 0
    assert script.read_bytes() != b"edited"
    assert "#SBATCH --partition=gpu" in run("export", "slurm", "plan", "-o", "-", "--partition", "gpu").out
    assert run("export", "local", "-o", "elsewhere.sh").code == 0
    assert f"here={tmp_path}/plan" in (tmp_path / "elsewhere.sh").read_text().replace("'", "")
    refusals = {"ssh nowhere": "nowhere has no plan.json", "ssh -o plan": "plan is a folder: name the file to write"}
    check_refusals(run, {f"export {line}": said for line, said in refusals.items()})


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
