# SPDX-License-Identifier: Apache-2.0
"""The table of domains: every numeric field has a row, and each row holds its edges and nothing beyond them."""

import dataclasses
import importlib
import inspect
import math
import pkgutil
import re
from types import SimpleNamespace
from typing import Any

import fiddle as fdl
import pytest
from megatron.core.optimizer import OptimizerConfig

import nemo2.models
from nemo2 import recipes
from nemo2.base.errors import ConfigError
from nemo2.config import Config
from nemo2.config.domains import Domain, out_of_range
from nemo2.data import demo, mock, pretraining
from nemo2.data.finetuning import hf_dataset, module, published
from nemo2.mcore.optim import lr_scheduler
from nemo2.models.gpt import GPTConfig
from nemo2.models.ssm import SSMConfig
from nemo2.preflight.checks import domains, find_problems
from nemo2.preflight.checks.rules.ranks import _WITHOUT_GROUPS
from support.nightly import daily_and_nightly

TABLES = {
    "model": domains.MODEL, "optimizer": domains.OPTIMIZER, "schedule": lr_scheduler.SCHEDULE,
    "data": mock.MockDataModule.valid_numbers, "files": pretraining.PreTrainingDataModule.valid_numbers,
    "standard library": demo.StdlibDataModule.valid_numbers, "records": hf_dataset.HFDatasetDataModule.valid_numbers,
    "optimizer module": domains.OPTIMIZER_MODULE,
}  # fmt: skip
ROWS = [
    pytest.param(row, id=f"{table}.{name}")
    for table, rows in TABLES.items()
    for name, row in rows.items()
    if isinstance(row, Domain)
]
ON_THE_STRATEGY = "the strategy's, whose sizes are judged there"
WITHOUT_GROUPS = "refused, because no strategy creates their groups"
A_KERNELS = "handed to a kernel or a communication library as it is"
OF_INFERENCE = "read in inference, which nemo2 runs without it"
NOT_BUILT = "of a part of Megatron-Core that nemo2 does not build"
WITHOUT_A_ROW = {
    **dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
         "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
         "microbatch_group_size_per_vp_stage",
         "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"), ON_THE_STRATEGY),
    **dict.fromkeys(_WITHOUT_GROUPS, WITHOUT_GROUPS),
    **dict.fromkeys(
        ("moe_flex_dispatcher_num_sms", "moe_deepep_num_sms", "moe_hybridep_num_sms", "moe_hybridep_num_sms_preprocessing",
         "moe_hybridep_num_blocks_permute", "moe_hybridep_num_blocks_unpermute", "moe_mlp_glu_interleave_size",
         "moe_shared_expert_glu_interleave_size"), A_KERNELS),
    "inference_sampling_seed": OF_INFERENCE,
    **dict.fromkeys(
        ("moe_paged_stash_page_size", "moe_paged_stash_buffer_size_factor_cuda", "moe_paged_stash_buffer_size_factor_cpu",
         "moe_expert_rank_capacity_factor", "moe_router_force_biased"), NOT_BUILT),
    "rampup_batch_size": "three numbers that the sampler judges together",
    "num_microbatches_with_partial_activation_checkpoints": "refused whatever its value",
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_a_row_holds_its_edges_and_refuses_just_beyond(row: Domain) -> None:
    low, high = (float(edge) for edge in row.interval[1:-1].split(", "))
    whole = row.kind != "real"
    for edge, closed, outwards in ((low, row.interval[0] == "[", -1), (high, row.interval[-1] == "]", 1)):
        if math.isinf(edge):
            assert row.holds(edge) == closed
            continue
        at: Any = int(edge) if whole else edge
        beyond: Any = at + outwards if whole else math.nextafter(edge, outwards * math.inf)
        within: Any = at - outwards if whole else math.nextafter(edge, -outwards * math.inf)
        assert row.holds(at) == closed
        assert not row.holds(beyond)
        assert row.holds(within)
    assert row.holds(None)
    assert not any(map(row.holds, (math.nan, -math.inf, True, "1", [math.nan])))
    assert row.holds(1.5) == (not whole and low <= 1.5 < high)


@pytest.mark.parametrize(
    ("table", "field", "value"),
    [("model", "layernorm_epsilon", -1), ("model", "rotary_base", -1), ("model", "init_method_std", -1),
     ("model", "vocab_size", 0), ("optimizer", "lr", math.inf), ("optimizer", "clip_grad", -1), ("data", "seed", -1),
     ("files", "seed", 2**32), ("schedule", "max_steps", 0), ("schedule", "warmup_ratio", 1.4), ("model", "layer", math.nan),
     ("model", "window_size", [8]),
     ("model", "moe_aux_loss_coeff", [0.1, -0.1]), ("model", "moe_layer_freq", [0, 2]), ("model", "moe_layer_freq", 0)],
)  # fmt: skip
def test_nonsense_is_told_with_field_value_and_domain(table: str, field: str, value: Any) -> None:
    (told,) = out_of_range(SimpleNamespace(**{field: value}), "here", TABLES[table])
    assert re.match(rf"here\.{field}={re.escape(repr(value))}: must be .+\.$", told)


def test_a_window_has_two_sides_but_where_a_class_takes_its_width() -> None:
    """Megatron-Core reads both; Gemma 3's class makes them of one number."""
    for name, told in (("mistral_7b", ["model.config.window_size=512"]), ("gemma3_1b", [])):
        recipe = recipes.get(name).pretrain_recipe()
        recipe.model.config.window_size = 512
        assert [words.partition(":")[0] for words in find_problems(recipe)] == told
        recipe.model.config.window_size = (511, 0)
        assert not find_problems(recipe)


@pytest.mark.parametrize(
    ("path", "value"),
    [("model.config.make_vocab_size_divisible_by", 0), ("model.config.no_rope_freq", -1), ("data.num_workers", -1)],
)
def test_a_number_out_of_range_is_told_by_one_rule(path: str, value: int) -> None:
    """A data module that is refused might have made the tokenizer, so none is missed."""
    from nemo2.config.walk import node_at

    recipe = recipes.get("llama_tiny").pretrain_recipe()
    recipe.data = Config(mock.MockDataModule)
    owner, _, field = path.rpartition(".")
    setattr(node_at(recipe, owner), field, value)
    [told] = find_problems(recipe)
    assert told.startswith(f"{path}={value}: must be ")


def test_all_violations_are_told_at_once() -> None:
    node = SimpleNamespace(layernorm_epsilon=-1.0, rotary_base=0, init_method_std=math.nan)
    assert len(list(out_of_range(node, "model.config", domains.MODEL))) == 3


def model_classes() -> list[type]:
    modules = [
        importlib.import_module(f"nemo2.models.{one.name}") for one in pkgutil.iter_modules(nemo2.models.__path__)
    ]
    found = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
    return [one for one in found if issubclass(one, GPTConfig | SSMConfig)]


def test_every_numeric_field_has_a_row_or_a_reason() -> None:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    schedules = [
        one for one in vars(lr_scheduler).values() if inspect.isclass(one) and issubclass(one, lr_scheduler.LRSchedule)
    ]
    modules = [mock.MockDataModule, pretraining.PreTrainingDataModule, demo.StdlibDataModule]
    modules += [module.FineTuningDataModule, module.ChatDataModule, hf_dataset.HFDatasetDataModule]
    modules += [published.SquadDataModule, published.DollyDataModule, published.AlpacaDataModule]
    missing = [
        f"{owner.__name__}.{name}"
        for owners, rows in (
            ([*model_classes(), MLATransformerConfig], domains.MODEL),
            ([OptimizerConfig], domains.OPTIMIZER),
            (schedules, lr_scheduler.SCHEDULE),
        )
        for owner in owners
        if dataclasses.is_dataclass(owner)
        for name, kind in ((field.name, field.type) for field in dataclasses.fields(owner))
        if numeric(kind) and name not in rows and name not in WITHOUT_A_ROW
    ]
    missing += [
        f"{module.__name__}.{parameter.name}"
        for module in modules
        for parameter in inspect.signature(module.__init__).parameters.values()
        if numeric(parameter.annotation)
        and parameter.name not in module.valid_numbers
        and parameter.name not in WITHOUT_A_ROW
    ]
    assert sorted(set(missing)) == []


def numeric(kind: Any) -> bool:
    return re.search(r"\b(int|float)\b", kind if isinstance(kind, str) else str(kind)) is not None


def test_a_point_inside_an_interval_may_be_refused() -> None:
    capacity = domains.MODEL["moe_expert_capacity_factor"]
    assert [capacity.holds(value) for value in (-1.0, 0, 0.0, 1e-3, 1)] == [True, False, False, True, True]
    assert "other than 0" in capacity.words


def refusals(*, data: Any = None, **parts: Any) -> list[str]:
    """The paragraphs with which a run made of these objects is refused."""
    from nemo2 import MegatronStrategy, Trainer, llm
    from nemo2.data.mock import MockDataModule
    from nemo2.preflight.checks.parts import check_parts

    given = {"trainer": Trainer(max_steps=1, strategy=MegatronStrategy(), accelerator="cpu", devices=1)} | parts
    try:
        check_parts(llm.train, given | {"data": data or MockDataModule()})
    except ConfigError as error:
        return str(error).splitlines()
    return []


def test_live_parts_are_judged_by_the_same_table() -> None:
    from nemo2.data.mock import MockDataModule
    from nemo2.mcore.optim.lr_scheduler import CosineAnnealingScheduler
    from nemo2.mcore.optim.megatron import MegatronOptimizerModule
    from nemo2.models.llama import LlamaConfig, LlamaModel

    def parts(lr: float = 1e-3, seed: int = 1, rounds: int = 1, **model: Any) -> list[str]:
        config = LlamaConfig(num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, **model)
        schedule = CosineAnnealingScheduler(frequency=rounds)
        optim = MegatronOptimizerModule(OptimizerConfig(lr=lr), lr_scheduler=schedule)
        data = MockDataModule()
        data.seed = seed  # as its class would refuse
        return refusals(model=LlamaModel(config), data=data, optim=optim)

    assert parts() == []
    told = parts(lr=math.inf, seed=-1, layernorm_epsilon=-1.0)
    assert [words.partition("=")[0] for words in told] == [
        "model.config.layernorm_epsilon", "optim.config.lr", "data.seed"
    ]  # fmt: skip
    mine = SimpleNamespace(vocab_size=100, seed=-1, micro_batch_size=2)
    assert refusals(data=mine) == []
    mine.micro_batch_size = 0
    assert len(refusals(data=mine)) == 1


@pytest.mark.parametrize("names", daily_and_nightly(recipes.names()))
def test_what_the_configurations_of_recipes_hold_once_they_are_made_is_in_the_table(names: list[str]) -> None:
    for name in names:
        config = fdl.build(recipes.get(name).pretrain_recipe().model.config)
        assert list(out_of_range(config, name, domains.MODEL)) == []


@pytest.mark.parametrize("value", [10**400, 2**63, -(10**400)], ids=["1e400", "2**63", "-1e400"])
def test_numbers_beyond_64_bits_are_refused_and_nothing_is_made_of_them(value: int) -> None:
    for table in (domains.MODEL, domains.OPTIMIZER, lr_scheduler.SCHEDULE):
        for domain in table.values():
            if isinstance(domain, Domain) and domain.interval.endswith("inf)"):
                assert not domain.holds(value), domain
    (problem,) = out_of_range(SimpleNamespace(max_steps=value), "trainer", domains.TRAINER, others=False)
    assert (f"{2**63 - 1:,}" in problem) is (value > 0)
    assert not domains.MODEL["num_layers"].holds(10**9) and domains.MODEL["num_layers"].holds(1000)


def test_an_argument_that_ends_in_a_field_has_the_domain_of_the_field() -> None:
    """In a recipe and on live objects, for each argument of the overlap callback, the precision and the gradient
    buffers that a table names."""
    from nemo2.callbacks import MegatronCommOverlapCallback
    from nemo2.config.aliases import parameter_names
    from nemo2.mcore.parallel.ddp_config import DistributedDataParallelConfig
    from nemo2.mcore.precision import MegatronMixedPrecision

    fields = {**domains.MODEL, **domains.MODEL_TEXTS, **domains.BUFFERS, **domains.OPTIMIZER}
    drawn = []
    for target, table in (
        (MegatronCommOverlapCallback, domains.OVERLAP),
        (MegatronMixedPrecision, domains.PRECISION),
        (DistributedDataParallelConfig, domains.BUFFERS),
    ):
        for name in parameter_names(target):
            assert (name in table) == (name.removeprefix("fp16_") in fields), f"{target.__name__}.{name}"
            if name not in table:
                continue
            wrong = next(value for value in (-3, 1.5, "ncl") if not table[name].holds(value))
            recipe: Any = recipes.get("llama_tiny").pretrain_recipe()
            recipe.trainer.devices = 1
            if target is MegatronMixedPrecision:
                recipe.trainer.plugins = Config(target, precision="16-mixed", **{name: wrong})
            elif target is MegatronCommOverlapCallback:
                recipe.trainer.callbacks = [Config(target, **{name: wrong})]
            else:
                setattr(recipe.trainer.strategy.ddp, name, wrong)
            live = refusals(trainer=fdl.build(recipe.trainer))
            assert any(f"{name}={wrong!r}" in problem for problem in live), name
            assert any(f"{name}={wrong!r}" in str(problem) for problem in find_problems(recipe)), name
            drawn.append(name)
    assert {"bucket_size", "wgrad_deferral_limit", "tp_comm_bootstrap_backend", "fp16_hysteresis"} <= set(drawn)


@pytest.mark.parametrize(
    ("name", "known", "unknown"),
    [
        ("moe_token_dispatcher_type", "alltoall", "all2all"),
        ("moe_router_dtype", None, "fp16"),
        ("moe_router_load_balancing_type", ["aux_loss", "none"], ["aux_loss", "non"]),
        ("position_embedding_type", "rope", "yarn"),
    ],
)
def test_texts_are_those_of_the_annotations_and_of_the_table(name: str, known: Any, unknown: Any) -> None:
    texts = domains.model_texts(GPTConfig)
    config = GPTConfig(num_layers=2, hidden_size=32, num_attention_heads=4)
    assert not list(out_of_range(config, "model.config", texts))
    for value, count in ((known, 0), (unknown, 1)):
        setattr(config, name, value)
        assert len(list(out_of_range(config, "model.config", texts))) == count
