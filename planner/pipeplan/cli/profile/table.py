"""A profile as a table in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from pipeplan.drawing.fold_chains import layer_time_s, most_expensive_layers
from pipeplan.profile_data.layers import Layer, Size
from pipeplan.profile_data.profile import Profile
from pipeplan.util.text import one_line
from pipeplan.util.units import show_size, show_time

PLAINLY = "torch.export"
"""The tracer of models that contain no opaque modules."""
MIB, GIB = 2**20, 2**30
WIDE = 10 * GIB
"""Smallest total of a column, in bytes, that is shown in GiB."""
LEAST_SHARE = 0.05
"""Layers with a smaller share of the time are not named as the layer that busy cores slow down the most."""
MUCH_READING = 0.1
"""Share of the compute time above which separate processes for reading samples are recommended."""
LONGEST = 18
"""Largest number of characters of an operation's name. Names from other tools contain all arguments."""


def measured_profile(profile: Profile) -> Iterator[RenderableType]:
    """A heading, the table of layers, its totals, and notes on the measurement."""
    where = profile.provenance
    if where.warning:
        yield one_line(where.warning)
    heading = (
        f"{profile.model_name}, microbatch {profile.minibatch}, on {where.device_name or where.device or 'unknown'}"
    )
    yield one_line(heading)
    yield layer_table(profile)
    traced = [f"Traced by {where.traced}"] if where.traced not in ("", PLAINLY) else []
    for line in (*profile_totals(profile), *traced, *(f"Note: {note}" for note in where.notes)):
        yield one_line(line)


def shown_layers(profile: Profile, top: int | None) -> list[Layer]:
    """All layers in their order, or the `top` most expensive layers sorted by time."""
    layers = list(profile.layers)
    return layers if top is None else sorted(layers, key=layer_time_s, reverse=True)[:top]


def layer_table(profile: Profile, top: int | None = None) -> Table:
    """The layers of `shown_layers`, and a row with the sums."""
    columns = _columns(profile)
    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "operation"):
        table.add_column(heading, overflow="fold")
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)

    def add_row(name: str, operation: str, part: Sequence[Layer], style: str = "") -> None:
        cells = (name, operation, *(cell(part) for cell in columns.values()))
        table.add_row(*(Text(one_line(cell), style) for cell in cells))

    hot, layers = set(most_expensive_layers(profile)), shown_layers(profile, top)
    for layer in layers:
        add_row(layer.name, _operation(layer), [layer], "bold" if layer.name in hot else "")
    shown = {layer.name for layer in layers}
    if rest := [layer for layer in profile.layers if layer.name not in shown]:
        add_row(f"{len(rest)} others", "", rest, "dim")
    add_row("sum", f"{len(profile.layers)} layers", profile.layers)
    return table


def _columns(profile: Profile) -> dict[str, Callable[[Sequence[Layer]], str]]:
    """The figures of some layers as text, by the heading of their column."""
    output_bytes = profile.made_bytes()
    total_s = profile.total_s or 1.0
    columns: dict[str, Callable[[Sequence[Layer]], str]] = {
        "forward\nms": lambda part: _ms(sum(layer.forward_s for layer in part)),
        "backward\nms": lambda part: _ms(sum(layer.backward_s for layer in part)),
    }
    if any(layer.forward_spread_s or layer.backward_spread_s for layer in profile.layers):
        columns["±\n%"] = _deviation
    columns["share\n%"] = lambda part: f"{sum(map(layer_time_s, part)) / total_s * 100:.1f}"
    if any(layer.update_s for layer in profile.layers):
        columns["update\nms"] = lambda part: _ms(sum(layer.update_s for layer in part))

    def add_sizes(heading: str, size: Callable[[Layer], int], total: Callable[[Iterable[int]], int] = sum) -> None:
        unit, name = (GIB, "GiB") if total(map(size, profile.layers)) >= WIDE else (MIB, "MiB")
        columns[f"{heading}\n{name}"] = lambda part: f"{total(map(size, part)) / unit:.2f}"

    add_sizes("output", lambda layer: output_bytes[layer.name])
    add_sizes("weights", lambda layer: layer.weight_bytes)
    add_sizes("kept", lambda layer: layer.saved_bytes)
    if any(layer.workspace_bytes for layer in profile.layers):
        add_sizes("work", lambda layer: layer.workspace_bytes, max)
    return columns


def _operation(layer: Layer) -> str:
    """The operation of a layer, and the layer that was measured in its place if there is such a layer."""
    text = layer.op if len(layer.op) <= LONGEST else layer.op[: LONGEST - 1] + "…"
    return f"{text} = {layer.like}" if layer.like else text


def _deviation(part: Sequence[Layer]) -> str:
    """The spread of a layer in percent of its time; empty for several layers, or for a layer without time."""
    spread_s = part[0].forward_spread_s + part[0].backward_spread_s
    time_s = layer_time_s(part[0]) if len(part) == 1 else 0.0
    return f"{spread_s / time_s * 100:.0f}" if time_s else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3f}" if seconds < 0.1 else f"{seconds * 1e3:.1f}"


def profile_totals(profile: Profile) -> list[str]:
    """Lines below the table: the meaning of ±, the sum against the whole model, the update, memory, and other sizes."""
    lines = []
    if any(layer.forward_spread_s or layer.backward_spread_s for layer in profile.layers):
        lines.append(
            f"± is the interquartile range of the time of {profile.provenance.repeats} passes, forward plus backward."
        )
    lines += [*_whole(profile), *_under_load(profile)]
    alike = sum(bool(layer.like) for layer in profile.layers)
    if alike:
        lines.append(f"Layers that have the times of an identical layer (= its name): {alike}.")
    update = sum(layer.update_s for layer in profile.layers)
    if update:
        fixed = f", {show_time(profile.step_s)} of it at every stage" if profile.step_s else ""
        lines.append(f"The optimiser's step: {show_time(update + profile.step_s)}{fixed}.")
    lines += _reading(profile)
    if profile.peak_bytes:
        lines.append(f"Peak memory of a pass and update of the whole model: {show_size(profile.peak_bytes)}.")
    frozen = sum(layer.frozen_bytes for layer in profile.layers)
    if frozen:
        trained = sum(layer.parameter_bytes for layer in profile.layers)
        lines.append(f"Trained weights: {show_size(trained)}; frozen weights: {show_size(frozen)}.")
    buffers = sum(layer.buffer_bytes for layer in profile.layers) - frozen
    if buffers:
        lines.append(f"Buffers (state that is not a weight): {show_size(buffers)}.")
    if profile.sizes:
        own = (profile.minibatch, profile.layers, profile.tensors, profile.whole_forward_s, profile.whole_backward_s)
        sizes = sorted((Size(*own), *profile.sizes), key=lambda size: size.minibatch)
        lines += ["Microbatch sizes of the same run:", *map(_size, sizes)]
    if any(layer.workspace_bytes for layer in profile.layers):
        lines.append(
            "work: temporary memory of a layer while it runs, beyond its inputs, outputs and kept tensors; "
            "the sum row has the largest."
        )
    return lines


def _reading(profile: Profile) -> list[str]:
    """A line on the time of reading samples, with advice if it is long; empty if the time is not known."""
    if not profile.read_s:
        return []
    line = f"Reading the samples of a microbatch: {show_time(profile.read_s)}"
    if profile.read_s > MUCH_READING * profile.total_s:
        line += ", while the worker computes nothing; Data(processes=2) reads them in other processes"
    return [f"{line}."]


def _whole(profile: Profile) -> list[str]:
    if not profile.whole_forward_s or not profile.whole_backward_s:
        return []
    forward = sum(layer.forward_s for layer in profile.layers)
    backward = sum(layer.backward_s for layer in profile.layers)
    whole_forward, whole_backward = profile.whole_forward_s, profile.whole_backward_s
    line = (
        f"Sum of the layers: forward {forward * 1e3:.2f} ms, backward {backward * 1e3:.2f} ms. "
        f"The whole model: {whole_forward * 1e3:.2f} ms, {whole_backward * 1e3:.2f} ms. "
        f"Sum / whole: {forward / whole_forward:.2f}, {backward / whole_backward:.2f}."
    )
    return [line]


def _under_load(profile: Profile) -> list[str]:
    """A line on the times with all cores busy, and the long layer that busy cores slow down the most."""
    processes = profile.provenance.load_processes
    if not processes or not profile.total_s:
        return []
    loaded_s = sum(map(_loaded_s, profile.layers))
    line = f"With {processes} processes busy: {show_time(loaded_s)}, {_more(loaded_s, profile.total_s)}"
    heavy = [layer for layer in profile.layers if layer_time_s(layer) >= LEAST_SHARE * profile.total_s]
    if len(heavy) > 1:
        most = max(heavy, key=lambda layer: _loaded_s(layer) / layer_time_s(layer))
        line += f"; {most.name} {_more(_loaded_s(most), layer_time_s(most))}"
    return [line + "."]


def _loaded_s(layer: Layer) -> float:
    return layer.loaded_forward_s + layer.loaded_backward_s


def _more(loaded_s: float, alone_s: float) -> str:
    return f"{loaded_s / alone_s - 1:+.0%}"


def _size(size: Size) -> str:
    forward, backward = sum(layer.forward_s for layer in size.layers), sum(layer.backward_s for layer in size.layers)
    made = sum(tensor.bytes for tensor in size.tensors)
    line = (
        f"  {size.minibatch}: forward {show_time(forward)}, backward {show_time(backward)}, "
        f"{show_time((forward + backward) / size.minibatch)} a sample, "
        f"kept {show_size(sum(layer.saved_bytes for layer in size.layers))}, outputs {show_size(made)}"
    )
    whole_s = (size.whole_forward_s or 0.0) + (size.whole_backward_s or 0.0)
    return line + (f"; sum / whole {(forward + backward) / whole_s:.2f}" if whole_s else "")
