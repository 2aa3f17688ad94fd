"""Makes the bundled profiles: the bundled models on a V100, with estimated, not measured, times.

    python profiles/v100.py [MODEL…]

Each profile is the result of `pipeplan profile MODEL --device v100` at the minibatch size of the PipeDream paper,
without its date, and written with one layer a line. docs/estimate.md explains how the times are estimated and how
accurate they are.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.profiler import profile_model
from pipeplan.util.files import write_text

MODELS = {
    "mnist": "layer",
    "vgg16": "layer",
    "alexnet": "layer",
    "resnet50": "module",
    "gnmt8": "layer",
    "gnmt16": "layer",
    "awd-lm": "layer",
    "s2vt": "layer",
}
"""Names and granularities. ResNet-50 is cut into modules, because a stage boundary inside one of its blocks, which two
tensors cross, is never worth its traffic."""


def main() -> None:
    """Write the profiles of the models named on the command line, or of all models, beside this script."""
    for name in sys.argv[1:] or MODELS:
        write_text(Path(__file__).with_name(f"{name}-v100.json"), text_of(build(name)))


def build(name: str) -> Profile:
    """The profile of a bundled model."""
    profile = profile_model(name, ProfilerOptions(device="v100", granularity=MODELS[name]))
    how = f"{profile.provenance.how}; by profiles/v100.py"
    return replace(profile, provenance=replace(profile.provenance, when="", how=how))


def text_of(profile: Profile) -> str:
    """The JSON of a profile with one layer and one tensor a line, without optional fields that are 0 or empty."""
    document = profile.to_json()
    for layer in document["layers"]:
        for field in ("update_s", "workspace_bytes", "like"):
            if not layer[field]:
                del layer[field]
    lines = [f" {json.dumps(key)}: {_value(value)}" for key, value in document.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {json.dumps(one)}" for one in value) + "\n ]"
    return json.dumps(value)


if __name__ == "__main__":
    main()
