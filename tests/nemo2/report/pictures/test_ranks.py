# SPDX-License-Identifier: Apache-2.0
"""The contents of each rank, against the groups that Megatron-Core really makes and the layers that models really build."""

import math
from typing import Any

import pytest

from nemo2 import recipes
from nemo2.base.errors import ConfigError
from nemo2.mcore.parallel.layout import Layout, groups_of, rank_order
from nemo2.report.pictures.ranks import Placement, place_recipe, stages_of
from support.ranks import simulated_rank

SPLITS = {
    "even": (Layout(pp=4), {"num_layers": 8}),
    "interleaved": (Layout(pp=2, vp=3), {"num_layers": 12}),
    "first and last smaller": (
        Layout(pp=4),
        {"num_layers": 8, "num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 3},
    ),
    "embedding and loss count as layers": (
        Layout(pp=2, vp=2),
        {"num_layers": 6, "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
    ),
    "written out": (Layout(pp=2), {"num_layers": 5, "pipeline_model_parallel_layout": "Ett|tttL"}),
    "written out, interleaved": (Layout(pp=2, vp=2), {"num_layers": 5, "pipeline_model_parallel_layout": "Et|tt|t|tL"}),
}


def layers_in_fact(cases: dict[str, tuple[Layout, dict[str, Any]]]) -> dict[str, list[list[tuple]]]:
    """The layers, embedding and output layer of the chunks that every pipeline rank builds, one rank after the other."""
    import torch

    from nemo2.base.backend import get_backend
    from nemo2.mcore.parallel.groups import destroy_model_parallel, initialize_model_parallel, seed_random_streams
    from nemo2.models.llama import LlamaConfig

    get_backend().install()
    found: dict[str, list[list[tuple]]] = {}
    for name, (layout, fields) in cases.items():
        for rank in range(layout.pp):
            with simulated_rank(rank, layout.pp):
                initialize_model_parallel(layout, create_gloo_process_groups=False)
                seed_random_streams(1)
                config = LlamaConfig(
                    hidden_size=8,
                    ffn_hidden_size=8,
                    num_attention_heads=2,
                    vocab_size=16,
                    seq_length=4,
                    pipeline_dtype=torch.float32,
                    pipeline_model_parallel_size=layout.pp,
                    virtual_pipeline_model_parallel_size=layout.vp,
                    **fields,
                )
                chunks = []
                for index in range(layout.vp or 1):
                    model = config.configure_model(None, vp_stage=index if layout.vp else None)
                    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
                    chunks.append((layers, hasattr(model, "embedding"), hasattr(model, "output_layer")))
                found.setdefault(name, []).append(chunks)
                destroy_model_parallel()
    return found


@pytest.fixture(scope="module")
def built(run_on_ranks):
    return run_on_ranks(layers_in_fact, 1, SPLITS, init_process_group=False)[0]


@pytest.mark.parametrize("name", SPLITS)
def test_stages_hold_the_layers_that_models_build(name, built):
    layout, fields = SPLITS[name]
    stages = stages_of(layout, **fields)
    ours = [[(list(chunk.layers), chunk.embedding, chunk.loss) for chunk in stage] for stage in stages]
    assert ours == built[name]


PIPELINED = [name for name in recipes.names() if recipes.get(name).RECIPE.layout.pp > 1]


def test_every_recipe_with_stages_has_each_layer_once_and_the_ends_at_the_ends():
    for name in PIPELINED:
        recipe, layout = recipes.get(name).pretrain_recipe(), recipes.get(name).RECIPE.layout
        # The smallest world that it fits: what stages hold doesn't depend on the world.
        world = math.lcm(layout.model_parallel_size, layout.expert_tensor_size * layout.ep * layout.pp)
        placed = place_recipe(recipe, name=name, world_size=world)
        layers = sorted(layer for stage in placed.stages for chunk in stage for layer in chunk.layers)
        assert layers == list(range(recipe.model.config.num_layers)), name
        ends = [(chunk.embedding, chunk.loss) for stage in placed.stages for chunk in stage]
        assert (
            ends[0] == (True, False) and ends[-1] == (False, True) and ends[1:-1] == [(False, False)] * (len(ends) - 2)
        )
        assert len(placed.stages) == layout.pp


def test_without_a_world_a_recipe_has_the_one_it_asks_for():
    facts = recipes.get("llama3_70b").RECIPE
    placed = place_recipe(recipes.get("llama3_70b").pretrain_recipe())
    assert placed.world_size == facts.nodes * facts.gpus_per_node and placed.gpus_per_node == facts.gpus_per_node


def place(layout: Layout, world: int, **fields: Any) -> Placement:
    return Placement(
        name="",
        layout=layout,
        world_size=world,
        gpus_per_node=8,
        order=rank_order(),
        groups=groups_of(layout, world),
        stages=stages_of(layout, num_layers=layout.pp * (layout.vp or 1)),
        **fields,
    )


def test_a_replica_is_all_stages_of_one_data_parallel_index():
    placed = place(Layout(tp=2, pp=2), 16)
    assert placed.replicas == 4
    assert placed.replica(0) == [[0, 1], [8, 9]] and placed.replica(3) == [[6, 7], [14, 15]]
    assert sorted(rank for index in range(4) for row in placed.replica(index) for rank in row) == list(range(16))


def test_tensor_groups_stay_within_a_node_and_stages_are_far_apart():
    placed = place(Layout(tp=8, pp=4), 64)
    assert placed.nodes_spanned("tp") == 1 and placed.nodes_spanned("pp") == 4 and placed.nodes == 8
    assert placed.group_of("tp", 13) == tuple(range(8, 16)) and placed.index_in("tp", 13) == 5


def test_experts_are_shared_out_in_order_and_each_is_held_once_per_group():
    placed = place(Layout(tp=2, ep=4, etp=1), 8, num_experts=16)
    held = [expert for rank in placed.group_of("ep", 0) for expert in placed.experts_of(rank)]
    assert held == list(range(16))
    assert place(Layout(), 2).experts_of(0) == range(0)


@pytest.mark.parametrize(
    ("layout", "fields"),
    [
        (Layout(pp=4), {"num_layers": 6}),
        (Layout(pp=2, vp=2), {"num_layers": 6}),
        (Layout(pp=2), {"num_layers": 4, "pipeline_model_parallel_layout": "Ett|tL"}),
    ],
)
def test_layers_that_cannot_be_cut_are_refused_in_megatron_cores_words(layout, fields):
    with pytest.raises(ConfigError, match="layers can't be split over pipeline_model_parallel_size"):
        stages_of(layout, **fields)


def test_a_chunk_says_what_it_holds():
    (first,), (last,) = stages_of(Layout(pp=2), num_layers=4, mtp_num_layers=1)
    assert first.describe() == "embedding, layers 0-1"
    assert last.describe() == "layers 2-3, MTP, output"
