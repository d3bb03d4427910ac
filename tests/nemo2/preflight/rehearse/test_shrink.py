# SPDX-License-Identifier: Apache-2.0
"""A recipe shrunk: small in every size, the same in kind, and really trained."""

from pathlib import Path
from typing import Any

import pytest

from nemo2.models.peft import PEFT
from nemo2.recipes import _shipped, llama3_8b
from support.nightly import daily_and_nightly


def shrink_all(names: list[str]) -> dict[str, dict[str, Any]]:
    """The shrunk form of each named recipe; nothing is built."""
    from nemo2 import recipes
    from nemo2.mcore.parallel.layout import Layout
    from nemo2.preflight.checks import find_problems
    from nemo2.preflight.rehearse.shrink import shrink

    results = {}
    for name in names:
        recipe = recipes.get(name).pretrain_recipe()
        small = shrink(recipe, max_processes=8)
        before, after = Layout.of(recipe.trainer.strategy), Layout.of(small.recipe.trainer.strategy)
        model = small.recipe.model.config
        results[name] = {
            "before": {key: getattr(before, key) for key in ("tp", "pp", "vp", "cp", "ep")},
            "after": {key: getattr(after, key) for key in ("tp", "pp", "vp", "cp", "ep")},
            "processes": small.processes,
            "notes": small.notes,
            "hidden": model.hidden_size,
            "problems": find_problems(small.recipe, devices=small.processes, local=True),
            "experts": (recipe.model.config.num_moe_experts, model.num_moe_experts),
            "callbacks": [str(c.__fn_or_cls__) for c in recipe.trainer.callbacks]
            == [str(c.__fn_or_cls__) for c in small.recipe.trainer.callbacks],
        }
    return results


@pytest.fixture(scope="module", params=daily_and_nightly(_shipped.names()))
def shrunk(request: pytest.FixtureRequest, run_on_ranks: Any) -> dict[str, dict[str, Any]]:
    return run_on_ranks(shrink_all, 1, request.param, init_process_group=False)[0]


def test_every_recipe_becomes_small(shrunk: Any) -> None:
    assert len(shrunk) > 10
    for name, result in shrunk.items():
        assert result["hidden"] <= 64 and result["processes"] <= 8, name


def test_a_hybrid_whose_pattern_writes_out_stages_keeps_as_many_as_there_are_chunks() -> None:
    from nemo2.models.ssm import SSMConfig
    from nemo2.preflight.rehearse.shrink import small_sizes

    config = SSMConfig(num_layers=8, hybrid_override_pattern="M-|M*M|M-|M", hidden_size=64, mamba_num_groups=2)
    sizes = small_sizes(config, chunks=4)
    assert (sizes["num_layers"], sizes["hybrid_override_pattern"]) == (4, "M|-|*|M")


def test_no_rule_refuses_a_shrunk_recipe_on_this_machine(shrunk: Any) -> None:
    assert {name: result["problems"] for name, result in shrunk.items() if result["problems"]} == {}


def test_what_is_cut_stays_cut_unless_a_note_says_otherwise(shrunk: Any) -> None:
    for name, result in shrunk.items():
        if result["notes"]:
            continue
        for size, before in result["before"].items():
            assert (result["after"][size] or 1) == min(2, before or 1), (name, size)


def test_experts_and_callbacks_stay(shrunk: Any) -> None:
    for name, result in shrunk.items():
        before, after = result["experts"]
        assert bool(before) == bool(after), name
        assert result["callbacks"], name


def train(directory: str) -> tuple[Any, str]:
    import fiddle as fdl

    from nemo2 import llm
    from nemo2.preflight.rehearse.shrink import shrink

    small = shrink(llm.llama3_8b.pretrain_recipe(dir=directory, name="tiny"), max_processes=2, steps=3)
    call = fdl.build(small.recipe)
    run_dir = call()
    return call.keywords["trainer"].global_step, str(run_dir)


def test_a_shrunk_recipe_trains_and_leaves_what_a_run_leaves(run_on_ranks: Any, tmp_path: Path) -> None:
    ranks = run_on_ranks(train, 2, str(tmp_path), init_process_group=False)
    steps, run_dir = ranks[0]
    assert steps == 3
    assert (Path(run_dir) / "metrics.jsonl").read_text().count("reduced_train_loss") == 3
    assert list((Path(run_dir) / "checkpoints").glob("*/weights"))


def test_what_belongs_to_eight_bits_is_left_out_with_them() -> None:
    import fiddle as fdl

    from nemo2.preflight.rehearse.stage import in_sixteen_bits
    from nemo2.recipes.precision.mixed_precision import bf16_with_fp8_current_scaling_mixed

    recipe = llama3_8b.pretrain_recipe()
    recipe.trainer.plugins = bf16_with_fp8_current_scaling_mixed()
    plugin = fdl.build(in_sixteen_bits(recipe).trainer.plugins)
    assert plugin.dtype_config.fp8 is None and plugin.dtype_config.bf16
    # A run would say these of each setting that it finds without effect.
    assert plugin.ineffective() == []
    assert recipe.trainer.plugins.fp8_recipe == "tensorwise"
    recipe.trainer.plugins.fp8 = None
    assert any("fp8_recipe='tensorwise'" in sentence for sentence in fdl.build(recipe.trainer.plugins).ineffective())


def test_fine_tuning_data_becomes_random_tokens_and_a_note_says_so() -> None:
    from nemo2 import Config, llm
    from nemo2.preflight.checks import find_problems
    from nemo2.preflight.rehearse.shrink import shrink

    recipe = llm.llama3_8b.pretrain_recipe()
    packed = Config(llm.PackedSequenceSpecs, packed_sequence_size=4096)
    recipe.data = Config(llm.SquadDataModule, seq_length=4096, micro_batch_size=1, packed_sequence_specs=packed)
    small = shrink(recipe, max_processes=2)
    assert small.recipe.data.__fn_or_cls__ is llm.MockDataModule
    assert any("random tokens instead of SquadDataModule" in note for note in small.notes)
    assert find_problems(small.recipe, devices=small.processes) == []


def test_with_transformer_engine_eight_bits_stay_and_an_adapter_fits_the_smallest_width() -> None:
    from nemo2 import recipes
    from nemo2.preflight.rehearse.shrink import shrink

    recipe: Any = recipes.get("deepseek_v3").finetune_recipe()
    recipe.optim.config.use_precision_aware_optimizer = True
    with_te, without = shrink(recipe, transformer_engine=True), shrink(recipe)
    assert with_te.recipe.optim.config.use_precision_aware_optimizer
    assert not without.recipe.optim.config.use_precision_aware_optimizer and len(without.notes) > len(with_te.notes)
    assert without.recipe.peft.dim <= without.recipe.model.config.kv_lora_rank


def test_an_adapter_of_a_router_fits_the_number_of_experts() -> None:
    from nemo2 import recipes
    from nemo2.preflight.rehearse.shrink import shrink

    small = shrink(recipes.get("nemotron3_nano_30b_a3b").finetune_recipe(peft_scheme="lora")).recipe
    assert small.peft.dim <= small.model.config.num_moe_experts


def test_a_method_of_the_users_own_without_a_rank_stays() -> None:
    from nemo2 import llm
    from nemo2.config import Config
    from nemo2.preflight.rehearse.shrink import shrink

    recipe: Any = llm.llama_tiny.finetune_recipe()
    recipe.peft = Config(Norms)
    assert shrink(recipe).recipe.peft == recipe.peft


class Norms(PEFT):
    """A method without a rank."""

    def transform(self, module: Any, name: Any = None, prefix: Any = None) -> Any:
        return module.requires_grad_("norm" in name)
