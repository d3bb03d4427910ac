# SPDX-License-Identifier: Apache-2.0
"""Random switches of small models, in layouts of two and four ranks: ``python -m tests.long.random_switches SECONDS [SEED]``.

A model of `tests.long.random_values` gets some of the switches that users set on ``recipe.model.config``,
``recipe.strategy`` and ``recipe.optim.config``: any boolean of these, turned, and the groups below; some have packed
samples, other micro-batches or 16 bits. One process trains it, and so do layouts of two and four ranks from the same weights
on the same samples. Losses and gradient norms of three steps and each parameter's gradient of the first step are compared.
Each layout ends as one of

    same     within the bounds of the parity table (`tests.long.parity.verdict`), in 16 bits within `ROUGH`
    refused  by nemo2's rules before it starts, or by the configuration itself

A layout that differs and a legal one that fails are printed with their seed, which reproduces them, and the exit code is 1.
"""

import functools
import inspect
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import fiddle as fdl
import torch.nn.functional as F
from torch.utils.data import DataLoader

import nemo2
from nemo2.config import Config
from nemo2.config.capture import configurable
from nemo2.config.walk import class_of
from nemo2.data.mock import MockDataModule
from nemo2.llm.fn import openai_gelu, quick_gelu, squared_relu
from support import gradients, moments, ranks
from tests.long import random_values
from tests.long.parity import measure, models, verdict

STEPS = 3
PACKED, PATTERN = "packed", "model.config.hybrid_override_pattern"
FLOOR = 1e-4
"""Of the largest norm of a gradient. Smaller ones, such as that of the bias of keys, are rounding errors."""
ROUGH = {"loss": 2e-2, "grad_norm": 0.1, "gradient": 0.4}
"""In 16 bits: less than a rank, a micro-batch or a scale that is left out makes."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {"world": 2},
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "CP2": {"context_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
    "PP2 VP2": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "EP2": {"expert_model_parallel_size": 2},
    "TP2 SP EP2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2,
                   "expert_tensor_parallel_size": 1},
    "FSDP": {"kind": "FSDPStrategy"},
    "FSDP2": {"kind": "FSDP2Strategy"},
    "FSDP2 CP2": {"kind": "FSDP2Strategy", "context_parallel_size": 2},
    "Megatron-FSDP": {"fsdp": "megatron"},
    "PP4": {"world": 4, "pipeline_model_parallel_size": 4},
    "PP2 VP2 TP2": {"world": 4, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2,
                    "tensor_model_parallel_size": 2, "sequence_parallel": True},
    "PP2 DP2": {"world": 4, "pipeline_model_parallel_size": 2},
    "PP2 CP2": {"world": 4, "pipeline_model_parallel_size": 2, "context_parallel_size": 2},
    "TP2 SP CP2": {"world": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
    "PP2 EP2": {"world": 4, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2},
    "TP2 SP EP2 ETP2": {"world": 4, "tensor_model_parallel_size": 2, "sequence_parallel": True,
                        "expert_model_parallel_size": 2},
    "CP2 EP4": {"world": 4, "context_parallel_size": 2, "expert_model_parallel_size": 4},
}  # fmt: skip
_MODEL: list[dict[str, tuple[Any, ...]]] = [
    {"normalization": ("LayerNorm", "RMSNorm"), "layernorm_zero_centered_gamma": (True, False)},
    {"qk_layernorm": (True, False), "qk_l2_norm": (False, False, True), "qk_layernorm_over_heads": (True, False)},
    {"post_sublayer_layernorm": (True, False), "pre_sublayer_layernorm": (True, False)},
    {"add_bias_linear": (True, False), "add_qkv_bias": (True, False), "bias_activation_fusion": (True, False)},
    {"gated_linear_unit": (True, False), "activation_func": (F.silu, openai_gelu, quick_gelu, squared_relu),
     "activation_func_clamp_value": (None, 0.5), "glu_linear_offset": (0.0, 1.0), "bias_activation_fusion": (True, False)},
    {"position_embedding_type": ("rope", "learned_absolute", "none"), "rotary_percent": (1.0, 0.5),
     "rotary_interleaved": (True, False), "seq_len_interpolation_factor": (None, 2.0), "no_rope_freq": (None, 2, [1, 0])},
    {"attn_logit_softcapping": (None, 2.0), "final_logit_softcapping": (None, 3.0), "softmax_scale": (None, 0.7)},
    {"softmax_type": ("off-by-one", "learnable"), "window_size": (None, (5, 0))},
    {"window_size": ((5, 0), (-1, 0)), "window_attn_skip_freq": (None, 2, [1, 0])},
    {"num_query_groups": (1, 2, 4), "attention_output_gate": (True, False)},
    {"vocab_size": (None, 128, 131), "make_vocab_size_divisible_by": (1, 7, 64), "mask_vocab_padding": (True, False),
     "share_embeddings_and_output_weights": (True, False)},
    {"cross_entropy_loss_fusion": (True, False), "cross_entropy_fusion_impl": ("native", "te")},
    {"cp_comm_type": ("p2p", "a2a", "all_gather", ["p2p", "a2a"])},
    {"recompute_granularity": ("full",), "recompute_method": ("uniform", "block"), "recompute_num_layers": (1, 2),
     "distribute_saved_activations": (True, False)},
    {"recompute_granularity": ("selective",), "recompute_modules": (
        ["core_attn"], ["mlp"], ["layernorm"], ["moe_act"], ["mla_up_proj"], ["moe"], ["shared_experts"], ["mlp", "layernorm"])},
    {"mtp_num_layers": (1, 2), "mtp_loss_scaling_factor": (0.1, 1.0), "mtp_use_repeated_layer": (True, False),
     "mtp_detach_heads": (True, False), "calculate_per_token_loss": (True, False)},
    {"use_mup": (True,), "mup_width_mult": (1.0, 4.0), "mup_embedding_mult": (1.0, 3.0), "mup_output_mult": (1.0, 0.5)},
    {"experimental_attention_variant": ("gated_delta_net",), "linear_attention_freq": (2, [1, 0]), "linear_key_head_dim": (8,),
     "linear_value_head_dim": (8,), "linear_num_key_heads": (2, 4), "linear_num_value_heads": (4,)},
    {"overlap_p2p_comm": (True, False), "batch_p2p_comm": (True, False), "deallocate_pipeline_outputs": (True, False)},
]  # fmt: skip
_EXPERTS: list[dict[str, tuple[Any, ...]]] = [
    {"moe_token_dispatcher_type": ("allgather", "alltoall", "flex"), "moe_grouped_gemm": (True, False)},
    {"moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn"),
     "moe_aux_loss_coeff": (0.1,), "moe_z_loss_coeff": (None, 0.1), "calculate_per_token_loss": (True, False)},
    {"moe_router_load_balancing_type": (["aux_loss", "seq_aux_loss"],), "moe_aux_loss_coeff": ([0.1, 0.2],)},
    {"moe_shared_expert_intermediate_size": (16,), "moe_shared_expert_overlap": (True, False),
     "moe_shared_expert_gate": (True, False)},
    {"moe_router_topk": (1, 2, 4), "moe_router_pre_softmax": (True, False), "moe_router_score_function": ("softmax", "sigmoid"),
     "moe_router_topk_scaling_factor": (None, 2.5), "moe_router_dtype": (None, "fp32", "fp64"),
     "moe_router_enable_expert_bias": (True, False)},
    {"moe_router_num_groups": (2,), "moe_router_group_topk": (1,)},
    {"moe_layer_freq": (1, 2, [0, 1]), "moe_latent_size": (None, 16)},
    {"moe_expert_capacity_factor": (1.0, 4.0), "moe_pad_expert_input_to_capacity": (True, False),
     "moe_token_drop_policy": ("probs", "position")},
    {"add_bias_linear": (True, False), "moe_apply_probs_on_input": (True, False), "moe_router_topk": (1,)},
]  # fmt: skip
_LATENT: list[dict[str, tuple[Any, ...]]] = [
    {"q_lora_rank": (None, 16), "qk_layernorm": (True, False), "v_head_dim": (6, 8)},
    {"rope_type": ("rope", "yarn"), "rotary_scaling_factor": (4.0,), "original_max_position_embeddings": (16,), "mscale": (0.7,)},
]  # fmt: skip
_HYBRID: list[dict[str, tuple[Any, ...]]] = [
    {"hybrid_override_pattern": ("MMMM", "M-M*", "M*|M-", "*-M|M", "M|*|-|M"), "mamba_num_groups": (1, 2, 4)},
    {
        "hybrid_override_pattern": ("M*M-/M*", "M*|M-/M", "M|*|-|M/*"),
        "mtp_num_layers": (1,),
        "share_embeddings_and_output_weights": (True, False),
        "calculate_per_token_loss": (True, False),
    },
]
_OPTIM: list[dict[str, tuple[Any, ...]]] = [{"optimizer": ("adam", "sgd"), "clip_grad": (0.0, 0.2, 1.0)}]
_DDP: list[dict[str, tuple[Any, ...]]] = [
    {"overlap_grad_reduce": (True, False), "overlap_param_gather": (True, False), "bucket_size": (None, 2000)},
    {"average_in_collective": (True, False), "grad_reduce_in_fp32": (True, False)},
    {"num_distributed_optimizer_instances": (2,)},
    {"data_parallel_sharding_strategy": ("optim", "optim_grads", "optim_grads_params")},
]  # fmt: skip
_STRATEGY: list[dict[str, tuple[Any, ...]]] = [
    {"account_for_embedding_in_pipeline_split": (True, False), "account_for_loss_in_pipeline_split": (True, False)},
    {"num_layers_in_first_pipeline_stage": (1, 3)},
    {"microbatch_group_size_per_vp_stage": (2, 4)},
    {"pipeline_model_parallel_layout": ("Et*3|tL", "Ett|t|tL|L")},
]
_RUN: list[dict[str, tuple[Any, ...]]] = [
    {"data.micro_batch_size": (1, 4)},
    {PACKED: (True,), "data.micro_batch_size": (1, 2), "model.config.calculate_per_token_loss": (True, False)},
    {"optim.config.use_distributed_optimizer": (False,), "trainer.strategy.ddp.overlap_grad_reduce": (True, False),
     "trainer.strategy.ddp.overlap_param_gather": (False,)},
    {"trainer.plugins": (Config(nemo2.MegatronMixedPrecision, "bf16-mixed"),
                         Config(nemo2.MegatronMixedPrecision, "16-mixed", fp16_initial_loss_scale=1024.0))},
]  # fmt: skip
NOT_DRAWN = re.compile(
    "^(bf16|fp16|sequence_parallel|setup_optimizers|init_model_parallel|lazy_init|perform_initialization|mask_vocab_padding)$|"
    "force_load_balancing|fp8|fp4|inference|offload|cuda_graph|kitchen|paged|hybridep|ncclep|meta_device|ckpt|progress"
)
"""Booleans that name another run (its precision, without an optimizer, with as much padding as a layout needs) or a GPU's."""
HOW = re.compile(
    r"strategy|recompute|(?<!activation_)fusion|overlap|p2p|cp_comm|saved_activations|deallocate|defer|dispatcher|mem_eff"
)
"""Switches that must not change what is computed. The process that layouts are compared with doesn't have them. A fused gelu is
the approximation by tanh."""


@configurable
class PackedData(MockDataModule):
    packed = True


def drawn(seed: int) -> tuple[str, dict[str, Any], list[str]]:
    """A model, its switches by path, and layouts. The same seed gives the same case."""
    dice = random.Random(seed)
    base = dice.choices(("dense", "experts", "latent", "hybrid"), (5, 4, 2, 2))[0]
    own = {"experts": _EXPERTS, "latent": _EXPERTS + _LATENT, "hybrid": _HYBRID}.get(base, _MODEL)
    recipe, values = random_values._looked_at(base), {}
    for _ in range(dice.choice((1, 2, 2, 3, 4))):
        path, groups = dice.choices(
            (("model.config", dice.choice((_MODEL, own))), ("optim.config", _OPTIM), ("trainer.strategy.ddp", _DDP),
             ("trainer.strategy", _STRATEGY)), (12, 1, 2, 1),
        )[0]  # fmt: skip
        node = reduce(getattr, path.split("."), recipe)
        parameters = inspect.signature(class_of(node)).parameters.values()
        switches = {
            one.name: (not one.default,)
            for one in parameters
            if isinstance(one.default, bool) and not NOT_DRAWN.search(one.name)
        }
        name = dice.choice(sorted(switches))
        group = dice.choice((dice.choice(groups), {name: switches[name]}))
        values |= {f"{path}.{name}": dice.choice(of) for name, of in group.items() if hasattr(node, name)}
    if dice.random() < 0.4:
        of_experts = base in ("experts", "latent")  # in 16 bits tokens would go to other experts
        values |= {path: dice.choice(of) for path, of in dice.choice(_RUN[: len(_RUN) - of_experts]).items()}
    # How many tokens an expert may have is counted over those of a rank.
    drops = values.get("model.config.moe_expert_capacity_factor") == 1.0
    layouts = [
        name
        for name in LAYOUTS
        if ("EP" not in name or base in ("experts", "latent")) and not (drops and re.search("SP|CP", name))
    ]
    dice.shuffle(layouts)
    return base, values, layouts


def world_of(layout: dict[str, Any] | None) -> int:
    return layout.get("world", 2) if layout else 1


def recipe_of(base: str, values: dict[str, Any], layout: dict[str, Any] | None) -> Any:
    """The case in a layout. None: on one process, without the switches that say how."""
    recipe = random_values._base(base)
    config, optim, trainer = recipe.model.config, recipe.optim.config, recipe.trainer
    if PACKED in values:
        values = {path: value for path, value in values.items() if path != PACKED}
        recipe.data = Config(
            PackedData, **{str(name): value for name, value in fdl.ordered_arguments(recipe.data).items()}
        )
    recipe.data.micro_batch_size, recipe.data.global_batch_size = 2, models.GLOBAL_BATCH
    config.num_layers, config.init_method_std, config.vocab_size = 4, 0.08, models.VOCAB
    if base == "latent":
        config.moe_layer_freq = [0, 1, 1, 1]
    trainer.plugins, trainer.max_steps = Config(nemo2.MegatronMixedPrecision, "32"), STEPS
    trainer.devices = world_of(layout)
    optim.lr, optim.use_distributed_optimizer, recipe.optim.lr_scheduler = 1e-2, layout is not None, None
    if layout is None:
        trainer.strategy.ddp.overlap_grad_reduce = trainer.strategy.ddp.overlap_param_gather = False
        values = {path: value for path, value in values.items() if not HOW.search(path)}
        if isinstance(pattern := values.get(PATTERN), str):
            values[PATTERN] = pattern.replace("|", "")
    layout = {name: value for name, value in (layout or {}).items() if name != "world"}
    if kind := layout.pop("kind", None):
        trainer.strategy = Config(getattr(nemo2, kind))
        values = {
            path: value
            for path, value in values.items()
            if not path.startswith("trainer.strategy.") or hasattr(trainer.strategy, path.split(".")[2])
        }
    for path, value in (*values.items(), *((f"trainer.strategy.{name}", value) for name, value in layout.items())):
        *parents, name = path.split(".")
        setattr(reduce(getattr, parents, recipe), name, value)
    return recipe


def train(case: tuple[Any, ...], folder: str, directory: str) -> dict[str, Any]:
    """Losses and gradient norms of this rank. One process leaves weights and gradients in ``folder``; ranks of a layout
    start from these weights, and have ``errors`` of gradients."""
    import torch

    from nemo2.checkpoint.auto_resume import RestoreConfig
    from nemo2.llm import api
    from support import small_runs

    small_runs.quiet()
    torch._dynamo.config.disable = True
    api.check_parts = lambda *args, **kwargs: None
    recipe, one, path = recipe_of(*case), case[2] is None, Path(folder)
    recipe.log.explicit_log_dir = directory

    def weights(trainer: Any) -> None:
        dump = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)
        trainer.strategy.save_checkpoint(dump, path / measure.WEIGHTS, storage_options={"with_context": False})

    first = functools.partial(save_gradients if one else gradient_errors, folder=path)
    recorder = measure.Recorder(first, weights if one else None)
    call = fdl.build(recipe)
    call.keywords["trainer"].callbacks.append(recorder)
    call.keywords["data"].train_dataloader = lambda: DataLoader(
        measure.Samples(measure.Run(model="llama, packed" if PACKED in case[1] else "llama", steps=STEPS))
    )
    if not one:
        call.keywords["trainer"].strategy.restore_config = RestoreConfig(path=str(path / measure.WEIGHTS))
    call()
    return {"losses": recorder.losses, "grad_norms": recorder.grad_norms} | recorder.first


def save_gradients(trainer: Any, folder: Path) -> dict[str, Any]:
    """For `gradient_errors` of other layouts."""
    import torch

    torch.save(gradients.whole_gradients(measure._megatrons(trainer)), folder / measure.GRADIENTS)
    return {"errors": {}}


def gradient_errors(trainer: Any, folder: Path) -> dict[str, Any]:
    """How far each gradient is from the one that one process left; those below `FLOOR` weigh less. Every rank calls it."""
    import torch

    whole = measure.gradients_in(folder)
    if not moments.holds_gradients(trainer.strategy) and trainer.lightning_module.optim.config.optimizer != "adam":
        return {"errors": {"": 0.0}}
    own = gradients.differences(measure._pieces(trainer, whole), whole)
    everyones: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyones, own)
    norms = {entry["label"]: float(entry["gradient"].norm()) for entry in whole.values()}
    errors = gradients.relative_errors([item for rank in everyones for item in rank], whole)
    least = FLOOR * max(norms.values())
    scale = {name: min(1.0, norm / least) if norm else 1.0 for name, norm in norms.items()}
    return {"errors": {name: error * scale[name] for name, error in errors.items()}}


def refused(case: tuple[Any, ...]) -> str:
    """The rules that refuse the case, or the words of the configuration. Empty: it is legal."""
    from nemo2.base.errors import ConfigError
    from nemo2.preflight.checks.find import find

    try:
        problems = find(recipe_of(*case), devices=world_of(case[2]), nodes=1, local=True)
    except ConfigError as error:
        return str(error)
    return " ".join(sorted({problem.rule for problem in problems}))


def run(case: tuple[Any, ...], folder: str) -> dict[str, Any]:
    """What the first rank has to tell of a legal case.

    Raises:
        RankFailed: it failed.
    """
    with tempfile.TemporaryDirectory() as directory:
        return ranks.run(train, world_of(case[2]), case, folder, directory, timeout=240.0, quiet=True)[0]


def results_of(seed: int) -> Iterator[tuple[str, str, Any]]:
    """Of each layout its name, its end, and why; no more than three of them run."""
    base, values, layouts = drawn(seed)
    legal: list[tuple[str, Any]] = []
    for name, layout in (("one process", None), *((name, LAYOUTS[name]) for name in layouts)):
        if why := refused(case := (base, values, layout)):
            yield name, "refused", why
        else:
            legal.append((name, case))
        if not legal or len(legal) == 4:
            break
    with tempfile.TemporaryDirectory() as folder:
        reference: dict[str, Any] = {}
        for name, case in legal if len(legal) > 1 else ():
            try:
                report = run(case, folder)
            except ranks.RankFailed as error:
                yield name, "FAILED", shown(error)
                if not reference:
                    return
                continue
            if not reference:
                reference = report
                continue
            difference = verdict.differences(report, reference)
            bounds = ROUGH if "trainer.plugins" in values else verdict.BOUNDS
            yield name, "DIFFERS" if verdict.broken(difference, bounds) else "same", difference


def shown(error: ranks.RankFailed) -> str:
    return str(error) if os.environ.get("TRACEBACK") else str(error).split("\n")[0][:500]


def main(cases: Any, seconds: str = "60", first: str = "0") -> int:
    """Print the ends of the ``cases`` of a module such as this one, for so many seconds, from the seed ``first`` on."""
    ranks.prepare(*random_values.PRELOAD, "tests.long.parity.measure")
    ends: Counter[str] = Counter()
    begun, seed = time.monotonic(), int(first)
    while time.monotonic() - begun < float(seconds):
        base, values, *_ = cases.drawn(seed)
        switches = ", ".join(f"{path}={getattr(value, '__name__', repr(value))}" for path, value in values.items())
        for layout, end, why in cases.results_of(seed):
            ends[end] += 1
            if end.isupper() or os.environ.get("ALL"):
                print(f"seed {seed}, {base}, {layout}: {switches}\n  {end}: {why}", flush=True)
        seed += 1
    print(f"{seed - int(first)} cases from seed {first}: {dict(ends)}")
    return 1 if ends["FAILED"] + ends["DIFFERS"] else 0


if __name__ == "__main__":
    from tests.long import random_switches  # ranks know its functions by this name

    sys.exit(random_switches.main(random_switches, *sys.argv[1:]))
