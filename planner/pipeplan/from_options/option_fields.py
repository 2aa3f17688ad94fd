"""The fields of `Options` that arguments of the command line and keywords of the Python API set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypedDict, get_type_hints

from pipeplan.errors import InputError
from pipeplan.problem.options import Options, Sharding
from pipeplan.util.files import Node
from pipeplan.util.text import did_you_mean
from pipeplan.util.typed import decode, shortened, whole_number


class OptionKeywords(TypedDict, total=False):
    """The fields of `Options` as keyword arguments of the Python API, for type checkers; all have defaults."""

    inference: bool
    overlap: float | None
    """Share of gradient synchronisation that hides behind compute; None for `default_overlap`."""
    memory: bool
    stages: int | None
    max_replicas: int | None
    allow_copies: bool
    schedule: str
    """A training schedule. By default the best schedule is chosen."""
    accumulate: int | None
    virtual_stages: int | None
    correction: str
    shard_optimizer: bool
    unequal_shares: bool
    """Whether shares of the batch may be unequal; allowed only with `stages=1` and the schedule 1f1b-flush."""
    recompute: bool
    contention: bool
    boundary: str
    max_stages: int | None
    max_workers: int | None
    pins: tuple[tuple[str, int], ...]
    together: tuple[tuple[str, ...], ...]
    no_cut_after: tuple[str, ...]
    grid: bool
    ignore_memory: bool
    no_recompute: bool
    no_contention: bool
    pin: str | tuple[str, ...]
    """One or several texts of the form `LAYER=STAGE`."""


FLAGS: Mapping[str, Mapping[str, Any]] = {
    "ignore_memory": {"memory": False},
    "no_recompute": {"recompute": False},
    "no_contention": {"contention": False},
    "shard_optimizer": {"sharding": Sharding.OPTIMIZER},
}
"""The fields of `Options` that a flag of the command line sets. Every other option has the name of its field."""


def option_fields(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Options` that arguments of the command line set, by name of the field.

    Arguments without a value (None, False, or empty) and arguments that do not belong to `Options` are ignored. Raises
    an `InputError` if a flag contradicts another option.
    """
    names = {field.name for field in fields(Options)}
    set_arguments = {name: value for name, value in arguments.items() if value is not None and value is not False}
    chosen = {name: value for name, value in set_arguments.items() if name in names and value not in ("", ())}
    for flag in (flag for flag in FLAGS if flag in set_arguments):
        for name, value in FLAGS[flag].items():
            if chosen.get(name, value) != value:
                options = f"--{flag.replace('_', '-')} and --{name.replace('_', '-')} {chosen[name]}"
                raise InputError(f"{options} contradict each other: leave out one of them")
        chosen |= FLAGS[flag]
    return chosen


def parse_pin(text: str) -> tuple[str, int]:
    """(layer, stage) from a text such as `conv1=1`. Raises `InputError`."""
    layer, _, stage = text.rpartition("=")
    number = whole_number(stage)
    if not layer or not number:
        raise InputError(f"--pin: expected a layer and a stage from 1 on, as in conv1=1, found {shortened(text, 80)}")
    return layer, number


def checked_keywords(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Options` that keywords of the Python API set, by name of the field.

    Keywords are fields of `Options`, or flags and `pin` as on the command line; None stands for the default. Raises
    `InputError` for an unknown keyword and a value of another type.
    """
    fields_set: dict[str, Any] = {}
    kinds = get_type_hints(Options, include_extras=True)
    for name, value in options.items():
        if name not in OptionKeywords.__annotations__:
            raise InputError(f"there is no option {name!r}; {did_you_mean(name, OptionKeywords.__annotations__)}")
        node = Node(_plain(value), name)
        if value is None:
            continue
        if name in FLAGS:
            fields_set |= FLAGS[name] if node.boolean() else {}
        elif name == "pin":
            texts = [node] if isinstance(value, str) else node.items()
            fields_set["pins"] = (*fields_set.get("pins", ()), *(parse_pin(text.text()) for text in texts))
        else:
            fields_set[name] = decode(node, kinds[name])
    return fields_set


def _plain(value: Any) -> Any:
    """The value with lists instead of tuples, and Python's numbers instead of numpy's."""
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value.item() if hasattr(value, "item") else value


def default_overlap(kind: str) -> float:
    """The share of gradient synchronisation that hides behind compute on devices of a kind, `cuda` or `cpu`."""
    # On CPUs the cores that compute also move the data, so communication does not overlap with computing.
    return 1.0 if kind == "cuda" else 0.0


def options_for(kind: str, **chosen: Any) -> Options:
    """Options for devices of a kind, `cuda` or `cpu`. The kind sets the default of the overlap."""
    if chosen.get("overlap") is None:
        chosen["overlap"] = default_overlap(kind)
    return Options(**chosen)
