"""`pipeplan profile show`: print a profile as a table and a drawing of its graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
from rich.console import RenderableType

from pipeplan.cli.options import bundled_profiles, complete_names, json_option, quiet_option
from pipeplan.cli.output import answer_width, print_answer, print_json
from pipeplan.cli.profile.table import layer_table, profile_totals, shown_layers
from pipeplan.drawing.fold_chains import layer_time_s, most_expensive_layers
from pipeplan.drawing.terminal import dag_lines
from pipeplan.profile_data.layers import LOADED_TIMES
from pipeplan.profile_data.profile import Profile, load_profile
from pipeplan.util.text import one_line
from pipeplan.util.units import show_size, show_time

ORIGINS = {
    "measured": "measured on",
    "modelled": "modelled, not measured, for",
    "imported": "imported, measured on",
    "calibrated": "calibrated by runs on",
}


@click.command("show")
@click.argument("profile", metavar="FILE", shell_complete=complete_names(bundled_profiles, ".json"))
@click.option(
    "--top",
    type=click.IntRange(min=1),
    metavar="N",
    help="Show only the N most expensive layers, most expensive first.",
)
@click.option("--no-picture", is_flag=True, help="Leave out the drawing of the graph.")
@json_option
@quiet_option
def command(profile: str, top: int | None, no_picture: bool, as_json: bool) -> None:
    """Show a profile: the origin of its numbers, the cost of each layer, and its graph.

    FILE is a profile, or the name of a bundled profile, such as vgg16-v100.

    \b
    pipeplan profile show profile.json --top 10
    pipeplan profile show vgg16-v100
    """
    loaded = load_profile(profile)
    if as_json:
        print_json(profile_summary(loaded, top))
    else:
        print_answer(_profile_parts(loaded, top, drawn=not no_picture), wide=True)


def _profile_parts(profile: Profile, top: int | None, *, drawn: bool) -> Iterator[RenderableType]:
    if profile.provenance.warning:
        yield one_line(profile.provenance.warning)
    yield from map(one_line, profile_heading(profile))
    yield ""
    yield layer_table(profile, top)
    yield from map(one_line, profile_totals(profile))
    if not drawn:
        return
    hot = most_expensive_layers(profile)
    share = sum(layer_time_s(layer) for layer in profile.layers if layer.name in hot) / (profile.total_s or 1.0)
    marked = "1 layer that takes" if len(hot) == 1 else f"{len(hot)} layers that take"
    mark = f"; ● marks {marked} {share:.0%}" if hot else ""
    yield f"\nThe graph, and each part's share of the time{mark}:"
    yield from dag_lines(profile, answer_width())


def profile_heading(profile: Profile) -> list[str]:
    """Lines on the model and on the origin of the numbers."""
    origin = profile.provenance
    lines = [f"{profile.model_name or 'a model'}, microbatch {profile.minibatch}: {len(profile.layers)} layers"]
    lines[0] += f" ({profile.granularity}), {show_time(profile.total_s)} forward and backward"
    where = origin.device_name or origin.device or "an unnamed device"
    conditions = [
        f"{ORIGINS.get(origin.kind, origin.kind)} {where}"
        + (f" ({origin.device})" if origin.device and origin.device_name else "")
    ]
    conditions += [f"{origin.threads} thread{'s' if origin.threads > 1 else ''}"] if origin.threads else []
    conditions += [f"{origin.repeats} passes after {origin.warmup}"] if origin.repeats else []
    lines.append("  " + ", ".join([*conditions, *([origin.when] if origin.when else [])]))
    lines += [f"  {text}" for text in (origin.how, origin.traced and f"traced by {origin.traced}") if text]
    versions = [f"{name} {value}" for name, value in (("torch", origin.torch), ("pipeplan", origin.pipeplan)) if value]
    lines += ["  " + ", ".join(versions)] if versions else []
    ratio = profile.optimizer_state_ratio
    state = f"whose state is {ratio:g} times the weights" if ratio else "which keeps no state"
    lines.append(f"  {profile.optimizer_name}, {state}")
    if profile.model_ref:
        lines.append(f"  model {profile.model_ref}" + (f", graph {profile.graph_hash}" if profile.graph_hash else ""))
    for group in profile.together:
        rest = f" and {len(group) - 3} more" if len(group) > 3 else ""
        lines.append(f"  layers that stay together: {', '.join(group[:3])}{rest}")
    for tie in profile.tied:
        rest = f" and {len(tie.layers) - 3} more" if len(tie.layers) > 3 else ""
        lines.append(f"  layers that share {show_size(tie.bytes)} of weights: {', '.join(tie.layers[:3])}{rest}")
    lines += [f"  note: {note}" for note in origin.notes]
    lines.append("  times and sizes are for one microbatch: ms, and MiB of 2^20 or GiB of 2^30 bytes")
    lines.append(f"  {profile.digest()}")
    return lines


def profile_summary(profile: Profile, top: int | None) -> dict[str, Any]:
    """The document of `--json`: the digest, sums, and the layers with their shares, in seconds and bytes."""
    content = profile.to_json()
    by_name = {layer["name"]: layer for layer in content["layers"]}
    total_time_s = profile.total_s or 1.0
    output_bytes = profile.made_bytes()
    rows = [
        by_name[layer.name] | {"output_bytes": output_bytes[layer.name], "share": layer_time_s(layer) / total_time_s}
        for layer in shown_layers(profile, top)
    ]
    sums = {
        name: sum(layer[name] for layer in content["layers"])
        for name in ("forward_s", "backward_s", "update_s", "parameter_bytes", "buffer_bytes", "saved_bytes")
    }
    if profile.provenance.load_processes:
        sums |= {name: sum(getattr(layer, name) for layer in profile.layers) for name in LOADED_TIMES}
    kept = {key: content[key] for key in ("model", "minibatch", "provenance", "optimizer", "peak_bytes", "whole")}
    sizes = [
        {
            "minibatch": size.minibatch,
            "forward_s": sum(layer.forward_s for layer in size.layers),
            "backward_s": sum(layer.backward_s for layer in size.layers),
        }
        for size in profile.sizes
    ]
    found = {"sum": sums, "expensive": most_expensive_layers(profile), "layers": rows, "sizes": sizes}
    return {"digest": profile.digest(), **kept, **found}
