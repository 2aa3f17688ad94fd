"""Measure a model on this machine and write down what its layers cost."""

from __future__ import annotations

from pipeplan.profiler import torch_version as torch_version  # first: it says which torch this needs
from pipeplan.profiler.options import Options
from pipeplan.profiler.profiler import profile_model

__all__ = ["Options", "profile_model"]
