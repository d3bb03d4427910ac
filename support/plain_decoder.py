# SPDX-License-Identifier: Apache-2.0
"""The models of `model_samples`, from their papers' formulas, in plain PyTorch and double precision.

One token's view at a time where that is clearer: nothing here is fast, and nothing is shared with what it checks.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-5


class PlainDecoder:
    """Logits `[B, S, V]` and the auxiliary loss of a batch, from weights under Megatron-Core's names."""

    def __init__(self, weights: dict[str, Tensor], config: Any):
        self.weights, self.config = {name: w.double() for name, w in weights.items()}, config
        self.auxiliary = torch.zeros((), dtype=torch.float64)

    def __call__(self, tokens: Tensor) -> Tensor:
        c = self.config
        x = self.weights["embedding.word_embeddings.weight"][tokens]
        for index in range(c.num_layers):
            prefix = f"decoder.layers.{index}."
            layer = {k.removeprefix(prefix): v for k, v in self.weights.items() if k.startswith(prefix)}
            h = self.norm(x, layer["input_layernorm.weight"])
            h = self.latent(layer, h) if c.multi_latent_attention else self.grouped(layer, h, index)
            if "self_attention.linear_proj.post_layernorm.weight" in layer:
                h = self.norm(h, layer["self_attention.linear_proj.post_layernorm.weight"])
            x = x + h
            h = self.norm(x, layer["pre_mlp_layernorm.weight"])
            h = self.experts(layer, h) if "mlp.router.weight" in layer else self.feed_forward(layer, "mlp", h)
            if "mlp.linear_fc2.post_layernorm.weight" in layer:
                h = self.norm(h, layer["mlp.linear_fc2.post_layernorm.weight"])
            x = x + h
        logits = self.norm(x, self.weights["decoder.final_layernorm.weight"]) @ self.weights["output_layer.weight"].T
        cap = getattr(c, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        one = 1.0 if self.config.layernorm_zero_centered_gamma else 0.0
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (one + weight)

    # --------------------------------------------------------------------------------------------------- attention

    def grouped(self, layer: dict[str, Tensor], x: Tensor, index: int) -> Tensor:
        """Grouped queries; rotary positions on halves; a window on layers 1, 3, ... where the sample has one."""
        c = self.config
        batch, length, _ = x.shape
        heads, groups, width = c.num_attention_heads, c.num_query_groups, c.kv_channels
        qkv = x @ layer["self_attention.linear_qkv.weight"].T + layer.get("self_attention.linear_qkv.bias", 0.0)
        qkv = qkv.view(batch, length, groups, heads // groups + 2, width)
        q, k, v = qkv[..., :-2, :].flatten(2, 3), qkv[..., -2, :], qkv[..., -1, :]
        if c.qk_layernorm:
            q = self.norm(q, layer["self_attention.q_layernorm.weight"])
            k = self.norm(k, layer["self_attention.k_layernorm.weight"])
        angles = torch.outer(torch.arange(length).double(), 10000.0 ** (-torch.arange(0, width, 2).double() / width))
        q, k = rotate_halves(q, angles), rotate_halves(k, angles)
        k, v = (t.repeat_interleave(heads // groups, dim=2) for t in (k, v))
        look_back = c.window_size[0] if c.window_size and (index + 1) % c.window_attn_skip_freq else length
        sink = layer.get("self_attention.core_attention.softmax_offset")
        cap = getattr(c, "attn_logit_softcapping", None)
        out = attention(q, k, v, scale=width**-0.5, look_back=look_back, cap=cap, sink=sink)
        return out @ layer["self_attention.linear_proj.weight"].T + layer.get("self_attention.linear_proj.bias", 0.0)

    def latent(self, layer: dict[str, Tensor], x: Tensor) -> Tensor:
        """DeepSeek-V2, equations 9 to 19; positions stretched as YaRN does."""
        c = self.config
        w = {name.removeprefix("self_attention."): value for name, value in layer.items()}
        batch, length, _ = x.shape
        heads, plain, rotary = c.num_attention_heads, c.qk_head_dim, c.qk_pos_emb_head_dim
        latent_q = self.norm(x @ w["linear_q_down_proj.weight"].T, w["q_layernorm.weight"])
        q = (latent_q @ w["linear_q_up_proj.weight"].T).view(batch, length, heads, plain + rotary)
        down = x @ w["linear_kv_down_proj.weight"].T
        latent_kv, k_rotary = down[..., : c.kv_lora_rank], down[..., None, c.kv_lora_rank :]
        up = self.norm(latent_kv, w["kv_layernorm.weight"]) @ w["linear_kv_up_proj.weight"].T
        up = up.view(batch, length, heads, plain + c.v_head_dim)
        angles = torch.outer(torch.arange(length).double(), yarn_frequencies(rotary, c))
        # YaRN's temperature: part of it on the rotated channels alone, the rest on all of the score.
        on_all, wanted = (0.1 * m * math.log(c.rotary_scaling_factor) + 1.0 for m in (c.mscale_all_dim, c.mscale))
        q = torch.cat([q[..., :plain], wanted / on_all * rotate_pairs(q[..., plain:], angles)], dim=-1)
        k_rotary = wanted / on_all * rotate_pairs(k_rotary, angles).expand(-1, -1, heads, -1)
        k = torch.cat([up[..., :plain], k_rotary], dim=-1)
        out = attention(q, k, up[..., plain:], scale=on_all**2 * (plain + rotary) ** -0.5, look_back=length)
        return out @ w["linear_proj.weight"].T

    # ------------------------------------------------------------------------------------------------ feed-forward

    def feed_forward(self, layer: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
        c = self.config
        h = x @ layer[f"{name}.linear_fc1.weight"].T + layer.get(f"{name}.linear_fc1.bias", 0.0)
        gate, up = h.chunk(2, dim=-1)
        if c.activation_func_clamp_value is not None:
            bound = c.activation_func_clamp_value
            gate, up = torch.minimum(gate, torch.tensor(bound)), torch.clamp(up, -bound, bound)
        h = c.activation_func(gate) * (up + c.glu_linear_offset)
        return h @ layer[f"{name}.linear_fc2.weight"].T + layer.get(f"{name}.linear_fc2.bias", 0.0)

    def experts(self, layer: dict[str, Tensor], x: Tensor) -> Tensor:
        """Every token through its experts, one token at a time."""
        c = self.config
        rows = x.flatten(0, 1)
        logits = rows @ layer["mlp.router.weight"].T + layer.get("mlp.router.bias", 0.0)
        sigmoid = c.moe_router_score_function == "sigmoid"
        out = []
        for row, logit in enumerate(logits):
            experts, shares = self.route_sigmoid(layer, logit) if sigmoid else self.route_softmax(logit)
            parts = [
                share * self.feed_forward(layer, f"mlp.experts.local_experts.{expert}", rows[row])
                for expert, share in zip(experts, shares, strict=True)
            ]
            out.append(sum(parts))
        scores = torch.sigmoid(logits) if sigmoid else logits.softmax(-1)
        if sigmoid:
            scores = scores / scores.sum(-1, keepdim=True)
        # Choices by score alone are counted, without groups and biases (DeepSeek-V3, equation 18).
        chosen = torch.zeros_like(scores).scatter(1, scores.topk(c.moe_router_topk, dim=1).indices, 1.0)
        self.balance(scores.view(*x.shape[:2], -1), chosen.view(*x.shape[:2], -1), logits)
        result = torch.stack(out).view_as(x)
        if c.moe_shared_expert_intermediate_size:
            result = result + self.feed_forward(layer, "mlp.shared_experts", x)
        return result

    def route_softmax(self, logit: Tensor) -> tuple[list[int], Tensor]:
        """Mixtral: the softmax of the best logits alone."""
        best = logit.topk(self.config.moe_router_topk)
        return best.indices.tolist(), best.values.softmax(-1)

    def route_sigmoid(self, layer: dict[str, Tensor], logit: Tensor) -> tuple[list[int], Tensor]:
        """DeepSeek-V3, section 2.1.2: choose by score plus bias within the best groups, weigh by the score alone."""
        c = self.config
        score = torch.sigmoid(logit)
        biased = (score + layer["mlp.router.expert_bias"]).detach()
        groups = biased.view(c.moe_router_num_groups, -1)
        # A group counts by the sum of its best topk / group_topk members.
        merit = groups.topk(c.moe_router_topk // c.moe_router_group_topk, dim=-1).values.sum(-1)
        kept = torch.full_like(groups, -math.inf)
        for group in merit.topk(c.moe_router_group_topk).indices.tolist():
            kept[group] = groups[group]
        experts = kept.flatten().topk(c.moe_router_topk).indices.tolist()
        share = score[experts] / score[experts].sum()
        return experts, share * c.moe_router_topk_scaling_factor

    def balance(self, scores: Tensor, chosen: Tensor, logits: Tensor) -> None:
        """coeff * E * sum_i f_i P_i (Switch, arXiv:2101.03961, equation 4), over the batch or the mean over sequences."""
        c = self.config
        runs = [(scores.flatten(0, 1), chosen.flatten(0, 1))]
        if c.moe_router_load_balancing_type == "seq_aux_loss":
            runs = list(zip(scores, chosen, strict=True))
        for p, f in runs:
            share = f.mean(0) / c.moe_router_topk * p.mean(0)
            self.auxiliary = self.auxiliary + c.moe_aux_loss_coeff * c.num_moe_experts * share.sum() / len(runs)
        if c.moe_z_loss_coeff:
            self.auxiliary = self.auxiliary + c.moe_z_loss_coeff * logits.exp().sum(-1).log().square().mean()


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    look_back: int,
    cap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """`[B, S, N, D]` to `[B, S, N * E]`; causal."""
    length = q.size(1)
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) * scale
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    scores = scores.masked_fill((distance < 0) | (distance > look_back), -math.inf)
    total = scores.exp().sum(-1, keepdim=True)
    if sink is not None:
        total = total + sink.exp()[:, None, None]
    return torch.einsum("bnqk,bknd->bqnd", scores.exp() / total, v).flatten(2)


def rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotate_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Neighbouring channels as one complex number."""
    turned = (
        torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(angles.new_ones(()), angles)[:, None]
    )
    return torch.view_as_real(turned).flatten(-2)


def yarn_frequencies(width: int, config: Any) -> Tensor:
    """Radians per token. Fast ones stay, slow ones are divided by the factor, those between are blended (YaRN, 3.2)."""
    base = config.rotary_base ** (-torch.arange(0, width, 2).double() / width)

    def channel(turns: float) -> float:
        """The channel that makes this many turns over the original context."""
        length = config.original_max_position_embeddings
        return width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(config.rotary_base))

    low = max(math.floor(channel(config.beta_fast)), 0)
    high = min(math.ceil(channel(config.beta_slow)), width - 1)
    slow = ((torch.arange(width // 2).double() - low) / max(high - low, 0.001)).clamp(0, 1)
    return base / config.rotary_scaling_factor * slow + base * (1 - slow)


def loss_of(decoder: PlainDecoder, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy, to whose gradient the auxiliary losses are added."""
    return F.cross_entropy(decoder(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def scaled_by_wavelength(frequencies: list[float], scale: float, low: float, high: float, old: int) -> list[float]:
    """Llama 3.1's rotary frequencies: the three cases as meta-llama/llama-models states them."""
    scaled = []
    for frequency in frequencies:
        wavelength = 2 * math.pi / frequency
        if wavelength < old / high:
            scaled.append(frequency)
        elif wavelength > old / low:
            scaled.append(frequency / scale)
        else:
            smooth = (old / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / scale + smooth * frequency)
    return scaled
