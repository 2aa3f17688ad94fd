"""A plan's step time in the units of a training run: samples and tokens per second, share of the peak, price and hours.

docs/choice.md, "What a run takes", has the formulas. All formulas use the steady step time: they leave out the start,
the evaluation and the checkpoints of a run. A price is in the currency of the cluster file, and counts the whole
cluster even if the plan uses only a part.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.devices import DeviceFile, bundled_model_of, device_mismatch
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.profile_data.layers import SampleFlops
from pipeplan.profile_data.profile import Profile
from pipeplan.util.units import show_step_time

HOUR_S = 3600.0
MILLION = 1e6
MOST = 10**15
"""Largest number of epochs, samples or tokens that an option accepts. Larger numbers are probably typing errors."""


@dataclass(frozen=True)
class RunSize:
    """The size of a training run, as far as the user gives it. Raises an `InputError` for a number below 1."""

    epochs: int | None = None
    dataset_size: int | None = None
    """Samples in an epoch; None stands for the number in the profile."""
    tokens_per_sample: int | None = None
    """Tokens in a sample; None stands for the number in the profile."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value is not None and not 1 <= value <= MOST:
                option = "--" + name.replace("_", "-")
                raise InputError(f"{option} must be at least 1 and at most {MOST:.0e}, not {value}")

    def check(self, profile: Profile, *, inference: bool) -> None:
        """Raise an `InputError` if epochs are given for inference, or if the size of an epoch is unknown."""
        if self.epochs is not None and inference:
            raise InputError("--epochs is for training: leave it out with --inference")
        if self.epochs is not None and not (self.dataset_size or profile.work.dataset_size):
            raise InputError("--epochs needs the samples of an epoch, which the profile does not say: dataset_size")


@dataclass(frozen=True)
class Throughput:
    """A plan's step time in the units of a training run.

    None stands for a figure that is unknown or was not asked for.
    """

    samples_per_s: float
    tokens_per_s: float | None = None
    peak_share: float | None = None
    """Share of the peak FLOP/s of the busy workers that the model's own FLOPs take (MFU)."""
    peak_device: str = ""
    """Names of the devices whose peaks `peak_share` refers to."""
    price_per_million_samples: float | None = None
    epochs: int | None = None
    dataset_size: int | None = None
    """Samples in an epoch."""
    epoch_s: float | None = None
    price_per_epoch: float | None = None
    run_s: float | None = None
    """Time of all epochs, in seconds."""
    run_price: float | None = None
    tokens_per_sample: int | None = None
    """Tokens of a sample, if the user gives another number than the profile."""

    @property
    def lines(self) -> list[str]:
        """All figures except samples per second, as text in up to two lines."""
        rates = [
            *([] if self.tokens_per_s is None else [f"{show_step_time(self.tokens_per_s)} tokens/s"]),
            *([] if self.peak_share is None else [f"{self.peak_share:.1%} of the peak of {self.peak_device} (MFU)"]),
            *(
                []
                if self.price_per_million_samples is None
                else [f"price per million samples {show_price(self.price_per_million_samples)}"]
            ),
        ]
        return [*([", ".join(rates)] if rates else []), *self._run_lines()]

    def _run_lines(self) -> list[str]:
        if self.epoch_s is None:
            return []
        price = "" if self.price_per_epoch is None else f", price {show_price(self.price_per_epoch)}"
        line = f"an epoch of {self.dataset_size} samples takes {show_duration(self.epoch_s)}{price}"
        if self.run_s is not None:
            price = "" if self.run_price is None else f", price {show_price(self.run_price)}"
            line += f"; {self.epochs} epochs take {show_duration(self.run_s)}{price}"
        return [line]

    def to_json(self) -> dict[str, Any]:
        """The object that plan.json holds under `throughput`."""
        content = asdict(self)
        if self.tokens_per_sample is None:
            del content["tokens_per_sample"]
        return content


def throughput_of(plan: Plan, profile: Profile, cluster: Cluster, step_time_s: float, size: RunSize) -> Throughput:
    """The throughput of a plan that takes `step_time_s` seconds for a minibatch."""
    rate, work = profile.minibatch / step_time_s if step_time_s else math.inf, profile.work
    tokens = size.tokens_per_sample or work.tokens_per_sample
    share, device = _peak_share(plan, profile, cluster, rate)
    samples = size.dataset_size or (work.dataset_size if size.epochs else None)
    hourly = cluster.price_per_hour
    epoch_s = None if samples is None else samples / rate
    run_s = None if epoch_s is None or size.epochs is None else epoch_s * size.epochs
    return Throughput(
        samples_per_s=rate,
        tokens_per_s=rate * tokens if tokens else None,
        tokens_per_sample=tokens if tokens != work.tokens_per_sample else None,
        peak_share=share,
        peak_device=device,
        price_per_million_samples=_price(hourly, MILLION / rate),
        epochs=size.epochs,
        dataset_size=samples,
        epoch_s=epoch_s,
        price_per_epoch=_price(hourly, epoch_s),
        run_s=run_s,
        run_price=_price(hourly, run_s),
    )


def price_per_million(price_per_hour: float, samples_per_s: float) -> float:
    """The price of a million samples: P / 3600 · 10⁶ / rate."""
    return price_per_hour / HOUR_S * MILLION / samples_per_s


def _price(price_per_hour: float | None, seconds: float | None) -> float | None:
    return None if price_per_hour is None or seconds is None else price_per_hour / HOUR_S * seconds


def _peak_share(plan: Plan, profile: Profile, cluster: Cluster, samples_per_s: float) -> tuple[float | None, str]:
    """The share of the busy workers' peak FLOP/s, and the names of their devices; (None, "") if the peak is unknown."""
    if not profile.work.flops or device_mismatch(profile, cluster):
        return None, ""
    busy = [cluster.device_of(worker).name for stage in plan.stages for worker in stage.workers]
    models = {name: bundled_model_of(name) for name in set(busy)}
    peak_rate = 0.0
    for name in busy:
        model = models[name]
        if model is None:
            return None, ""
        peak_rate += 1 / sum(_peak_seconds(one, model, plan.inference) for one in profile.work.flops)
    return samples_per_s / peak_rate, ", ".join(sorted({model.name for model in models.values() if model}))


def _peak_seconds(work: SampleFlops, model: DeviceFile, inference: bool) -> float:
    """Time of one sample's FLOPs at the device's peak, in seconds."""
    flops = work.forward if inference else work.forward + work.backward
    return flops / model.peaks[model.usable_arithmetic(work.kind, work.arithmetic)]


def show_price(price: float) -> str:
    """A price as text, to two decimals or four digits."""
    return f"{price:.2f}" if price >= 1 else f"{price:.4g}"


def show_duration(seconds: float) -> str:
    """A duration as text, in seconds, minutes, hours or days."""
    for unit, factor in (("days", 48 * HOUR_S), ("hours", HOUR_S), ("minutes", 60.0)):
        if seconds >= factor:
            return f"{seconds / (HOUR_S * 24 if unit == 'days' else factor):.3g} {unit}"
    return f"{seconds:.3g} s"
