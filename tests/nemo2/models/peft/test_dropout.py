# SPDX-License-Identifier: Apache-2.0
"""Dropout of additions: before them as `peft` has it, behind them, and alike on ranks that hold the same."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nemo2.models.peft import LoRA

RATE, SCALE = 0.5, 2.0


def tuned(position: str, **options: Any) -> Any:
    """A linear layer with an addition, of which nothing is zero."""
    torch.manual_seed(5)
    model = nn.Module()
    model.fc = nn.Linear(16, 12)
    method = LoRA(
        target_modules=["fc"],
        dim=4,
        alpha=8,
        dropout=RATE,
        dropout_position=position,
        lora_B_init_method="normal",
        **options,
    )
    return method(model).train()


def test_before_the_addition_it_is_what_peft_does_and_so_are_the_gradients() -> None:
    import peft

    ours = tuned("pre")
    theirs: Any = nn.Sequential()
    theirs.fc = nn.Linear(16, 12)
    theirs = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=RATE, target_modules=["fc"]))
    layer = theirs.base_model.model.fc
    layer.base_layer.load_state_dict(ours.fc.to_wrap.state_dict())
    pairs = [
        (ours.fc.adapter.linear_in.weight, layer.lora_A["default"].weight),
        (ours.fc.adapter.linear_out.weight, layer.lora_B["default"].weight),
    ]
    with torch.no_grad():
        for mine, other in pairs:
            other.copy_(mine)
    x = torch.randn(3, 7, 16)
    outputs = []
    for model in (ours.fc, layer.train()):
        torch.manual_seed(11)
        outputs.append(model(x))
        outputs[-1].square().sum().backward()
    torch.testing.assert_close(outputs[0], outputs[1])
    for mine, other in pairs:
        assert mine.grad is not None and mine.grad.any()
        torch.testing.assert_close(mine.grad, other.grad)


def test_behind_the_addition_each_of_its_numbers_is_dropped_or_grows_by_what_is_dropped() -> None:
    layer = tuned("post").fc
    x = torch.randn(200, 16)
    with torch.no_grad():
        base, added = layer.to_wrap(x), SCALE * layer.adapter.linear_out(layer.adapter.linear_in(x))
        found = layer(x) - base
    dropped = found.abs() < 1e-7
    torch.testing.assert_close(found[~dropped], added[~dropped] / (1 - RATE), rtol=1e-4, atol=1e-6)
    assert float(dropped.float().mean()) == pytest.approx(RATE, abs=0.03)
    layer.eval()
    torch.testing.assert_close(layer(x) - base, added)


def between_factors(position: str) -> dict[str, list[Tensor]]:
    """What each layer's addition has between its factors and adds in the end, on this rank, of tensor-parallel layers without
    sequence parallelism."""
    from support import small_runs

    model = small_runs.build_llama(gated_linear_unit=True)
    model.model_transform = LoRA(
        dim=4,
        alpha=8,
        dropout=RATE,
        dropout_position=position,
        lora_A_init_method="uniform",
        lora_B_init_method="normal",  # pyright: ignore
    )
    kept: dict[str, list[Tensor]] = {}

    def watch(trainer: Any) -> None:
        core = trainer.strategy.megatron_parallel.unwrapped[0].train()
        for name, module in core.named_modules():
            if name.endswith("adapter"):
                module.linear_out.register_forward_hook(
                    lambda factor, inputs, output, name=name: kept.setdefault(name, []).append(
                        inputs[0].detach().clone()
                    )
                )
                module.register_forward_hook(
                    lambda whole, inputs, output, name=name: kept[name].append(output.detach().clone())
                )
        tokens = small_runs.global_batch(0, 2)["tokens"]
        core(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None)

    small_runs.fit(model, max_steps=1, inspect=watch, tensor_model_parallel_size=2)
    small_runs.release()
    return kept


def both_positions() -> dict[str, Any]:
    return {position: between_factors(position) for position in ("pre", "post")}


@pytest.mark.quick
def test_tensor_parallel_ranks_drop_alike_what_they_hold_alike_and_apart_what_they_hold_apart(run_on_ranks) -> None:
    first, second = run_on_ranks(both_positions, 2)
    for position in ("pre", "post"):
        assert any("linear_qkv" in name for name in first[position])
        for name, (between, added) in first[position].items():
            there, other = second[position][name]
            torch.testing.assert_close(between, there, msg=f"{position} {name}: all of it is on both ranks")
            if "linear_proj" in name or "linear_fc2" in name:  # row-parallel: their sum is on both ranks
                torch.testing.assert_close(added, other, msg=f"{position} {name}")
            elif position == "post":  # column-parallel: other channels, by another stream
                assert not torch.equal(added == 0, other == 0)
