# SPDX-License-Identifier: Apache-2.0
"""The measured cases: recipes as they ship, on one GPU, with as many layers as fit it together with the optimizer.

Nothing here needs a GPU: a case is a recipe tree, and `nemo2.preflight.rehearse` says whether it fits:
`python -m bench.gpu --fits`.
"""

import dataclasses
from typing import Any

PRECISIONS = {
    "bf16": "bf16_mixed",
    "fp8-delayed": "bf16_with_fp8_mixed",
    "fp8-current": "bf16_with_fp8_current_scaling_mixed",
}
"""Name of a precision here to the recipe factory that makes its plugin."""


GRAPHS = "+graphs"
"""Stands in the name of a case with CUDA graphs, before their kind."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the table.

    Attributes:
        recipe: name of the recipe.
        layers: how many of the model's layers; None: all.
        seq: tokens per sample.
        precision: a key of `PRECISIONS`.
        microbatches: of one sample each per step.
        graphs: which CUDA graphs (``model.config.cuda_graph_impl``); None: none.
        toy: the same in kind at a size for a CPU: says that the scripts run, nothing about speed.
    """

    recipe: str
    layers: int | None
    seq: int
    precision: str = "bf16"
    microbatches: int = 4
    graphs: str | None = None
    toy: bool = False

    @property
    def name(self) -> str:
        return f"{self.recipe}/{self.seq}/{self.precision}" + (f"{GRAPHS}-{self.graphs}" if self.graphs else "")

    @property
    def tokens_per_step(self) -> int:
        return self.seq * self.microbatches


# Layers: what a GPU holds at 18 bytes a parameter with the activations of one sample, by `--fits`, and with room for
# the copies of the weights in fp8, two bytes a parameter, which `rehearse` does not count.
_MODELS: dict[str, dict[int, dict[str, int | None]]] = {
    "llama3_8b": {8192: {"H200": 20, "H100": 9}, 4096: {"H200": 23, "H100": 10}},
    "llama32_1b": {8192: {"H200": None, "H100": None}, 4096: {"H200": None, "H100": None}},
    "mixtral_8x7b": {4096: {"H200": 4, "H100": 2}},
    "qwen3_30b_a3b": {4096: {"H200": 9, "H100": 4}},
}
GPUS = ("H200", "H100")
"""GPUs that have a column of layer counts."""
_GRAPHS = (("llama32_1b", 4096, "transformer_engine"), ("llama32_1b", 4096, "full_iteration"))
"""Cases that the launch of many small kernels may slow down."""


def cases(gpu: str = "H200", *, toy: bool = False, fp8: bool = False) -> list[Case]:
    """All cases for a GPU of `GPUS`, those first whose figures are asked for first. ``fp8``: toys have it too, as no CPU does."""
    table = [
        Case(recipe=recipe, layers=layers[gpu], seq=seq, precision=precision)
        for precision in PRECISIONS
        for recipe, lengths in _MODELS.items()
        for seq, layers in lengths.items()
    ]
    if toy:
        return list(dict.fromkeys(small(case) for case in table if fp8 or case.precision == "bf16"))
    return table + [
        Case(recipe=recipe, layers=_MODELS[recipe][seq][gpu], seq=seq, graphs=graphs) for recipe, seq, graphs in _GRAPHS
    ]


def gpu_for(gib: float) -> str:
    """The largest of `GPUS` whose layers fit a GPU with this much memory.

    Raises:
        ValueError: it holds none.
    """
    from nemo2.base.gpus import GIB, gpu

    for name in GPUS:
        if gib >= gpu(name).memory / GIB - 1:
            return name
    raise ValueError(f"This GPU has {gib:.0f} GiB; the cases are laid out for {' and '.join(GPUS)}.")


def small(case: Case) -> Case:
    """The case at toy size. With current scaling the first and the last layer are in bf16."""
    return dataclasses.replace(case, layers=2 if case.precision == "bf16" else 4, seq=64, microbatches=2, toy=True)


def recipe_of(case: Case, *, steps: int = 10) -> Any:
    """The recipe tree of a case: on one device, without layout, checkpoints or validation, otherwise as it ships."""
    from nemo2 import Config, recipes
    from nemo2.data import NullTokenizer
    from nemo2.recipes.precision import mixed_precision

    shipped: Any = recipes.get(case.recipe)
    recipe = shipped.pretrain_recipe(num_nodes=1, num_gpus_per_node=1)
    recipe.trainer.plugins = getattr(mixed_precision, PRECISIONS[case.precision])()
    _on_one_device(recipe.trainer.strategy)
    _of_a_size(recipe.model.config, case, vocabulary=shipped.RECIPE.vocabulary)
    recipe.data.tokenizer = Config(NullTokenizer, vocab_size=recipe.model.config.vocab_size)
    recipe.data.seq_length = case.seq
    recipe.data.micro_batch_size = 1
    recipe.data.global_batch_size = case.microbatches
    recipe.data.num_workers = 0 if case.toy else 2
    recipe.data.num_train_samples = steps * case.microbatches
    recipe.trainer.max_steps = steps
    recipe.trainer.limit_val_batches = 0
    recipe.trainer.num_sanity_val_steps = 0
    recipe.trainer.enable_progress_bar = False
    recipe.trainer.enable_checkpointing = False
    recipe.log.ckpt = None
    recipe.resume = None
    if case.graphs:
        recipe.model.config.cuda_graph_impl = case.graphs
        # A graph of the whole step can't wait for what its gradients are; the plain row looks at them.
        recipe.trainer.strategy.ddp.check_for_nan_in_grad = case.graphs != "full_iteration"
    return recipe


def _on_one_device(strategy: Any) -> None:
    for name in ("tensor", "pipeline", "context", "expert"):
        stem = name if name == "context" else f"{name}_model"
        setattr(strategy, f"{stem}_parallel_size", 1)
    strategy.expert_tensor_parallel_size = None
    strategy.virtual_pipeline_model_parallel_size = None
    strategy.pipeline_dtype = None
    strategy.sequence_parallel = False


def _of_a_size(config: Any, case: Case, *, vocabulary: int) -> None:
    config.vocab_size = vocabulary
    if case.toy:
        from nemo2.preflight.rehearse.shrink import small_sizes

        for name, value in small_sizes(config).items():
            if name != "seq_length":
                setattr(config, name, value)
    if case.layers is not None:
        config.num_layers = case.layers
    # A GPU of its own has the memory: what is computed twice would only hide how fast the rest is.
    config.recompute_granularity = config.recompute_method = config.recompute_num_layers = None


def fits(case: Case, gpu: str = "H200") -> tuple[bool, float]:
    """Whether the case fits, and GiB at its peak, as `nemo2.preflight.rehearse` counts them."""
    from nemo2.preflight.rehearse import rehearse

    result = rehearse(recipe_of(case), name=case.name, gpus=f"{gpu}x1", advice=False)
    return result.verdict.fits, max(rank.memory.total for rank in result.ranks) / 2**30
