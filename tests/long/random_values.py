# SPDX-License-Identifier: Apache-2.0
"""Random recipes with values at and beyond the limits of their fields, judged by `check` and by running them.

A recipe that ``check`` accepts must train two steps on CPU ranks with a finite loss. A rejected recipe runs too,
without nemo2's checks: Megatron-Core, torch or a class must raise, or the loss must not be finite. If it runs, its rule
is listed with a count, because the rule's reason is then arithmetic (growing weights, a rising rate) or invisible
(layers that aren't recomputed). Rules that claim a refusal by Megatron-Core must not be listed.

    python -m tests.long.random_values --cases 2000

On 2026-11-22 all 2,000 of seed 20261123 were judged, a quarter of them on two ranks (85 minutes on two cores that were not idle;
a recipe takes 0.6 s of a core per rank): 808 were legal and ran, 732 refused and failed, 437 refused and ran, for the sake of
their arithmetic; 23 were legal and failed, of five kinds, which are refused now or run: a window of one number, mock data of less
than a batch, YaRN's positions that context ranks can't share, experts whose rows torch can't group, and partial checkpoints of
activations. All that was told has been judged
again, without a disagreement.
"""

import argparse
import functools
import math
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Optional

os.environ["CUDA_VISIBLE_DEVICES"] = ""

from support import ranks

SEED = 20261122
STEPS = 2
SECONDS = 240.0
PRELOAD = ("nemo2.llm.api", "nemo2.models.nemotronh", "nemo2.data.mock", "nemo2.data.tokenizer", "support.warm")
"""Modules that ranks import before they start. The imports would otherwise take two thirds of a rank's time."""
SILENT_HERE = {"model-numbers-are-in-range"}
"""Rules for what Megatron-Core refuses in some places only: some numbers."""
_CONFIG, _OPTIM, _SCHEDULE = "model.config.", "optim.config.", "optim.lr_scheduler."
_STRATEGY = "trainer.strategy."


@dataclass(frozen=True)
class Drawn:
    """A recipe: its base, the ranks it runs on, and what is changed by its path."""

    base: str
    world: int
    values: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.base} on {self.world}: {', '.join(f'{path}={value!r}' for path, value in self.values.items())}"


@dataclass
class Results:
    """The verdicts of both judges."""

    kinds: Counter[str] = field(default_factory=Counter)
    runs_all_the_same: Counter[str] = field(default_factory=Counter)
    """Rules that refused what then ran."""
    disagreements: list[str] = field(default_factory=list)

    def add(self, drawn: Drawn, rules: list[str], failure: Optional[str]) -> None:
        from nemo2.preflight.checks.table import RULES

        if not rules:
            self.kinds["legal, and ran" if failure is None else "legal, and failed"] += 1
            if failure is not None:
                self.disagreements.append(f"no rule refuses {drawn}; it ended with {failure}")
            return
        self.kinds["refused, and fails" if failure is not None else "refused, and runs"] += 1
        if failure is None:
            self.runs_all_the_same.update(set(rules))
            loud = {rule.name for rule in RULES if rule.megatron_refuses} & set(rules) - SILENT_HERE
            if loud == set(rules):
                self.disagreements.append(f"{', '.join(sorted(loud))} refuse {drawn}, which runs")


def drawn(count: int, seed: int = SEED) -> list[Drawn]:
    """The drawn cases. The same seed gives the same cases."""
    dice = random.Random(seed)
    return [_draw(dice) for _ in range(count)]


def recipe_of(one: Drawn) -> Any:
    """The case as a recipe; nothing in it is built."""
    recipe = _base(one.base)
    recipe.trainer.devices = one.world
    for path, value in one.values.items():
        *parents, name = path.split(".")
        setattr(reduce(getattr, parents, recipe), name, value)
    return recipe


def rules_against(one: Drawn) -> list[str]:
    """The rules that refuse it here."""
    from nemo2.base.errors import ConfigError
    from nemo2.preflight.checks.find import find

    try:
        recipe = recipe_of(one)
    except ConfigError as error:
        return [f"a recipe can't hold it: {error}"]
    return sorted({problem.rule for problem in find(recipe, devices=one.world, nodes=1, local=True)})


def failure_of(one: Drawn) -> Optional[str]:
    """The error that ends the case's two steps. None: both steps succeeded. nemo2's own checks of numbers are turned
    off."""
    try:
        with tempfile.TemporaryDirectory() as directory:
            losses = ranks.run(two_steps, one.world, one, directory, timeout=SECONDS, quiet=True)[0]
    except ranks.RankFailed as error:
        lines = [line for line in str(error).strip().splitlines() if line.strip()]
        return lines[-1][:300] if lines else "a rank that ended without a word"
    if len(losses) != STEPS:
        return f"{len(losses)} steps instead of {STEPS}"
    return None if all(map(math.isfinite, losses)) else f"losses {losses}"


def two_steps(one: Drawn, directory: str) -> list[float]:
    """Train on this rank, in a directory that all ranks know; the losses."""
    import fiddle as fdl
    import lightning.pytorch as pl
    import torch

    from nemo2.llm import api
    from support import small_runs

    small_runs.quiet()
    torch._dynamo.config.disable = (
        True  # compiling what Megatron-Core fuses takes a minute per process, and says nothing here
    )
    api.check_parts = lambda *args, **kwargs: None
    losses: list[float] = []

    class Losses(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            losses.append(float(trainer.callback_metrics["reduced_train_loss"]))

    recipe = recipe_of(one)
    recipe.log.explicit_log_dir = directory
    call = fdl.build(recipe)
    call.keywords["trainer"].callbacks.append(Losses())
    call()
    return losses


# ------------------------------------------------------------------------------------------------------ what is drawn


def _base(name: str) -> Any:
    from nemo2 import recipes
    from nemo2.config import Config
    from nemo2.data.mock import MockDataModule
    from nemo2.data.tokenizer import NullTokenizer
    from nemo2.training.run_dir.logger import NeMoLogger

    recipe = recipes.get(
        {"latent": "deepseek_v2_lite", "hybrid": "nemotronh_4b"}.get(name, "llama_tiny")
    ).pretrain_recipe()
    recipe.data = Config(
        MockDataModule, seq_length=32, tokenizer=Config(NullTokenizer, vocab_size=128), micro_batch_size=1,
        global_batch_size=4, num_train_samples=64, num_val_samples=8, num_test_samples=8, num_workers=0,
    )  # fmt: skip
    recipe.log = Config(NeMoLogger, ckpt=None, tensorboard=None)
    recipe.resume = None
    trainer, strategy, config = recipe.trainer, recipe.trainer.strategy, recipe.model.config
    trainer.max_steps, trainer.limit_val_batches, trainer.val_check_interval = STEPS, 0, STEPS
    trainer.log_every_n_steps, trainer.num_nodes, trainer.callbacks = 1, 1, []
    strategy.tensor_model_parallel_size = strategy.pipeline_model_parallel_size = strategy.context_parallel_size = 1
    strategy.expert_model_parallel_size, strategy.sequence_parallel = 1, False
    strategy.virtual_pipeline_model_parallel_size = None
    recipe.optim.lr_scheduler.warmup_steps = 1
    config.num_layers, config.hidden_size, config.ffn_hidden_size = 2, 32, 64
    config.num_attention_heads = 4
    if name == "latent":
        config.moe_layer_freq, config.num_moe_experts, config.moe_router_topk = [0, 1], 4, 2
        config.q_lora_rank, config.kv_lora_rank, config.moe_ffn_hidden_size = 16, 16, 16
        config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim = 8, 8, 8
        config.moe_shared_expert_intermediate_size = 16
    elif name == "hybrid":
        config.num_layers, config.hybrid_override_pattern, config.num_query_groups = 4, "M-M*", 2
        config.mamba_num_heads, config.mamba_head_dim, config.mamba_num_groups, config.mamba_state_dim = 4, 16, 2, 16
        config.kv_channels = 8
    else:
        config.num_query_groups, config.kv_channels = 2, 8
    if name == "experts":
        config.num_moe_experts, config.moe_router_topk, config.moe_router_pre_softmax = 4, 2, True
        config.moe_token_dispatcher_type, config.moe_ffn_hidden_size = "alltoall", 32
    return recipe


@functools.cache
def _looked_at(name: str) -> Any:
    """The base, not to be changed: thousands of recipes are drawn by the names of its fields."""
    return _base(name)


def _draw(dice: random.Random) -> Drawn:
    base = dice.choices(("dense", "experts", "latent", "hybrid"), (5, 3, 2, 1))[0]
    world = dice.choice((1, 1, 1, 2))
    values: dict[str, Any] = {}
    if world == 2:
        values |= dice.choice(
            (
                {_STRATEGY + "tensor_model_parallel_size": 2},
                {_STRATEGY + "tensor_model_parallel_size": 2, _STRATEGY + "sequence_parallel": True},
                {_STRATEGY + "pipeline_model_parallel_size": 2},
                {_STRATEGY + "context_parallel_size": 2},
                {_STRATEGY + "expert_model_parallel_size": 2},
                {},
            )
        )
    for _ in range(dice.choice((1, 1, 2, 3))):
        values |= dice.choices((_number, _choice), (5, 3))[0](base, dice)
    return Drawn(base, world, values)


def _number(base: str, dice: random.Random) -> dict[str, Any]:
    """A field of the table of domains, at an edge, just beyond it, or within."""
    from nemo2.config.domains import Domain
    from nemo2.config.walk import class_of
    from nemo2.mcore.optim.lr_scheduler import SCHEDULE
    from nemo2.preflight.checks import domains

    recipe = _looked_at(base)
    places = [
        (prefix, node, table)
        for prefix, node, table in (
            (_CONFIG, recipe.model.config, domains.MODEL),
            (_OPTIM, recipe.optim.config, domains.OPTIMIZER),
            (_SCHEDULE, recipe.optim.lr_scheduler, SCHEDULE),
            ("data.", recipe.data, class_of(recipe.data).valid_numbers),
        )
        for _ in range({_CONFIG: 5, _OPTIM: 2}.get(prefix, 1))
    ]
    prefix, node, table = dice.choice(places)
    name = dice.choice([name for name, row in table.items() if hasattr(node, name) and isinstance(row, Domain)])
    return {prefix + name: _value(table[name], getattr(node, name), dice)}


def _value(domain: Any, now: Any, dice: random.Random) -> Any:
    low, high = (float(edge) for edge in domain.interval[1:-1].split(", "))
    whole = domain.kind != "real"
    step = 1 if whole else 1e-3
    values: list[Any] = [math.nan, math.inf, -1, 0, 1, *domain.but]
    for edge, outwards in ((low, -1), (high, 1)):
        if math.isfinite(edge):
            values += [int(edge) if whole else edge] * 3
            values += [edge + outwards * step, edge - outwards * step]
    values = [int(value) if whole and math.isfinite(value) else value for value in values]
    if isinstance(now, int | float) and not isinstance(now, bool):
        values += [now, now * 2, now / 2 if not whole else max(1, int(now) // 2)]
    return dice.choice(values)


def _choice(base: str, dice: random.Random) -> dict[str, Any]:
    """Settings that belong together, or don't."""
    groups: list[tuple[str, dict[str, tuple[Any, ...]]]] = [
        (
            _CONFIG,
            {
                "recompute_granularity": ("full", "full", "selective", None),
                "recompute_method": ("uniform", "block", None),
                "recompute_num_layers": (None, 1, 1, 2, 3, 99),
            },
        ),
        (_CONFIG, {"cp_comm_type": ("p2p", "a2a", ["p2p", "p2p"], ["p2p"])}),
        (_CONFIG, {"mtp_num_layers": (1, 2), "recompute_granularity": (None, "full"), "recompute_method": ("uniform",),
                   "recompute_num_layers": (1, 2)}),
        (_CONFIG, {"num_attention_heads": (1, 2, 3, 4, 8), "num_query_groups": (1, 2, 3, 4)}),
        (_CONFIG, {"num_layers": (1, 2, 3, 4)}),
        (_CONFIG, {"position_embedding_type": ("rope", "learned_absolute", "none"), "rotary_percent": (1.0, 0.5, 0.0)}),
        (_CONFIG, {"normalization": ("LayerNorm", "RMSNorm"), "qk_layernorm": (True, False)}),
        (_CONFIG, {"gated_linear_unit": (True, False), "add_bias_linear": (True, False)}),
        (_CONFIG, {"share_embeddings_and_output_weights": (True, False), "vocab_size": (None, 128, 130, 64)}),
        (_CONFIG, {"window_size": ((8, 0), (-1, 0), (0, 0), None), "attention_dropout": (0.0, 0.5)}),
        (_CONFIG, {"moe_router_load_balancing_type": ("aux_loss", "none", "sinkhorn", "seq_aux_loss"),
                   "moe_expert_capacity_factor": (None, 1.0, 0, -1.0), "moe_pad_expert_input_to_capacity": (True, False)}),
        (_CONFIG, {"moe_router_num_groups": (None, 1, 2, 3), "moe_router_group_topk": (None, 1, 2)}),
        (_CONFIG, {"moe_router_score_function": ("softmax", "sigmoid"), "moe_router_enable_expert_bias": (True, False)}),
        (_OPTIM, {"optimizer": ("adam", "sgd"), "use_distributed_optimizer": (True, False)}),
        (_OPTIM, {"lr": (1e-3, 1e-5, 6e-5), "clip_grad": (1.0, 0, 0.0)}),
        (_SCHEDULE, {"warmup_steps": (0, 1, 2, 3, 750), "constant_steps": (0, 1, 80000)}),
        (_SCHEDULE, {"max_steps": (None, 1, 2, 10, 1e3), "min_lr": (0, 1e-6, 6e-5, 1e-2)}),
        ("data.", {"micro_batch_size": (1, 2, 4, 3), "global_batch_size": (4, 2, 6)}),
        ("data.", {"seq_length": (1, 2, 31, 32, 64)}),
        ("data.", {"num_val_samples": (0, 8), "num_train_samples": (1, 4, 8, 64)}),
        ("trainer.", {"limit_val_batches": (0, 1, 0.5), "val_check_interval": (1, 2, 0.5)}),
    ]  # fmt: skip
    prefix, fields = dice.choice(groups)
    node = reduce(getattr, prefix.rstrip(".").split("."), _looked_at(base))
    return {prefix + name: dice.choice(values) for name, values in fields.items() if hasattr(node, name)}


def judge(one: Drawn) -> tuple[list[str], Optional[str]]:
    """The rules that refuse it, and what ends its run."""
    return rules_against(one), failure_of(one)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=None, help="begin no other run after that")
    options = parser.parse_args()
    ranks.prepare(*PRELOAD)
    started, found, done = time.monotonic(), Results(), 0

    def late() -> bool:
        return options.minutes is not None and time.monotonic() - started > 60 * options.minutes

    made = drawn(options.first + options.cases, options.seed)[options.first :]
    with ThreadPoolExecutor(options.processes) as pool:
        answers = pool.map(lambda one: None if late() else (one, *judge(one)), made)
        for answer in answers:
            if answer is None:
                break
            before, done = len(found.disagreements), done + 1
            found.add(*answer)
            for line in found.disagreements[before:]:
                print(line, flush=True)
            if done % 100 == 0:
                print(f"{done}: {dict(found.kinds)}", file=sys.stderr, flush=True)
    print(f"{done} recipes in {time.monotonic() - started:.0f} s, seed {options.seed}, from number {options.first}")
    for kind, count in found.kinds.most_common():
        print(f"  {kind}: {count}")
    for rule, count in found.runs_all_the_same.most_common():
        print(f"    {rule}: {count}")
    return 1 if found.disagreements else 0


if __name__ == "__main__":
    from tests.long import random_values  # ranks know its functions by this name

    sys.exit(random_values.main())
