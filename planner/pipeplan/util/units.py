"""Parses and formats quantities such as `16 GB`, `10 Gbit/s` and `5 us`.

All of pipeplan computes in bytes, bytes per second and seconds. SI prefixes are powers of 1000 (GB, Gbit), binary
prefixes are powers of 1024 (GiB).
"""

from __future__ import annotations

import math
import re

from pipeplan.errors import InputError

LARGEST = 10**18
"""Largest number that is read as a size, a rate or a time, in its own unit."""
_SIZES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_RATES = {f"{unit}/s": float(factor) for unit, factor in _SIZES.items()} | {
    f"{prefix}bit/s": factor / 8 for prefix, factor in (("", 1.0), ("K", 1e3), ("M", 1e6), ("G", 1e9), ("T", 1e12))
}
# Units per second, because dividing by 1e6 is exact but multiplying by 1e-6 is not.
_TIMES = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*(\S*)\s*", re.ASCII)


def parse_size(value: object, where: str) -> int:
    """Bytes, from a number of bytes or text such as `16 GiB`.

    For other values this and the other parsers raise an `InputError` that begins with `where`, the place of the value.
    """
    return round(_parse(value, _SIZES, "a size such as '16 GB'", where))


def parse_rate(value: object, where: str) -> float:
    """Bytes per second, from a number of bytes per second or text such as `10 Gbit/s` or `12 GB/s`."""
    return _parse(value, _RATES, "a rate such as '10 Gbit/s' or '12 GB/s'", where)


def parse_time(value: object, where: str) -> float:
    """Seconds, from a number of seconds or text such as `5 us`."""
    if isinstance(value, str) and (match := _QUANTITY.fullmatch(value)) and match[2] in _TIMES:
        return float(match[1]) / _TIMES[match[2]]
    return _parse(value, {}, "a time such as '5 us'", where)


def parse_share(value: object, where: str) -> float:
    """A share of 1, from a number such as 0.05 or text such as `5%`."""
    return _parse(value, {"": 1.0, "%": 0.01}, "a share such as '5%' or 0.05", where)


def _parse(value: object, units: dict[str, int] | dict[str, float], example: str, where: str) -> float:
    number: float | None = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) if abs(value) <= LARGEST else math.inf
    elif isinstance(value, str) and (match := _QUANTITY.fullmatch(value)) and match[2] in units:
        number = float(match[1]) * units[match[2]]
    if number is None or not math.isfinite(number) or number < 0:
        found = repr(value) if not isinstance(value, int) or abs(value) <= LARGEST else "a number beyond 1e18"
        raise InputError(f"{where}: expected {example}, found {found[:80]}")
    return number


def show_time(seconds: float) -> str:
    """A time as text: in microseconds below 1 ms, in seconds from 10 s on, else in milliseconds."""
    if seconds == 0:
        return "0"
    if seconds >= 10:
        return f"{seconds:.1f} s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def show_size(size: float) -> str:
    """A size as text in B, KiB, MiB or GiB."""
    if size == 0:
        return "0"
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 1000 * factor else f"{size / factor:.0f} {unit}"
    return f"{size:.0f} B"


def show_rate(rate: float) -> str:
    """A rate in bytes per second as text in Gbit/s."""
    gigabits = rate * 8 / 1e9
    return f"{gigabits:.3g} Gbit/s" if gigabits < 1000 else f"{gigabits:.0f} Gbit/s"


def show_step_time(per_s: float) -> str:
    """A number per second as text with four digits and no exponent, such as `49.9`, `3194` or `282800`."""
    rounded = float(f"{per_s:.4g}")
    return f"{rounded:.0f}" if rounded >= 1000 else f"{rounded:.4g}"


def show_throughput(samples_per_s: float) -> str:
    """A throughput in samples per second, such as `1655 samples/s`."""
    return f"{show_step_time(samples_per_s)} samples/s"
