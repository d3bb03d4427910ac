# SPDX-License-Identifier: Apache-2.0
import enum
import pathlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Annotated, Any, Literal, Optional, Union

import fiddle as fdl
import pytest
import torch
from nemo_run import Config as RunConfig
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecisionPolicy

from nemo2 import llm
from nemo2.base.errors import ConfigError
from nemo2.config import Config, apply_overrides, from_json, to_json, who_set
from nemo2.config.overrides import COMMAND_LINE, paths_of
from nemo2.config.show import flatten
from nemo2.config.typed_text import Text, WrongType
from nemo2.config.values import describe, typed
from support.config_samples import Callback, Mode, recipe


def read(text, hint):
    parsed = Text.parse(text)
    return typed(parsed.literal, hint, text=parsed.raw)


@pytest.mark.parametrize(
    ("text", "hint", "value"),
    [
        ("100", int, 100),
        ("1e3", int, 1000),
        ("1_000", int, 1000),
        ("1", float, 1.0),
        ("1e-4", float, 1e-4),
        ("inf", float, float("inf")),
        ("true", bool, True),
        ("False", bool, False),
        ("name", str, "name"),
        ("'quoted text'", str, "quoted text"),
        ("123", str, "123"),
        ("a=b,c", str, "a=b,c"),
        ("none", Optional[int], None),
        ("null", Optional[str], None),
        ("8", Union[list[int], str, int], 8),
        ("[0,1]", Union[list[int], str, int], [0, 1]),
        ("auto", Union[list[int], str, int], "auto"),
        ("0.5", Union[int, float], 0.5),
        ("1", Union[int, float, None], 1),
        ("5", Optional[float], 5.0),
        ("1", Union[bool, int], 1),
        ("2", Literal[1, 2], 2),
        ("cosine", Literal["cosine", "linear"], "cosine"),
        ("16", int | str, 16),
        ("/data/x", pathlib.Path, pathlib.Path("/data/x")),
        ("7", Optional[pathlib.Path], pathlib.Path("7")),
        ("90s", timedelta, timedelta(seconds=90)),
        ("1.5h", timedelta, timedelta(minutes=90)),
        ("02:03:04", timedelta, timedelta(hours=2, minutes=3, seconds=4)),
        ("1:02:03:04", timedelta, timedelta(days=1, hours=2, minutes=3, seconds=4)),
        ("60", timedelta, timedelta(minutes=1)),
        ("[a, b]", list[str], ["a", "b"]),
        ("[1, 2.0]", list[int], [1, 2]),
        ("[]", list[int], []),
        ("(1,2)", tuple[int, int], (1, 2)),
        ("[1,2,3]", tuple[int, ...], (1, 2, 3)),
        ("[1,2]", Sequence[float], [1.0, 2.0]),
        ("{'a': 1}", dict[str, float], {"a": 1.0}),
        ("bf16", torch.dtype, torch.bfloat16),
        ("torch.float16", Optional[torch.dtype], torch.float16),
        ("float32", torch.dtype, torch.float32),
        ("EXACT", Mode, Mode.EXACT),
        ("exact", Mode, Mode.EXACT),
        ("torch.nn.functional.gelu", Callable, torch.nn.functional.gelu),
        ("torch.nn.functional:silu", Optional[Callable[[Any], Any]], torch.nn.functional.silu),
        ("cuda:0", torch.device, torch.device("cuda:0")),
        ("3", Annotated[int, "layers"], 3),
        ("3", Any, 3),
        ("text", Any, "text"),
        ("3", "SomeForwardName", 3),
    ],
)
def test_text_becomes_what_the_annotation_asks_for(text, hint, value):
    got = read(text, hint)
    assert got == value and type(got) is type(value)


class Color(enum.IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("text", "hint", "message"),
    [
        ("1.5", int, "takes a whole number, not '1.5'"),
        ("abc", int, "takes a whole number"),
        ("true", int, "takes a whole number"),
        ("none", int, "takes a whole number"),
        ("1", bool, "takes true or false, not '1'"),
        ("x", float, "takes a number"),
        ("3", Literal["a", "b"], "takes one of 'a', 'b'"),
        ("cosin", Literal["cosine", "linear"], r"did you mean 'cosine'\?$"),
        ("x", Optional[int], "takes a whole number"),
        ("{}", Union[int, list[int]], "takes a whole number or a list"),
        ("3", list[int], r"takes a list such as \[1,2\]"),
        ("[a]", list[int], "takes a whole number, not 'a'"),
        ("[1,2,3]", tuple[int, int], "takes 2 values"),
        ("soon", timedelta, "takes a time span such as 90s"),
        ("bf17", torch.dtype, "takes a dtype such as torch.bfloat16"),
        ("blue", Color, "takes one of RED"),
        ("os.system", Callable, "cannot be 'os.system'"),
        ("torch.load", Callable, "cannot be 'torch.load'"),
        ("3", Callable, "dotted name"),
        ("3", Callback, "takes a Callback"),
        ("3", type(None), "takes None"),
    ],
)
def test_text_that_is_something_else_is_refused(text, hint, message):
    with pytest.raises(WrongType, match=message):
        read(text, hint)


@pytest.mark.parametrize("hint", [int, float, bool, str, list[int], dict, timedelta, pathlib.Path, Mode, torch.dtype])
def test_the_example_that_an_error_gives_is_accepted(hint):
    words, example = describe(hint)
    read(example, hint)
    assert words


def test_overrides_reach_through_aliases_lists_dicts_and_unset_configs():
    r = recipe()
    r.options.extra = {"a": 1}
    same = apply_overrides(
        r,
        [
            "strategy.tensor_parallel=4",
            "trainer.strategy.ddp_config.overlap_grad_sync=true",
            "trainer.callbacks[0].every=9",
            "trainer.callbacks[-1].every+=1",
            "options.extra.b=2",
            "options.extra['a']=5",
            "options.fallback.bucket_size=7",
            "options.ddp.dims=[1,2]",
            "options.ddp.dims+=[3]",
            "options.note=text",
            "model.dtype=bf16",
        ],
    )
    assert same is r
    model, trainer, options = fdl.build(r)()
    assert (trainer.strategy.tensor_parallel, trainer.strategy.ddp.overlap_grad_reduce) == (4, True)
    assert trainer.callbacks[0].every == 10
    assert options.extra == {"a": 5, "b": 2} and options.fallback.bucket_size == 7 and options.ddp.dims == [1, 2, 3]
    assert options.note == "text" and model.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("trainer.max_steps*=2", "trainer.max_steps", 20),
        ("trainer.max_steps /= 5", "trainer.max_steps", 2),
        ("trainer.max_steps-=1", "trainer.max_steps", 9),
        ("trainer.lr*=0.5", "trainer.lr", 0.0005),
        ("options.name+='_b'", "options.name", "run_b"),
        ("strategy.ddp_config=megatron", "trainer.strategy.ddp", "megatron"),
        ("options.note=none", "options.note", None),
        ("options=nemo2.config.aliases", "options", "nemo2.config.aliases"),  # an unannotated field takes text as it is
    ],
)
def test_operators_change_what_is_there_and_an_alias_is_set_as_a_whole(override, path, value):
    assert flatten(apply_overrides(recipe(), [override]))[path] == pytest.approx(value)


def test_a_key_of_a_dict_that_is_not_set_makes_the_dict():
    from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule

    data = Config(HFDatasetDataModule, path_or_dataset="chats.jsonl")
    apply_overrides(data, ["dataset_kwargs.chat_template=plain", "dataset_kwargs.turns=last"])
    assert data.dataset_kwargs == {"chat_template": "plain", "turns": "last"}
    with pytest.raises(ConfigError, match="dataset_kwarg"):
        apply_overrides(data, ["dataset_kwarg.chat_template=plain"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_step=1", "Trainer has no parameter 'max_step'; did you mean 'max_steps'"),
        ("tariner.max_steps=1", "did you mean 'trainer'"),
        ("trainer.max_steps=abc", r"takes a whole number, not 'abc'\. For example trainer.max_steps=100"),
        ("trainer.max_steps.x=1", "trainer.max_steps is 10, which has no 'x'"),
        ("trainer.callbacks.every=1", r"trainer.callbacks is a list. .* trainer.callbacks\[0\]"),
        ("trainer.callbacks[4].every=1", "has 1 item, "),
        ("trainer.callbacks=[Every(1", r"'\(' is not closed"),
        ("trainer.max_steps", "not of the form path=value"),
        ("=3", "not of the form path=value"),
        ("trainer.max_steps/=0", "division by zero"),
        (f"trainer.max_steps=1{'0' * 400}.", "takes a whole number"),
        ("trainer.max_steps*=x", "cannot be applied to it"),
        ("trainer.max_steps/=3", "takes a whole number"),
        ("trainer.strategy.root+=x", "is not set"),
        ("trainer.strategy.root.x=1", "does not name a single class"),
        ("model=3", "takes a Model"),
        ("model=os.path", "cannot be"),
        ("recipe.tariner.max_steps=3", "did you mean 'trainer'"),
    ],
)
def test_what_cannot_be_applied_is_explained_and_changes_nothing(override, message):
    r = recipe()
    with pytest.raises(ConfigError, match=message):
        apply_overrides(r, ["trainer.lr=0.5", "options.ddp.dims=[3]", "options.fallback.bucket_size=7", override])
    assert r == recipe()
    assert flatten(r) == flatten(recipe())


def test_all_that_cannot_be_applied_is_named_at_once():
    with pytest.raises(ConfigError) as caught:
        apply_overrides(recipe(), ["trainer.max_stps=1", "trainer.lr=1", "trainer.max_steps=x"])
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 overrides cannot be applied:" and len(lines) == 3
    assert lines[1].startswith("  trainer.max_stps=1: ")


def test_new_data_keeps_the_sizes_that_it_does_not_set():
    run = llm.llama3_8b.pretrain_recipe()
    before = run.data.seq_length
    apply_overrides(run, ["data=PreTrainingDataModule(paths=corpus,global_batch_size=16)"])
    assert (run.data.seq_length, run.data.global_batch_size) == (before, 16)


def test_the_shortest_path_of_a_name_comes_first():
    run = llm.llama3_8b.finetune_recipe()
    assert paths_of(run, "restore_config") == ["resume.restore_config", "trainer.strategy.restore_config"]


def test_history_says_command_line():
    r = apply_overrides(recipe(), ["model.hidden=4", "strategy.tensor_parallel=8"])
    history = who_set(r.strategy, "tensor_parallel")
    assert history[-1] == (COMMAND_LINE, 2, 8) and [value for _, _, value in history] == [2, 8]


def test_live_and_foreign_nodes_can_be_overridden():
    r = recipe(Callback(every=1), RunConfig(Callback))
    apply_overrides(r, ["trainer.callbacks[1].every=5", "trainer.callbacks[2].every=6"])
    assert [item.every for item in fdl.build(r)()[1].callbacks] == [3, 5, 6]
    with pytest.raises(ConfigError, match="did you mean 'every'"):
        apply_overrides(r, ["trainer.callbacks[2].evry=6"])


def test_what_the_command_line_says_is_never_evaluated(tmp_path):
    marker = tmp_path / "marker"
    evil = f"__import__('pathlib').Path({str(marker)!r}).touch()"
    r = apply_overrides(recipe(), [f"options.name={evil}"])
    assert r.options.name == evil and not marker.exists()


SHORT = {
    "tp": "trainer.strategy.tensor_model_parallel_size",
    "pp": "trainer.strategy.pipeline_model_parallel_size",
    "vp": "trainer.strategy.virtual_pipeline_model_parallel_size",
    "cp": "trainer.strategy.context_parallel_size",
    "ep": "trainer.strategy.expert_model_parallel_size",
    "etp": "trainer.strategy.expert_tensor_parallel_size",
    "mbs": "data.micro_batch_size",
    "gbs": "data.global_batch_size",
    "lr": "optim.config.lr",
}


@pytest.mark.parametrize("place", ["", "strategy.", "trainer.strategy.", "model.config.", "optim.", "data."])
@pytest.mark.parametrize("short", SHORT)
def test_a_short_name_is_answered_with_the_line_to_write(place, short):
    run = llm.llama3_8b.pretrain_recipe()
    with pytest.raises(ConfigError) as caught:
        apply_overrides(run, [f"{place}{short}=2"])
    line = str(caught.value).rpartition("Write ")[2]
    assert line == f"{SHORT[short]}=2"
    apply_overrides(run, [line])


def test_a_path_may_begin_with_the_recipe_as_in_a_script():
    run = llm.llama_tiny.pretrain_recipe()
    apply_overrides(run, ["recipe.trainer.max_steps=3", "recipe.strategy.sequence_parallel=false"])
    assert run.trainer.max_steps == 3 and run.trainer.strategy.sequence_parallel is False


@pytest.mark.parametrize(
    ("strategy", "name", "text", "value"),
    [
        ("FSDP2Strategy", "offload_policy", "CPUOffloadPolicy", CPUOffloadPolicy()),
        ("FSDP2Strategy", "offload_policy", "CPUOffloadPolicy(pin_memory=False)", CPUOffloadPolicy(pin_memory=False)),
        (
            "FSDP2Strategy",
            "mp_policy",
            "MixedPrecisionPolicy(reduce_dtype=fp32)",
            MixedPrecisionPolicy(reduce_dtype=torch.float32),
        ),
        ("FSDPStrategy", "cpu_offload", "CPUOffload(offload_params=True)", CPUOffload(True)),
    ],
)
def test_torchs_options_of_sharding_are_given_by_name_and_survive_a_file(strategy, name, text, value):
    run = llm.llama_tiny.pretrain_recipe()
    apply_overrides(run, [f"strategy=nemo2.{strategy}", f"strategy.{name}=torch.distributed.fsdp.{text}"])
    for one in (run, from_json(to_json(run))):
        assert fdl.build(getattr(one.trainer.strategy, name)) == value


def test_an_item_of_a_list_takes_the_type_of_the_lists_items():
    run = llm.llama_tiny.pretrain_recipe()
    run.trainer.callbacks = [Config(Callback)]
    apply_overrides(run, ["trainer.callbacks[0]=TimingCallback"])
    assert run.trainer.callbacks[0].__fn_or_cls__.__name__ == "TimingCallback"
    for wrong in ("trainer.callbacks[0]=1", "trainer.callbacks[0]=Timing", f"trainer.callbacks[{'9' * 5000}]=1"):
        with pytest.raises(ConfigError, match=r"trainer\.callbacks"):
            apply_overrides(run, [wrong])


def test_a_failure_restores_the_recipe_and_leaves_its_parts_attached(monkeypatch):
    run = llm.llama_tiny.pretrain_recipe()
    held = run.trainer.strategy.ddp
    before = flatten(run)
    monkeypatch.setattr("nemo2.config.overrides._put", lambda *_: 1 / 0)
    for override in ("log.name=x", "resume.restore_config.path=/x"):
        with pytest.raises(ZeroDivisionError):
            apply_overrides(run, [override])
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="nosuch"):
        apply_overrides(run, ["strategy.ddp.bucket_size=7", "trainer.nosuch=1"])
    assert flatten(run) == before
    held.bucket_size = 9
    assert run.strategy.ddp.bucket_size == 9
