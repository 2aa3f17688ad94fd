"""A pipeline of some stages for a traced model that has no plan yet."""

from __future__ import annotations

from pipeplan_launch.tracing.trace import TracedModel

STAGES = 3
"""A middle stage receives and sends, and may pass on tensors that it does not read."""


def even_stages(traced: TracedModel, stages: int = STAGES) -> list[list[str]]:
    """The model's layers in their order, cut into `stages` parts of about as many layers each, or fewer parts where
    layers must stay together.
    """
    names = [layer.name for layer in traced.layers]
    place = {name: index for index, name in enumerate(names)}
    spans = [(min(map(place.__getitem__, group)), max(map(place.__getitem__, group))) for group in traced.together]
    allowed = [cut for cut in range(1, len(names)) if not any(first < cut <= last for first, last in spans)]
    if not allowed:
        return [names]
    wanted = [round(len(names) * part / stages) for part in range(1, stages)]
    cuts = sorted({min(allowed, key=lambda cut: abs(cut - want)) for want in wanted})
    return [names[start:end] for start, end in zip([0, *cuts], [*cuts, len(names)], strict=True)]
