# SPDX-License-Identifier: Apache-2.0
"""Which layers add their weights' gradients themselves, by what is installed."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from megatron.core.tensor_parallel import layers

from nemo2.base.backend import extras, get_backend
from nemo2.base.backend.cpu import CpuBackend
from support import small_runs


@contextmanager
def installed(te: bool, apex: bool) -> Iterator[None]:
    """A machine with these packages, as far as fused gradients ask."""
    from nemo2.mcore.settle import machine
    from nemo2.models import fused_gradients
    from nemo2.models.layers import spec  # noqa: F401  # imported before, so that it keeps the real answers

    with ExitStack() as patches:
        for module in (extras, fused_gradients, machine):
            patches.enter_context(patch.object(module, "has", lambda name: apex if name == extras.APEX else te))
            patches.enter_context(patch.object(module, "have_te", lambda: te))
        yield


def build(te: bool, apex: bool) -> dict[str, Any]:
    """A model that was asked to fuse, on a machine with these packages; its layers stay the plain ones."""

    from nemo2.mcore.parallel.groups import initialize_model_parallel, seed_random_streams
    from nemo2.mcore.parallel.layout import Layout
    from nemo2.mcore.settle import Machine
    from nemo2.models.llama import LlamaConfig

    get_backend().install()
    initialize_model_parallel(Layout())
    seed_random_streams(0)
    config = LlamaConfig(**small_runs.MODEL, share_embeddings_and_output_weights=False)
    config.adjust_to_this_machine()
    config.gradient_accumulation_fusion = True
    with installed(te, apex), patch.object(CpuBackend, "config_overrides", lambda self: {}):  # it would object
        try:
            model = config.configure_model(None)
        except RuntimeError as error:
            return {"raised": str(error), "left": layers._grad_accum_fusion_available}
        fuses = Machine.here().output_layer_can_fuse
    found = {
        name: part.gradient_accumulation_fusion
        for name, part in model.named_modules()
        if hasattr(part, "gradient_accumulation_fusion")
    }
    return {"linears": found, "asked": config.gradient_accumulation_fusion, "fuses": fuses} | {
        "left": layers._grad_accum_fusion_available
    }


def test_megatron_cores_own_linears_leave_it_where_only_transformer_engine_fuses(run_on_ranks: Any) -> None:
    found = run_on_ranks(build, 1, te=True, apex=False)[0]
    assert found["linears"] and not any(found["linears"].values())
    assert "output_layer" in found["linears"]
    assert found["asked"] is True  # what Transformer Engine's layers read
    assert found["fuses"] is False
    assert found["left"] is False


def test_without_either_megatron_core_says_what_is_missing(run_on_ranks: Any) -> None:
    found = run_on_ranks(build, 1, te=False, apex=False)[0]
    assert "fused_weight_gradient_mlp_cuda" in found["raised"]


def sharded() -> dict[str, Any]:
    import nemo2 as nl
    from nemo2.config.provenance import adjustments

    real = CpuBackend.config_overrides
    told = {}
    kept = {"gradient_accumulation_fusion"}
    with patch.object(
        CpuBackend, "config_overrides", lambda self: {k: v for k, v in real(self).items() if k not in kept}
    ):
        for name, options in {"FSDP2": {"strategy": nl.FSDP2Strategy()}, "Megatron-FSDP": {"fsdp": "megatron"}}.items():
            model = small_runs.build_llama(distributed=True)
            model.config.gradient_accumulation_fusion = True
            with patch.object(layers, "_grad_accum_fusion_available", True):
                small_runs.fit(model, max_steps=1, precision="bf16-mixed", **options)
            told[name] = [one.why for one in adjustments(model.config)["gradient_accumulation_fusion"]]
            small_runs.release()
    return told


def test_sharded_gradients_are_added_apart(run_on_ranks: Any) -> None:
    told = run_on_ranks(sharded, 2)[0]
    assert told == {
        "FSDP2": ["FSDP2Strategy has no gradient buffers"],
        "Megatron-FSDP": ["Megatron-FSDP keeps gradients in pieces"],
    }
