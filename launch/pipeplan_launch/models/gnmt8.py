"""GNMT with 4 LSTM layers in the encoder and 4 in the decoder."""

from __future__ import annotations

from pipeplan_launch.job import Job
from pipeplan_launch.models.gnmt import GNMT8, job


def build() -> Job:
    """The job: translation between vocabularies of 32,320 tokens, on generated sentences."""
    return job(GNMT8, "gnmt8")
