"""The rows of a sweep with their prices and their Pareto set, as CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeplan.cost.throughput import price_per_million
from pipeplan.drawing.tables import describe_cluster
from pipeplan.sweeps.points import SweepPoint
from pipeplan.sweeps.sweep import PointAnswer

FORMAT, VERSION = "pipeplan-sweep", 1


@dataclass(frozen=True)
class SweepRow:
    """A point, its answer, and the price of its cluster."""

    point: SweepPoint
    answer: PointAnswer
    price_per_hour: float | None = None
    """Price of the whole cluster for one hour, including idle servers."""

    @property
    def minibatch(self) -> int:
        """Samples of a minibatch of the plan, or of the point if it has no plan."""
        return self.answer.minibatch or self.point.microbatch or self.point.profile.minibatch

    @property
    def rate(self) -> float | None:
        """Samples per second; None if there is no plan."""
        return None if self.answer.step_time_s is None else self.minibatch / self.answer.step_time_s

    @property
    def cost(self) -> float | None:
        """Cost of a million samples; None if there is no price or no plan."""
        if self.price_per_hour is None or self.rate is None:
            return None
        return price_per_million(self.price_per_hour, self.rate)


def hourly_price(point: SweepPoint, per_server: float | None) -> float | None:
    """Hourly price of the point's cluster, from `per_server` if given, else from the cluster; None if unknown."""
    if per_server is not None:
        return per_server * point.cluster.servers
    return point.cluster.price_per_hour


def pareto_rows(rows: Sequence[SweepRow]) -> set[int]:
    """Indices of the Pareto set: rows for which no other row is faster and not dearer, or cheaper and not slower."""
    known = [(number, row.rate, row.cost) for number, row in enumerate(rows)]
    priced = [(number, rate, cost) for number, rate, cost in known if rate is not None and cost is not None]
    return {
        number
        for number, rate, cost in priced
        if not any(
            other_rate >= rate and other_cost <= cost and (other_rate > rate or other_cost < cost)
            for _, other_rate, other_cost in priced
        )
    }


def varying_settings(rows: Iterable[SweepRow]) -> list[str]:
    """The names of the settings that differ between rows, in the order in which they are shown."""
    settings = [row.point.settings() for row in rows]
    names = list(dict.fromkeys(name for setting in settings for name in setting))
    return [name for name in names if len({setting.get(name) for setting in settings}) > 1]


def row_records(rows: Sequence[SweepRow]) -> list[dict[str, Any]]:
    """Every row as plain values in seconds, bytes and bytes/s; None where a value does not apply."""
    best = pareto_rows(rows)
    records = []
    for number, row in enumerate(rows):
        point, answer = row.point, row.answer
        records.append(
            {
                "servers": point.cluster.servers,
                "workers": point.cluster.workers,
                "devices": describe_cluster(point.cluster),
                **{f"bandwidth_{name}_bytes_per_s": rate for name, rate in point.bandwidths.items()},
                "memory_bytes": point.memory_bytes,
                "minibatch": row.minibatch,
                "schedule": answer.schedule or point.schedule,
                "synchronous": None if answer.step_time_s is None else answer.synchronous,
                "minibatch_s": answer.step_time_s,
                "samples_per_s": row.rate,
                "ideal_samples_per_s": point.ideal_rate,
                "over_data_parallelism": answer.over_parallelism,
                "data_parallelism_fits": None if answer.step_time_s is None else answer.parallelism_fits,
                "config": answer.config or None,
                "busy_workers": answer.busy or None,
                "bound_by": answer.bound or None,
                "proven": answer.proven or None,
                "price_per_hour": row.price_per_hour,
                "cost_per_million_samples": row.cost,
                "pareto": None if row.cost is None else number in best,
                "why": answer.why or None,
            }
        )
    return records


def sweep_csv(rows: Sequence[SweepRow]) -> str:
    """The records as CSV with a header line."""
    records = row_records(rows)
    file = io.StringIO()
    names = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(file, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue()


def sweep_json(rows: Sequence[SweepRow], *, planned: int) -> dict[str, Any]:
    """The document that `pipeplan sweep --json` prints; `planned` is the number of points, solved or not."""
    return {"format": FORMAT, "version": VERSION, "planned": planned, "rows": row_records(rows)}
