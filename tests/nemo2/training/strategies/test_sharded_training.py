# SPDX-License-Identifier: Apache-2.0
"""FSDP in its three forms against one process that shards nothing: losses, gradient norms, every parameter's gradient."""

import time
from typing import Any

import pytest
import torch

from nemo2.base.errors import ConfigError
from support import collectives, sharded_runs, small_runs
from support.nightly import each_case, requested

SHARDED = ["FSDP2Strategy", "FSDPStrategy", "Megatron-FSDP", "Megatron-FSDP, ZeRO-2", "Megatron-FSDP, ZeRO-1"]
TIED: dict[str, Any] = {"share_embeddings_and_output_weights": True, "calculate_per_token_loss": True}


def on_one_rank() -> dict[str, Any]:
    return {
        "plain": sharded_runs.train("MegatronStrategy"),
        "tied": sharded_runs.train("MegatronStrategy", **TIED),
        "bf16": sharded_runs.train("MegatronStrategy", precision="bf16-mixed"),
    }


def on_two_ranks(names: list[str]) -> dict[str, Any]:
    return {name: sharded_runs.train(RUNS[name][0], **RUNS[name][1]) for name in names}


@pytest.fixture(scope="module")
def expected(run_on_ranks) -> dict[str, Any]:
    return run_on_ranks(on_one_rank, 1, timeout=280)[0]


@pytest.fixture(scope="module")
def ranks(request, run_on_ranks) -> list[dict[str, Any]]:
    return run_on_ranks(on_two_ranks, 2, requested(request, "name"), timeout=280)


BF16 = [f"{kind}, bf16" for kind in SHARDED[:3]]
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{kind}, plain": (kind, {}) for kind in SHARDED},
    **{f"{kind}, tied": (kind, TIED) for kind in SHARDED[:3]},
    **{name: (kind, {"precision": "bf16-mixed"}) for name, kind in zip(BF16, SHARDED, strict=False)},
    "FSDP2Strategy, plain, CP": ("FSDP2Strategy", {"strategy": {"context_parallel_size": 2}}),
}
FP32 = [name for name in RUNS if name not in BF16]
NIGHTLY = ("Megatron-FSDP, ZeRO-2, plain", "FSDPStrategy, tied", "Megatron-FSDP, tied")


@pytest.mark.parametrize("name", each_case(FP32, [name for name in FP32 if name not in NIGHTLY]))
def test_it_trains_as_one_process_does_with_the_gradient_of_each_parameter(name, expected, ranks):
    reference = expected["tied" if "tied" in name else "plain"]
    for rank in ranks:
        assert rank[name]["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert rank[name]["norms"] == pytest.approx(reference["norms"], rel=1e-4)
        assert rank[name]["val_losses"] == pytest.approx(reference["val_losses"], rel=1e-5)
        assert rank[name]["metrics"]["num_zeros_in_grad"] == reference["metrics"]["num_zeros_in_grad"]
    assert expected["plain"]["metrics"]["num_zeros_in_grad"] > 0  # rows of tokens that no sample has
    assert len(set(reference["losses"])) == 4
    gradients = sharded_runs.whole([reference["gradients"]])
    actual = sharded_runs.whole([rank[name]["gradients"] for rank in ranks])
    assert actual.keys() == gradients.keys()
    for key, gradient in gradients.items():
        assert float((actual[key] - gradient).norm() / gradient.norm()) < 1e-4, key


@pytest.mark.parametrize("name", BF16)
def test_bf16_differs_by_rounding(name, expected, ranks):
    losses = ranks[0][name]["losses"]
    assert losses == pytest.approx(expected["bf16"]["losses"], rel=3e-4)
    assert losses != pytest.approx(expected["plain"]["losses"], rel=1e-7), "this wasn't bf16"


def test_sharded_runs_log_what_others_do(ranks):
    for name, run in ranks[0].items():
        logged = {"reduced_train_loss", "grad_norm", "lr", "consumed_samples", "global_batch_size", "val_loss"}
        assert logged <= run["metrics"].keys(), name


def test_no_memory_is_freed_under_a_collective(ranks):
    for name, run in ((name, run) for rank in ranks for name, run in rank.items()):
        assert not run["watch"]["problems"], f"{name}\n{run['watch']['problems'][0]}"
        assert run["watch"]["collectives"] > 20, name
        assert run["watch"]["resized"] > 20 or "ZeRO-" in name, name


def watched_on_one_rank() -> list[int]:
    counts = []
    with collectives.watched() as watch:
        tensor, other = torch.ones(4), torch.ones(4)
        work: Any = torch.distributed.all_reduce(tensor, async_op=True)
        while not work.is_completed():  # so that what is wrong here does no harm
            time.sleep(0.001)
        other.untyped_storage().resize_(0)
        counts.append(len(watch.problems))
        tensor.untyped_storage().resize_(32)
        counts.append(len(watch.problems))
        work.wait()
        tensor.untyped_storage().resize_(0)
        counts.append(len(watch.problems))
        watch.begin("broadcast", None, [torch.ones(1).expand(4)])
        counts += [len(watch.problems), watch.seen, watch.resized]
    return counts


def test_memory_that_is_freed_too_early_would_be_noticed(run_on_ranks):
    assert run_on_ranks(watched_on_one_rank, 1, env={"CUDA_VISIBLE_DEVICES": ""})[0] == [0, 1, 1, 2, 2, 3]


def test_the_norm_counts_every_element_once():
    from nemo2.mcore.optim.sharded import global_norm

    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0, 0.0]), torch.full((2, 2), 2.0)
    assert global_norm(parameters) == pytest.approx(5.0)


def used_again(kind: str) -> dict[str, Any]:
    def trainer(max_steps: int) -> Any:
        strategy = sharded_runs.strategies()[kind]()
        return small_runs.build_trainer(max_steps=max_steps, strategy=strategy, trainer={"limit_val_batches": 1})

    small_runs.quiet()
    model, data, first = small_runs.build_llama(distributed=True), small_runs.TokenData(), trainer(2)
    first.fit(model, data)
    losses = [first.validate(model, data, verbose=False)[0]["val_loss"]]
    refused = ""
    try:
        first.fit_loop.epoch_loop.max_steps = 3
        first.fit(model, data)
        losses.append(first.validate(model, data, verbose=False)[0]["val_loss"])
        trainer(2).fit(model, data)
    except ConfigError as error:
        refused = str(error)
    small_runs.release()
    return {"losses": losses, "refused": refused}


def all_used_again() -> dict[str, Any]:
    return {kind: used_again(kind) for kind in (*SHARDED[:3], "MegatronStrategy")}


def test_a_trainer_validates_and_goes_on_with_the_model_that_it_has_sharded(run_on_ranks):
    runs = run_on_ranks(all_used_again, 2, timeout=280)[0]
    once, twice = runs["MegatronStrategy"]["losses"]
    assert once != twice
    assert runs["FSDP2Strategy"]["losses"] == pytest.approx([once, twice], rel=1e-5)
    assert "another trainer" in runs["FSDP2Strategy"]["refused"]
    for kind in ("FSDPStrategy", "Megatron-FSDP"):
        assert runs[kind]["losses"] == pytest.approx([once], rel=1e-5)
        assert "Create the model anew" in runs[kind]["refused"]
