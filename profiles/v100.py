"""Makes the bundled profiles: what the bundled models would take on a V100, estimated, not measured.

    python profiles/v100.py [MODEL…]

Each is what `pipeplan profile MODEL --device v100` gives at the minibatch size of the paper, without its date, and
written with one layer a line. docs/estimate.md tells how estimates are made and how far they are from measurements.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeplan.files import write_text
from pipeplan.profile_data import Profile
from pipeplan.profiler import Options, profile_model

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
"""Name and granularity. A stage boundary inside a block of ResNet-50 is never worth its second tensor."""


def main() -> None:
    """Write the profiles of the models that are named, or of all, beside this script."""
    for name in sys.argv[1:] or MODELS:
        write_text(Path(__file__).with_name(f"{name}-v100.json"), text_of(build(name)))


def build(name: str) -> Profile:
    """The profile of a bundled model."""
    made = profile_model(name, Options(device="v100", granularity=MODELS[name]))
    how = f"{made.provenance.how}; by profiles/v100.py"
    return replace(made, provenance=replace(made.provenance, when="", how=how))


def text_of(profile: Profile) -> str:
    """The document with one layer and one tensor a line, without the fields that may be left out and are 0."""
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
