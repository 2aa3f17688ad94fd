"""What a reader of a measured profile should know of the model, besides how steady the times were."""

from __future__ import annotations

from pipeplan.profile_layers import Size
from pipeplan_launch.trace import TracedModel

AGREES = 0.1
"""The share by which the sum of the layers may differ from the whole model before it is worth a sentence."""
MOST_NAMES = 3


def unread_parameters(traced: TracedModel) -> list[str]:
    """A sentence on parameters that the outputs do not depend on: they are in no stage, and are never trained."""
    read = {name for info in traced.layers for name in info.parameters}
    unread = [name for name, _ in traced.model.named_parameters() if name not in read]
    if not unread:
        return []
    more = f" and {len(unread) - MOST_NAMES} more" if len(unread) > MOST_NAMES else ""
    return [f"no output depends on these parameters, which are in no layer: {', '.join(unread[:MOST_NAMES])}{more}"]


def sum_against_whole(size: Size) -> list[str]:
    """A sentence where the layers by themselves do not add up to the model as its author wrote it."""
    sums = {
        "forward": (sum(layer.forward_s for layer in size.layers), size.whole_forward_s),
        "backward": (sum(layer.backward_s for layer in size.layers), size.whole_backward_s),
    }
    off = [
        f"{found / whole:.2f} of it {way}" for way, (found, whole) in sums.items() if _is_off(found, whole) and whole
    ]
    if not off:
        return []
    what = " and ".join(off)
    why = "very short layers cost more by themselves, and a busy machine slows some passes more than others"
    return [f"the layers do not add up to the whole model, {what}: {why}"]


def _is_off(found: float, whole: float | None) -> bool:
    return whole is not None and whole > 0 and abs(found / whole - 1) > AGREES
