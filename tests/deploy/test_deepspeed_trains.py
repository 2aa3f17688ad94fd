"""A generated module trains in DeepSpeed, on the CPU over Gloo, to the same weights as one process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from decoders import chain, grid, problem
from deployed import free_ports, need

from pipeplan.exports.deepspeed import CONFIG, HOSTS, MODULE, TARGET
from pipeplan.exports.target import export_files, write_export

pytestmark = pytest.mark.deploy

WORKER = """
import json, multiprocessing, os, sys
import deepspeed, torch
from torch import nn
from planned_pipeline import PlannedPipeline, layers_of

# Disables a faster all-reduce for CPUs, which would take minutes to compile and is not under test here.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 4))


def data(update, microbatch, replica):
    drawn = torch.Generator().manual_seed(100 * update + 10 * microbatch + replica)
    return torch.randn(4, 8, generator=drawn), torch.randn(4, 4, generator=drawn)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def train(rank, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    pipeline = PlannedPipeline(layers_of(model()), loss_fn=nn.functional.mse_loss)
    engine, *_ = deepspeed.initialize(model=pipeline, optimizer=sgd(pipeline), config="ds_config.json")
    replica = engine.grid.get_data_parallel_id()
    losses = [
        engine.train_batch(iter([data(update, microbatch, replica) for microbatch in range(3)])).item()
        for update in range(3)
    ]
    said = {"parts": pipeline.parts, "stage": pipeline.stage_id, "replica": replica, "losses": losses}
    said["interval"] = pipeline.activation_checkpoint_interval
    said["weights"] = [value.flatten().tolist() for value in pipeline.parameters()]
    with open(f"rank-{rank}.json", "w") as file:
        json.dump(said, file)


def eager():
    whole, losses = model(), []
    optimizer = sgd(whole)
    for update in range(3):
        optimizer.zero_grad()
        batch = [data(update, microbatch, replica) for microbatch in range(3) for replica in range(2)]
        inputs, targets = (torch.cat(part) for part in zip(*batch))
        loss = nn.functional.mse_loss(whole(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with open("eager.json", "w") as file:
        json.dump({"losses": losses, "weights": [value.flatten().tolist() for value in whole.parameters()]}, file)


if __name__ == "__main__":
    torch.set_num_threads(1)
    forked = multiprocessing.get_context("fork")
    workers = [forked.Process(target=train, args=(rank, sys.argv[1])) for rank in range(4)]
    for worker in workers:
        worker.start()
    eager()
    for worker in workers:
        worker.join()
    sys.exit(max(abs(worker.exitcode) for worker in workers))
"""


@pytest.fixture(autouse=True)
def _deepspeed() -> None:
    need("deepspeed", "0.19.8")


def test_two_stages_with_two_replicas_train_as_one_process_does(tmp_path: Path) -> None:
    profile = chain(["0", "1", "2", "3", "4", "5", "loss"])
    plan = grid(profile, ["4"], replicas=2, accumulate=6)
    plan = replace(plan, stages=(replace(plan.stages[0], recompute=True), plan.stages[1]))
    write_export(tmp_path, export_files(TARGET, problem(profile), plan))
    (tmp_path / "train.py").write_text(WORKER)
    command = [sys.executable, "train.py", str(*free_ports())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert [(one["stage"], one["replica"]) for one in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(one["parts"] == [0, 4, 6] for one in ranks)
    assert [one["interval"] for one in ranks] == [4, 4, 0, 0], "the first stage recomputes, as a whole"
    eager = json.loads((tmp_path / "eager.json").read_text())
    for one in ranks:
        assert one["losses"] == pytest.approx(eager["losses"], rel=1e-5)
        weights = eager["weights"][:4] if one["stage"] == 0 else eager["weights"][4:]
        for ours, theirs in zip(one["weights"], weights, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def test_deepspeed_reads_the_host_file(tmp_path: Path) -> None:
    from deepspeed.launcher.runner import fetch_hostfile

    profile = chain(["0", "1", "loss"])
    files = export_files(TARGET, problem(profile, servers=2), grid(profile, ["1"], replicas=4))
    write_export(tmp_path, {HOSTS: files[HOSTS]})
    assert dict(fetch_hostfile(str(tmp_path / HOSTS))) == {"server0": 4, "server1": 4}
    assert set(files) == {MODULE, CONFIG, HOSTS}
