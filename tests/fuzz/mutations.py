"""Random damage to files: to a parsed document, or to the text of any file."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

NUMBERS: list[Any] = [
    *(0, 1, -1, 2, 3, 0.5, 1e-9, 1e9, 1e18, -0.0, 1e-300, 1e308, -1e308, 2**31, 2**53 + 1, 2**63, 2**64, 10**30),
    *(1 << 20, (1 << 20) + 1, 1 << 16, 1000, 10**400, float("nan"), float("inf"), -float("inf")),
]
PLAUSIBLE: list[Any] = [0, 1, 2, 3, 5, 8, 16, 100, 1000, 0.1, 0.5, 1.0, 2.5, 1e-6, 1 << 20, 1 << 30, 1 << 34]
TEXTS = [
    *("", " ", "x", "0", "nan", "10 Gbit/s", "12 GB", "5 us", "-5 us", "1e99 TB", "1e400 B", "½", "١٦ GiB", "null"),
    *("a", "b", "c", "server", "\x00", "\x1b[31mred", "\n", "a\tb", "\u202eevil", "\u2028", "é" * 40, "z" * 5000),
    *("../../outside", "/etc/passwd", "'; touch owned; '", "$(touch owned)", "{{ 7 * 7 }}", "[bold]x[/bold]", "[/x]"),
    *("%s%n", "1f1b-stashing", "vertical-sync", "2bw", "gpipe", "1f1b-flush", "forward-only", "cuda", "cpu"),
]
OTHERS: list[Any] = [None, True, False, [], {}, [[]], [None], {"a": 1}, "\ud800"]
DEPTH = 5000


class Deep:
    """Stands for a value nested so deeply that only its text can be written."""


def damaged(document: Any, rng: random.Random) -> Any:
    """A copy of a document after one to three mutations."""
    document = copy.deepcopy(document)
    for _ in range(rng.choice([1, 1, 1, 1, 2, 3])):
        _mutate(document, rng)
    return document


def _mutate(document: Any, rng: random.Random) -> None:
    places = _places(document)
    if not places:
        return
    holder, key = rng.choice(places)
    # What is a little wrong goes deeper into the program than what is missing.
    ways = ("replace", "scale", "delete", "rename", "duplicate", "swap", "reorder")
    match rng.choices(ways, weights=(10, 8, 1, 1, 2, 2, 2))[0]:
        case "replace":
            _replace(holder, key, places, rng)
        case "scale":
            _scale(places, rng)
        case "delete":
            del holder[key]
        case "rename" if isinstance(holder, dict):
            holder[rng.choice([*TEXTS, f"{key}s", str(key).upper()])] = holder.pop(key)
        case "duplicate" if isinstance(holder, dict):
            holder[f"{key}_"] = copy.deepcopy(holder[key])
        case "duplicate":
            for _ in range(rng.choice([1, 1, 3, 20])):
                holder.insert(rng.randint(0, len(holder)), copy.deepcopy(holder[key]))
        case "swap":
            other, place = rng.choice(places)
            if not (_within(holder[key], other) or _within(other[place], holder)):
                holder[key], other[place] = other[place], holder[key]
        case "reorder":
            lists = [one[at] for one, at in places if isinstance(one[at], list)]
            if lists:
                rng.shuffle(rng.choice(lists))


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a document."""
    found: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            found.append((holder, key))
            waiting.append(holder[key])
    return found


def _within(value: Any, holder: Any) -> bool:
    """Whether a container is part of a value: swapping the two would tie a knot."""
    return any(inner is holder for inner, _ in _places(value))


def _replace(holder: Any, key: Any, places: list[Any], rng: random.Random) -> None:
    value = holder[key]
    if rng.random() < 0.15:
        holder[key] = copy.deepcopy(rng.choice([*NUMBERS, *TEXTS, *OTHERS, Deep()]))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        holder[key] = rng.choice(PLAUSIBLE if rng.random() < 0.7 else NUMBERS)
    elif isinstance(value, str):
        holder[key] = rng.choice(TEXTS)
    else:
        _scale(places, rng)


def _scale(places: list[Any], rng: random.Random) -> None:
    numbers = [place for place in places if isinstance(place[0][place[1]], int | float)]
    if numbers:
        holder, key = rng.choice(numbers)
        try:
            scaled = holder[key] * rng.choice([-1, 0, 2, 3, 10, 0.5, 0.1, 1000, 1000000, 1e-6, 1e12])
        except OverflowError:
            scaled = 0
        # A count stays a whole number.
        holder[key] = int(scaled) if isinstance(holder[key], int) and abs(scaled) < 1e300 else scaled


def damaged_text(text: str, rng: random.Random) -> bytes:
    """The bytes of a text after one to three mutations of its characters, lines or bytes."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        lines = text.split("\n")
        line, at = rng.randrange(len(lines)), rng.randint(0, len(text))
        kind = rng.randrange(7)
        if kind == 0:
            text = text[:at]
        elif kind == 1:
            text = text[:at] + text[at + rng.randint(1, 20) :]
        elif kind == 2:
            more = rng.choice(["\x00", '"', "{", "]", ",", "\\", "9" * 30, "é", "\r", "\t", "-"])
            text = text[:at] + more + text[at:]
        elif kind == 3:
            text = "\n".join([*lines[: line + 1], *lines[line:]])
        elif kind == 4:
            text = "\n".join([*lines[:line], *lines[line + 1 :]])
        elif kind == 5:
            numbers = [word for word in text.replace(",", " ").split() if word.strip("-").replace(".", "").isdigit()]
            if numbers:
                text = text.replace(rng.choice(numbers), str(rng.choice(NUMBERS))[:60], 1)
        else:
            text = text[at:] + text[:at]
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        at = rng.randint(0, len(data))
        data = data[:at] + rng.choice([b"\xff\xfe", b"\x80", b"\xef\xbb\xbf"]) + data[at:]
    return data


def as_json(document: Any) -> str:
    """JSON, with NaN, infinities and lone surrogates where the document has them."""
    return json.dumps(document, indent=1, default=lambda _: "@deep@").replace('"@deep@"', "[" * DEPTH + "]" * DEPTH)


def as_toml(value: Any, *, top: bool = True) -> str:
    """TOML of inline tables."""
    if top:
        return "".join(f"{_text(key)} = {as_toml(item, top=False)}\n" for key, item in value.items())
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_text(key)} = {as_toml(item, top=False)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(as_toml(item, top=False) for item in value) + "]"
    if isinstance(value, Deep):
        return "[" * DEPTH + "]" * DEPTH
    if isinstance(value, str):
        return _text(value)
    return {"None": "false", "True": "true", "False": "false"}.get(str(value), str(value))


def _text(value: Any) -> str:
    return json.dumps(str(value))
