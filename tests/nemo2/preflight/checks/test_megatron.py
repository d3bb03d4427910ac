# SPDX-License-Identifier: Apache-2.0
"""What the installed Megatron-Core refuses is refused before the launch, with the setting and a value that it accepts."""

import re
import shlex
from typing import Any, NamedTuple

import pytest

from nemo2.config import apply_overrides
from nemo2.preflight.checks.find import find
from nemo2.preflight.checks.megatron import AGREES
from support.megatron_verdict import verdicts
from support.rule_cases import Case, problems_of, recipe_of, sides

MODEL = "model.config."
TP, PP, VP, CP, EP = (
    f"strategy.{name}"
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    )
)
FULL = f"{MODEL}recompute_granularity=full {MODEL}recompute_method="
FIRST, LAST = "strategy.num_layers_in_first_pipeline_stage", "strategy.num_layers_in_last_pipeline_stage"
OVERLAP = f"{MODEL}overlap_moe_expert_parallel_comm=True"
OFFLOAD = f"{MODEL}cpu_offloading=True {MODEL}cpu_offloading_num_layers="
SELECTIVE = f"{MODEL}recompute_granularity=selective {MODEL}recompute_modules="
FP8 = "trainer.plugins.fp8=hybrid"
AWARE = "optim.config.use_precision_aware_optimizer=True"
ENDS = "trainer.plugins.first_last_layers_bf16"
BALANCING = f"{MODEL}moe_router_load_balancing_type"


class Row(NamedTuple):
    """Changes to a recipe that Megatron-Core refuses and changes near them that it takes, as `sides` reads them, and the settings
    that the message may name first."""

    recipe: str
    changes: str
    named: str

    def case(self, *, mended: bool) -> Case:
        return Case(recipe=self.recipe, changes=sides(self.changes)[mended])


ROWS = (
    Row("llama3_8b", f"{EP}=2->1", "expert_model_parallel_size"),
    Row("llama3_8b", f"strategy.sequence_parallel=True ->{TP}=2", "sequence_parallel"),
    Row(
        "llama3_8b",
        f"{PP}=4 {FIRST}=8 {LAST}=8 strategy.account_for_embedding_in_pipeline_split=True->",
        "account_for_embedding_in_pipeline_split",
    ),
    Row(
        "llama3_8b",
        f"{PP}=2 strategy.pipeline_model_parallel_layout='Et*15|t*16L'->'Et*16|t*16L'",
        "pipeline_model_parallel_layout",
    ),
    Row(
        "llama3_8b",
        f"{PP}=4 {VP}=2 {MODEL}overlap_p2p_comm_warmup_flush=True {MODEL}overlap_p2p_comm=False->True "
        f"->{MODEL}batch_p2p_comm=False",
        "overlap_p2p_comm_warmup_flush",
    ),
    Row(
        "llama3_8b",
        f"{MODEL}defer_embedding_wgrad_compute=True->False {MODEL}gradient_accumulation_fusion=True->",
        "defer_embedding_wgrad_compute",
    ),
    Row("mixtral_8x7b", f"{MODEL}moe_router_topk=1 ->{MODEL}moe_router_pre_softmax=True", "moe_router_topk"),
    Row(
        "deepseek_v2_lite", f"{MODEL}moe_router_group_topk=2 {MODEL}moe_router_num_groups=7->8", "moe_router_num_groups"
    ),
    Row(
        "deepseek_v2_lite",
        f"{MODEL}moe_pad_expert_input_to_capacity=True ->{MODEL}moe_expert_capacity_factor=1.0",
        "moe_pad_expert_input_to_capacity",
    ),
    Row(
        "deepseek_v2_lite",
        f"{MODEL}moe_router_enable_expert_bias=True {MODEL}moe_router_score_function=softmax->sigmoid",
        "moe_router_enable_expert_bias moe_router_score_function",
    ),
    Row("llama3_8b", f"{MODEL}moe_ffn_hidden_size=1024-> ->{MODEL}ffn_hidden_size=1024", "moe_ffn_hidden_size"),
    Row(
        "mixtral_8x7b",
        f"{BALANCING}=['aux_loss','seq_aux_loss'] {MODEL}moe_aux_loss_coeff=[0.01]->[0.01,0.01]",
        "moe_router_load_balancing_type moe_aux_loss_coeff",
    ),
    Row("mixtral_8x7b", f"{OVERLAP} {VP}=None->", "overlap_moe_expert_parallel_comm"),
    Row(
        "mixtral_8x7b",
        f"{OVERLAP} {MODEL}moe_token_dispatcher_type=allgather->",
        "overlap_moe_expert_parallel_comm moe_token_dispatcher_type",
    ),
    Row("mixtral_8x7b", f"{MODEL}delay_wgrad_compute=True ->{OVERLAP}", "delay_wgrad_compute"),
    Row("llama3_8b", f"{FP8}-> trainer.plugins.fp4=e2m1", "fp8 fp4"),
    Row("llama3_8b", f"trainer.plugins.fp8_param_gather=True ->{FP8}", "fp8_param_gather"),
    Row(
        "llama3_8b",
        f"{FP8} {ENDS}=True trainer.plugins.fp8_recipe=delayed->tensorwise",
        "first_last_layers_bf16 fp8_recipe fp8",
    ),
    Row(
        "llama3_8b",
        f"{FP8} {ENDS}=True trainer.plugins.fp8_recipe=tensorwise trainer.plugins.num_layers_at_start_in_bf16=33->32",
        "num_layers_at_start_in_bf16 first_last_layers_bf16 fp8",
    ),
    Row(
        "llama3_8b",
        f"{SELECTIVE}['mla_up_proj']->['core_attn','mlp']",
        "recompute_modules recompute_granularity",
    ),
    Row(
        "mixtral_8x7b",
        f"{SELECTIVE}['moe_act'] {MODEL}moe_grouped_gemm=False->True",
        "recompute_modules recompute_granularity moe_grouped_gemm",
    ),
    Row(
        "llama3_8b",
        f"{FULL}block {MODEL}recompute_num_layers=4 {MODEL}distribute_saved_activations=True {TP}=2 "
        "strategy.sequence_parallel=True->",
        "distribute_saved_activations sequence_parallel",
    ),
    Row("llama3_8b", f"{OFFLOAD}4 {PP}=2-> {CP}=1->", "cpu_offloading"),
    Row("llama3_8b", f"{OFFLOAD}32->31", "cpu_offloading_num_layers cpu_offloading"),
    Row("llama3_8b", "optim.config.exp_avg_dtype=torch.bfloat16->torch.float32", "exp_avg_dtype"),
    Row("llama3_8b", f"{AWARE} optim.config.optimizer=sgd->", "use_precision_aware_optimizer optimizer"),
    Row("nemotron3_4b", f"{MODEL}bias_activation_fusion=True->False", "bias_activation_fusion"),
)
each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.changes.replace(MODEL, ""))


@pytest.fixture(scope="module")
def built(run_on_ranks: Any) -> list[str | None]:
    """Megatron-Core's verdict on each mended recipe."""
    return run_on_ranks(verdicts, 1, [row.case(mended=True) for row in ROWS], init_process_group=False, timeout=280)[0]


@each_row
def test_a_refusal_names_a_setting_and_values_that_megatron_core_accepts(row: Row) -> None:
    problems = [problem for problem in find(recipe_of(row.case(mended=False))) if problem.rule == AGREES]
    assert problems
    named = re.match(r"(\S+)\.(\w+)=", problems[0].message)
    assert named is not None and named[2] in row.named.split(), problems[0].message
    proposed = re.findall(r"(?:accepts|, or) ([\w.]+=\S+?)(?=\.$|, or|$)", problems[-1].message)
    assert proposed, problems[-1].message
    for change in proposed if len(problems) == 1 else ():
        changed = recipe_of(row.case(mended=False))
        assert not [one for one in find(apply_overrides(changed, [change]) or changed) if one.rule == AGREES]


@pytest.mark.parametrize(
    ("broken", "alternative"),
    [("strategy.sequence_parallel=True", f"{TP}=2"), ("optim.config.exp_avg_dtype=torch.bfloat16", AWARE)],
)
def test_alternatives_that_the_message_says_in_words_are_proposed(broken: str, alternative: str) -> None:
    (problem,) = find(recipe_of(Case(recipe="llama3_8b", changes=(broken,))))
    assert problem.rule == AGREES and alternative in problem.message.partition("It accepts")[2]


@each_row
def test_its_neighbour_is_legal_and_megatron_core_builds_it(row: Row, built: list[str | None]) -> None:
    assert problems_of(row.case(mended=True)) == []
    assert built[ROWS.index(row)] is None


def test_what_stands_behind_the_first_refusal_is_told_too() -> None:
    both = Case(
        recipe="llama3_8b",
        changes=(
            f"{MODEL}moe_ffn_hidden_size=1024",
            f"{MODEL}distribute_saved_activations=True",
            f"{TP}=2",
            *shlex.split(f"strategy.sequence_parallel=True {FULL}block {MODEL}recompute_num_layers=4"),
        ),
    )
    told = " ".join(problem.message for problem in find(recipe_of(both)))
    assert f"{MODEL}moe_ffn_hidden_size=1024" in told and f"{MODEL}distribute_saved_activations=True" in told
