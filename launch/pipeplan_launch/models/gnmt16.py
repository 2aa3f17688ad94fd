"""GNMT with 8 LSTM layers in the encoder and 8 in the decoder."""

from __future__ import annotations

from pipeplan_launch.job import Job
from pipeplan_launch.models.gnmt import GNMT16, job


def build() -> Job:
    """The job: translation between vocabularies of 32,320 tokens, on generated sentences."""
    return job(GNMT16, "gnmt16")
