"""The sections of the goldens, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import golden_plans
import golden_streams
import golden_texts

SECTIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "plans": golden_plans.plans,
    "random": golden_plans.random_problems,
    "files": golden_texts.files,
    "help": golden_texts.help_texts,
    "api": golden_texts.api,
    "streams": golden_streams.streams,
}
IN_PARTS = ("plans", "random", "files")
"""The sections that take long, and can be asked for a part of their entries, by `every`."""
