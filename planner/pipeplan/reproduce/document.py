"""The table as JSON."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from pipeplan.reproduce import inference
from pipeplan.reproduce.experiments import VARIANTS
from pipeplan.reproduce.published import SOURCE
from pipeplan.reproduce.replayed import Replay
from pipeplan.reproduce.rows import Predicted, Row
from pipeplan.reproduce.table import Table

FORMAT, VERSION = "pipeplan-table1", 1


def document(table: Table) -> dict[str, Any]:
    """Everything, in seconds and bytes."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "source": SOURCE,
        "efficiencies": [asdict(one) | {"rate": one.rate} for one in table.efficiencies],
        "rows": [_row(row) for row in table.rows],
        "variants": [{"key": one.key, "title": one.title, "text": one.text} for one in VARIANTS],
        "experiments": [
            {"row": trial.name, "gains": dict(trial.gains), "needs": asdict(trial.needs)} for trial in table.trials
        ],
        "reasons": [asdict(reason) for reason in table.reasons],
        "inference": {
            "source": inference.SOURCE,
            "shares": inference.shares(),
            "ways": [asdict(one) | {"error": one.error} for one in table.inference],
        },
        "replays": [asdict(one) | {"error": one.error} for one in table.replays],
        "replay_errors": errors(table.replays),
    }


def errors(replays: tuple[Replay, ...]) -> dict[str, float] | None:
    """The median and the largest error of the replays; None without any that ran."""
    sizes = [abs(one.error) for one in replays if one.error is not None]
    if not sizes:
        return None
    return {"median": median(sizes), "worst": max(sizes)}


def _row(row: Row) -> dict[str, Any]:
    published = row.published
    return {
        "name": published.name,
        "model": published.model,
        "servers": published.servers,
        "gpus_per_server": published.each,
        "cluster": published.cluster,
        "minibatch": published.minibatch,
        "profile": row.source.text,
        "published": {
            "config": published.config,
            "speedup": published.speedup,
            "speedup_to_accuracy": published.to_accuracy,
        },
        "data_parallelism": _predicted(row.parallel),
        "paper": _predicted(row.paper) | {"error": row.error, "off": row.off},
        "rank": {"place": row.rank.place, "better": row.rank.better, "among": row.rank.among},
        "ours": _predicted(row.ours)
        | {"proven": row.outcome.verdict.proven, "verdict": row.outcome.verdict.text, "gap": row.outcome.gap},
        "straight": None if row.straight is None else _predicted(row.straight),
    }


def _predicted(one: Predicted) -> dict[str, Any]:
    return {
        "config": one.config,
        "minibatch_s": one.pace_s,
        "bound_by": one.score.bound,
        "gain": one.gain,
        "fits": one.score.fits,
    }
