"""Measure a model on this machine and write down what its layers cost."""

from __future__ import annotations

from pipeplan.profiler import needed as needed  # first: what torch this needs
from pipeplan.profiler.options import Options
from pipeplan.profiler.profiler import profile_model

__all__ = ["Options", "profile_model"]
