"""What a job gives: minibatches, an optimiser, a count of what is right, and hooks."""

from __future__ import annotations

import re
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import prune
from torch.optim import SGD, AdamW, Muon, Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset

from pipeplan_launch import Callback, Data, Job, StageInfo, muon
from pipeplan_launch.checkpoint.optimizer_state import load_optimizer, optimizer_state
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.hooks import hooked_gradients, parameter_hooks, refuse_accumulation_hooks
from pipeplan_launch.job.job import collate_samples
from pipeplan_launch.job.nested_tensors import map_tensors
from pipeplan_launch.runtime.inference import Score
from pipeplan_launch.tracing.trace import trace_job

SAMPLES = TensorDataset(torch.arange(12.0).view(6, 2), torch.arange(6))


def job(**more) -> Job:
    return Job(nn.Linear(2, 3), **{"data": lambda: Data(SAMPLES), **more})


def test_minibatches_come_from_the_data_which_is_built_once() -> None:
    built = []
    one = job(data=lambda: built.append(1) or Data(SAMPLES))
    assert torch.equal(one.example_inputs(4)[0], SAMPLES.tensors[0][:4])
    assert one.example_batch(8).target.tolist() == [0, 1, 2, 3, 4, 5, 0, 1], "a small data set repeats"
    assert built == [1]
    assert job(data=None, inputs=lambda n: torch.ones(n, 2)).example_batch(3).target is None
    batch = collate_samples([((torch.ones(2), torch.zeros(3)), 1), ((torch.ones(2), torch.zeros(3)), 0)])
    assert [tuple(one.shape) for one in batch.inputs] == [(2, 2), (2, 3)]
    assert batch.target.tolist() == [1, 0]


def test_errors() -> None:
    for call, says in (
        (lambda: collate_samples([torch.ones(2)]), "must be a pair"),
        (lambda: collate_samples([({"x": "text"}, 1)]), "a dictionary of tensors, not a dictionary with 'x' list"),
        (lambda: collate_samples([({}, 1)]), "a dictionary of tensors, not an empty dictionary"),
        (lambda: job(data=lambda: Data([])).example_batch(1), "is empty"),
        (lambda: job(data=lambda: SAMPLES).datasets, "must return pipeplan_launch.Data, not TensorDataset"),
        (lambda: job(inputs=lambda n: [n]).example_inputs(1), "the job's `inputs` must be"),
        (lambda: job(optimizer=lambda p: None).make_optimizer([]), "must return a torch optimiser"),
        (lambda: job(data=None, inputs=lambda n: torch.ones(n, 2)).datasets, "has no data"),
        (lambda: job(data=lambda: Data(Samples())).example_batch(2), "the job's data failed: TypeError: 'int' object"),
        (
            lambda: job(data=broken_data).example_inputs(2),
            "(?s)^the job's data failed: ValueError: none .*:\\d+: raise",
        ),
        (
            lambda: job(inputs=lambda n: broken_data()).example_inputs(2),
            "(?s)^the job's inputs failed: ValueError: non",
        ),
        (lambda: collate_samples([([0, 1], 0), ([0], 0)]), "differ in shape: pad the samples"),
        (lambda: Data(iter([])), r"can only be read from its start.* write train=list\(samples\)"),
        (lambda: Data(Endless()), "`train` has no length, as it is of type Endless: give its class a __len__"),
    ):
        with pytest.raises(LaunchError, match=says):
            call()


def broken_data() -> Data:
    raise ValueError("none")


class Samples:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int):
        return index[0]


class Endless:
    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2), index


def test_default_optimizer() -> None:
    made = job().make_optimizer([nn.Parameter(torch.ones(1))])
    assert type(made) is torch.optim.SGD
    assert (made.defaults["lr"], made.defaults["momentum"]) == (0.01, 0.9)


def test_what_counts_as_correct() -> None:
    scores = torch.tensor([[1.0, 2.0], [3.0, 0.0], [0.0, 1.0]])
    dense, target = torch.zeros(2, 3, 4), torch.ones(2, 4, dtype=torch.int64)
    dense[:, 1], target[1, 2] = 1.0, 0
    for output, wanted, right in (
        (scores, torch.tensor([1, 1, 1]), 2),
        (scores, torch.tensor([1.0, 1.0, 1.0]), None),
        ((scores, scores), torch.tensor([1, 1, 1]), None),
        (dense, target, 1),  # of the samples
        (torch.zeros(2, 4, 3), torch.zeros(2, 4, dtype=torch.int64), None),  # that do not fit
        (torch.zeros(3), torch.tensor(1), None),
        (torch.zeros(4, 1), torch.zeros(4, dtype=torch.long), None),  # a regression: one number for each sample
        (torch.zeros(4, 1), torch.zeros(4, 1), None),
        (torch.zeros(4, 2), torch.zeros(4, dtype=torch.long), 4),
    ):
        assert job().correct(output, wanted) == right
    assert job(metric=lambda output, target: torch.tensor(7)).correct(scores, None) == 7
    score = Score(samples=4, loss_sum=8)
    assert [score.text(has_loss=has_loss) for has_loss in (True, False)] == ["loss 2.0000", "4 samples"]
    assert Score(3, 4, 4).text(has_loss=True) == "accuracy 75.00% (3 of 4)"


def test_an_optimiser_is_told_its_stage_if_it_asks() -> None:
    """It asks by a second parameter without a default, or of the name `stage`: torch's own have a rate there."""
    info, parameters = StageInfo(minibatches_per_update=3), [nn.Parameter(torch.ones(1))]

    def asks(parameters, stage):
        return SGD(parameters, lr=0.1 * stage.minibatches_per_update)

    def may_ask(parameters, stage=None):
        return asks(parameters, stage)

    class Asks:
        def __call__(self, parameters, stage):
            return asks(parameters, stage)

    for build in (asks, may_ask, Asks(), partial(asks)):
        assert job(optimizer=build).make_optimizer(parameters, info).param_groups[0]["lr"] == pytest.approx(0.3)
        assert job(optimizer=build).rate_depends_on_stage
    for build in (SGD, partial(SGD, lr=0.001), lambda p: SGD(p), lambda p, rate=0.001: SGD(p, lr=rate)):
        assert job(optimizer=build).make_optimizer(parameters, info).param_groups[0]["lr"] == 0.001
        assert not job(optimizer=build).rate_depends_on_stage


def test_rates_are_scaled_to_the_effective_batch() -> None:
    info = StageInfo(minibatch=4, minibatches_per_update=9)
    two = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(2))]
    for rule, factor in (("linear", 9.0), ("sqrt", 3.0), (None, 1.0)):
        made = job(optimizer=lambda p: SGD([{"params": p[:1]}, {"params": p[1:], "lr": 0.5}], lr=0.1), scale_lr=rule)
        groups = made.make_optimizer(two, info).param_groups
        assert [group["lr"] for group in groups] == pytest.approx([0.1 * factor, 0.5 * factor])
    assert info.samples_per_update == 36


def test_settings_that_make_no_sense_are_told_what_to_write() -> None:
    for more, says in (
        (lambda: {"scale_lr": "cubic"}, "scale_lr must be 'linear', 'sqrt' or None, not 'cubic'"),
        (lambda: {"scheduler_interval": "step"}, "scheduler_interval must be 'epoch' or 'minibatch', not 'step'"),
        (lambda: {"clip_norm": 0.0}, "clip_norm must be above 0, not 0.0"),
        (lambda: {"clip_norm": float("nan")}, "clip_norm must be above 0, not nan"),
        (lambda: {"callbacks": [print]}, "derived from pipeplan_launch.Callback, not builtin_function_or_method"),
        *(
            (lambda wrong=wrong: {"tokens_per_sample": wrong}, "tokens_per_sample must be a whole number of at least 0")
            for wrong in (-1, 1.5, True, "many")
        ),
        (lambda: {"data": None}, "needs example inputs or data"),
        (lambda: {"minibatch": 0}, "at least 1, not 0"),
        (lambda: {"data": SAMPLES}, "write data=lambda: Data(train=...); it is of type TensorDataset"),
        (lambda: {"optimizer": "adam"}, "write optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3)"),
        (lambda: {"scheduler": 3}, "write scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10)"),
        (lambda: {"inputs": torch.zeros(8, 3, 5)}, "write inputs=lambda n: torch.randn(n, 3, 5); it is of type Tensor"),
        (lambda: {"loss": "mse"}, "write loss=torch.nn.functional.cross_entropy, or your own loss(output, target)"),
        (lambda: {"loss": nn.MSELoss}, "not its class MSELoss: write loss=MSELoss()"),
        (lambda: {"model": nn.Linear}, "not its class Linear: write model=Linear(...)"),
        (lambda: {"model": small_model}, "write model=small_model()"),
        (lambda: {"model": None}, "must be a torch.nn.Module, not NoneType"),
        (lambda: {"metrics": {"mean": 0.5}}, "must be functions (output, target); 'mean' is of type float"),
        (lambda: {"metrics": [abs]}, "write metrics={'name': function}"),
        (lambda: {"callbacks": Callback()}, "write callbacks=[...]; it is of type Callback"),
        (lambda: {"minibatch": "64"}, "must be a whole number of at least 1, not '64'"),
        (lambda: {"data": Data(DataLoader(SAMPLES))}, "`train` is a DataLoader: give its data set"),
        (lambda: {"data": Data(SAMPLES, test=SAMPLES.tensors)}, "write test=torch.utils.data.TensorDataset("),
        (lambda: {"data": Data(SAMPLES, order=[1, 2])}, "`order` must be a function of the epoch; it is of type list"),
    ):
        with pytest.raises(LaunchError, match=re.escape(says)):
            Job(**{"model": nn.Linear(2, 3), "data": lambda: Data(SAMPLES), **more()})


def small_model() -> nn.Module:
    return nn.Linear(2, 3)


Named = namedtuple("Named", "scores more")


@dataclass
class Registered:
    scores: torch.Tensor
    more: list[torch.Tensor]


torch.export.register_dataclass(Registered, serialized_type_name="test_job.Registered")


def test_tensors_of_any_output_are_found() -> None:
    one = torch.ones(2)
    for output in (Named(one, [one]), Registered(one, [one]), {"scores": one, "more": (one, None, 3)}, [one, (one,)]):
        doubled = map_tensors(output, lambda tensor: tensor * 2)
        assert type(doubled) is type(output)
        leaves = [leaf for leaf in tree_leaves(doubled) if isinstance(leaf, torch.Tensor)]
        assert [leaf.tolist() for leaf in leaves] == [[2.0, 2.0]] * 2


WORDS = [{"labels": torch.full((3,), i), "ids": torch.arange(3) + i} for i in range(8)]


def test_inputs_by_keyword_are_in_the_order_of_their_names() -> None:
    """Whatever the order of a dictionary; one that is the sample is the target, too."""
    by_name = job(data=None, inputs=lambda n: {"b": torch.zeros(n, 1), "a": torch.ones(n, 2)})
    batch = by_name.example(3)
    assert (batch.names, by_name.input_names) == (("a", "b"), ("a", "b"))
    assert [tuple(one.shape) for one in batch.inputs] == [(3, 2), (3, 1)]
    batch = collate_samples(WORDS[:2])
    assert batch.names == ("ids", "labels")
    assert torch.equal(batch.inputs[0], torch.tensor([[0, 1, 2], [1, 2, 3]]))
    assert torch.equal(batch.target["labels"], batch.inputs[1])
    batch = collate_samples([(sample, 1) for sample in WORDS[:2]])
    assert (batch.names, batch.target.tolist()) == (("ids", "labels"), [1, 1])

    class Model(nn.Module):
        def forward(self, *, labels, ids):
            return ids - labels

    assert torch.equal(collate_samples(WORDS[:2]).call(Model()), torch.tensor([[0, 1, 2], [0, 1, 2]]))
    one = job(inputs=None, data=lambda: Data(WORDS))
    one.check_names(collate_samples(WORDS[2:4]))
    with pytest.raises(LaunchError, match="a minibatch has the inputs ids, and the model was traced with ids, labels"):
        one.check_names(collate_samples([{"ids": torch.arange(3)}]))


def hooked(change: Callable[[nn.Sequential], object]) -> Job:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    change(model)
    return Job(model, inputs=lambda n: torch.randn(n, 4))


def test_hooks_on_a_backward_pass_of_modules_are_refused() -> None:
    for change, says in (
        (lambda model: model[0].register_full_backward_pre_hook(lambda *_: None), "the module '0' has a hook"),
        (lambda model: model[0].register_backward_hook(lambda *_: None), "the module '0' has a hook on its backward"),
        (lambda model: model.register_full_backward_hook(lambda *_: None), "the model has a hook on its backward pass"),
    ):
        with pytest.raises(LaunchError, match=says):
            trace_job(hooked(change), 2)
    handle = torch_module.register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(LaunchError, match="every module has a hook on its backward pass"):
            trace_job(hooked(lambda _: None), 2)
    finally:
        handle.remove()


def test_other_hooks_are_not() -> None:
    for change in (
        lambda model: model[0].register_full_backward_hook(lambda *_: None).remove(),
        lambda model: model[0].register_forward_hook(lambda *_: None),
        lambda model: model[0].weight.register_hook(lambda gradient: gradient),
        lambda model: model.register_state_dict_post_hook(lambda *_: None),
        lambda model: prune.random_unstructured(model[0], "weight", 0.5),
    ):
        trace_job(hooked(change), 2)


def test_hooks_of_a_parameter_change_its_gradient_in_their_order() -> None:
    parameters = {name: nn.Parameter(torch.ones(2)) for name in ("a", "b", "c")}
    seen: list[Any] = []
    parameters["a"].register_hook(lambda gradient: gradient + 1)
    parameters["a"].register_hook(lambda gradient: gradient * 2)
    parameters["b"].register_hook(seen.append)
    found = hooked_gradients({name: torch.ones(2) for name in ("a", "b")}, parameter_hooks(parameters))
    assert [found[name].tolist() for name in ("a", "b")] == [[4.0, 4.0], [1.0, 1.0]]
    assert [one.tolist() for one in seen] == [[1.0, 1.0]]


def test_a_hook_that_the_optimizer_has_registered_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    refuse_accumulation_hooks({"a": parameter})
    parameter.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(LaunchError, match="change gradients in register_hook, and weights in the job's optimizer"):
        refuse_accumulation_hooks({"a": parameter})


def muon_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def updates(model: nn.Module, optimizers: list[Optimizer], first: int, count: int) -> list[torch.Tensor]:
    """The weights after so many updates, of samples that depend on the number of the update."""
    for number in range(first, first + count):
        tokens = torch.arange(8).add(number) % 5
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(tokens).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_muon_is_torchs_muon_for_matrices_and_adamw_for_the_others() -> None:
    plain, ours, resumed = muon_model(), muon_model(), muon_model()
    named = dict(plain.named_parameters())
    matrices = [named["1.weight"], named["3.weight"]]
    others = [named[name] for name in ("0.weight", "1.bias", "3.bias")]
    both = [Muon(matrices, 0.01, 0.1, adjust_lr_fn="match_rms_adamw"), AdamW(others, 0.01, weight_decay=0.1)]

    def made(model: nn.Module) -> tuple[Optimizer, dict[str, nn.Parameter]]:
        names = dict(model.named_parameters())
        build = muon(0.01, adamw_names=["0."])
        return build([*model.parameters()], StageInfo(named_parameters=tuple(names.items()))), names

    optimizer, names = made(ours)
    expected = updates(plain, both, 0, 6)
    updates(ours, [optimizer], 0, 3)
    content, tensors = optimizer_state(optimizer, names)
    resumed.load_state_dict(ours.state_dict())
    other, other_names = made(resumed)
    load_optimizer(other, other_names, content, lambda wanted: {name: tensors[name].clone() for name in wanted}, "here")
    for model, own in ((ours, optimizer), (resumed, other)):
        assert all(map(torch.equal, updates(model, [own], 3, 3), expected))


def test_muon_where_a_stage_has_no_matrix_or_nothing_else() -> None:
    for parameter, expected in ((nn.Parameter(torch.ones(2)), "betas"), (nn.Parameter(torch.eye(2)), "ns_steps")):
        (group,) = muon(0.5)([parameter]).param_groups
        assert (group["lr"], expected in group) == (0.5, True)


def test_muon_refuses_names_that_it_cannot_use() -> None:
    with pytest.raises(LaunchError, match="adamw_names is a list of parts of names"):
        muon(adamw_names="embed")
    with pytest.raises(LaunchError, match="needs the names of parameters"):
        muon(adamw_names=["embed"])([nn.Parameter(torch.eye(2))])
