# SPDX-License-Identifier: Apache-2.0
"""Tiny transformers models on disk, and nemo2 runs that start from their weights."""

from pathlib import Path
from typing import Any

from support import small_runs
from support.resharding import Cut

SIZES = {
    "vocab_size": small_runs.VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "sliding_window": None},
}


def import_release(source: Path | str, target: Path | str, *, config: Any = None, **options: Any) -> Path:
    """A checkpoint of the weights in the Hugging Face folder ``source``. ``options`` are those of `write_checkpoint`."""
    from nemo2.hugging_face.importing import write_checkpoint
    from nemo2.hugging_face.released import open_released

    return write_checkpoint(open_released(Path(source), config), target, **options)


def write(kind: str, folder: Path, *, dtype: Any = None, shard_size: str = "5GB", **settings: Any) -> Any:
    """A model of random weights in ``folder``, each parameter disturbed, so that norms and biases count; returns it."""
    import torch
    import transformers

    torch.manual_seed(5)
    name = kind.capitalize()
    config = getattr(transformers, f"{name}Config")(**(SIZES | KINDS[kind] | settings))
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model = model if dtype is None else model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model.eval()


def tensors(folder: Path) -> dict[str, Any]:
    """All of a folder's tensors by name, read by safetensors itself."""
    from safetensors.torch import load_file

    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def first_loss(model: Any) -> float:
    """The loss of transformers' model over the counted tokens of the first global batch that `run_all` trains on."""
    import torch

    batch = small_runs.global_batch(0)
    with torch.no_grad():
        logits = model(batch["tokens"]).logits.float()
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none")
    mask = batch["loss_mask"]
    return float((each * mask).sum() / mask.sum())


def run_all(kind: str, path: str, cuts: list[Cut], folder: str) -> dict[str, list[float]]:
    """The losses of two steps that begin with the weights of ``path``, in each layout; what the first begins with is saved as
    ``folder/<layout>``."""
    return {str(cut): _run(kind, path, cut, f"{folder}/{str(cut).replace(' ', '_')}") for cut in cuts}


def _run(kind: str, path: str, cut: Cut, saved: str) -> list[float]:
    import lightning.pytorch as pl

    from nemo2.checkpoint.auto_resume import RestoreConfig

    class Save(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.save_checkpoint(saved, weights_only=True)

    small_runs.release()
    strategy = cut.strategy()
    begin = RestoreConfig(path=path, load_artifacts=False)
    if "strategy" in strategy:
        strategy["strategy"].restore_config = begin
    else:
        strategy["restore_config"] = begin
    model = build(kind, distributed=cut.distributed)
    data = small_runs.TokenData(size=32, micro_batch_size=1)
    options = {"max_steps": 2, "precision": cut.precision, "callbacks": [Save()]}
    return small_runs.fit(model, data, **options, **strategy)["losses"]


def build(kind: str, *, distributed: bool = False) -> Any:
    from megatron.core.optimizer import OptimizerConfig

    from nemo2 import llm
    from nemo2.mcore.optim.megatron import MegatronOptimizerModule

    sizes = small_runs.MODEL | {"num_layers": SIZES["num_hidden_layers"], "layernorm_epsilon": 1e-5}
    optim = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0, use_distributed_optimizer=distributed)
    if kind == "llama":
        return llm.LlamaModel(llm.LlamaConfig(**sizes, rotary_base=10_000), optim=MegatronOptimizerModule(optim))
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 0.0, "moe_ffn_hidden_size": 64}
    config = llm.MixtralConfig(**sizes, **experts)
    return llm.MixtralModel(config, optim=MegatronOptimizerModule(optim))
