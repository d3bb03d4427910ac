# SPDX-License-Identifier: Apache-2.0
"""Random models under random layouts, judged by the rules and by Megatron-Core: `make sweep`.

Megatron-Core builds each model's first and last rank on meta tensors in a world of fake ranks (`support.megatron_verdict`).
A rule must reject every model that Megatron-Core refuses. No rule that claims a refusal by Megatron-Core may reject a
model that Megatron-Core builds. The nearest layout that nemo2 proposes must build. Prints the results, and exits with 1
if rules and Megatron-Core disagree.

    python -m tests.long.random_layouts --cases 2000
"""

import argparse
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Optional

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from support.rule_cases import Case

SEED = 20261120
IN_A_BATCH = 25
_STRATEGY = "trainer.strategy."
LEFT_OUT = "layers-over-stages"
"""The rule that stands for an assertion of Megatron-Core's, but in its hybrids for layers that these leave out in silence."""


@dataclass
class Results:
    """The number of cases in which rules and Megatron-Core agree, and the cases in which they don't."""

    kinds: Counter[str] = field(default_factory=Counter)
    for_what_it_would_train: Counter[str] = field(default_factory=Counter)
    """Rules that refused what Megatron-Core builds: it would stop in the first step, or train something else."""
    disagreements: list[str] = field(default_factory=list)

    def add(self, other: "Results") -> None:
        self.kinds += other.kinds
        self.for_what_it_would_train += other.for_what_it_would_train
        self.disagreements += other.disagreements


def cases(count: int, seed: int = SEED) -> list[Case]:
    """The cases. The same seed gives the same cases."""
    dice = random.Random(seed)
    return [dice.choices((dense, experts, latent, hybrid), (5, 3, 1, 1))[0](dice) for _ in range(count)]


def dense(dice: random.Random) -> Case:
    """A small Llama; sizes that often fit and often don't."""
    heads = dice.choice((4, 8, 8, 6))
    settings = _layout(dice) | {
        "model.config.num_layers": dice.choice((4, 8, 8, 7, 6)),
        "model.config.num_attention_heads": heads,
        "model.config.num_query_groups": dice.choice((heads, heads // 2, 1)),
        "model.config.kv_channels": 8,
        "model.config.hidden_size": 64,
        "model.config.ffn_hidden_size": dice.choice((128, 128, 128, 126)),
        "model.config.vocab_size": dice.choice((None, None, 4096, 4098)),
    }
    return Case(recipe="llama_tiny", assigned=settings)


def experts(dice: random.Random) -> Case:
    """Cases with experts, and sometimes with expert sizes but without experts."""
    settings = dict(dense(dice).assigned) | _expert_sizes(dice)
    settings |= {
        "model.config.num_moe_experts": dice.choice((4, 4, 8, 6, None)),
        "model.config.moe_router_topk": dice.choice((1, 2, 2)),
        "model.config.moe_router_pre_softmax": True,
        "model.config.moe_token_dispatcher_type": dice.choice(("alltoall", "alltoall", "allgather")),
        "model.config.moe_ffn_hidden_size": None,
    }
    return Case(recipe="llama_tiny", assigned=settings)


def latent(dice: random.Random) -> Case:
    """DeepSeek V2 Lite with fewer layers: latent attention, a dense layer before those with experts, shared experts."""
    layers = dice.choice((4, 8, 6))
    settings = _layout(dice) | _expert_sizes(dice)
    settings |= {
        "model.config.num_layers": layers,
        "model.config.moe_layer_freq": [0] + [1] * (layers - 1),
        "model.config.num_moe_experts": dice.choice((8, 16, 12)),
        "model.config.moe_router_topk": 2,
        "model.config.num_attention_heads": dice.choice((16, 16, 6)),
    }
    return Case(recipe="deepseek_v2_lite", assigned=settings)


def hybrid(dice: random.Random) -> Case:
    """Nemotron-H with fewer layers: Mamba mixers, attention and feed-forward layers.

    Without context parallelism: the mixers of a machine without mamba-ssm have none, which says nothing of Megatron-Core.
    """
    layers = dice.choice((4, 8, 6))
    settings = _layout(dice) | {
        _STRATEGY + "context_parallel_size": 1,
        "model.config.num_layers": layers,
        "model.config.hybrid_override_pattern": ("M-M*" * 4)[:layers],
        "model.config.mamba_num_groups": dice.choice((8, 8, 4, 2)),
        _STRATEGY + "num_layers_in_first_pipeline_stage": None,
        _STRATEGY + "account_for_embedding_in_pipeline_split": False,
    }
    return Case(recipe="nemotronh_4b", assigned=settings)


def _layout(dice: random.Random) -> dict[str, Any]:
    tp, pp, cp = dice.choice((1, 1, 2, 2, 4)), dice.choice((1, 1, 2, 4)), dice.choice((1, 1, 1, 2))
    replicas = dice.choice((1, 2))
    return {
        "trainer.num_nodes": 1,
        "trainer.devices": dice.choice((tp * pp * cp * replicas,) * 6 + (6, 8)),
        _STRATEGY + "tensor_model_parallel_size": tp,
        _STRATEGY + "pipeline_model_parallel_size": pp,
        _STRATEGY + "virtual_pipeline_model_parallel_size": dice.choice((None, None, 2)) if pp > 1 else None,
        _STRATEGY + "context_parallel_size": cp,
        _STRATEGY + "expert_model_parallel_size": 1,
        _STRATEGY + "expert_tensor_parallel_size": None,
        _STRATEGY + "sequence_parallel": dice.random() < (0.9 if tp > 1 else 0.05),
        _STRATEGY + "num_layers_in_first_pipeline_stage": dice.choice((None,) * 5 + (1, 2)),
        _STRATEGY + "account_for_embedding_in_pipeline_split": dice.random() < 0.15,
        _STRATEGY + "use_tp_pp_dp_mapping": dice.random() < 0.1,
        "data.global_batch_size": dice.choice((replicas * 8,) * 5 + (6,)),
        "data.micro_batch_size": 1,
    }


def _expert_sizes(dice: random.Random) -> dict[str, Any]:
    return {
        _STRATEGY + "expert_model_parallel_size": dice.choice((1, 2, 2, 4)),
        _STRATEGY + "expert_tensor_parallel_size": dice.choice((None, None, 1)),
    }


def compare(batch: list[Case]) -> Results:
    """Judge these cases by the rules and by Megatron-Core. Runs in a separate process, as on a machine without optional
    packages."""
    from nemo2.preflight.checks.table import RULES
    from support.megatron_verdict import verdicts
    from support.rule_cases import problems_of

    found = Results()
    silent = {rule.name for rule in RULES if not rule.megatron_refuses}
    problems = [problems_of(case) for case in batch]
    proposals = [_nearest(case) if told else None for case, told in zip(batch, problems, strict=True)]
    answers = verdicts([*batch, *(case for case in proposals if case is not None)])
    of_proposals = iter(answers[len(batch) :])
    for case, told, proposal, answer in zip(batch, problems, proposals, answers, strict=False):
        rules = [problem.rule for problem in told]
        quiet = silent | ({LEFT_OUT} if "model.config.hybrid_override_pattern" in case.assigned else set())
        loud = [rule for rule in rules if rule not in quiet]
        if answer is not None:
            found.kinds["refused by both" if told else "refused by Megatron-Core only"] += 1
            if not told:
                found.disagreements.append(f"no rule refuses {case.assigned}; Megatron-Core: {answer}")
        elif loud:
            found.kinds["refused by the rules only"] += 1
            found.disagreements.append(f"Megatron-Core builds {case.assigned}; {', '.join(loud)} refuse it")
        elif told:
            found.kinds["built, and refused for what it would train"] += 1
            found.for_what_it_would_train.update(set(rules))
        else:
            found.kinds["legal and built"] += 1
        if proposal is not None:
            refusal = next(of_proposals)
            if refusal is not None and "without mamba-ssm" in refusal:
                found.kinds["proposals for machines with mamba-ssm"] += 1
                continue
            found.kinds["proposals built" if refusal is None else "proposals refused"] += 1
            if refusal is not None:
                found.disagreements.append(
                    f"proposed for {case.assigned}: {proposal.assigned}; Megatron-Core: {refusal}"
                )
    return found


def _nearest(case: Case) -> Optional[Case]:
    """The case with the layout that nemo2 proposes. None: there is no proposal, or the case breaks other rules too."""
    from nemo2.preflight.checks.facts import read_facts
    from nemo2.preflight.checks.nearest import nearest_layouts
    from support.rule_cases import problems_of, recipe_of

    near = nearest_layouts(read_facts(recipe_of(case)), limit=1)
    if not near:
        return None
    sizes = {_STRATEGY + name: value for name, value in near[0][0].fields().items()}
    moved = replace(case, assigned={**case.assigned, **sizes})
    return None if problems_of(moved) else moved


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    started, found = time.perf_counter(), Results()
    made = cases(arguments.cases, arguments.seed)
    context = multiprocessing.get_context("spawn")
    with context.Pool(arguments.processes) as pool:
        for part in pool.imap_unordered(compare, _batches(made)):
            found.add(part)
    print(f"{arguments.cases} layouts in {time.perf_counter() - started:.0f} s, seed {arguments.seed}")
    for kind, count in found.kinds.most_common():
        print(f"  {kind}: {count}")
    for rule, count in found.for_what_it_would_train.most_common():
        print(f"    {rule}: {count}")
    for line in found.disagreements:
        print(line, file=sys.stderr)
    return 1 if found.disagreements else 0


def _batches(made: list[Case]) -> Iterator[list[Case]]:
    for start in range(0, len(made), IN_A_BATCH):
        yield made[start : start + IN_A_BATCH]


if __name__ == "__main__":
    sys.exit(main())
