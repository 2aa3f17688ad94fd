"""What is said before training where workers or links are not as planned, and it matters. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.placement.crossing import Team
from pipeplan_launch.placement.pace import pace_s
from pipeplan_launch.placement.reality import Reality
from pipeplan_launch.placement.seats import Seats

MATTERS = 0.05
"""Share of the pace below which nothing is said."""
MOST_NAMED = 2
MOST_JUDGED = 8
"""Of the slowest, by what they reach of what is planned."""


def notes(plan: LaunchPlan, seats: Seats, measured: Mapping[Team, float]) -> list[str]:
    """At most a line on who is apart, and one on links."""
    if plan.links is None:
        return [f"note: {_apart(seats)}"] if seats.apart else []
    planned = plan.predictions[0].minibatch_s
    found = []
    between = {team: rate for team, rate in measured.items() if not _is_apart(team, seats)}
    if seats.apart:
        # Also what was measured between those who are apart.
        inside = {team: rate for team, rate in measured.items() if team not in between}
        found += _said(_apart(seats), planned, pace_s(plan, Reality(plan, seats, inside)))
    slowest = _slowest(plan, seats, between)
    if slowest is not None:
        now = pace_s(plan, Reality(plan, seats, measured))
        before = pace_s(plan, Reality(plan, seats, {one: rate for one, rate in measured.items() if one not in between}))
        if now is not None and before is not None and now * (1 - MATTERS) >= before:
            found += _said(_slow(plan, seats, slowest, between[slowest]), planned, now)
    return found


def _said(what: str, planned: float | None, now: float | None) -> list[str]:
    if not planned or now is None:
        return [f"note: {what}"]
    loss = 1 - planned / now
    if loss < MATTERS:
        return []
    return [f"note: {what}: {_ms(now)} ms a minibatch instead of {_ms(planned)}, {loss:.0%} slower"]


def _is_apart(team: Team, seats: Seats) -> bool:
    """Whether the plan has these workers on one server."""
    return len({seats.meant[worker] for worker in team.workers}) == 1


def _slowest(plan: LaunchPlan, seats: Seats, measured: Mapping[Team, float]) -> Team | None:
    """The one of which it costs most that it is slower than planned."""
    planned = Reality(plan, seats).planned
    worst = sorted(measured, key=lambda team: measured[team] / planned(team))[:MOST_JUDGED]
    paces = {team: pace_s(plan, Reality(plan, seats, {team: measured[team]})) or 0.0 for team in worst}
    return max(paces, key=lambda team: (paces[team], team.share), default=None)


def _apart(seats: Seats) -> str:
    named = [_numbers(workers) for workers in seats.apart[:MOST_NAMED]]
    more = len(seats.apart) - len(named)
    servers = list(dict.fromkeys(seats.name(seats.servers[worker]) for worker in seats.apart[0]))
    where = f"on different machines ({', '.join(servers[:4])}{', …' if len(servers) > 4 else ''})"
    who = "; ".join(named) + (f" and those of {more} more servers" if more else "")
    return f"workers {who}, meant to share a server{' each' if len(seats.apart) > 1 else ''}, are {where}"


def _slow(plan: LaunchPlan, seats: Seats, team: Team, rate: float) -> str:
    planned = Reality(plan, seats).planned(team)
    if team.is_ring:
        return (
            f"all-reduces of stage {team.stage} reach {gbit(rate)} between servers, the plan was made for "
            f"{gbit(planned)}"
        )
    ends = " and ".join(dict.fromkeys(seats.name(seats.servers[worker]) for worker in team.workers))
    return f"between {ends} {gbit(rate)} are reached, the plan was made for {gbit(planned)}"


def gbit(rate: float) -> str:
    """Of bytes/s: `1.9 Gbit/s`."""
    bits = rate * 8
    for factor, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= factor:
            return f"{bits / factor:.3g} {name}"
    return f"{bits / 1e3:.3g} Kbit/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _numbers(workers: Sequence[int]) -> str:
    if len(workers) > 2 and list(workers) == list(range(workers[0], workers[-1] + 1)):
        return f"{workers[0]} to {workers[-1]}"
    return " and ".join(filter(None, [", ".join(map(str, workers[:-1])), str(workers[-1])]))
