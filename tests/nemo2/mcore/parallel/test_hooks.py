# SPDX-License-Identifier: Apache-2.0
"""Hooks of a step: who is called, when, and with which arguments."""

import inspect
from typing import Any

import lightning.pytorch as pl

from nemo2.mcore.parallel.hooks import HOOKS, CallbackConnector
from support import small_runs

ARGUMENTS = {
    "on_megatron_step_start": {"step"},
    "on_megatron_microbatches_start": {"step"},
    "on_megatron_microbatch_start": {"step", "batch", "forward_callback"},
    "on_megatron_microbatch_end": {"step", "batch", "forward_callback", "output"},
    "on_megatron_microbatches_end": {"step", "microbatch_outputs"},
    "on_megatron_reduce_microbatches_start": {"step", "microbatch_outputs"},
    "on_megatron_reduce_microbatches_end": {"step", "microbatch_outputs", "loss_reduction", "reduced"},
    "on_megatron_step_end": {"step", "microbatch_outputs", "reduced"},
}
"""The table of the documentation, as the docstring of `nemo2.mcore.parallel.hooks` has it."""


class Listener:
    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []

    def on_megatron_step_end(self, reduced: float) -> None:
        self.heard.append(("end", reduced))

    def on_megatron_step_start(self, step: int) -> int | None:
        self.heard.append(("start", step))
        return step + 1 if step < 5 else None

    def on_train_start(self) -> None:
        raise AssertionError("not a hook of ours")


def test_a_method_gets_the_arguments_it_names_and_no_others():
    listener = Listener()
    connector = CallbackConnector().add(listener)
    connector.event("on_megatron_step_end", step=1, microbatch_outputs=[], reduced=2.5)
    connector.event("on_megatron_microbatch_start", step=1, batch=2, forward_callback=3)
    assert listener.heard == [("end", 2.5)]


def test_a_replacement_travels_on_and_none_leaves_the_value():
    first, second = Listener(), Listener()
    connector = CallbackConnector([first, second])
    assert connector.transform_event("on_megatron_step_start", 4) == 5
    assert (first.heard, second.heard) == ([("start", 4)], [("start", 5)])


def test_objects_are_registered_once_and_connectors_are_joined():
    listener, other = Listener(), Listener()
    joined = CallbackConnector([listener, listener, None, object()]) + CallbackConnector([other, listener])
    joined.event("on_megatron_step_end", reduced=1.0)
    assert listener.heard == other.heard == [("end", 1.0)]
    assert listener in joined and object() not in joined


def test_the_docstring_lists_every_hook_with_its_arguments():
    import nemo2.mcore.parallel.hooks as module

    lines = [line.split(maxsplit=1) for line in (module.__doc__ or "").splitlines() if line.startswith("on_megatron")]
    documented = {name: set(rest.partition(";")[0].replace(",", " ").split()) for name, rest in lines}
    assert documented == ARGUMENTS
    assert tuple(ARGUMENTS) == HOOKS


class Spy(pl.Callback):
    """All hooks, with everything they are given."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.arguments: dict[str, set[str]] = {}
        self.facts: dict[str, Any] = {}

    def _hear(self, name: str, arguments: dict[str, Any]) -> None:
        self.order.append(name)
        self.arguments[name] = set(arguments)
        if name == "on_megatron_microbatch_end":
            self.facts["output shape"] = tuple(arguments["output"].shape)
            self.facts["batch keys"] = sorted(arguments["batch"])
        if name == "on_megatron_step_start":
            self.facts["step"] = (arguments["step"].stage, arguments["step"].num_microbatches)
        if name == "on_megatron_step_end":
            self.facts["reduced equals"] = float(arguments["reduced"])
            self.facts["reports"] = len(arguments["microbatch_outputs"])


for _name in HOOKS:
    setattr(Spy, _name, lambda self, _name=_name, **arguments: self._hear(_name, arguments))


def spied() -> dict[str, Any]:
    spy = Spy()
    run = small_runs.fit(small_runs.build_llama(), max_steps=1, callbacks=[spy])
    return {"order": spy.order, "arguments": spy.arguments, "facts": spy.facts, "loss": run["losses"][0]}


def test_a_real_step_calls_them_in_the_documented_order(run_on_ranks):
    assert all("arguments" in inspect.signature(getattr(Spy, name)).parameters for name in HOOKS)
    found = run_on_ranks(spied, 1)[0]
    microbatches = small_runs.GBS // small_runs.MBS
    assert found["order"] == [
        *HOOKS[:2],
        *(["on_megatron_microbatch_start", "on_megatron_microbatch_end"] * microbatches),
        *HOOKS[4:],
    ]
    assert found["arguments"] == ARGUMENTS
    assert found["facts"] == {
        "step": ("training", microbatches),
        "output shape": (small_runs.MBS, small_runs.SEQ),
        "batch keys": ["attention_mask", "labels", "loss_mask", "padding_mask", "position_ids", "tokens"],
        "reports": microbatches,
        "reduced equals": found["loss"],
    }
