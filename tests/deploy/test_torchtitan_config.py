"""The export to torchtitan, read by torchtitan: its own parser of configurations, and its own model."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "planner"))

from decoders import decoder, grid, problem

from pipeplan.exports.torchtitan import TARGET
from pipeplan.exports.written import export, write
from pipeplan.plan import Plan
from pipeplan.profile_data import Profile

# torchtitan imports triton, which works on GPUs only and takes a gigabyte, but uses none of it to read a configuration.
# torch looks for it, too, and finds that there is none.
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


@pytest.fixture(scope="module", autouse=True)
def _torchtitan() -> None:
    try:
        found = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("torchtitan is not installed: pip install -e '.[deploy]'")
    if TARGET.title != f"torchtitan {found}":
        pytest.skip(f"the export is for {TARGET.title}, and {found} is installed")


def read(folder: Path, profile: Profile, plan: Plan) -> dict[str, Any]:
    write(folder, export(TARGET, problem(profile), plan))
    done = subprocess.run([sys.executable, "-c", READ], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_torchtitan_reads_stages_degrees_and_batches(tmp_path: Path) -> None:
    profile = decoder(6)
    plan = grid(profile, ["h.2.ln"], replicas=2, accumulate=12)
    # One more in flight than torch's schedule has.
    plan = replace(plan, stages=(replace(plan.stages[0], depth=3), plan.stages[1]))
    found = read(tmp_path, profile, plan)
    stages = found["module_fqns_per_model_part"]
    assert stages[0] == ["tok_embeddings", "layers.0", "layers.1"]
    # Every module of torchtitan's model is in one stage.
    assert sorted(name for stage in stages for name in stage) == sorted(found["modules"])
    assert found["pipeline_parallel_degree"] == 2
    assert (found["data_parallel_replicate_degree"], found["data_parallel_shard_degree"]) == (2, 1)
    assert found["pipeline_parallel_schedule"] == "1F1B"
    assert Path(found["pipeline_parallel_schedule_csv"]).read_text().startswith("0F0,0F1,0F2,0B0,0F3")
    # Microbatches of 4 samples: 6 on each replica, 12 in all.
    assert found["pipeline_parallel_microbatch_size"] == 4
    assert found["training"] == [24, 48]
    assert found["recompute"] is None
