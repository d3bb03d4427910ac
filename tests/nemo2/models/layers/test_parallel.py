# SPDX-License-Identifier: Apache-2.0
"""Models of these layers under every parallelism against one process: the gradient of each parameter at the first step.

Weights drawn by one process are resharded into each layout. Losses and gradient norms are compared over two steps, but
they alone would not do: wrong gradients of single parameters of multi-latent attention hid behind them.
"""

import functools
import shutil
from typing import Any

import pytest
import torch

from support.model_samples import SIZES, build
from support.nightly import each_case
from support.resharding import read_tensors

RUN: dict[str, Any] = {"gbs": 4, "steps": 2, "calculate_per_token_loss": True}
TP = {"tp": 2, "sequence_parallel": True}
RING, HEADS = {"cp_comm_type": "p2p"}, {"cp_comm_type": "a2a"}
# The layouts of a model: fields of `Settings`, the expert sizes, and under "config" fields of the model.
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {
        "ep2": {"ep": 2},
        "tp2 sp, ep2 of whole experts": TP | {"ep": 2, "etp": 1},
        "cp2 ep2": {"cp": 2, "ep": 2},
    },
    "deepseek": {
        "tp2 sp ep2": TP | {"ep": 2, "etp": 1},
        "cp2 ring": {"cp": 2, "config": RING},
        "ep2, shared experts beside the dispatch": {"ep": 2, "config": {"moe_shared_expert_overlap": True}},
    },
    "gemma": {"tp2 sp": TP, "cp2 heads": {"cp": 2, "config": HEADS}},
    "gpt_oss": {"tp2 sp ep2": TP | {"ep": 2, "etp": 1}, "cp2 ring": {"cp": 2, "config": RING}},
    "mtp": {"tp2 sp": TP},
}
MORE_LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {
        "ep2, all-gather dispatch": {"ep": 2, "config": {"moe_token_dispatcher_type": "allgather"}},
        "ep2, one expert after the other": {"ep": 2, "config": {"moe_grouped_gemm": False}},
        "dp2, experts on every rank": {},
        "tp2 sp, experts cut too": TP,
    },
    "deepseek": {"tp2 sp": TP, "ep2": {"ep": 2}, "cp2": {"cp": 2}, "pp2": {"pp": 2}},
    "gemma": {"tp2": {"tp": 2}, "cp2 ring": {"cp": 2, "config": RING}, "pp2": {"pp": 2}},
    "gpt_oss": {"cp2 heads": {"cp": 2, "config": HEADS}, "ep2": {"ep": 2}},
    "mtp": {"tp2": {"tp": 2}, "pp2": {"pp": 2}},
}
LAYOUTS_OF_FOUR: dict[str, dict[str, dict[str, Any]]] = {
    "mixtral": {
        "tp2 sp ep2, experts cut too": TP | {"ep": 2},
        "pp2 ep2": {"pp": 2, "ep": 2},
        "cp2 tp2 sp ep4": TP | {"cp": 2, "ep": 4, "etp": 1},
    },
    "deepseek": {"tp2 sp pp2": TP | {"pp": 2}, "cp2 ring tp2 sp ep2": TP | {"cp": 2, "ep": 2, "config": RING}},
    "gpt_oss": {
        "cp4 ring": {"cp": 4, "config": RING},
        "tp2 sp cp2 ring ep2": TP | {"cp": 2, "ep": 2, "etp": 1, "config": RING},
    },
    "gemma": {"cp4 ring": {"cp": 4, "config": RING}, "tp2 sp cp2": TP | {"cp": 2}},
    "mtp": {"tp2 sp pp2": TP | {"pp": 2}},
}


def batches(step: int) -> dict[str, torch.Tensor]:
    """Random tokens, of which the loss skips about a third."""
    from support.bare_megatron import Settings, random_batches

    batch = random_batches(Settings(**SIZES, gbs=RUN["gbs"]))(step)
    keep = torch.rand(batch["tokens"].shape, generator=torch.Generator().manual_seed(step)) > 0.3
    return batch | {"loss_mask": keep.float()}


def train(model: str, layout: dict[str, Any], **files: str) -> dict[str, Any]:
    from megatron.core import parallel_state, tensor_parallel

    from nemo2.mcore.parallel.groups import destroy_model_parallel
    from support import bare_megatron as bare

    def start_parallel(settings: Any) -> None:
        destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=settings.tp,
            pipeline_model_parallel_size=settings.pp,
            context_parallel_size=settings.cp,
            expert_model_parallel_size=layout.get("ep", 1),
            expert_tensor_parallel_size=layout.get("etp"),
        )
        torch.manual_seed(settings.seed)
        tensor_parallel.model_parallel_cuda_manual_seed(settings.seed)

    def weights(chunks: list[Any]) -> dict[str, Any]:
        # 0.16 cannot describe a last stage with an embedding of its own without a dictionary to put groups into.
        return {f"model{index}": chunk.sharded_state_dict(metadata={}) for index, chunk in enumerate(chunks)}

    bare.start_parallel, bare.weights = start_parallel, weights  # the bare loop's own know no experts
    plain = {name: value for name, value in layout.items() if name not in ("ep", "etp", "config")}
    settings = bare.Settings(**SIZES | RUN | plain)
    return bare.train(settings, batches, build_model=functools.partial(build, model, settings, layout), **files)  # pyright: ignore[reportArgumentType]


def alone(model: str, folder: str) -> dict[str, Any]:
    return train(model, {}, save_weights_to=f"{folder}/weights", save_gradients_to=f"{folder}/gradients")


def together(model: str, layouts: dict[str, dict[str, Any]], reference: str, folder: str) -> dict[str, Any]:
    """Each layout after the other in the same processes: losses, gradient norms and the relative error per parameter."""
    expected, results = read_tensors(f"{reference}/gradients"), {}
    for name, layout in layouts.items():
        result = train(model, layout, load_weights_from=f"{reference}/weights", save_gradients_to=f"{folder}/gradients")
        torch.distributed.barrier()
        actual = read_tensors(f"{folder}/gradients")
        result["errors"] = {
            key: float((actual[key] - value).norm() / value.norm()) for key, value in expected.items() if value.any()
        }
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(f"{folder}/gradients")
        torch.distributed.barrier()
        results[name] = result
    return results


@pytest.fixture(scope="module")
def one_process(run_on_ranks: Any, tmp_path_factory: Any) -> Any:
    """The run of a model in one process, and the folder of what it leaves: once for all layouts."""

    @functools.cache
    def run(model: str) -> tuple[str, dict[str, Any]]:
        folder = str(tmp_path_factory.mktemp(model))
        return folder, run_on_ranks(alone, 1, model, folder)[0]

    return run


def check(run_on_ranks: Any, one_process: Any, folder: Any, model: str, layouts: dict[str, Any], ranks: int) -> None:
    reference, expected = one_process(model)
    results = run_on_ranks(together, ranks, model, layouts, reference, str(folder))[0]
    assert results.keys() == layouts.keys()
    for name, result in results.items():
        assert max(result["errors"].values()) < 1e-5, (name, result["errors"])
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-6), name
        assert result["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-5), name


@pytest.mark.parametrize("model", LAYOUTS)
def test_two_ranks_train_as_one(run_on_ranks, one_process, tmp_path, model):
    check(run_on_ranks, one_process, tmp_path, model, LAYOUTS[model], 2)


@pytest.mark.nightly
@pytest.mark.parametrize("model", MORE_LAYOUTS)
def test_two_ranks_train_as_one_in_further_layouts(run_on_ranks, one_process, tmp_path, model):
    check(run_on_ranks, one_process, tmp_path, model, MORE_LAYOUTS[model], 2)


@pytest.mark.slow
@pytest.mark.parametrize("model", each_case(LAYOUTS_OF_FOUR, ["deepseek"]))
def test_four_ranks_train_as_one(run_on_ranks, one_process, tmp_path, model):
    check(run_on_ranks, one_process, tmp_path, model, LAYOUTS_OF_FOUR[model], 4)
