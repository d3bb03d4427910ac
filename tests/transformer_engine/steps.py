# SPDX-License-Identifier: Apache-2.0
"""Steps of Megatron-Core's GPT over the Python code of one version of Transformer Engine, in each number format that we offer.

Layers are built, called and differentiated through Megatron-Core's own wrappers and contexts, with the fields that
`nemo2.mcore.precision` lays into the model's configuration; only kernels are absent (`kernels.py`). What is
refused, and with which words, goes into the tables of `facts.py`.
"""

import base64
import importlib
import os
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from typing import Any

import torch

from tests.transformer_engine.kernels import as_if_on_a_gpu, gpu

RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")
GPUS = ("8.0", "8.9", "9.0", "10.0", "12.0")
CUDAS = ("12.4", "12.8", "12.9", "13.0")
COUNTS = (1, 4, 8, 16, 32, 64, 128)
SIZE = 128
"""The size of all dimensions that aren't varied, such as tokens and hidden size. A multiple of each format's block."""


def prepare(version: str) -> None:
    """Set up one gloo rank with Megatron-Core's groups, inside `as_if_on_a_gpu`. Once per process."""
    as_if_on_a_gpu()
    base: Any = importlib.import_module("transformer_engine.pytorch.module.base")
    for name in ("get_workspace", "get_cublas_workspace_size_bytes"):
        if hasattr(base, name):
            setattr(base, name, lambda *args: torch.zeros(1, dtype=torch.uint8))
    cuda: Any = torch.cuda
    cuda.manual_seed = cuda.set_rng_state = lambda *args, **kwargs: None
    cuda.get_rng_state = lambda *args, **kwargs: torch.zeros(1)
    store = f"file://{tempfile.mkdtemp()}/store"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    from megatron.core import parallel_state, utils
    from megatron.core.tensor_parallel import random
    from packaging.version import Version

    utils._te_version = Version(version)  # pyright: ignore[reportAttributeAccessIssue]
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.zeros(1)
    parallel_state.initialize_model_parallel()
    warnings.simplefilter("ignore")


def formats() -> dict[str, Any]:
    """The refusals by recipe, GPU, CUDA version, sizes and states. None: no refusal."""
    return {recipe: _format(recipe) for recipe in RECIPES}


def _format(recipe: str) -> dict[str, Any]:
    by_gpu = {name: _on(name, lambda: enter(recipe)) for name in GPUS}
    able = [name for name in GPUS if by_gpu[name] is None]
    if not able:
        return {"gpus": by_gpu}
    best = able[-1]
    return {
        "gpus": by_gpu,
        "cuda": {cuda: _on(able[0], lambda: enter(recipe), cuda) for cuda in CUDAS},
        "step": _on(best, lambda: step(model(recipe))),
        "parameters_in_it": _on(best, lambda: step(model(recipe, param=True))),
        "layers_in_16_bits": _on(best, lambda: step(model(recipe, first_last_layers_bf16=True))),
        "tokens": {str(count): _on(best, lambda c=count: step(model(recipe), tokens=c)) for count in COUNTS},
        "width": {str(count): _on(best, lambda c=count: step(model(recipe, ffn_hidden_size=c))) for count in COUNTS},
        "recomputed": _on(best, lambda: step(model(recipe, **_ALL_OF_IT))),
        **_states(recipe, best),
    }


_ALL_OF_IT = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def _on(name: str, call: Callable[[], Any], cuda: str = "13.0") -> str | None:
    major, _, minor = name.partition(".")
    with gpu(int(major), int(minor), cuda):
        return words(call)


def words(call: Callable[[], Any]) -> str | None:
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager  # pyright: ignore[reportMissingImports]

    try:
        call()
    except Exception as error:
        # The first line; addresses and paths differ from process to process.
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:240]
    finally:
        FP8GlobalStateManager.reset()
    return None


# ---------------------------------------------------------------------------------------------------------- the model


def _config(recipe: str | None, *, param: bool = False, **changes: Any) -> Any:
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo2.mcore.precision import MegatronMixedPrecision

    asked: dict[str, Any] = {"first_last_layers_bf16": changes.pop("first_last_layers_bf16", False)}
    if asked["first_last_layers_bf16"]:
        asked |= {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
    if recipe == "nvfp4":
        asked |= {"fp4": "e2m1", "fp4_recipe": recipe}
    elif recipe is not None:
        asked |= {"fp8": "hybrid", "fp8_recipe": recipe, "fp8_param_gather": param}
    dtypes = MegatronMixedPrecision(precision="bf16-mixed", **asked).dtype_config
    known = {one.name for one in fields(TransformerConfig)}
    laid = {one.name: getattr(dtypes, one.name) for one in fields(dtypes) if one.name in known}
    if recipe == "nvfp4" and param:
        laid["fp4_param"] = True
    shape = {"num_layers": 3, "hidden_size": SIZE, "num_attention_heads": 4, "ffn_hidden_size": 2 * SIZE}
    plain = {"normalization": "RMSNorm", "add_bias_linear": False, "attention_dropout": 0.0, "hidden_dropout": 0.0}
    plain |= {"gated_linear_unit": True, "bias_dropout_fusion": False, "use_cpu_initialization": True}
    return TransformerConfig(**(shape | plain | laid | {"attention_backend": AttnBackend.unfused} | changes))


def model(recipe: str | None, *, param: bool = False, **changes: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if "recompute_granularity" in changes:
        model_parallel_cuda_manual_seed(1)
    config = _config(recipe, param=param, **changes)
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=config.num_moe_experts)
    return GPTModel(config, spec, SIZE, SIZE, position_embedding_type="rope")


def step(model: Any, tokens: int = SIZE) -> Any:
    ids = torch.zeros(1, tokens, dtype=torch.long)
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).triu(1)
    model(ids, ids, mask, labels=ids).float().mean().backward()
    return model


def enter(recipe: str) -> None:
    from megatron.core.fp4_utils import get_fp4_context
    from megatron.core.fp8_utils import get_fp8_context

    with (get_fp4_context if recipe == "nvfp4" else get_fp8_context)(_config(recipe)):
        pass


# --------------------------------------------------------------------------------------------------------- its states


def _states(recipe: str, name: str) -> dict[str, Any]:
    """The states beside the tensors after a step: the longest, packed, and who takes them."""
    major, _, minor = name.partition(".")
    with gpu(int(major), int(minor)):
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager  # pyright: ignore[reportMissingImports]

        try:
            saved = step(model(recipe)).state_dict()
            plain = step(model(None)).state_dict()
        except Exception:
            return {}
        finally:
            FP8GlobalStateManager.reset()
    states = [value for key, value in saved.items() if key.endswith("_extra_state") and value is not None]
    longest = max(states, key=torch.numel).numpy().tobytes()
    return {
        "state": {version("megatron-core"): base64.b64encode(zlib.compress(longest)).decode()},
        "state_loaded": _on(name, lambda: step(_loaded(model(recipe), saved))),
        "state_loaded_with_leave": _on(name, lambda: _with_leave(lambda: step(_loaded(model(recipe), saved)))),
        "state_loaded_into_16_bits": _on(name, lambda: step(_loaded(model(None), saved))),
        "state_of_16_bits_loaded": _on(name, lambda: step(_loaded(model(recipe), plain))),
    }


def _loaded(model: Any, state: dict[str, Any]) -> Any:
    model.load_state_dict(state)
    return model


@contextmanager
def _leave() -> Iterator[None]:
    os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"] = "1"
    try:
        yield
    finally:
        del os.environ["NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"]


def _with_leave(call: Callable[[], Any]) -> None:
    with _leave():
        call()
