# SPDX-License-Identifier: Apache-2.0
"""The same training step three ways: our stack, a bare Megatron-Core loop, Hugging Face's Trainer.

Each arm trains a case for some steps on the one device of this process and returns a `Turn`. Weights, gradients and optimizer
states are gone when it returns, so that arms can take turns on a GPU that holds one of them.

Alike in all: model shape, sequence, samples per step, random token ids, AdamW, clipping at 1, weight decay 0.1, a loss every
step, and a clock that is read when the device has finished a step. Kernels are alike in the first two; the third is what
``transformers`` has: bf16 autocast over fp32 weights, SDPA attention, ``torch.compile``.
"""

import copy
import dataclasses
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from bench.gpu.cases import Case, recipe_of
from nemo2.base.backend import get_backend

CLIP, WEIGHT_DECAY = 1.0, 0.1


@dataclasses.dataclass(frozen=True)
class Turn:
    """The steps of one arm in one turn.

    Attributes:
        seconds: per step, those of the warm-up left out.
        losses: of all steps.
        peak_bytes: the most that tensors held.
    """

    seconds: list[float]
    losses: list[float]
    peak_bytes: int


class Clock:
    """Reads the time when the device is done."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def read(self) -> None:
        get_backend().synchronize()
        self.times.append(time.perf_counter())

    def steps(self, warm_up: int) -> list[float]:
        gaps = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        return gaps[warm_up:]


def ours(case: Case, *, steps: int, warm_up: int) -> Turn:
    """The recipe, built and called in this process."""
    return _ours(case, steps=steps, warm_up=warm_up)[0]


def _ours(case: Case, *, steps: int, warm_up: int) -> tuple[Turn, Any]:
    recipe = recipe_of(case, steps=steps)
    recipe.optim.config.clip_grad = CLIP
    recipe.optim.config.weight_decay = WEIGHT_DECAY
    return timed_run(recipe, warm_up=warm_up)


def timed_run(recipe: Any, *, warm_up: int) -> tuple[Turn, Any]:
    """Build and call a recipe in this process. Returns its steps and the model configuration that it ended with."""
    import fiddle as fdl
    import lightning.pytorch as pl

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            clock.read()

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            clock.read()
            losses.append(float(trainer.strategy.last_loss))

    clock, losses = Clock(), []
    with tempfile.TemporaryDirectory() as folder:
        recipe.log.log_dir = folder
        run = fdl.build(recipe)
        arguments = run.keywords
        arguments["trainer"].callbacks.append(Watch())
        run()
    peak = get_backend().memory_figures()["peak_bytes"]
    return Turn(clock.steps(warm_up), losses, peak), arguments["model"].config


def bare(case: Case, *, steps: int, warm_up: int) -> Turn:
    """Megatron-Core's model, DDP, optimizer and schedule in a plain loop, with the configuration that our stack ends with."""
    from support import bare_megatron

    config = _final_config(case)
    settings = bare_megatron.Settings(
        layers=config.num_layers,
        vocab=config.vocab_size,
        seq=case.seq,
        mbs=1,
        gbs=case.microbatches,
        steps=steps,
        dtype="bf16",
        clip_grad=CLIP,
        weight_decay=WEIGHT_DECAY,
        use_distributed_optimizer=True,
        calculate_per_token_loss=bool(config.calculate_per_token_loss),
    )
    result = bare_megatron.train(settings, build_model=_builder(config))
    peak = get_backend().memory_figures()["peak_bytes"]
    bare_megatron.stop_parallel()
    return Turn(result["step_times"][warm_up:], result["losses"], peak)


_configs: dict[str, Any] = {}


def _final_config(case: Case) -> Any:
    """The model configuration after strategy, precision and callbacks have written theirs, from a run of two steps.

    Its functions are bound to that run's optimizer and model, which would stay on the device with them.
    """
    if case.name not in _configs:
        config = copy.copy(_ours(case, steps=2, warm_up=0)[1])
        for name in _FUNCTIONS:
            setattr(config, name, None)
        _configs[case.name] = config
        empty_device()
    return _configs[case.name]


_FUNCTIONS = ("grad_scale_func", "finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func")
"""Fields of a configuration that a training loop writes."""


def _builder(final: Any) -> Callable[[bool, bool, int | None], Any]:
    def build(pre_process: bool, post_process: bool, vp_stage: int | None) -> Any:
        from megatron.core.models.gpt import GPTModel

        from nemo2.models.fused_gradients import fusing_where_possible
        from nemo2.models.layers.spec import layer_spec
        from nemo2.models.tracked_losses import forget_tracked_losses

        config = copy.copy(final)
        forget_tracked_losses()
        model = partial(
            GPTModel,
            config=config,
            transformer_layer_spec=layer_spec(config, vp_stage=vp_stage),
            vocab_size=config.vocab_size,
            max_sequence_length=config.seq_length,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=config.share_embeddings_and_output_weights,
            position_embedding_type=config.position_embedding_type,
            rotary_percent=config.rotary_percent,
            rotary_base=config.rotary_base,
            vp_stage=vp_stage,
        )
        return fusing_where_possible(model)

    return build


def hugging_face(case: Case, *, steps: int, warm_up: int) -> Turn:
    """``transformers.Trainer`` over the same shape of model."""
    import logging

    import transformers

    class Watch(transformers.TrainerCallback):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            clock.read()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            clock.read()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if "loss" in (logs or {}):
                losses.append(float(logs["loss"]))

    transformers.logging.set_verbosity_error()
    logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
    clock, losses = Clock(), []
    config = transformers_config(case)
    with torch.device(get_backend().device):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    on_gpu = get_backend().name == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=case.microbatches,
            bf16=True,
            torch_compile=on_gpu,  # on a CPU it needs a C++ compiler and minutes
            use_cpu=not on_gpu,
            optim="adamw_torch_fused" if on_gpu else "adamw_torch",
            weight_decay=WEIGHT_DECAY,
            max_grad_norm=CLIP,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_num_workers=0 if case.toy else 2,
        )
        data: Any = RandomTokens(steps * case.microbatches, case.seq, config.vocab_size)
        transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Watch()]).train()
    return Turn(clock.steps(warm_up), losses, get_backend().memory_figures()["peak_bytes"])


def transformers_config(case: Case) -> Any:
    """The case's shape as a configuration of ``transformers``."""
    import transformers

    ours: Any = recipe_of(case).model.config
    shape: dict[str, Any] = {
        "num_hidden_layers": ours.num_layers,
        "hidden_size": ours.hidden_size,
        "num_attention_heads": ours.num_attention_heads,
        "num_key_value_heads": ours.num_query_groups,
        "intermediate_size": ours.ffn_hidden_size,
        "vocab_size": ours.vocab_size,
        "max_position_embeddings": case.seq,
        "tie_word_embeddings": ours.share_embeddings_and_output_weights,
        "use_cache": False,
    }
    if ours.kv_channels:
        shape["head_dim"] = ours.kv_channels
    kind = case.recipe.split("_")[0]
    if kind == "mixtral":
        return transformers.MixtralConfig(
            num_local_experts=ours.num_moe_experts,
            num_experts_per_tok=ours.moe_router_topk,
            output_router_logits=True,
            **shape,
        )
    if kind == "qwen3":
        return transformers.Qwen3MoeConfig(
            num_experts=ours.num_moe_experts,
            num_experts_per_tok=ours.moe_router_topk,
            moe_intermediate_size=ours.moe_ffn_hidden_size,
            output_router_logits=True,
            **shape,
        )
    return transformers.LlamaConfig(**shape)


class RandomTokens(torch.utils.data.Dataset):
    """Random ids, labels the same ids: the model shifts them itself."""

    def __init__(self, samples: int, seq: int, vocabulary: int) -> None:
        self.samples, self.seq, self.vocabulary = samples, seq, vocabulary

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(self.vocabulary, (self.seq,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


ARMS: dict[str, Callable[..., Turn]] = {"ours": ours, "bare": bare, "hf": hugging_face}


def take_turn(arm: str, case: Case, *, steps: int, warm_up: int) -> Turn:
    """Run one turn of an arm on an empty device."""
    empty_device()
    try:
        return ARMS[arm](case, steps=steps, warm_up=warm_up)
    finally:
        empty_device()


def empty_device() -> None:
    """Let go of what no variable holds any more, and count the peak from here."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if "torch._dynamo" in sys.modules:  # asking torch for it would import it
        torch._dynamo.reset()
    get_backend().reset_peak_memory()
