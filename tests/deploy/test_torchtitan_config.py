"""The export to torchtitan, read by torchtitan's own parser of configurations and built as its own model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from decoders import decoder, grid, problem
from deployed import need

from pipeplan.exports.target import export_files, write_export
from pipeplan.exports.torchtitan import TARGET

# torchtitan imports triton, which needs a GPU and a gigabyte of disk, but does not use it to read a configuration. The
# parts of torch that look for triton are imported first, and find none.
READ = """
import json, sys
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import torch._inductor.compile_fx
import torch._inductor.runtime.triton_compat

for name in ("triton", "triton.language"):
    sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None))

from torchtitan.config.manager import ConfigManager

config = ConfigManager().parse_args(["--module", "plan_config", "--config", "plan"])
with torch.device("meta"):
    model = config.model_spec.model.build()
modules = [name for name, _ in model.named_children() if name != "layers"]
modules += [f"layers.{name}" for name in model.layers]
fields = {name: getattr(config.parallelism, name) for name in config.parallelism.__dataclass_fields__}
training = [config.training.local_batch_size, config.training.global_batch_size]
print(json.dumps({"modules": modules, "recompute": config.activation_checkpoint, "training": training} | fields))
"""

pytestmark = pytest.mark.deploy


@pytest.fixture(autouse=True)
def _torchtitan() -> None:
    need("torchtitan", TARGET.title.removeprefix("torchtitan "))


def test_torchtitan_reads_stages_degrees_and_batches(tmp_path: Path) -> None:
    profile = decoder(6)
    plan = grid(profile, ["h.2.ln"], replicas=2, accumulate=12)
    # The first stage has one more microbatch in flight than in torch's schedule.
    plan = replace(plan, stages=(replace(plan.stages[0], depth=3), plan.stages[1]))
    write_export(tmp_path, export_files(TARGET, problem(profile), plan))
    done = subprocess.run([sys.executable, "-c", READ], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    config = json.loads(done.stdout.splitlines()[-1])
    stages = config["module_fqns_per_model_part"]
    assert stages[0] == ["tok_embeddings", "layers.0", "layers.1"]
    # Every module of torchtitan's model is in exactly one stage.
    assert sorted(name for stage in stages for name in stage) == sorted(config["modules"])
    assert config["pipeline_parallel_degree"] == 2
    assert (config["data_parallel_replicate_degree"], config["data_parallel_shard_degree"]) == (2, 1)
    assert config["pipeline_parallel_schedule"] == "1F1B"
    assert Path(config["pipeline_parallel_schedule_csv"]).read_text().startswith("0F0,0F1,0F2,0B0,0F3")
    # There are 12 microbatches of 4 samples, 6 of them on each replica.
    assert config["pipeline_parallel_microbatch_size"] == 4
    assert config["training"] == [24, 48]
    assert config["recompute"] is None
