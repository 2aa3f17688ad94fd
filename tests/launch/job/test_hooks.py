"""Hooks of the user's own: which are refused, and what those on parameters do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.utils import prune

from pipeplan_launch import Job
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.hooks import hooked_gradients, parameter_hooks, refuse_accumulation_hooks
from pipeplan_launch.tracing.trace import trace_job


def job(change: Callable[[nn.Sequential], object]) -> Job:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    change(model)
    return Job(model, inputs=lambda n: torch.randn(n, 4))


def test_hooks_on_a_backward_pass_of_modules_are_refused() -> None:
    for change, says in (
        (lambda model: model[2].register_full_backward_hook(lambda *_: None), "the module '2' has a hook on its backw"),
        (lambda model: model[0].register_full_backward_pre_hook(lambda *_: None), "the module '0' has a hook"),
        (lambda model: model[0].register_backward_hook(lambda *_: None), "the module '0' has a hook on its backward"),
        (lambda model: model.register_full_backward_hook(lambda *_: None), "the model has a hook on its backward pass"),
        (
            lambda model: model[0].weight.register_post_accumulate_grad_hook(lambda _: None),
            "the parameter '0.weight' has a hook of register_post_accumulate_grad_hook",
        ),
    ):
        with pytest.raises(LaunchError, match=says):
            trace_job(job(change), 2)
    handle = torch_module.register_module_full_backward_hook(lambda *_: None)
    try:
        with pytest.raises(LaunchError, match="every module has a hook on its backward pass"):
            trace_job(job(lambda _: None), 2)
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
        trace_job(job(change), 2)


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
