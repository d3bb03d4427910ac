# SPDX-License-Identifier: Apache-2.0
"""A NeMo 2.0 run as a recipe of ours, from files that fiddle writes of classes by NeMo's names and NeMo's own layout."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import fiddle as fdl
import pytest
import torch
from fiddle._src.experimental import serialization
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from typer.testing import CliRunner

import nemo2 as nl
from nemo2 import llm
from nemo2.base.errors import CheckpointError, SecurityError
from nemo2.callbacks import MegatronCommOverlapCallback, TimingCallback
from nemo2.checkpoint.foreign_files import MOST_VALUES
from nemo2.cli.app import app
from nemo2.config.reading import from_json
from nemo2.data import AutoTokenizer
from nemo2.from_nemo.recipe import recipe_of

_CLASSES = {
    "nemo.lightning.io.pl": ("TrainerContext", "model trainer extra"),
    "nemo.collections.llm.gpt.model.llama": ("LlamaModel", "config optim tokenizer model_transform"),
    "nemo.collections.llm.gpt.model.config": ("LlamaConfig", "num_layers hidden_size num_attention_heads seq_length bf16 "
                                              "tensor_model_parallel_size activation_func data_step_fn of_another_age fp8"),
    "nemo.lightning.pytorch.trainer": ("Trainer", "strategy callbacks plugins devices max_steps accelerator logger"),
    "nemo.lightning.pytorch.strategies.megatron_strategy": ("MegatronStrategy", "tensor_model_parallel_size ddp kwargs"),
    "nemo.lightning.pytorch.optim.megatron": ("MegatronOptimizerModule", "config lr_scheduler"),
    "nemo.lightning.pytorch.optim.lr_scheduler": ("CosineAnnealingScheduler", "warmup_steps min_lr"),
    "nemo.collections.llm.gpt.data.pre_training": ("PreTrainingDataModule", "paths seq_length micro_batch_size "
                                                   "global_batch_size tokenizer"),
    "nemo.collections.llm.gpt.data.squad": ("SquadDataModule", "seq_length"),
    "nemo.collections.common.tokenizers.huggingface.auto_tokenizer": ("AutoTokenizer", "pretrained_model_name "
                                                                      "trust_remote_code"),
    "nemo.collections.llm.peft.lora": ("LoRA", "dim target_modules"),
    "nemo.lightning.pytorch.plugins.mixed_precision": ("MegatronMixedPrecision", ""),
    "nemo.utils.exp_manager": ("TimingCallback", ""),
    "nemo.lightning.pytorch.callbacks.garbage_collection": ("GarbageCollectionCallback", ""),
    "nemo.lightning.pytorch.callbacks.megatron_comm_overlap": ("MegatronCommOverlapCallback", "tp_comm_overlap"),
    "nemo.lightning.io.artifact.file": ("FileArtifact", "attr skip"),
    "nemo.lightning.run.plugins": ("Unheard", "of"),
    "nemo.collections.llm.api": ("pretrain", "model data trainer log resume optim"),
    "nemo.collections.llm.recipes.log.default": ("NeMoLogger", "name log_dir"),
}  # fmt: skip
"""Of NeMo 2.0, by module: a class and its parameters, as far as these files need them."""


@pytest.fixture
def theirs() -> Iterator[Any]:
    """Classes by NeMo's names, so that fiddle itself writes files that name them; gone before anything is read."""
    made: dict[str, Any] = {}
    for module, (name, parameters) in _CLASSES.items():
        space: dict[str, Any] = {}
        signature = "".join(f", {one}=None" for one in parameters.replace("kwargs", "**kwargs").split())
        exec(f"class {name}:\n    def __init__(self{signature.replace('**kwargs=None', '**kwargs')}): pass\n", space)
        made[name] = space[name]
        made[name].__module__ = module
        sys.modules[module] = ModuleType(module)
        setattr(sys.modules[module], name, made[name])
    steps = ModuleType("nemo.collections.llm.gpt.model.base")
    exec("def gpt_data_step(): pass", steps.__dict__)
    sys.modules[steps.__name__] = steps
    made["gpt_data_step"] = steps.gpt_data_step
    serialization.register_constant("torch", "bfloat16", compare_by_identity=True)
    yield type("Theirs", (), made)
    _forget()


def _forget() -> None:
    for module in [*_CLASSES, "nemo.collections.llm.gpt.model.base"]:
        sys.modules.pop(module, None)


@dataclass
class Pickled:
    """Stands for an object that NeMo pickles beside the file, of which the file has the type and the name of the pickle."""

    cls: type


serialization.register_node_traverser(
    Pickled,
    flatten_fn=lambda one: (("0815-pickle",), one.cls),
    unflatten_fn=lambda values, metadata: None,
    path_elements_fn=lambda one: (serialization.IdentityElement(),),
)


def written(context: Path, config: Any, name: str = "io.json") -> Path:
    """``config`` by fiddle's own hand; of a pickled object the type and the pickle's name, as `_io_flatten_object` of NeMo's
    io/mixin.py leaves them."""
    text = json.loads(serialization.dump_json(config))
    for one in text["objects"].values():
        if one["type"].get("name") == "Pickled":
            one["type"], one["metadata"] = one["metadata"], None
    context.mkdir(parents=True, exist_ok=True)
    (context / name).write_text(json.dumps(text))
    _forget()
    return context


def whole(nemo: Any, **changes: Any) -> Any:
    made: dict[str, Any] = {
        "model": fdl.Config(
            nemo.LlamaModel,
            config=fdl.Config(
                nemo.LlamaConfig, num_layers=2, hidden_size=64, num_attention_heads=4, seq_length=16, bf16=True,
                tensor_model_parallel_size=2, activation_func=torch.nn.functional.silu, data_step_fn=nemo.gpt_data_step,
                fp8="hybrid",
            ),
            optim=fdl.Config(
                nemo.MegatronOptimizerModule,
                config=fdl.Config(OptimizerConfig, lr=3e-4, weight_decay=0.1, bf16=True, params_dtype=torch.bfloat16,
                                  clip_grad=1.0),
                lr_scheduler=fdl.Config(nemo.CosineAnnealingScheduler, warmup_steps=5, min_lr=3e-5),
            ),
            tokenizer=fdl.Config(nemo.AutoTokenizer, pretrained_model_name=fdl.Config(nemo.FileArtifact, attr="a/b", skip=True)),
        ),
        "trainer": fdl.Config(
            nemo.Trainer,
            accelerator="gpu", devices=8, max_steps=100,
            strategy=fdl.Config(
                nemo.MegatronStrategy, tensor_model_parallel_size=2, gradient_as_bucket_view=True,
                ddp=fdl.Config(DistributedDataParallelConfig, overlap_grad_reduce=True, grad_reduce_in_fp32=True),
            ),
            plugins=Pickled(nemo.MegatronMixedPrecision),
            callbacks=[Pickled(nemo.TimingCallback), fdl.Config(nemo.MegatronCommOverlapCallback, tp_comm_overlap=False)],
        ),
        "extra": {
            "datamodule": fdl.Config(nemo.PreTrainingDataModule, paths=["/data/a_text_document"], seq_length=16,
                                     micro_batch_size=1, global_batch_size=8)
        },
    }  # fmt: skip
    return fdl.Config(nemo.TrainerContext, **(made | changes))


def test_the_context_of_a_run_is_a_recipe_and_none_of_its_names_is_imported(theirs, tmp_path):
    done = recipe_of(written(tmp_path / "context", whole(theirs)))
    assert not [name for name in sys.modules if name.partition(".")[0] == "nemo"]
    recipe: Any = done.recipe
    assert recipe.__fn_or_cls__ is llm.pretrain and done.source == tmp_path / "context" / "io.json"

    model, strategy, data = recipe.model, recipe.trainer.strategy, recipe.data
    assert (model.__fn_or_cls__, model.config.__fn_or_cls__) == (llm.LlamaModel, llm.LlamaConfig)
    assert model.config.__arguments__ == {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 16,
    }, "what strategy and precision wrote into it is theirs, and Llama's activation is its default"  # fmt: skip
    assert (strategy.__fn_or_cls__, strategy.tensor_model_parallel_size) == (nl.MegatronStrategy, 2)
    assert strategy.ddp.__arguments__ == {"overlap_grad_reduce": True}, "NeMo writes every field of a dataclass down"
    assert recipe.optim.config.__arguments__ == {"lr": 3e-4, "weight_decay": 0.1}
    assert (recipe.optim.lr_scheduler.warmup_steps, recipe.optim.lr_scheduler.min_lr) == (5, 3e-5)
    assert (data.__fn_or_cls__, data.paths, data.global_batch_size) == (
        llm.PreTrainingDataModule, ["/data/a_text_document"], 8,
    )  # fmt: skip
    assert (data.tokenizer.__fn_or_cls__, data.tokenizer.pretrained_model_name) == (AutoTokenizer, "a/b")
    precision = recipe.trainer.plugins
    assert precision.__fn_or_cls__ is nl.MegatronMixedPrecision and precision.fp8 == "hybrid"
    assert recipe.trainer.accelerator == "auto" and recipe.trainer.devices == 8
    assert [one.__fn_or_cls__ for one in recipe.trainer.callbacks] == [TimingCallback, MegatronCommOverlapCallback]
    assert recipe.trainer.callbacks[1].tp_comm_overlap is False

    assert [(one.path, "0815-pickle" in one.reason) for one in done.left] == [("trainer.callbacks[0]", True)]


def test_what_is_not_known_is_told_by_its_path_with_its_value_and_the_reason(theirs, tmp_path):
    context = whole(theirs)
    context.model.config.of_another_age = 7
    context.trainer.strategy.store_optimizer_states = True
    context.trainer.callbacks += [fdl.Config(theirs.Unheard, of=1), Pickled(theirs.GarbageCollectionCallback)]
    context.model.tokenizer.trust_remote_code = True
    done = recipe_of(written(tmp_path / "context", context))
    told = {one.path: one for one in done.left}
    assert told["model.config.of_another_age"].value == "7"
    assert "LlamaConfig has no of_another_age" in told["model.config.of_another_age"].reason
    assert "ignores it" in told["trainer.strategy.store_optimizer_states"].reason
    assert "nemo.lightning.run.plugins.Unheard: nemo2 has no such class" in told["trainer.callbacks[2]"].reason
    assert "needs gc_interval_train" in told["trainer.callbacks[3]"].reason
    assert "it runs code" in told["data.tokenizer.trust_remote_code"].reason
    assert (
        len(done.recipe.trainer.callbacks) == 2 and "trust_remote_code" not in done.recipe.data.tokenizer.__arguments__
    )


def test_a_fine_tuned_model_becomes_a_recipe_of_fine_tuning(theirs, tmp_path):
    context = whole(theirs, extra={"datamodule": fdl.Config(theirs.SquadDataModule, seq_length=512)})
    context.model.model_transform = fdl.Config(theirs.LoRA, dim=8, target_modules=["linear_qkv"])
    recipe: Any = recipe_of(written(tmp_path / "context", context)).recipe
    assert recipe.__fn_or_cls__ is llm.finetune
    assert (recipe.peft.dim, recipe.peft.target_modules, recipe.data.seq_length) == (8, ["linear_qkv"], 512)


def test_the_task_of_a_run_is_read_where_it_is_for_it_has_every_part(theirs, tmp_path):
    parts = whole(theirs)
    task = fdl.Partial(
        theirs.pretrain, model=parts.model, data=parts.extra["datamodule"], trainer=parts.trainer,
        log=fdl.Config(theirs.NeMoLogger, name="mine", log_dir="/runs"),
    )  # fmt: skip
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "io.json").write_text("not read")
    done = recipe_of(written(tmp_path, task, "task.json"))
    assert done.source.name == "task.json"
    assert (done.recipe.log.name, done.recipe.log.log_dir) == ("mine", "/runs")
    assert done.recipe.data.global_batch_size == 8


def test_the_command_writes_python_or_json_and_lists_what_is_left(theirs, tmp_path):
    context = written(tmp_path / "context", whole(theirs))
    run = CliRunner()
    done = run.invoke(app, ["translate", str(context), "--output", str(tmp_path / "recipe.py")])
    assert done.exit_code == 1 and "io.json: trainer.callbacks[0] = TimingCallback(...): NeMo pickled" in done.stderr
    space: dict[str, Any] = {}
    exec((tmp_path / "recipe.py").read_text(), space)
    expected = recipe_of(context).recipe
    assert space["pretrain_recipe"]() == expected
    run.invoke(app, ["translate", str(tmp_path), "--output", str(tmp_path / "recipe.json")])
    assert from_json((tmp_path / "recipe.json").read_text()) == expected


def _with(theirs: Any, tmp_path: Path, **objects: Any) -> Path:
    """A context whose root is ``objects["root"]``, among the objects given."""
    (tmp_path / "context").mkdir()
    root = objects.pop("root")
    (tmp_path / "context" / "io.json").write_text(json.dumps({"root": root, "objects": objects}))
    return tmp_path / "context"


def _list(*items: Any) -> dict[str, Any]:
    return {
        "type": {"type": "pyref", "module": "builtins", "name": "list"},
        "items": [["", one] for one in items],
        "metadata": None,
    }


def _ref(key: str) -> dict[str, str]:
    return {"type": "ref", "key": key}


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = _list(value)
    return value


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({"root": _ref("a"), "a": _list(_ref("a"))}, f"more than {MOST_VALUES} values"),
        ({"root": _ref("a0"), **{f"a{n}": _list(*[_ref(f"a{n + 1}")] * 10) for n in range(9)}, "a9": 1}, "more than"),
        ({"root": _deep(101)}, "levels deep"),
        ({"root": _ref("no")}, "it has no object no"),
        ({"root": {"type": "strange"}}, "is not a fiddle configuration"),
        ({"root": {"type": {"module": 1, "name": "x"}}}, "without module and name"),
        ({"root": 3}, "doesn't describe a run"),
        ({"root": {"type": {"module": "os", "name": "system"}, "items": 5}}, "without items"),
    ],
    ids=["holds itself", "a bomb", "deep", "a lost object", "a strange type", "no name", "a number", "no items"],
)  # fmt: skip
def test_a_file_made_to_harm_is_refused(theirs, tmp_path, objects, words):
    with pytest.raises(CheckpointError, match=words):
        recipe_of(_with(theirs, tmp_path, **objects))


def test_names_that_would_run_something_run_nothing(theirs, tmp_path, monkeypatch):
    """Whatever stands there: it is told, nothing of it is imported, and what policy forbids doesn't get into the recipe."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text("open('RAN', 'w').close()\ndef run(*a, **k): pass\nclass LlamaModel: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    pyref = {"type": "pyref", "module": "evil", "name": "run"}
    context = written(tmp_path / "context", whole(theirs))
    tree = json.loads((context / "io.json").read_text())
    text = json.dumps(tree)
    for target in ("nemo.lightning.pytorch.callbacks.megatron_comm_overlap", "torch.nn.functional"):
        text = text.replace(f'"{target}"', '"evil"')
    (context / "io.json").write_text(text)
    done = recipe_of(context)
    assert not (tmp_path / "RAN").exists() and "evil" not in sys.modules
    assert {"trainer.callbacks[1]"} <= {one.path for one in done.left}
    (context / "io.json").write_text(json.dumps({"root": pyref, "objects": {}}))
    with pytest.raises(CheckpointError, match="doesn't describe a run"):
        recipe_of(context)
    assert not (tmp_path / "RAN").exists()


def test_a_link_in_a_context_is_refused_and_a_tokenizer_stays_inside(theirs, tmp_path):
    context = whole(theirs)
    context.model.tokenizer.pretrained_model_name = "nemo_tokenizer"
    folder = written(tmp_path / "context", context)
    (folder / "nemo_tokenizer").mkdir()
    assert recipe_of(folder).recipe.data.tokenizer.pretrained_model_name == str(folder / "nemo_tokenizer")
    (folder / "io.json").write_text((folder / "io.json").read_text().replace("nemo_tokenizer", "../outside"))
    (tmp_path / "outside").mkdir()
    assert recipe_of(folder).recipe.data.tokenizer.pretrained_model_name == "../outside", "not pointed at"
    (folder / "io.json").rename(tmp_path / "elsewhere.json")
    (folder / "io.json").symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(SecurityError, match="a link to"):
        recipe_of(folder)
