# SPDX-License-Identifier: Apache-2.0
"""`settle`: pure, the same for a question and for a run, and its refusals are values that name their rule."""

import copy
import logging
from typing import Any

import fiddle as fdl
import pytest
import torch
from megatron.core import utils as megatron_utils

from nemo2.base.errors import ConfigError
from nemo2.config import apply_overrides
from nemo2.config.provenance import adjustments
from nemo2.mcore.settle import Machine, settle
from nemo2.mcore.settle.parts import RULE_OF
from nemo2.mcore.settle.run_settings import RunSettings
from nemo2.mcore.settle.settling import settle_run
from nemo2.models.llama import LlamaConfig
from nemo2.preflight.checks.find import find
from nemo2.preflight.checks.table import RULES
from nemo2.recipes import deepseek_v2_lite, llama3_8b, llama3_70b, mixtral_8x7b, nemotronh_8b

H100 = Machine.named("H100")
RECIPES = [llama3_8b, llama3_70b, mixtral_8x7b, deepseek_v2_lite, nemotronh_8b]


def changed(factory: Any, *overrides: str) -> Any:
    recipe = factory.pretrain_recipe()
    return apply_overrides(recipe, list(overrides)) or recipe


def run_of(recipe: Any) -> RunSettings:
    """The live configurations of a recipe, as its strategy has them when it is connected."""
    strategy, model, optim = (fdl.build(node) for node in (recipe.trainer.strategy, recipe.model.config, recipe.optim))
    if "seq_length" not in recipe.model.config.__arguments__:
        model.seq_length = recipe.data.seq_length
    return RunSettings(
        parallelism=strategy.parallelism,
        ddp_config=strategy.ddp_config,
        optimizer_config=optim.config,
        model_config=model,
        precision=fdl.build(recipe.trainer.plugins),
    )


def plain(value: Any) -> Any:
    return {name: str(value) if "0x" in str(value) else value for name, value in vars(value).items()}


@pytest.mark.parametrize("factory", RECIPES, ids=lambda factory: factory.__name__.rpartition(".")[2])
def test_what_is_told_beforehand_is_what_a_run_makes_of_its_live_configurations(factory: Any) -> None:
    recipe = factory.pretrain_recipe()
    recipe.trainer.callbacks = None  # these have their turn after the strategy's
    machine = Machine.here()
    told, run = settle(recipe, machine), run_of(recipe)
    settled = settle_run(run, machine)
    before = {path: id(live) for path, live in run.objects().items()}
    settled.apply(run)
    assert {path: id(live) for path, live in run.objects().items()} == before
    assert told.messages == [] and set(told.objects) == set(run.objects())
    for path, live in run.objects().items():
        fields = {name for name in vars(live) if not name.startswith("_")} - {"bucket_size"}
        for name in fields - {"seq_length"}:
            assert str(getattr(told.objects[path], name)) == str(getattr(live, name)), (path, name)
            assert [step.why for step in told.steps(path, name)] == [
                step.why for step in adjustments(live).get(name, ())
            ], (path, name)


def test_settling_changes_nothing_that_it_is_given() -> None:
    run = run_of(changed(llama3_70b, "strategy.expert_tensor_parallel_size=2"))
    before = {path: copy.deepcopy(plain(live)) for path, live in run.objects().items()}
    settled = settle_run(run, H100)
    assert settled.objects["model.config"].tensor_model_parallel_size == run.layout.tp
    assert {path: plain(live) for path, live in run.objects().items()} == before


def test_another_machine_is_a_matter_of_the_argument_only(caplog: pytest.LogCaptureFixture) -> None:
    recipe = changed(llama3_8b, "model.config.cuda_graph_impl=local", "model.config.apply_rope_fusion=True")
    found = megatron_utils._te_version
    with caplog.at_level(logging.INFO, logger="nemo2"):
        there, here = settle(recipe, H100), settle(recipe, Machine.here())
    assert megatron_utils._te_version is found and caplog.records == []
    assert there.value("model.config", "cuda_graph_impl") == (True, "local")
    assert there.value("model.config", "apply_rope_fusion") == (True, True)
    assert there.value("model.config", "gradient_accumulation_fusion") == (True, True)
    if not torch.cuda.is_available():
        assert here.value("model.config", "cuda_graph_impl") == (True, "none") and here.refusals == ()
        assert here.machine_decides["apply_rope_fusion"][0] is False
        assert "needs a GPU" in here.steps("model.config", "apply_rope_fusion")[-1].why
    assert LlamaConfig(num_layers=2, hidden_size=32, num_attention_heads=4).apply_rope_fusion is True


PP, VP = "strategy.pipeline_model_parallel_size", "strategy.virtual_pipeline_model_parallel_size"


@pytest.mark.parametrize(("recipe", "averages"), [(llama3_8b, False), (mixtral_8x7b, True)], ids=["dense", "experts"])
def test_megatron_fsdp_averages_in_collectives_where_there_are_experts(recipe: Any, averages: bool) -> None:
    run = changed(recipe, "strategy.fsdp=megatron", "strategy.ddp.average_in_collective=True", f"{PP}=1", f"{VP}=None")
    assert settle(run, H100).value("trainer.strategy.ddp", "average_in_collective") == (True, averages)


def test_sums_in_fp32_are_divided_before() -> None:
    assert llama3_8b.pretrain_recipe().strategy.ddp_config.average_in_collective
    settled = settle(changed(llama3_8b, "strategy.ddp.reduce_scatter_with_fp32_accumulation=True"), H100)
    assert settled.messages == [] and settled.value("trainer.strategy.ddp", "average_in_collective") == (True, False)


def test_the_buffers_wait_for_delayed_gradients_of_the_layers() -> None:
    changes = "model.config.overlap_moe_expert_parallel_comm=True model.config.delay_wgrad_compute=True"
    run = changed(mixtral_8x7b, *changes.split())
    assert settle(run, H100).value("trainer.strategy.ddp", "delay_wgrad_compute") == (True, True)
    run.strategy.ddp.delay_wgrad_compute = True
    here = settle(run, Machine(accelerator="cpu", overrides=Machine.here().overrides))
    assert here.messages == [] and here.value("trainer.strategy.ddp", "delay_wgrad_compute") == (True, False)


REFUSED = [
    ("model.config.tensor_model_parallel_size=4", "sizes-on-the-strategy"),
    *(
        (
            f"optim.config.overlap_param_gather_with_optimizer_step=True strategy.ddp.overlap_param_gather=False {other}",
            "gather-in-the-step-needs-virtual-stages",
        )
        for other in (f"{PP}=4 {VP}=2", f"{PP}=4 {VP}=2 optim.config.use_distributed_optimizer=False")
    ),
    *(
        (f"strategy.ddp.reduce_scatter_with_fp32_accumulation=True {other}", "fp32-sums-are-of-one-optimizers-shards")
        for other in (
            "optim.config.use_distributed_optimizer=False strategy.ddp.overlap_param_gather=False",
            f"strategy.fsdp=megatron {PP}=1",
            "strategy.num_distributed_optimizer_instances=2",
            f"{PP}=4 {VP}=2 model.config.share_embeddings_and_output_weights=True",
        )
    ),
    ("optim.config.optimizer=muon", "distributed-optimizer-is-adams"),
    ("strategy.ddp.use_custom_fsdp=True", "strategy-settings-are-supported"),
    ("data.micro_batch_size=0", "data-module-accepts-its-arguments"),
    ("data.vocab_file=vocab.json", "data-module-accepts-its-arguments"),
    ("trainer.devices=0", "nodes-and-devices-are-counts"),
    (f"{PP}=2 {VP}=2 model.config.batch_p2p_comm=True", "two-interleaved-stages-overlap-messages"),
]
"""Beside the examples of the rules (support/rule_examples.py), which `find` judges through `settle`."""


@pytest.mark.parametrize(("changes", "rule"), REFUSED, ids=[rule for _, rule in REFUSED])
def test_a_refusal_names_the_rule_that_tells_it(changes: str, rule: str) -> None:
    recipe = changed(llama3_8b, *changes.split())
    settled = settle(recipe, H100)
    assert [refusal.rule for refusal in settled.refusals] == [rule]
    assert settled.refused(rule) == settled.messages and settled.messages[0]
    assert rule in {problem.rule for problem in find(recipe, machine=H100)}


@pytest.mark.parametrize(
    ("changes", "overlapped", "batched"),
    [
        (f"{PP}=4 {VP}=2", False, True),
        (f"{PP}=4 {VP}=2 model.config.overlap_p2p_comm=True", True, False),
        (f"{PP}=2 {VP}=2", True, False),
        (f"{PP}=2 {VP}=2 model.config.overlap_p2p_comm=True", True, False),
        ("strategy.pipeline_model_parallel_size=1 model.config.overlap_p2p_comm=True", True, True),  # no messages
    ],
)
def test_messages_of_interleaved_stages_are_overlapped_or_batched(
    changes: str, overlapped: bool, batched: bool
) -> None:
    recipe = changed(llama3_8b, *changes.split(), "strategy.context_parallel_size=1", "trainer.callbacks=None")
    settled = settle(recipe, H100)
    assert settled.messages == []
    assert settled.value("model.config", "overlap_p2p_comm") == (True, overlapped)
    assert settled.value("model.config", "batch_p2p_comm") == (True, batched)


NAN_CHECK = "trainer.strategy.ddp", "check_for_nan_in_grad"
FUSED_LOSS = "model.config", "cross_entropy_loss_fusion"


@pytest.mark.parametrize(
    ("changes", "field", "kept"),
    [
        ("trainer.plugins=fp16_mixed", NAN_CHECK, False),
        ("trainer.plugins=fp16_mixed trainer.plugins.fp16_loss_scale=8", NAN_CHECK, True),
        ("trainer.plugins=fp32", FUSED_LOSS, False),
        ("trainer.plugins=fp32 model.config.cross_entropy_loss_fusion=True", FUSED_LOSS, True),
        ("", FUSED_LOSS, True),
    ],
)
def test_a_check_and_a_kernel_stay_where_nothing_takes_their_place(
    changes: str, field: tuple[str, str], kept: bool
) -> None:
    """A loss scale that never changes skips no step, and a fused loss that the user set in fp32 is the user's."""
    settled = settle(changed(llama3_8b, *changes.split(), "trainer.callbacks=None"), H100)
    assert settled.messages == []
    assert settled.value(*field) == (True, kept)


def staged(graphs: str, stages: int) -> tuple[str, ...]:
    impl, check = f"model.config.cuda_graph_impl={graphs}", "strategy.ddp_config.check_for_nan_in_grad=False"
    return f"{PP}={stages}", impl, check


@pytest.mark.parametrize(("graphs", "stages", "waits"), [("full_iteration", 2, False), ("none", 2, True)])
def test_a_captured_step_waits_for_no_message_between_stages(graphs: str, stages: int, waits: bool) -> None:
    """CUDA ends the capture otherwise (Megatron-LM's pull request 6958)."""
    settled = settle(changed(llama3_8b, *staged(graphs, stages)), H100)
    assert settled.messages == [] and settled.value("model.config", "batch_p2p_sync") == (True, waits)


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        ("model.config.cuda_graph_impl=local", True),
        ("model.config.position_embedding_type=none", False),
        (f"{PP}=1", False),
        ("model.config.cuda_graph_impl=full_iteration", False),
    ],
)
def test_graphs_of_layers_in_stages_are_refused_where_micro_batches_share_rotary_frequencies(
    more: str, refused: bool
) -> None:
    settled = settle(changed(llama3_8b, *staged("local", 2), more), H100)
    assert bool(settled.refused("graphs-go-with-the-rest")) is refused


@pytest.mark.parametrize(
    ("graphs", "stages", "freed"),
    [("local", 2, False), ("local", 1, True), ("full_iteration", 2, True), ("none", 2, True)],
)
def test_a_stage_frees_its_output_unless_that_is_a_buffer_of_a_graph(graphs: str, stages: int, freed: bool) -> None:
    """Megatron-Core ends the first step of such a stage with an AssertionError otherwise (``deallocate_output_tensor``)."""
    settled = settle(changed(llama3_8b, *staged(graphs, stages), "model.config.position_embedding_type=none"), H100)
    assert settled.messages == []
    assert settled.value("model.config", "deallocate_pipeline_outputs") == (True, freed)


def test_every_rule_that_a_refusal_may_name_is_in_the_table() -> None:
    assert {*RULE_OF.values(), *(rule for _, rule in REFUSED), "overlap-is-asked-for-once"} <= {
        rule.name for rule in RULES
    }


def test_a_refused_run_leaves_its_configurations_alone_and_says_all_that_is_refused() -> None:
    recipe = changed(llama3_8b, "model.config.tensor_model_parallel_size=4", "strategy.fsdp=megatron")
    recipe.model.config.cuda_graph_impl = "local"
    run = run_of(recipe)
    before = {path: copy.deepcopy(plain(live)) for path, live in run.objects().items()}
    with pytest.raises(ConfigError, match=r"(?s)with Megatron-FSDP.*tensor_model_parallel_size=4") as caught:
        settle_run(run, H100).apply(run)
    assert caught.value.rule == "graphs-go-with-the-rest"
    assert {path: plain(live) for path, live in run.objects().items()} == before
