"""A profile as a table in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeplan.profile import Layer, Profile

MIB = 2**20


def print_profile(profile: Profile, console: Console) -> None:
    """The layers as a table, and how their sum compares with the whole model."""
    made = {layer.name: 0 for layer in profile.layers}
    for tensor in profile.tensors:
        made[tensor.producer] += tensor.bytes
    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "operation"):
        table.add_column(heading, overflow="fold")
    for heading in ("forward\nms", "±", "backward\nms", "±", "output\nMiB", "weights\nMiB", "kept\nMiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in profile.layers:
        table.add_row(*_row(layer, made[layer.name]))
    where = profile.provenance
    console.print(
        f"{profile.model_name}, minibatch {profile.minibatch}, on {where.device_name or where.device}",
        highlight=False,
        markup=False,
    )
    console.print(table)
    for line in _totals(profile):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _row(layer: Layer, made: int) -> list[Text]:
    times = (layer.forward_s, layer.forward_spread_s, layer.backward_s, layer.backward_spread_s)
    sizes = (made, layer.parameter_bytes, layer.saved_bytes)
    cells = [layer.name, layer.op, *(f"{time * 1e3:.3f}" for time in times), *(f"{size / MIB:.2f}" for size in sizes)]
    return [Text(cell) for cell in cells]


def _totals(profile: Profile) -> list[str]:
    forward = sum(layer.forward_s for layer in profile.layers)
    backward = sum(layer.backward_s for layer in profile.layers)
    lines = [f"± is the interquartile range of {profile.provenance.repeats} passes."]
    if profile.whole_forward_s and profile.whole_backward_s:
        whole_forward, whole_backward = profile.whole_forward_s, profile.whole_backward_s
        lines.append(
            f"Sum of the layers: forward {forward * 1e3:.2f} ms, backward {backward * 1e3:.2f} ms. "
            f"The whole model: {whole_forward * 1e3:.2f} ms, {whole_backward * 1e3:.2f} ms. "
            f"Sum / whole: {forward / whole_forward:.2f}, {backward / whole_backward:.2f}."
        )
    return lines
