# SPDX-License-Identifier: Apache-2.0
"""Performance modes carry the overlap and the buffers that fit their own width and layout, not another model's."""

import pytest

from nemo2 import recipes
from nemo2.mcore.overlap.presets import PRESETS, preset
from nemo2.mcore.settle import Machine, settle


@pytest.mark.parametrize(
    ("name", "gpu", "chosen"),
    [
        ("llama3_8b", "h100", None),
        ("llama3_70b", "h100", "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"),
        ("llama3_70b", "h200", "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"),
        ("llama3_70b", "a100", None),
        ("llama31_8b", "h100", None),
        ("llama31_70b", "h100", "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"),
        ("llama31_405b", "h100", "userbuffers_bf16_h100_h16384_tp8_cp2_mbs1_seqlen8192"),
        ("nemotron4_15b", "h100", None),
        ("nemotron4_340b", "h100", None),
        ("nemotron4_340b", "b200", "userbuffers_bf16_b200_h18432_tp8_mbs1_seqlen4096"),
        ("gpt3_175b", "h100", "userbuffers_bf16_h100_h12288_tp4_mbs1_seqlen2048"),
        ("mixtral_8x7b", "h100", None),
        ("mixtral_8x22b", "h100", None),
    ],
)
def test_a_performance_mode_gets_the_buffers_tuned_for_it(name, gpu, chosen):
    recipe = recipes.get(name).pretrain_recipe(performance_mode=True)
    effective = settle(recipe, Machine.named(gpu))
    assert effective.messages == []
    strategy, config = recipe.trainer.strategy, recipe.model.config
    settings = effective.decisions.get("tp_comm_overlap_cfg")
    assert (settings.value if settings else None) == (preset(chosen) if chosen else None)
    if chosen is not None:
        tuned = PRESETS[chosen].job
        assert (tuned.hidden_size, tuned.tensor_parallel) == (config.hidden_size, strategy.tensor_model_parallel_size)
        assert tuned.seq_length == recipe.data.seq_length
    interleaved = strategy.pipeline_model_parallel_size > 1 and (strategy.virtual_pipeline_model_parallel_size or 1) > 1
    model, ddp = effective.objects["model.config"], effective.objects["trainer.strategy.ddp"]
    assert model.overlap_p2p_comm is interleaved and ddp.align_param_gather is (
        interleaved and ddp.overlap_param_gather
    )
    asked = [callback for callback in recipe.trainer.callbacks if getattr(callback, "tp_comm_overlap", None)]
    assert model.tp_comm_overlap is bool(asked), "every performance mode that asks for it has the layout for it"
