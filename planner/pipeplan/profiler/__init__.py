"""Profile a model: measure its layers on this machine, or estimate them for another device."""

from __future__ import annotations

from pipeplan.profiler import torch_version as torch_version  # first: it says which torch this needs
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.profiler import profile_model

__all__ = ["ProfilerOptions", "profile_model"]
