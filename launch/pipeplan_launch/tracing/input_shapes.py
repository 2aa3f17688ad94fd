"""The shapes that minibatches may have: the traced shapes, with any number of samples."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import PADDING_REMEDY
from pipeplan_launch.tracing.opaque_modules import shape_text
from pipeplan_launch.tracing.trace import Dimension, dimension_at


def check_input_shape(index: int, shape: Sequence[int], dimensions: Sequence[Dimension], samples: int) -> None:
    """Raise `LaunchError` if a model input does not have the traced shape at this number of samples."""
    expected = tuple(dimension_at(dimension, samples) for dimension in dimensions)
    if tuple(shape) != expected:
        raise LaunchError(
            f"input {index} of the model is {shape_text(shape)} for {samples} samples, and was {shape_text(expected)} "
            f"where the model was traced: only the number of samples may differ between minibatches; {PADDING_REMEDY}"
        )
