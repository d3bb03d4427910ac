# SPDX-License-Identifier: Apache-2.0
"""``nemo2 show --explain``: every layer of a setting, and what the run makes of it."""

import re

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from nemo2.base.errors import ConfigError
from nemo2.callbacks import MegatronCommOverlapCallback
from nemo2.cli.app import main
from nemo2.config import Config, apply_overrides
from nemo2.mcore.settle import Machine, settle
from nemo2.preflight.explain import Explanation, explain, explain_all
from nemo2.recipes import deepseek_v3, gpt3_175b, llama3_8b, llama3_70b, llama_tiny, mixtral_8x7b
from nemo2.recipes.precision import mixed_precision


def explained(recipe, field: str, gpu: str = "h100") -> dict[str, Explanation]:
    return {one.path: one for one in explain(recipe, settle(recipe, Machine.named(gpu)), field)}


def test_default_recipe_and_command_line_are_told_in_order() -> None:
    recipe = llama3_8b.pretrain_recipe()
    apply_overrides(recipe, ["strategy.ddp_config.overlap_grad_sync=False"])
    found = explained(recipe, "strategy.ddp_config.overlap_grad_sync")["trainer.strategy.ddp.overlap_grad_reduce"]
    assert [layer.value for layer in found.layers] == [False, True, False]
    assert [layer.who.split(",")[0] for layer in found.layers] == [
        "default of DistributedDataParallelConfig",
        "recipe",
        "command line",
    ]
    assert re.search(r"recipe, recipes/llama3_8b\.py:\d+", str(found)) and found.effective is False
    assert explained(recipe, "recipe.strategy.ddp_config.overlap_grad_sync") == {found.path: found}


def test_a_users_own_line_is_told_by_its_file() -> None:
    recipe = llama_tiny.pretrain_recipe()
    recipe.trainer.max_steps = 7
    [found] = explained(recipe, "trainer.max_steps").values()
    assert found.effective == 7 and found.layers[-1].who.startswith(f"{__file__}:")


def test_performance_mode_and_precision_are_layers_of_their_own() -> None:
    found = explained(llama3_8b.pretrain_recipe(performance_mode=True), "grad_reduce_in_fp32")
    plugin = found["trainer.plugins.grad_reduce_in_fp32"]
    assert plugin.layers[-1].who.startswith("performance mode, recipes/_performance.py:")
    plain = explained(llama3_8b.pretrain_recipe(), "grad_reduce_in_fp32")["trainer.strategy.ddp.grad_reduce_in_fp32"]
    assert plain.layers[-1] == plain.layers[-1].__class__(value=True, who="trainer.plugins.grad_reduce_in_fp32")


def test_what_the_layout_turns_off_says_why() -> None:
    recipe = llama3_8b.pretrain_recipe()
    recipe.trainer.callbacks.append(MegatronCommOverlapCallback(overlap_p2p_comm=True, tp_comm_overlap=True))
    found = explained(recipe, "overlap_p2p_comm")
    callback = next(one for path, one in found.items() if "callbacks" in path)
    assert (callback.layers[-1].value, callback.layers[-1].who) == (False, "pipeline_model_parallel_size is 1")
    model = found["model.config.overlap_p2p_comm"]
    assert model.effective is False
    assert "is 1" in explained(recipe, "MegatronCommOverlapCallback.tp_comm_overlap").popitem()[1].layers[-1].who


def test_gpt3_overlaps_its_pipeline_with_virtual_stages_as_its_configuration_says() -> None:
    recipe = gpt3_175b.pretrain_recipe(performance_mode=True)
    assert recipe.strategy.virtual_pipeline_model_parallel_size == 6
    effective = settle(recipe, Machine.named("h100"))
    config = effective.objects["model.config"]
    assert effective.messages == []
    assert (config.overlap_p2p_comm, config.batch_p2p_comm, config.tp_comm_overlap) == (True, False, True)
    assert effective.objects["trainer.strategy.ddp"].align_param_gather is True


def test_states_that_need_transformer_engine_are_explained_without_it() -> None:
    effective = settle(deepseek_v3.pretrain_recipe(), Machine.named("h100"))
    assert effective.messages == []
    assert effective.objects["optim.config"].use_precision_aware_optimizer is True


def test_contradictions_are_told_as_the_run_would_tell_them() -> None:
    recipe = llama3_70b.pretrain_recipe()
    recipe.strategy.ddp_config.bucket_size = 5
    recipe.trainer.callbacks.append(MegatronCommOverlapCallback(bucket_size=6))
    [refusal] = settle(recipe, Machine.named("h100")).messages
    line = rf"\({re.escape(__file__)}:\d+\)"
    assert re.search(rf"bucket_size=6\) {line} contradicts strategy\.ddp_config\.bucket_size=5 {line}", refusal)


def test_a_value_of_two_names_is_what_was_set_under_either() -> None:
    recipe = llama3_8b.pretrain_recipe()
    recipe.strategy.ddp_config.num_distributed_optimizer_instances = 2
    effective = settle(recipe, Machine.named("h100"))
    assert effective.value("trainer.strategy.ddp", "num_distributed_optimizer_instances") == (True, 2)
    recipe.strategy.num_distributed_optimizer_instances = 4
    [refusal] = settle(recipe, Machine.named("h100")).messages
    assert "instances=4 contradicts strategy.ddp_config.num_distributed_optimizer_instances=2" in refusal


def test_the_dtype_of_the_pipeline_is_the_strategys_and_the_plugins() -> None:
    recipe = llama3_70b.pretrain_recipe()
    recipe.strategy.pipeline_dtype = torch.float32
    effective = settle(recipe, Machine.named("h100"))
    for path in ("model.config", "trainer.plugins"):
        assert effective.value(path, "pipeline_dtype") == (True, torch.float32)
    [refusal] = effective.messages
    assert "strategy.pipeline_dtype=torch.float32: activations between layers are torch.bfloat16" in refusal
    recipe.trainer.plugins.pipeline_dtype = torch.bfloat16
    refusal, *_ = settle(recipe, Machine.named("h100")).messages
    assert "strategy.pipeline_dtype=torch.float32 contradicts trainer.plugins.pipeline_dtype" in refusal


def test_one_switch_set_in_two_places_is_refused_with_both_lines() -> None:
    recipe = llama3_8b.pretrain_recipe()
    recipe.optim.config.use_distributed_optimizer = True
    recipe.strategy.ddp_config.use_distributed_optimizer = False
    [refusal] = settle(recipe, Machine.named("h100")).messages
    line = rf"\({re.escape(__file__)}:\d+\)"
    assert re.search(
        rf"optim\.config\.use_distributed_optimizer=True {line} contradicts .*=False {line}: both", refusal
    )


def test_the_precision_is_found_among_several_plugins() -> None:
    recipe = llama3_8b.pretrain_recipe()
    recipe.trainer.plugins = [Config(LightningEnvironment), mixed_precision.fp16_mixed()]
    effective = settle(recipe, Machine.named("h100"))
    assert effective.value("model.config", "fp16") == (True, True)
    assert "trainer.plugins[1].grad_reduce_in_fp32" in {
        one.path for one in explain(recipe, effective, "grad_reduce_in_fp32")
    }


def test_a_bucket_size_without_overlap_is_explained() -> None:
    recipe = llama_tiny.pretrain_recipe()
    recipe.strategy.ddp_config.bucket_size = 1000
    recipe.strategy.ddp_config.overlap_grad_reduce = False
    [found] = explained(recipe, "strategy.ddp_config.bucket_size").values()
    assert found.effective is None
    assert found.layers[-1].who == "overlap_grad_reduce is off, so Megatron-Core puts all gradients into one bucket"


@pytest.mark.parametrize("field", ["strategy.ddp_config.overlap_grad_sync", "overlap_grad_reduce", "bucket_size"])
def test_buffers_that_are_left_to_the_strategy_are_explained_too(field: str) -> None:
    recipe = gpt3_175b.pretrain_recipe(performance_mode=True)
    recipe.trainer.strategy.ddp = "megatron"
    found = explained(recipe, field)
    [buffers] = [one for path, one in found.items() if path.startswith("trainer.strategy.ddp.")]
    assert buffers.layers[0].who == "default of DistributedDataParallelConfig" and buffers.effective not in (
        None,
        False,
    )
    assert buffers.layers[-1].who == "MegatronCommOverlapCallback: 16 ranks reduce gradients together"
    with pytest.raises(ConfigError, match="No setting of this recipe is called"):
        explained(recipe, "optim.config.overlap_grad_sync")


def test_userbuffers_are_shown_by_the_name_of_their_preset() -> None:
    recipe = llama3_70b.pretrain_recipe(performance_mode=True)
    name = "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"
    found = explained(recipe, "model.config.tp_comm_overlap_cfg")["model.config.tp_comm_overlap_cfg"]
    assert str(found).splitlines()[0] == f"model.config.tp_comm_overlap_cfg = '{name}'"
    assert max(map(len, str(found).splitlines())) < 300


def test_the_recipe_is_not_changed() -> None:
    recipe, untouched = llama3_70b.pretrain_recipe(), llama3_70b.pretrain_recipe()
    settle(recipe, Machine.named("b200"))
    assert recipe == untouched


def test_the_whole_tree_tells_what_differs_from_its_default() -> None:
    recipe = llama3_70b.pretrain_recipe(performance_mode=True)
    lines = {one.path: one.line() for one in explain_all(recipe, settle(recipe, Machine.named("h100")))}
    assert re.fullmatch(r"trainer\.max_steps = \d+  # recipe, recipes/\S+:\d+", lines["trainer.max_steps"])
    assert lines["model.config.tensor_model_parallel_size"].endswith("= 4  # strategy.tensor_model_parallel_size")
    assert "trainer.accelerator" not in lines, "it is its default"
    assert all(" = " in line and "  # " in line for line in lines.values())


def test_a_name_that_is_nowhere_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="is called 'overlap_grad_reduc'; did you mean 'overlap_grad_reduce'"):
        explained(llama_tiny.pretrain_recipe(), "overlap_grad_reduc")


def test_the_command_explains_a_field_and_a_tree(capsys: pytest.CaptureFixture[str]) -> None:
    change = "strategy.tensor_model_parallel_size=2"
    assert main(["show", "llama_tiny", "--explain", "tensor_model_parallel_size", change, "--gpu", "H100"]) == 0
    shown = capsys.readouterr().out
    assert "trainer.strategy.tensor_model_parallel_size = 2" in shown and "command line, change 1" in shown
    assert "of H100, TP 2 (SP); the last line of each setting is the value in the run." in shown
    assert main(["show", "llama_tiny", "--explain", "all"]) == 0
    assert re.search(r"^trainer\.max_steps = \d+  # recipe, ", capsys.readouterr().out, re.MULTILINE)
    assert main(["show", "llama_tiny", "--explain", "lr", "--gpu", "H1000"]) == 2
    assert "--gpus 'H1000': must be one of" in capsys.readouterr().err


@pytest.mark.parametrize("precision", ["bf16_with_fp8_mixed", "bf16_with_fp8_current_scaling_mixed"])
def test_experts_in_fp8_are_explained_where_transformer_engine_is_not_installed(precision: str) -> None:
    recipe = mixtral_8x7b.pretrain_recipe()
    recipe.trainer.plugins = getattr(mixed_precision, precision)()
    effective = settle(recipe, Machine.named("h100"))
    assert effective.messages == []
    assert effective.value("model.config", "fp8") == (True, "hybrid")


@pytest.mark.parametrize(
    ("change", "kind"),
    [("cuda_graph_impl=transformer_engine", "transformer_engine"), ("enable_cuda_graph=True", "local")],
)
def test_graphs_and_what_follows_from_them_are_explained_for_a_gpu(change: str, kind: str) -> None:
    from nemo2.config.provenance import adjustments

    recipe = llama3_8b.pretrain_recipe()
    apply_overrides(recipe, [f"model.config.{change}"])
    objects = settle(recipe, Machine.named("h100")).objects
    assert objects["model.config"].cuda_graph_impl == kind
    assert objects["model.config"].use_te_rng_tracker is True
    assert "graph" in adjustments(objects["trainer.strategy"])["use_te_rng_tracker"][-1].why
    here = settle(recipe, Machine.here()).objects["model.config"]
    assert here.cuda_graph_impl == "none"


def test_so_many_gpus_are_a_layer_of_nodes_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "llama3_8b", "--explain", "trainer.num_nodes", "--gpus", "H100x64"]) == 0
    told = capsys.readouterr().out
    assert "trainer.num_nodes = 8" in told and "command line, --gpus H100x64" in told
    assert "On 64 ranks of H100, CP 2" in told
    assert main(["show", "llama3_8b", "--explain", "trainer.num_nodes"]) == 0
    assert "On 8 ranks of this machine's" in capsys.readouterr().out
