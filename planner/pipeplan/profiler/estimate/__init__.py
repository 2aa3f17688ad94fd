"""Estimate what a model would cost on a device that is not here, from FLOPs, bytes and a device file."""

from __future__ import annotations

from pipeplan.profiler.estimate.estimator import estimate_model

__all__ = ["estimate_model"]
