"""The export to torch.distributed.pipelining trains as one process does on the same batches, or refuses the model."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from decoders import chain, decoder, folded, grid, problem

from pipeplan.exports.target import ExportFile, export_files, write_export
from pipeplan.exports.torch_pipelining import TARGET
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import FLUSH
from pipeplan.profile_data.profile import Profile

pytestmark = pytest.mark.deploy

JOB = """
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from pipeplan_launch import Data, Job


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln, self.attn = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.attn(self.ln(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(11, 16)
        self.h = nn.ModuleList(Block() for _ in range(4))
        self.ln_f, self.lm_head = nn.LayerNorm(16), nn.Linear(16, 11, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def text():
    tokens = torch.randint(11, (80, 9), generator=torch.Generator().manual_seed(1))
    return Data(TensorDataset(tokens[:, :-1], tokens[:, 1:]))


def make():
    loss = lambda output, target: functional.cross_entropy(output.flatten(0, 1), target.flatten())
    return Job(Decoder(), loss=loss, data=text, optimizer=lambda some: torch.optim.SGD(some, lr=0.5))
"""
SAMPLES, UPDATES = 24, 3
TRAIN = """
import sys
from pathlib import Path

import pipeline
import torch
import torch.distributed as dist
from pipeplan_launch import load_job

ref, saved, updates, samples = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo")
mesh, job, device = pipeline.grid("cpu"), load_job(ref, 0), torch.device("cpu")
assert samples == pipeline.MICROBATCH * pipeline.MICROBATCHES * pipeline.REPLICAS
stages, schedule = pipeline.build(job.model, job.example(pipeline.MICROBATCH).inputs, job.loss, mesh, device)
optimizer = job.make_optimizer([one for stage in stages for one in stage.submod.parameters()])
train, replica = job.datasets.train, mesh.get_local_rank("dp")
order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
for number in range(updates):
    indices = order[number * samples : (number + 1) * samples]
    pieces = [indices[first : first + pipeline.MICROBATCH] for first in range(0, samples, pipeline.MICROBATCH)]
    mine = [train[index] for piece in pieces[replica :: pipeline.REPLICAS] for index in piece]
    tokens, target = (torch.stack(column) for column in zip(*mine))
    last = {"target": target, "losses": []} if stages[-1].is_last else {}
    optimizer.zero_grad()
    schedule.step(*([tokens] if stages[0].is_first else []), **last)
    pipeline.average(stages, mesh)
    optimizer.step()
    if last:
        mean = torch.stack(last["losses"]).detach().mean()
        dist.all_reduce(mean, group=mesh.get_group("dp"))
        if replica == 0:
            print(f"loss {float(mean) / pipeline.REPLICAS:.6f}", flush=True)
if replica == 0:
    saved.mkdir(exist_ok=True)
    for stage in stages:
        torch.save(stage.submod.state_dict(), saved / f"stage-{stage.stage_index}.pt")
dist.destroy_process_group()
"""
"""What a user's own training script does with the exported module."""


def test_a_grid_of_four_workers_trains_as_one_process_does(tmp_path: Path) -> None:
    """The first of two stages recomputes, and has more microbatches in flight than in torch's own 1F1B."""
    profile = decoder(4)
    plan = grid(profile, ["h.2.ln"], replicas=2, accumulate=SAMPLES // 4)
    first, last = plan.stages
    plan = replace(plan, stages=(replace(first, depth=3, recompute=True), last))
    written = check_against_one_process(tmp_path, profile, plan)
    assert written["schedule.csv"].text == "0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2\n"


@pytest.mark.parametrize(
    ("schedule", "samples", "replicas"),
    [("1f1b-flush", 12, 1), ("zb-v", 4, 2), ("interleaved-1f1b", 6, 2), ("interleaved-1f1b", 8, 1), ("zb-v", 8, 1)],
    ids=[
        "fewer microbatches than stages",
        "zb-v",
        "interleaved",
        "interleaved by the plan's order",
        "zb-v, one replica",
    ],
)
def test_four_stages_train_as_one_process_does(schedule: str, samples: int, replicas: int, tmp_path: Path) -> None:
    """Each on a process of its own, or two on each. torch's own 1F1B refuses fewer microbatches than stages; the
    schedule that loads its order from a file runs them."""
    profile, cuts = decoder(4, minibatch=samples), ["h.1.ln", "h.2.ln", "h.3.ln"]
    if schedule == FLUSH:
        plan = grid(profile, cuts, accumulate=SAMPLES // samples)
        plan = replace(plan, stages=tuple(replace(stage, depth=min(stage.depth, 2)) for stage in plan.stages))
    else:
        plan = folded(profile, cuts, schedule, SAMPLES // samples, replicas)
    check_against_one_process(tmp_path, profile, plan)


def check_against_one_process(tmp_path: Path, profile: Profile, plan: Plan) -> Mapping[str, ExportFile]:
    """Check losses and parameters against those of one process; returns the exported files."""
    torch = pytest.importorskip("torch")
    (tmp_path / "job.py").write_text(JOB)
    ref = f"{tmp_path / 'job.py'}:make"
    files = export_files(TARGET, problem(profile), plan)
    write_export(tmp_path / "out", files)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command.append(str(len({worker for stage in plan.stages for worker in stage.workers})))
    (tmp_path / "out" / "train.py").write_text(TRAIN)
    command += [str(tmp_path / "out" / "train.py"), ref, str(tmp_path / "saved"), str(UPDATES), str(SAMPLES)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]

    expected, state = train_in_one_process(ref)
    assert [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)] == pytest.approx(expected, abs=2e-5)
    stages = [torch.load(tmp_path / "saved" / f"stage-{number}.pt") for number in range(len(plan.stages))]
    for stage, planned in zip(stages, plan.stages, strict=True):
        assert {name.removesuffix(".ln") for name in planned.layers if name.endswith(".ln")} == {
            ".".join(name.split(".")[:2]) for name in stage if name.startswith("h.")
        }
    assert {name for stage in stages for name in stage} == set(state)
    for name, value in (item for stage in stages for item in stage.items()):
        torch.testing.assert_close(value, state[name], rtol=1e-4, atol=1e-5)
    return files


def train_in_one_process(ref: str) -> tuple[list[float], dict[str, object]]:
    """The losses of the updates in one process, and the parameters after them."""
    import torch

    from pipeplan_launch.job.loading import load_job

    job = load_job(ref, 0)
    assert job.loss is not None
    optimizer = job.make_optimizer(list(job.model.parameters()))
    train = job.datasets.train
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0)).tolist()
    losses = []
    for number in range(UPDATES):
        samples = [train[index] for index in order[number * SAMPLES : (number + 1) * SAMPLES]]
        tokens, target = (torch.stack(column) for column in zip(*samples, strict=True))
        optimizer.zero_grad()
        loss = job.loss(job.model(tokens), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, dict(job.model.state_dict())


def test_models_that_torch_cuts_but_cannot_run_end_in_one_line(tmp_path: Path) -> None:
    """Before training, for three stages, which begin before `b` and before `c`."""
    torch = pytest.importorskip("torch")
    from torch.distributed.pipelining import pipeline

    profile = chain(["a", "b", "c", "loss"])
    write_export(tmp_path, export_files(TARGET, problem(profile), grid(profile, ["b", "c"])))
    exported = runpy.run_path(str(tmp_path / "pipeline.py"))
    for forward, words in (
        (lambda m, x: m.c(m.b(m.a(x)).relu()), None),
        (masked, "stage 3 reads what stage 1 makes"),
        (lambda m, x: m.c(m.b(early := m.a(x)).relu()) + early, "stage 3 reads what stage 1 makes"),
        (lambda m, x: m.c(m.b(m.a(x)).relu() + x), r"stage \d reads the model's input 'x'"),
        (lambda m, x: m.c(m.b(m.b(m.a(x)))), "cut into 4 stages, not 3"),
        (lambda m, x: ((found := m.c(m.b(m.a(x)))), found.sum()), "more than one tensor"),
    ):
        pipe = pipeline(three_layers(forward), (torch.zeros(2, 4),), split_spec=exported["SPLIT_SPEC"])
        if words is None:
            exported["check"](pipe)
            continue
        with pytest.raises(SystemExit, match=words) as ended:
            exported["check"](pipe)
        assert "\n" not in str(ended.value)


def three_layers(forward: Callable[[Any, Any], Any]) -> Any:
    """A model of three layers, a, b and c, with this forward()."""
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: Any) -> Any:
            return forward(self, x)

    return Model()


def masked(model: Any, x: Any) -> Any:
    import torch

    mask = torch.arange(4) % 2
    return model.c(model.b(model.a(x) * mask) * mask) * mask
