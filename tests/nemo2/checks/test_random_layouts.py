# SPDX-License-Identifier: Apache-2.0
"""Random small models under random layouts: the rules refuse what Megatron-Core refuses, and nothing that it builds but what
it builds wrongly."""

import random
from typing import Any

from megatron_verdict import verdicts

from nemo2.checks import RULES
from nemo2.checks.examples import problems_of
from nemo2.checks.rule import Case

CASES = 90


def a_case(dice: random.Random) -> Case:
    """Sizes that often fit and often don't."""
    tp, pp, cp = dice.choice((1, 1, 2, 2, 4)), dice.choice((1, 1, 2, 4)), dice.choice((1, 1, 1, 2))
    replicas = dice.choice((1, 2))
    world = dice.choice((tp * pp * cp * replicas,) * 6 + (6, 8))
    heads = dice.choice((4, 8, 8, 6))
    settings: dict[str, Any] = {
        "trainer.devices": world,
        "trainer.strategy.tensor_model_parallel_size": tp,
        "trainer.strategy.pipeline_model_parallel_size": pp,
        "trainer.strategy.virtual_pipeline_model_parallel_size": dice.choice((None, None, 2)) if pp > 1 else None,
        "trainer.strategy.context_parallel_size": cp,
        "trainer.strategy.sequence_parallel": tp > 1,
        "trainer.strategy.num_layers_in_first_pipeline_stage": dice.choice((None,) * 5 + (1, 2)),
        "trainer.strategy.account_for_embedding_in_pipeline_split": dice.random() < 0.15,
        "data.global_batch_size": dice.choice((replicas * 8,) * 5 + (6,)),
        "data.micro_batch_size": 1,
        "model.config.num_layers": dice.choice((4, 8, 8, 7, 6)),
        "model.config.num_attention_heads": heads,
        "model.config.num_query_groups": dice.choice((heads, heads // 2, 1)),
        "model.config.kv_channels": 8,
        "model.config.hidden_size": 64,
        "model.config.ffn_hidden_size": dice.choice((128, 128, 128, 126)),
        "model.config.vocab_size": dice.choice((None, None, 4096, 4098)),
    }
    if dice.random() < 0.4:
        settings |= {
            "trainer.strategy.expert_model_parallel_size": dice.choice((1, 2, 2, 4)),
            "trainer.strategy.expert_tensor_parallel_size": dice.choice((None, 1)),
            "model.config.num_moe_experts": dice.choice((4, 4, 6, None)),
            "model.config.moe_router_topk": 2,
        }
    return Case(recipe="llama_tiny", assigned=settings)


def test_the_rules_refuse_what_megatron_core_refuses_and_nothing_it_builds_right(run_on_ranks: Any) -> None:
    dice = random.Random(20261120)
    cases = [a_case(dice) for _ in range(CASES)]
    answers = run_on_ranks(verdicts, 1, cases, init_process_group=False, timeout=280)[0]
    built_wrongly = {rule.name for rule in RULES if not rule.megatron_refuses}
    kinds = {"built and legal": 0, "refused": 0, "built, and refused for what it would train": 0}
    for case, answer in zip(cases, answers, strict=True):
        problems = problems_of(case)
        if answer is not None:
            assert problems, (answer, case.assigned)
            kinds["refused"] += 1
        else:
            wrong = [problem for problem in problems if problem.rule not in built_wrongly]
            assert not wrong, (wrong, case.assigned)
            kinds["built, and refused for what it would train" if problems else "built and legal"] += 1
    assert kinds["built and legal"] >= 15 and kinds["refused"] >= 15, kinds
