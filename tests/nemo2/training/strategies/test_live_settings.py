# SPDX-License-Identifier: Apache-2.0
"""A live strategy's arguments, and those that may still be set on it."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import nemo2 as nl
from nemo2.base.errors import ConfigError, UnknownNameError
from nemo2.config.tree import as_config
from support import small_runs


def test_arguments_are_readable_under_their_names():
    strategy = nl.MegatronStrategy(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=3,
        context_parallel_size=5,
        sequence_parallel=True,
        expert_model_parallel_size=6,
        expert_tensor_parallel_size=1,
        ckpt_load_optimizer=False,
        save_ckpt_format="torch_dist",
        pipeline_dtype=torch.bfloat16,
        gradient_as_bucket_view=True,
    )
    sizes = (strategy.tensor_model_parallel_size, strategy.pipeline_model_parallel_size, strategy.context_parallel_size)
    assert sizes == (2, 4, 5) and strategy.virtual_pipeline_model_parallel_size == 3
    assert (strategy.expert_model_parallel_size, strategy.expert_tensor_parallel_size) == (6, 1)
    assert strategy.sequence_parallel is True and strategy.pipeline_dtype is torch.bfloat16
    assert (strategy.ckpt_load_optimizer, strategy.ckpt_save_optimizer, strategy.ckpt_parallel_load) == (
        False,
        True,
        True,
    )
    assert strategy.ddp is strategy.ddp_config and strategy.current_epoch_step == 0
    with pytest.raises(UnknownNameError, match="no parameter 'tensor_parallel_size'; did you mean 'tensor_model"):
        _ = strategy.tensor_parallel_size


def test_what_is_set_before_the_run_is_part_of_it_and_of_its_config():
    strategy = nl.MegatronStrategy()
    strategy.tensor_model_parallel_size, strategy.sequence_parallel, strategy.ckpt_load_optimizer = 2, True, False
    assert (strategy.layout.tp, strategy.layout.sp, strategy.form.load_optimizer) == (2, True, False)
    config = as_config(strategy)
    assert (config.tensor_model_parallel_size, config.sequence_parallel, config.ckpt_load_optimizer) == (2, True, False)
    with pytest.raises(ConfigError, match="must be a whole number of at least 1"):
        strategy.context_parallel_size = 0
    assert strategy.layout.cp == strategy.context_parallel_size == 1


@pytest.mark.parametrize(("asked", "kept"), [(False, "log_all"), (True, None), (None, None), ("log_all", "log_all")])
def test_strictness_is_judged_where_it_is_set_and_false_is_nemos_for_logging(asked, kept):
    later = nl.MegatronStrategy()
    later.ckpt_load_strictness = asked
    assert later.form.strictness == nl.MegatronStrategy(ckpt_load_strictness=asked).form.strictness == kept
    with pytest.raises(
        ConfigError, match="ckpt_load_strictness='log_al': must be None or one of .*did you mean 'log_all'"
    ):
        later.ckpt_load_strictness = "log_al"


def test_a_name_that_means_nothing_and_one_that_is_too_late_are_refused():
    strategy = nl.MegatronStrategy()
    with pytest.raises(UnknownNameError, match="MegatronStrategy has no parameter 'sequence_paralel'; did you mean"):
        strategy.sequence_paralel = True
    with pytest.raises(ConfigError, match="strategy.save_ckpt_format='x': save_ckpt_format is read only when"):
        strategy.save_ckpt_format = "x"
    with pytest.raises(ConfigError, match="strategy.gradient_as_bucket_view=False: .* views of its buffers"):
        nl.MegatronStrategy(gradient_as_bucket_view=False)


def test_a_subclass_keeps_attributes_of_its_own():
    class Mine(nl.MegatronStrategy):
        def __init__(self, note: str = "a") -> None:
            super().__init__(tensor_model_parallel_size=2)
            self.note = note

    strategy = Mine("b")
    strategy.note = "c"
    assert (strategy.note, strategy.tensor_model_parallel_size) == ("c", 2)


def set_on_a_live_strategy() -> dict[str, Any]:
    """A strategy laid out by attributes, and what it says during the run."""
    seen: dict[str, Any] = {}
    names: list[Any] = []

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            seen.setdefault("steps", []).append(trainer.strategy.current_epoch_step)
            wrapped, module = trainer.model, trainer.lightning_module
            seen["seen"] = {
                "optim": wrapped.optim is module.optim,
                "tokenizer": wrapped.tokenizer is module.tokenizer,
                "module": wrapped.module is wrapped.pipeline is module,
                "config": wrapped.module.config is module.config,
                "walk": wrapped.walk(lambda part: names.append(part) or part) is module and len(names) > 10,
                "no such name": not hasattr(wrapped, "no_such_name") and not hasattr(wrapped, "_no_such_name"),
            }

    def look(trainer: Any) -> None:
        from megatron.core import parallel_state

        seen["groups"] = parallel_state.get_tensor_model_parallel_world_size()
        seen["model"] = trainer.lightning_module.config.tensor_model_parallel_size
        seen["dtype"] = trainer.strategy.pipeline_dtype
        try:
            trainer.strategy.tensor_model_parallel_size = 1
        except ConfigError as error:
            seen["too late"] = str(error)

    strategy = nl.MegatronStrategy(ckpt_async_save=False)
    strategy.tensor_model_parallel_size = 2
    small_runs.fit(small_runs.build_llama(), max_steps=2, inspect=look, strategy=strategy, callbacks=[Watch()])
    return seen


def test_a_run_is_laid_out_by_what_was_set_and_says_so(run_on_ranks):
    for seen in run_on_ranks(set_on_a_live_strategy, 2):
        assert (seen["groups"], seen["model"], seen["steps"], seen["dtype"]) == (2, 2, [1, 2], torch.float32)
        assert seen["seen"] and all(seen["seen"].values()), (
            f"what a callback of NeMo's reads of trainer.model: {seen['seen']}"
        )
        assert "strategy.tensor_model_parallel_size=1: the strategy is already connected to a model" in seen["too late"]
