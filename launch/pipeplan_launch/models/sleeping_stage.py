"""An emulated stage, which the engine runs like any other: it sleeps instead of computing.

The sleep replaces the whole computation, including writing the results, which are prepared in advance. Messages,
all-reduces, weight versions and updates are real.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import Dataset

from pipeplan_launch.job.job import Data, Job, StageInfo
from pipeplan_launch.plan.launch_plan import CutTraffic, EmulatedLayer, EmulatedStage

FLOAT_BYTES = 4


@dataclass(frozen=True)
class EmulatedTensor:
    """A tensor that crosses the cut between two stages."""

    name: str
    size: int
    dtype: torch.dtype
    requires_grad: bool

    def shape(self, _batch: int) -> tuple[int, ...]:
        """Shape of the tensor, which does not depend on the minibatch size."""
        return (self.size,)


class SleepingStage:
    """A `pipeplan_launch.tracing.subgraph.Program` that sleeps."""

    def __init__(self, index: int, stage: EmulatedStage) -> None:
        self.receives: Sequence[EmulatedTensor] = _messages("before", stage.before)
        self.sends: Sequence[EmulatedTensor] = _messages("after", stage.after)
        self.model_inputs: Sequence[int] = ()
        self.shared: Mapping[str, tuple[int, ...]] = {}
        self._layers = stage.layers
        self._weights = {
            # A layer without parameters gets one number as a parameter, so that it has a gradient and an update.
            f"stage{index}.layer{number}": nn.Parameter(torch.zeros(max(1, layer.parameter_bytes // FLOAT_BYTES)))
            for number, layer in enumerate(stage.layers)
        }
        self._gradients = [torch.zeros_like(weight) for weight in self._weights.values()]
        self._sent = [torch.zeros(one.size, dtype=one.dtype) for one in self.sends]
        self._returned = torch.zeros(self.receives[0].size) if self.receives else None
        self._clock = _Clock()
        self._clock.forward, self._clock.backward = stage.products, 2 * stage.products
        self._clock.eviction = CacheEviction(stage.evicting_bytes) if stage.evicting_bytes else None

    def parameters_by_name(self) -> Mapping[str, nn.Parameter]:
        """One parameter for each layer."""
        return self._weights

    def buffers_by_name(self) -> Mapping[str, Tensor]:
        """An emulated stage has no buffers."""
        return {}

    def changing_state(self) -> Mapping[str, Tensor]:
        """An emulated stage has no changing state."""
        return {}

    def call(
        self, parameters: Mapping[str, Tensor], received: Sequence[Tensor], _inputs: Sequence[Tensor], _batch: int
    ) -> Any:
        """Sleep for as long as the stage's forward pass takes. The backward pass sleeps in the same way."""
        token: Tensor | None = received[0] if received else None
        returned, last = self._returned, len(self._layers) - 1
        self._clock.start()
        for number, (layer, weight) in enumerate(zip(self._layers, parameters.values(), strict=True)):
            result = self._sent[0] if number == last and self._sent else torch.zeros(1, 1)
            gradient, clock = self._gradients[number], self._clock
            leaf: Tensor | None = weight
            if layer.weights_s > 0 and token is not None:
                # `SplitBackward` may enter torch's own operations, such as this sum, a second time for the weight.
                made = _SleepForWeights.apply(weight, layer.weights_s, gradient, clock)  # type: ignore[no-untyped-call]
                token = _Enter.apply(token, returned) + made  # type: ignore[no-untyped-call]
                leaf, returned = None, torch.zeros(1, 1)
            token = _Sleep.apply(token, leaf, layer, result, returned, gradient, clock, number == last)  # type: ignore[no-untyped-call]
            returned = torch.zeros(1, 1)
        return (token, *(one.detach() for one in self._sent[1:])) if self._sent else token

    def train(self, _mode: bool = True) -> SleepingStage:
        """Return self: modes do not differ."""
        return self

    def eval(self) -> SleepingStage:
        """Return self: modes do not differ."""
        return self


class Products:
    """Products of two matrices that fit into a core's cache, so that each product takes the same time."""

    SIZE = 96

    def __init__(self) -> None:
        self._one, self._other, self._result = (torch.ones(self.SIZE, self.SIZE) for _ in range(3))

    def compute(self, count: int) -> None:
        """Compute this number of products."""
        for _ in range(count):
            torch.mm(self._one, self._other, out=self._result)


class _Clock:
    """Sleeps until the planned end of each layer. The emulation's overhead counts as part of the layers' times."""

    def __init__(self) -> None:
        self._due = 0.0
        self.products = Products()
        self.forward = self.backward = 0
        """Number of products in each layer's pass."""
        self.eviction: CacheEviction | None = None

    def start(self) -> None:
        """Begin a pass."""
        self._due = time.perf_counter()
        if self.eviction is not None:
            self.eviction.run()

    def sleep(self, seconds: float) -> None:
        """Sleep until the end of the pass's next layer, which takes `seconds`."""
        self._due += seconds
        left = self._due - time.perf_counter()
        if left > 0:  # even a sleep of 0 s takes about 50 µs
            time.sleep(left)


class _Sleep(torch.autograd.Function):
    """One layer, whose result and gradients are prepared in advance."""

    @staticmethod
    def forward(
        ctx: Any,
        _received: Tensor | None,
        weight: Tensor | None,
        layer: EmulatedLayer,
        result: Tensor,
        returned: Tensor | None,
        gradient: Tensor,
        clock: _Clock,
        last: bool,
    ) -> Tensor:
        ctx.backward_s, ctx.returned, ctx.clock, ctx.last = layer.backward_s, returned, clock, last
        ctx.gradient = gradient
        if weight is None:  # the gradient of the weight has its own node
            ctx.backward_s, ctx.gradient = layer.backward_s - layer.weights_s, None
        clock.sleep(layer.forward_s)
        clock.products.compute(clock.forward)
        return result.detach()

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.last:
            ctx.clock.start()
        ctx.clock.sleep(ctx.backward_s)
        ctx.clock.products.compute(ctx.clock.backward)
        returned, gradient = (None if one is None else one.detach() for one in (ctx.returned, ctx.gradient))
        return returned, gradient, None, None, None, None, None, None


class _Enter(torch.autograd.Function):
    """The beginning of a layer. Its backward pass returns the prepared gradient of the layer's input."""

    @staticmethod
    def forward(ctx: Any, _received: Tensor, returned: Tensor) -> Tensor:
        ctx.returned = returned
        return torch.zeros(1, 1)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.returned.detach(), None


class _SleepForWeights(torch.autograd.Function):
    """The part of a layer's backward pass that makes the gradients of its weights."""

    @staticmethod
    def forward(ctx: Any, _weight: Tensor, seconds: float, gradient: Tensor, clock: _Clock) -> Tensor:
        ctx.seconds, ctx.gradient, ctx.clock = seconds, gradient, clock
        return torch.zeros(1, 1)

    @staticmethod
    def backward(ctx: Any, *_gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.clock.start()
        ctx.clock.sleep(ctx.seconds)
        return ctx.gradient.detach(), None, None, None


class _SleepingOptimizer(SGD):
    """An optimiser that takes a given time per step and does not change the weights."""

    def __init__(self, parameters: list[Tensor], seconds: float) -> None:
        super().__init__(parameters, lr=0.0)
        self._seconds = seconds

    def step(self, closure: Any = None) -> Any:
        """Sleep as long as an update takes."""
        if self._seconds > 0:
            time.sleep(self._seconds)


class _EmptySamples(Dataset[Any]):
    """A data set of `count` samples without content."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(1), torch.zeros((), dtype=torch.long)


def load_emulated_stages(stages: Mapping[int, EmulatedStage]) -> tuple[Job, list[SleepingStage]]:
    """(job without a model, programs) of a worker's emulated stages by number."""

    def optimizer(parameters: list[Tensor], info: StageInfo) -> Optimizer:
        return _SleepingOptimizer(parameters, stages[info.stage].update_s)

    data = Data(_EmptySamples(next(iter(stages.values())).minibatches))
    job = Job(nn.Module(), loss=lambda output, _: output.sum(), optimizer=optimizer, data=lambda: data)
    return job, [SleepingStage(index, stage) for index, stage in stages.items()]


def _messages(cut: str, crossing: CutTraffic | None) -> tuple[EmulatedTensor, ...]:
    """The tensors that cross a cut: one with a gradient, and one without if activations have more bytes than
    gradients.
    """
    if crossing is None:
        return ()
    floats = max(1, crossing.returned // FLOAT_BYTES)
    messages = [EmulatedTensor(f"differentiated {cut}", floats, torch.float32, True)]
    rest = crossing.sent - floats * FLOAT_BYTES
    if rest > 0:
        messages.append(EmulatedTensor(f"not differentiated {cut}", rest, torch.uint8, False))
    return tuple(messages)


# Evicts a processor's caches between measurements, as an optimiser's update and other minibatches do in training.


class CacheEviction:
    """Memory that is read and written completely, so that the caches lose all other data and code."""

    spent_s = 0.0
    """Processor time that the threads of this process have spent on evicting, in seconds."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        """`size`: bytes that are read and written each time."""
        self._memory = torch.zeros(size // 4, device=device)

    def run(self) -> None:
        """Read and write everything once."""
        began = time.thread_time()
        self._memory.add_(1.0)
        CacheEviction.spent_s += time.thread_time() - began
