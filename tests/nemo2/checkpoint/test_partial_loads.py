# SPDX-License-Identifier: Apache-2.0
"""Loading less, or other things, than a checkpoint holds: fp32 parameters alone, and models that differ from the saved one."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import resharding, small_runs

STOP = 3
HALF: dict[str, Any] = {"precision": "bf16-mixed"}
FP32_ONLY: dict[str, Any] = {"ckpt_load_optimizer": False, "ckpt_load_main_params": True}
HALVES = ("half", "distributed")
INTO = [("half", "distributed"), ("distributed", "half")]
"""The optimizer that has saved, and the one that loads."""

# Torch says on every call that it was told to work without ranks.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def train(directory: str | Path, *, distributed: bool = False, model: Any = None, **options: Any) -> None:
    """Three steps; the last is saved to ``directory/step=3``."""
    model = model or small_runs.build_llama(distributed=distributed)
    small_runs.fit(model, max_steps=STOP, callbacks=[small_runs.keep(directory)], **options)


def load(path: str | Path, *, again: str | None = None, distributed: bool = False, **options: Any) -> str:
    """Load, and save to ``again`` what is then in memory; the error, if there is one."""
    import lightning.pytorch as pl

    class SaveAgain(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(again)

    config = options.pop("config", {})
    model = small_runs.build_llama(distributed=distributed, **config)
    callbacks = [SaveAgain()] if again else []
    try:
        small_runs.fit(model, max_steps=STOP + 1, ckpt_path=path, callbacks=callbacks, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def loads(directory: str) -> dict[str, str]:
    outcomes = {}
    for form, distributed in (("half", False), ("distributed", True)):
        train(f"{directory}/{form}", distributed=distributed, **HALF)
    for source, form in INTO:
        outcomes[f"{source} into {form}"] = load(
            f"{directory}/{source}/step={STOP}", again=f"{directory}/{source} into {form}",
            distributed=form == "distributed", **HALF, **FP32_ONLY,
        )  # fmt: skip
    for source in HALVES:
        outcomes[f"{source} in fp32"] = load(f"{directory}/{source}/step={STOP}", again=f"{directory}/{source} in fp32")
    outcomes["rounded"] = load(
        f"{directory}/half/step={STOP}", again=f"{directory}/rounded", ckpt_load_optimizer=False, **HALF
    )

    with asking_for_its_own_fields():
        for source in HALVES:
            for form in HALVES:
                path, distributed = f"{directory}/{source}/step={STOP}", form == "distributed"
                outcomes[f"{source} into another's {form}"] = load(path, distributed=distributed, **HALF)

    plain = f"{directory}/half/step={STOP}"
    tied, more = {"share_embeddings_and_output_weights": True}, {"qk_layernorm": True}
    weights = {"ckpt_load_optimizer": False}
    for name, config, strictness in (
        ("fewer by default", tied, None),
        ("fewer, strictly", tied, "raise_all"),
        ("more by default", more, None),
        ("more, refused beforehand", more, "raise_unexpected"),
        ("more, told only", more, "log_unexpected"),
    ):
        outcomes[name] = load(plain, config=config, ckpt_load_strictness=strictness, **HALF, **weights)
    return outcomes


@contextlib.contextmanager
def asking_for_its_own_fields() -> Iterator[None]:
    """Optimizers whose groups have fields that the saved ones lack, and which step only with them, as Transformer Engine's do
    that load what a CPU has saved."""
    from nemo2.base.backend.fused_adam import FusedAdam

    add, step = FusedAdam.add_param_group, FusedAdam.step

    def add_with_field(self: Any, group: dict[str, Any]) -> None:
        add(self, group | {"field": True})

    def step_with_field(self: Any, closure: Any = None) -> Any:
        assert all(group["field"] and group.get("step", STOP) == STOP for group in self.param_groups)
        return step(self, closure)

    FusedAdam.add_param_group, FusedAdam.step = add_with_field, step_with_field
    try:
        yield
    finally:
        FusedAdam.add_param_group, FusedAdam.step = add, step


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("partial")


@pytest.fixture(scope="module")
def outcomes(run_on_ranks, folder) -> dict[str, str]:
    return run_on_ranks(loads, 1, str(folder), timeout=280)[0]


@pytest.mark.parametrize(("source", "form"), INTO)
def test_fp32_parameters_are_taken_over_and_nothing_else_of_the_optimizer(folder, outcomes, source, form):
    name = f"{source} into {form}"
    assert outcomes[name] == "loaded"
    saved, loaded = _copies(folder / source / f"step={STOP}"), _copies(folder / name)
    assert len(saved) == len(loaded) > 8
    assert all(loaded[key].equal(value) for key, value in saved.items())
    moments = [value for key, value in resharding.whole_tensors(folder / name).items() if ".exp_avg" in key]
    assert all(not value.any() for value in moments)


@pytest.mark.parametrize("source", HALVES)
def test_a_run_that_goes_on_in_fp32_has_the_fp32_parameters(folder, outcomes, source):
    assert outcomes[f"{source} in fp32"] == "loaded"
    saved, loaded = _copies(folder / source / f"step={STOP}"), resharding.whole_tensors(folder / f"{source} in fp32")
    assert len(saved) > 8 and all(loaded[key].equal(value) for key, value in saved.items())


@pytest.mark.parametrize("source", HALVES)
@pytest.mark.parametrize("form", HALVES)
def test_an_optimizer_keeps_the_fields_that_another_did_not_save(outcomes, source, form):
    assert outcomes[f"{source} into another's {form}"] == "loaded"


def test_without_it_the_optimizer_begins_with_rounded_parameters(folder, outcomes):
    assert outcomes["rounded"] == "loaded"
    saved, loaded = _copies(folder / "half" / f"step={STOP}"), _copies(folder / "rounded")
    assert any(not loaded[key].equal(value) for key, value in saved.items())
    assert all(loaded[key].equal(value.bfloat16().float()) for key, value in saved.items())


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("fewer by default", "loaded"),
        ("fewer, strictly", "keys found in the checkpoint are missing"),
        ("more by default", "q_layernorm.weight"),
        ("more, refused beforehand", "q_layernorm.weight"),
        ("more, told only", "loaded"),
    ],
)
def test_how_strictly_names_have_to_match_is_the_users_to_say(outcomes, case, told):
    if told == "loaded":
        assert outcomes[case] == "loaded"
    else:
        assert outcomes[case].startswith("CheckpointError") and told in outcomes[case]


def _copies(checkpoint: Path) -> dict[str, Any]:
    """The optimizer's fp32 parameters, by the names of the model's."""
    kinds = ("optimizer.state.fp32_param.", "optimizer.state.param.")
    tensors = resharding.whole_tensors(checkpoint)
    return {key.removeprefix(kind): value for kind in kinds for key, value in tensors.items() if key.startswith(kind)}
