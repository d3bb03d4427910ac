# SPDX-License-Identifier: Apache-2.0
"""Attributes that a script sets on live objects."""

import copy
from typing import Any

import pytest

import nemo2 as nl
from nemo2 import callbacks, llm
from nemo2.base.errors import UnknownNameError

SETTINGS: list[tuple[Any, str, str]] = [
    (nl.AutoResume(), "resume_if_exist", "resume_if_exists"),
    (nl.NeMoLogger(), "log_dirs", "log_dir"),
    (nl.ModelCheckpoint(), "save_topk", "save_top_k"),
    (nl.MegatronDataSampler(seq_len=8), "micro_batchsize", "micro_batch_size"),
    (nl.MegatronMixedPrecision("bf16-mixed"), "grad_reduce_in_fp23", "grad_reduce_in_fp32"),
    (callbacks.GarbageCollectionCallback(1, 1), "gc_interval_trian", "gc_interval_train"),
    (llm.Llama3Config8B(), "hidden_sise", "hidden_size"),
    (nl.lr_scheduler.CosineAnnealingScheduler(), "warmup_step", "warmup_steps"),
    (nl.MegatronStrategy(), "tensor_model_parallel_sise", "tensor_model_parallel_size"),
    (llm.MockDataModule(seq_length=8), "seq_lenght", "seq_length"),
    (llm.LlamaModel(llm.Llama32Config1B()), "tokeniser", "tokenizer"),
    (nl.Trainer(accelerator="cpu", devices=1), "limit_val_batch", "limit_val_batches"),
]


@pytest.mark.parametrize(("obj", "typo", "meant"), SETTINGS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_typo_on_a_live_object_is_refused_with_the_name_that_was_meant(obj: Any, typo: str, meant: str) -> None:
    with pytest.raises(UnknownNameError, match=rf"{type(obj).__name__} has no parameter '{typo}'.*'{meant}'"):
        setattr(obj, typo, 1)
    assert not hasattr(obj, typo)


@pytest.mark.parametrize("obj", [one for one, *_ in SETTINGS[:9]], ids=lambda one: type(one).__name__)
def test_a_name_that_means_nothing_is_refused_on_settings(obj: Any) -> None:
    with pytest.raises(UnknownNameError, match="has no parameter 'no_such_thing'"):
        obj.no_such_thing = 1


@pytest.mark.parametrize("obj", [one for one, *_ in SETTINGS[9:]], ids=lambda one: type(one).__name__)
def test_models_data_and_trainers_keep_what_a_script_hangs_on_them(obj: Any) -> None:
    obj.my_own_state = 1
    assert obj.my_own_state == 1


def test_what_is_an_argument_is_set_and_copies_and_private_state_are_free() -> None:
    resume = nl.AutoResume()
    resume.resume_if_exists = True
    resume._mine = 1  # pyright: ignore[reportAttributeAccessIssue]
    assert copy.deepcopy(resume).resume_if_exists and copy.copy(resume)._mine == 1  # pyright: ignore


class WithState(nl.ModelCheckpoint):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.started = True


def test_a_class_of_a_users_own_keeps_its_state() -> None:
    mine = WithState()
    mine.on_train_start(None, None)
    mine.told = 2
    assert mine.started and mine.told == 2


SWALLOWED = (
    "store_optimizer_states",
    "ckpt_include_optimizer",
    "enable_nemo_ckpt_io",
    "params_dtype",
    "autocast_dtype",
    "precision",
)


@pytest.mark.parametrize("name", SWALLOWED)
def test_what_nemo_swallowed_is_told_what_does_its_work_and_not_what_looks_alike(name: str) -> None:
    for made in (lambda: nl.MegatronStrategy(**{name: None}), lambda: nl.Config(nl.MegatronStrategy, **{name: None})):
        with pytest.raises(
            UnknownNameError, match=rf"no parameter '{name}': .*(ckpt_|checkpoint_io|plugins=)"
        ) as caught:
            made()
        assert "did you mean" not in str(caught.value)


def test_the_tokenizer_of_a_hybrid_is_told_where_it_belongs() -> None:
    for name in ("tokenizer_library", "tokenizer_name", "tokenizer_model_path", "vocab_file", "mapping_type"):
        with pytest.raises(UnknownNameError, match="NeMo 2.0's converter"):
            llm.BaseMambaConfig130M(**{name: "x"})


@pytest.mark.parametrize("made", [nl.MegatronStrategy, lambda **given: nl.Config(nl.MegatronStrategy, **given)])
def test_dtypes_are_taken_by_name(made: Any) -> None:
    import torch

    for text in ("torch.bfloat16", "bfloat16", "bf16", torch.bfloat16):
        assert made(pipeline_dtype=text).pipeline_dtype is torch.bfloat16
    later = made()
    later.pipeline_dtype = "fp16"
    assert later.pipeline_dtype is torch.float16
    with pytest.raises(nl.errors.ConfigError, match="pipeline_dtype='bf61'.*is not a dtype"):
        made(pipeline_dtype="bf61")
