# SPDX-License-Identifier: Apache-2.0
"""The CPU backend: complete where it is installed, absent everywhere else. All of it in ranks, never in pytest itself."""

import dataclasses
import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo2.base.errors import RuntimeFault


def in_one_process(run_on_ranks, fn, *args):
    return run_on_ranks(fn, 1, *args, init_process_group=False)[0]


def every_target() -> dict:
    """The object at the place of each patch, by target."""
    from megatron.core import __version__

    from nemo2.base.backend.cpu import _JIT
    from nemo2.base.backend.cpu_patches import TORCH, megatron_patches

    found = {}
    for patch in (*TORCH, _JIT, *megatron_patches()):
        if patch.applies_to(__version__):
            owner, name = patch.resolve()
            found[patch.target] = getattr(owner, name, None)
    return found


def unchanged(before: dict) -> bool:
    after = every_target()
    return before.keys() == after.keys() and all(before[target] is after[target] for target in before)


# ------------------------------------------------------------------------------------------------ where it is not active


def on_a_gpu_machine() -> tuple[str, str, bool, str]:
    torch.cuda.is_available = lambda: True
    from nemo2.base.backend import cuda, get_backend
    from nemo2.base.backend.cpu import CpuBackend

    cuda.have_te = lambda: True
    before = every_target()
    backend = get_backend()
    backend.install()
    refusal = ""
    try:
        CpuBackend().install()
    except RuntimeFault as error:
        refusal = str(error)
    return backend.name, backend.process_group_backend, unchanged(before), refusal


def test_nothing_of_it_is_active_on_a_gpu_machine(run_on_ranks):
    name, process_groups, untouched, refusal = in_one_process(run_on_ranks, on_a_gpu_machine)
    assert (name, process_groups, untouched) == ("cuda", "nccl", True)
    assert "on a machine with a GPU" in refusal


def import_and_ask() -> bool:
    before = every_target()
    import nemo2.base.backend.cpu  # noqa: F401
    from nemo2.base.backend import get_backend

    backend = get_backend()
    assert (backend.name, backend.device.type, backend.process_group_backend) == ("cpu", "cpu", "gloo")
    assert get_backend() is backend
    backend.config_overrides()
    return unchanged(before)


@pytest.mark.quick
def test_importing_and_asking_patch_nothing(run_on_ranks):
    assert in_one_process(run_on_ranks, import_and_ask)


def refused(backend: Any) -> tuple[str, bool]:
    """Why it isn't installed, and whether that changed nothing."""
    before = every_target()
    try:
        backend.install()
    except RuntimeFault as error:
        return str(error), unchanged(before)
    return "", False


def install_without_psutil() -> tuple[str, bool]:
    from nemo2.base.backend import cpu

    cpu.has = lambda module: module != "psutil"
    return refused(cpu.CpuBackend())


def install_under_torch(version: str, world: int) -> tuple[str, bool]:
    import os

    from nemo2.base.backend import cpu

    cpu.torch.__version__ = version
    os.environ["WORLD_SIZE"] = str(world)
    return refused(cpu.CpuBackend())


@pytest.mark.parametrize(
    ("version", "world", "refused"),
    [("2.11.0+cu130", 2, True), ("2.11.0+cu130", 1, False), ("2.12.0a0+1.nv26.06", 2, False)],
)
def test_a_torch_whose_gloo_lacks_a_collective_is_refused_for_several_ranks(
    run_on_ranks, version: str, world: int, refused: bool
):
    message, untouched = in_one_process(run_on_ranks, install_under_torch, version, world)
    assert (version in message, untouched) == (refused, refused)


def with_kernels_of_transformer_engine() -> list[str]:
    """What still calls them after the installation, on a machine that has Transformer Engine and no GPU to use."""
    from nemo2.base.backend import cpu
    from nemo2.base.backend.te_absent import kernel_patches

    def kernel(*arguments: object) -> None: ...

    places = [patch.resolve() for patch in kernel_patches()]
    for owner, name in places:
        setattr(owner, name, kernel)
    cpu.CpuBackend().install()
    return [name for owner, name in places if getattr(owner, name) is kernel]


def test_kernels_of_transformer_engine_are_not_called_on_a_cpu(run_on_ranks):
    assert in_one_process(run_on_ranks, with_kernels_of_transformer_engine) == []


def test_a_missing_psutil_is_said_at_once(run_on_ranks):
    message, untouched = in_one_process(run_on_ranks, install_without_psutil)
    assert "pip install psutil" in message
    assert untouched


def fail_half_way() -> tuple[str, bool]:
    from nemo2.base.backend import cpu, cpu_patches
    from nemo2.base.backend.patching import Patch

    broken = Patch(target="megatron.core:no_such_name", replacement=None, why="a test")
    complete = cpu_patches.megatron_patches
    backend = cpu.CpuBackend()
    before = every_target()
    cpu_patches.megatron_patches = lambda: (*complete(), broken)
    try:
        backend.install()
    except RuntimeFault as error:
        cpu_patches.megatron_patches = complete
        return str(error), unchanged(before)
    return "", False


def test_a_failed_installation_leaves_nothing_behind(run_on_ranks):
    message, untouched = in_one_process(run_on_ranks, fail_half_way)
    assert "no_such_name" in message and untouched


# ----------------------------------------------------------------------------------------------------- where it is


def install_and_uninstall() -> tuple[int, bool]:
    from nemo2.base.backend.cpu import CpuBackend
    from nemo2.base.backend.te_absent import kernel_patches

    before = every_target()
    backend = CpuBackend()
    backend.install()
    backend.install()
    changed = sum(before[target] is not value for target, value in every_target().items())
    backend.uninstall()
    # Without Transformer Engine its kernels' places hold Megatron-Core's own functions already.
    return len(before) - changed - len(kernel_patches()), unchanged(before)


def test_every_target_exists_is_replaced_and_comes_back(run_on_ranks):
    unreplaced, restored = in_one_process(run_on_ranks, install_and_uninstall)
    # 0.19 has already put None where 0.16 has nothing, and no longer mistakes Transformer Engine for present.
    assert unreplaced <= 2
    assert restored


def copies_after_the_fact() -> dict[str, bool]:
    """Megatron-Core is imported by the server that ranks are forked from, long before install()."""
    import sys
    import types

    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    from nemo2.base.backend import get_backend
    from nemo2.base.backend.fused_adam import FusedAdam

    had_copy = token_dispatcher.maybe_move_tensor_to_cpu is moe_utils.maybe_move_tensor_to_cpu
    get_backend().install()
    modules = [module for name, module in sys.modules.items() if name.startswith("megatron.")]
    compiled = [
        value
        for module in modules
        for value in vars(module).values()
        # A function: some modules hold mocks, which have every attribute.
        if isinstance(getattr(value, "_torchdynamo_orig_callable", None), types.FunctionType)
    ]
    return {
        "copies exist at all": had_copy,
        "function": token_dispatcher.maybe_move_tensor_to_cpu is moe_utils.maybe_move_tensor_to_cpu,
        "class": distrib_optimizer.Adam is FusedAdam,
        "rng": random._set_cuda_rng_state.__module__ == "nemo2.base.backend.cpu_patches",
        "nothing compiled": not compiled,
    }


def test_it_also_reaches_what_was_imported_before(run_on_ranks):
    assert in_one_process(run_on_ranks, copies_after_the_fact) == dict.fromkeys(
        ["copies exist at all", "function", "class", "rng", "nothing compiled"], True
    )


def devices() -> dict[str, set[str]]:
    from nemo2.base.backend import get_backend

    get_backend().install()
    x = torch.ones(2)
    tensors = {
        "name": torch.empty(2, device="cuda"),
        "name and index": torch.zeros(2, device="cuda:1"),
        "device": torch.tensor([1.0], device=torch.device("cuda")),
        "index": torch.arange(3, device=torch.cuda.current_device()),
        "pinned": torch.rand(2, device="cpu", pin_memory=True),
        "like": torch.empty_like(x, device="cuda"),
        "to name": x.to("cuda", non_blocking=True),
        "to device": x.to(device=torch.device("cuda", 0)),
        "to index": x.to(torch.cuda.current_device()),
        "cuda()": x.cuda(),
        "new": x.new_empty(3, device="cuda"),
        "pin": x.pin_memory(),
        "module": torch.nn.Linear(2, 2).cuda().weight,
    }
    on_meta = {"to meta": x.to("meta"), "empty on meta": torch.empty(2, device="meta")}
    with torch.device("meta"):
        on_meta |= {"by context": torch.empty(2), "module by context": torch.nn.Linear(2, 2).weight}
    assert x.to(torch.float64).dtype == torch.float64
    assert x.to(torch.ones(1, dtype=torch.int32)).dtype == torch.int32
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
        torch.cuda.synchronize()
        x.record_stream(torch.cuda.current_stream())
    return {
        "cpu": {name for name, tensor in tensors.items() if tensor.device.type != "cpu"},
        "meta": {name for name, tensor in on_meta.items() if tensor.device.type != "meta"},
        "available": {str(torch.cuda.is_available()), str(torch.ones(1).is_cuda)},
        "type": {torch.ones(1).type()},
    }


def test_cuda_means_cpu_and_other_devices_stay_what_they_are(run_on_ranks):
    answer = in_one_process(run_on_ranks, devices)
    assert answer == {"cpu": set(), "meta": set(), "available": {"False"}, "type": {"torch.FloatTensor"}}


def random_numbers() -> tuple[bool, bool, bool, int]:
    from megatron.core import tensor_parallel

    from nemo2.base.backend import get_backend

    class Counter(logging.Handler):
        seen = 0

        def emit(self, record):
            Counter.seen += 1

    logging.getLogger("megatron.core.tensor_parallel.random").addHandler(Counter())
    get_backend().install()
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 7)
    torch.manual_seed(1)
    outside = torch.get_rng_state()
    with tracker.fork():
        first = torch.rand(3)
    with tracker.fork():
        second = torch.rand(3)
    undisturbed = torch.equal(torch.get_rng_state(), outside)
    expected = torch.rand(6, generator=torch.Generator().manual_seed(7))
    torch.cuda.manual_seed(7)
    return (
        torch.equal(torch.cat([first, second]), expected),
        undisturbed,
        torch.equal(torch.rand(6), expected),
        Counter.seen,
    )


def test_megatrons_generators_work_and_do_not_disturb_the_default_one(run_on_ranks):
    assert in_one_process(run_on_ranks, random_numbers) == (True, True, True, 0)


def gloo_groups() -> list:
    """Threads of groups that were made before the backend came, with it, and without it again; and what eight coalesced gathers
    of the second, under way at once, brought."""
    import time

    from torch.distributed.distributed_c10d import _coalescing_manager

    from nemo2.base.backend.cpu import CpuBackend

    def running() -> int:
        return sum(task.read_text().startswith("pt_gloo") for task in Path("/proc/self/task").glob("*/comm"))

    def made(threads: int) -> tuple[int, Any]:
        before, group = running(), torch.distributed.new_group(timeout=timedelta(seconds=77))
        for _ in range(1000):  # until they have given themselves their names
            if running() - before >= threads:
                break
            time.sleep(0.01)
        time.sleep(0.1)
        return running() - before, group

    for _ in range(1000):  # the world group's threads too
        if running() >= 2:
            break
        time.sleep(0.01)
    backend = CpuBackend()
    before, _ = made(2)
    backend.install()
    threads, group = made(1)
    options = group._get_backend(torch.device("cpu")).options
    rank, parts, works = torch.distributed.get_rank(), [torch.zeros(2) for _ in range(8)], []
    for value, part in enumerate(parts):
        with _coalescing_manager(group, async_ops=True) as work:
            torch.distributed.all_gather_into_tensor(part, torch.tensor([value + rank / 2]), group=group)
        works.append(work)
    for work in works:
        work.wait()
    backend.uninstall()
    after, _ = made(2)
    return [before, threads, after, len(options._devices), options._timeout, [part.tolist() for part in parts]]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux for the threads of a process")
def test_collectives_of_a_gloo_group_run_in_one_thread(run_on_ranks):
    for answer in run_on_ranks(gloo_groups, 2):
        gathered = [[float(value), value + 0.5] for value in range(8)]
        assert answer == [2, 1, 2, 1, timedelta(seconds=77), gathered]


def devices_of_groups() -> int:
    from nemo2.base.backend.cpu import CpuBackend

    CpuBackend().install()
    cpu = torch.device("cpu")
    options: list[Any] = [torch.distributed.new_group()._get_backend(cpu).options for _ in range(3)]  # pyright: ignore
    devices = [device for one in options for device in one._devices]
    return len({id(device) for device in devices})


@pytest.mark.parametrize(("ranks", "devices"), [(1, 1), (2, 3)])
def test_groups_that_send_nothing_share_a_device(run_on_ranks, ranks, devices):
    """Ranks that share one for groups of several would wait for each other for ever."""
    assert run_on_ranks(devices_of_groups, ranks) == [devices] * ranks


def memory() -> tuple[dict[str, int], dict[str, int]]:
    from nemo2.base.backend import get_backend

    backend = get_backend()
    before = backend.memory_figures()
    block = torch.ones(50 * 2**20 // 4)
    after = backend.memory_figures()
    assert block.numel() > 0
    return before, after


def test_memory_figures_see_an_allocation(run_on_ranks):
    before, after = in_one_process(run_on_ranks, memory)
    assert 40 * 2**20 < after["allocated_bytes"] - before["allocated_bytes"] < 80 * 2**20
    assert after["allocated_bytes"] <= after["peak_bytes"] * 1.01
    assert after["peak_bytes"] < after["capacity_bytes"]


# ------------------------------------------------------------------------------------------------------ its settings


def test_overrides_name_real_fields_and_make_a_gpu_configuration_legal():
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo2.base.backend.cpu import CpuBackend

    overrides = CpuBackend().config_overrides()
    known = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert set(overrides) - known <= {"external_cuda_graph", "use_te_rng_tracker", "enable_cuda_graph"}
    assert all(reason for _, reason in overrides.values())
    asked_for = {
        "num_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "apply_rope_fusion": True,
        "gradient_accumulation_fusion": True,
        "deallocate_pipeline_outputs": True,
        "fp8": "hybrid",
    }
    config = TransformerConfig(**asked_for | {k: v for k, (v, _) in overrides.items() if k in known})
    assert not config.apply_rope_fusion and config.fp8 is None
