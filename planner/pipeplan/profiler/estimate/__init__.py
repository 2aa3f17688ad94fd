"""Estimate a model's profile for a device that this machine does not have, from FLOPs, bytes and a device file."""

from __future__ import annotations

from pipeplan.profiler.estimate.estimator import estimate_model

__all__ = ["estimate_model"]
