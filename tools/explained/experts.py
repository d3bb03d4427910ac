# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: the router's choice, the exchange of tokens to the experts' ranks, and the way back."""

import torch

from nemo2.mcore.parallel.layout import Layout, groups_of
from nemo2.report.pictures.svg import Canvas, legend
from tools.explained.kit import COMMUNICATION, LEFT, OF_RANK, SMALL, TOP, box, note, sheet, signed

EP, EXPERTS, TOKENS, TOPK = 2, 4, 6, 2


def experts() -> Canvas:
    """Each token goes to its experts, wherever they are, and its results come back to be summed."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    (ranks,) = groups_of(Layout(ep=EP), EP)["ep"]
    scores = torch.tensor(
        [
            [float((7 * token + 5 * expert + token * expert) % 11) for expert in range(EXPERTS)]
            for token in range(TOKENS)
        ]
    )
    _, routed = topk_routing_with_score_function(scores, TOPK)
    chosen = [[expert for expert in range(EXPERTS) if routed[token, expert]] for token in range(TOKENS)]
    canvas = sheet(f"Expert parallelism: {EXPERTS} experts on {EP} ranks, top {TOPK}")
    row, per_rank, local = 30.0, TOKENS // EP, EXPERTS // EP
    left, middle, right, wide = 54.0, 166.0, 330.0, 54.0
    top = TOP + 46
    box(canvas, left + 30, TOP + 4, middle - left - 10, 24, "all-to-all: there", COMMUNICATION, size=SMALL)
    box(canvas, middle + 62, TOP + 4, right - middle - 48, 24, "all-to-all: back", COMMUNICATION, size=SMALL)
    at_token = [top + token * row + (token // per_rank) * 16 for token in range(TOKENS)]
    height = at_token[-1] + 24 - top
    step = height / EXPERTS
    at_expert = [top + expert * step + (step - 34) / 2 for expert in range(EXPERTS)]
    crossing = 0
    for token, wanted in enumerate(chosen):
        for expert in wanted:
            away = expert // local != token // per_rank
            crossing += away
            tone = "accent" if away else "soft"
            canvas.arrow(left + wide + 2, at_token[token] + 12, middle - 2, at_expert[expert] + 17, tone)
            canvas.arrow(middle + 76, at_expert[expert] + 17, right - 2, at_token[token] + 12, tone)
    for index, rank in enumerate(ranks):
        canvas.text(LEFT, at_token[index * per_rank] + 16 + row, f"rank {rank}", "ink", strong=True, size=SMALL)
    for token in range(TOKENS):
        fill = OF_RANK[token // per_rank]
        box(
            canvas,
            left,
            at_token[token],
            wide,
            24,
            f"token {token}",
            fill,
            size=SMALL,
            tip=f"to experts {chosen[token]}",
        )
        box(canvas, right, at_token[token], wide, 24, f"sum {token}", fill, size=SMALL)
    for expert in range(EXPERTS):
        load = sum(expert in wanted for wanted in chosen)
        words = f"expert {expert}\n{load} token{'s' * (load != 1)}"
        box(canvas, middle, at_expert[expert], 74, 34, words, OF_RANK[expert // local], size=SMALL)
    of_ranks = [(OF_RANK[index], f"on rank {rank}") for index, rank in enumerate(ranks)]
    legend(canvas, LEFT, top + height + 20, [*of_ranks, (COMMUNICATION, "exchange")])
    y = note(
        canvas,
        top + height + 40,
        f"the router on each rank picks {TOPK} experts for each token; {crossing} of {TOKENS * TOPK} copies change ranks (blue "
        "arrows, the others grey); results are summed by the router's weights",
    )
    return signed(canvas, y - 14, TopKRouter, MoEAlltoAllTokenDispatcher)
