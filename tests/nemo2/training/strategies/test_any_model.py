# SPDX-License-Identifier: Apache-2.0
"""Models that aren't nemo2's: an MLP classifier under every strategy, in stages too, and a Hugging Face language model."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from support import small_runs

STEPS, BATCH, FEATURES, HIDDEN, CLASSES = 4, 8, 6, 16, 3
ADAM: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
CLIP = 0.5


def halves() -> tuple[nn.Linear, nn.Linear]:
    generator = torch.Generator().manual_seed(7)
    first, second = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
    with torch.no_grad():
        for parameter in [*first.parameters(), *second.parameters()]:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return first, second


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(STEPS * BATCH, FEATURES, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (STEPS * BATCH,), generator=generator))


class Examples(pl.LightningDataModule):
    def __init__(self) -> None:
        from nemo2.data.sampler import MegatronDataSampler

        super().__init__()
        self.data_sampler = MegatronDataSampler(seq_len=1, micro_batch_size=BATCH // 4, global_batch_size=BATCH)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(examples())


class Classifier(pl.LightningModule):
    """As in Lightning's tutorials; `calls_forward` says how its step reaches the layers."""

    def __init__(self, calls_forward: bool = False) -> None:
        super().__init__()
        first, second = halves()
        self.net = nn.Sequential(first, nn.Tanh(), second)
        self.calls_forward = calls_forward

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, labels = batch
        logits = self(inputs) if self.calls_forward else self.net(inputs)
        return nn.functional.cross_entropy(logits.float(), labels)


class Wrapped(pl.LightningModule):
    """A module of Megatron-Core's in a LightningModule, with a loss of its own."""

    def __init__(self, kind: Any, **config: int) -> None:
        from megatron.core.transformer.transformer_config import TransformerConfig

        super().__init__()
        self.kind, self.config = kind, TransformerConfig(hidden_size=HIDDEN, **config)

    def configure_model(self) -> None:
        if not hasattr(self, "module"):
            self.module = self.kind(self.config)

    def forward_step(self, batch: Any) -> Tensor:
        return self.module(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.module(batch[0]).float(), batch[1])


def staged_classifier() -> pl.LightningModule:
    """The same layers, one on each of two pipeline stages: all that Megatron-Core asks of a model of one's own."""
    from megatron.core import parallel_state
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Stage(MegatronModule):
        def __init__(self, config: TransformerConfig) -> None:
            super().__init__(config)
            self.pre_process = parallel_state.is_pipeline_first_stage()
            self.post_process = parallel_state.is_pipeline_last_stage()
            first, second = halves()
            self.layer = first if self.pre_process else second

        def set_input_tensor(self, tensor: Any) -> None:
            self.received = tensor[0] if isinstance(tensor, list) else tensor

        def forward(self, inputs: Tensor) -> Tensor:
            if self.pre_process:
                return torch.tanh(self.layer(inputs)).unsqueeze(0)  # [sequence of one, batch, hidden]
            return self.layer(self.received.squeeze(0))

    return Wrapped(Stage, num_layers=2, num_attention_heads=1)


def parallel_classifier(*, gathers: bool) -> pl.LightningModule:
    """The same layers as Megatron-Core's parallel linears. With ``gathers``, the hidden values are gathered, and the second
    layer and the loss are plain PyTorch."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import (
        ColumnParallelLinear,
        RowParallelLinear,
        gather_from_tensor_model_parallel_region,
    )
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig

    class Net(MegatronModule):
        def __init__(self, config: TransformerConfig) -> None:
            super().__init__(config)
            options: Any = {"config": config, "init_method": nn.init.zeros_, "bias": True, "skip_bias_add": False}
            first, second = halves()
            rank, ranks = parallel_state.get_tensor_model_parallel_rank(), config.tensor_model_parallel_size
            self.first = ColumnParallelLinear(FEATURES, HIDDEN, gather_output=False, **options)
            self.second = second if gathers else RowParallelLinear(HIDDEN, CLASSES, input_is_parallel=True, **options)
            with torch.no_grad():
                self.first.weight.copy_(first.weight.chunk(ranks)[rank])
                self.first.bias.copy_(first.bias.chunk(ranks)[rank])
                if not gathers:
                    self.second.weight.copy_(second.weight.chunk(ranks, dim=1)[rank])
                    self.second.bias.copy_(second.bias)

        def set_input_tensor(self, tensor: Any) -> None: ...

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(inputs)[0])
            return self.second(gather_from_tensor_model_parallel_region(hidden)) if gathers else self.second(hidden)[0]

    return Wrapped(Net, num_layers=1, num_attention_heads=2)


def optimizer() -> Any:
    from megatron.core.optimizer import OptimizerConfig

    from nemo2.mcore.optim.megatron import MegatronOptimizerModule

    config = OptimizerConfig(
        optimizer="adam", adam_beta1=0.9, adam_beta2=0.95, adam_eps=1e-8, clip_grad=CLIP, use_distributed_optimizer=False,
        **ADAM,
    )  # fmt: skip
    return MegatronOptimizerModule(config)


def one_loop(net: nn.Module, losses: Any) -> dict[str, Tensor]:
    """Plain PyTorch, on whole batches; vectors don't decay."""
    groups = [
        {"params": [p for p in net.parameters() if p.dim() > 1]},
        {"params": [p for p in net.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, **ADAM)
    for step in range(STEPS):
        adam.zero_grad()
        losses(step).backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        adam.step()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def whole(value: Any) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().to("cpu", copy=True)


def fitted(module: Any, strategy: Any, data: Any = None) -> dict[str, Tensor]:
    """This rank's parameters after training, whole, by their names without what wraps them."""
    from nemo2.training.strategies.torch_sharded import TorchShardedStrategy
    from nemo2.training.trainer import Trainer

    small_runs.quiet()
    optimizer().connect(module)
    world = torch.distributed.get_world_size()
    trainer = Trainer(devices=world, max_steps=STEPS, strategy=strategy, enable_progress_bar=False)
    trainer.fit(module, data or Examples())
    named = dict(module.named_parameters())
    if isinstance(trainer.strategy, TorchShardedStrategy):
        named = {name: held.value for name, held in trainer.strategy.form.model_state().items()}
    found = {name.rpartition("module.")[2].removeprefix("net."): whole(value) for name, value in named.items()}
    small_runs.release()
    return found


def mlps() -> dict[str, dict[str, Tensor]]:
    import nemo2 as nl

    found = {}
    for name, strategy in (("DP", nl.MegatronStrategy), ("FSDP2", nl.FSDP2Strategy), ("FSDP", nl.FSDPStrategy)):
        for calls_forward in (False, True):
            found[f"{name}, {calls_forward}"] = fitted(Classifier(calls_forward), strategy())
    for gathers in (False, True):
        module = parallel_classifier(gathers=gathers)
        found[f"TP, {gathers}"] = fitted(module, nl.MegatronStrategy(tensor_model_parallel_size=2))
    found["PP"] = fitted(staged_classifier(), nl.MegatronStrategy(pipeline_model_parallel_size=2))
    return found


@pytest.fixture(scope="module")
def trained(run_on_ranks) -> list[dict[str, dict[str, Tensor]]]:
    return run_on_ranks(mlps, 2, timeout=280)


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    first, second = halves()
    net, data = nn.Sequential(first, nn.Tanh(), second), examples()

    def loss(step: int) -> Tensor:
        inputs, labels = data[step * BATCH : (step + 1) * BATCH]
        return nn.functional.cross_entropy(net(inputs), labels)

    return one_loop(net, loss)


@pytest.mark.quick
@pytest.mark.parametrize("calls_forward", [False, True])
@pytest.mark.parametrize("name", ["DP", "FSDP2", "FSDP"])
def test_an_mlp_of_ones_own_trains_as_one_loop_does(name, calls_forward, trained, expected):
    for rank in trained:
        actual = rank[f"{name}, {calls_forward}"]
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value, rtol=0, atol=1e-6)


def test_the_same_mlp_in_two_pipeline_stages(trained, expected):
    for stage, layer in enumerate(("0", "2")):
        for kind in ("weight", "bias"):
            actual = trained[stage]["PP"][f"layer.{kind}"]
            torch.testing.assert_close(actual, expected[f"{layer}.{kind}"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("gathers", [False, True])
def test_the_same_mlp_of_parallel_linears_with_its_own_loss(gathers, trained, expected):
    for rank, found in enumerate(trained):
        actual = found[f"TP, {gathers}"]
        parts = {f"first.{kind}": expected[f"0.{kind}"].chunk(2)[rank] for kind in ("weight", "bias")}
        second = expected["2.weight"]
        parts |= {
            "second.weight": second if gathers else second.chunk(2, dim=1)[rank],
            "second.bias": expected["2.bias"],
        }
        for name, value in parts.items():
            torch.testing.assert_close(actual[name], value, rtol=0, atol=1e-6)


VOCABULARY, LENGTH = 32, 8


def language_model() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LENGTH, tie_word_embeddings=False,
        )
    )  # fmt: skip


def texts() -> Tensor:
    return torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


class Texts(Examples):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(texts()))


class HuggingFace(pl.LightningModule):
    def configure_model(self) -> None:
        if not hasattr(self, "module"):
            self.module = language_model()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.module(input_ids=batch[0], labels=batch[0]).loss


def language_models() -> dict[str, dict[str, Tensor]]:
    import nemo2 as nl

    strategies = {
        "FSDP2": nl.FSDP2Strategy(),
        "FSDP2 with tensors cut by the model's plan": nl.FSDP2Strategy(tensor_parallel_size=2),
        "FSDP": nl.FSDPStrategy(),
    }
    return {name: fitted(HuggingFace(), strategy, Texts()) for name, strategy in strategies.items()}


def test_a_hugging_face_model_trains_as_one_loop_does(run_on_ranks):
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    ranks = run_on_ranks(language_models, 2, timeout=280)
    net, data = language_model(), texts()

    def loss(step: int) -> Tensor:
        ids = data[step * BATCH : (step + 1) * BATCH]
        return net(input_ids=ids, labels=ids).loss

    expected = one_loop(net, loss)
    for rank in ranks:
        for name, actual in rank.items():
            assert actual.keys() == expected.keys(), name
            for key, value in expected.items():
                torch.testing.assert_close(
                    actual[key], value, rtol=0, atol=2e-4, msg=lambda m, w=(name, key): f"{w}: {m}"
                )
