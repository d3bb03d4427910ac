# SPDX-License-Identifier: Apache-2.0
"""The pretend GPU against torch on the CPU: operators, NCCL, graphs, memory. `make pretend-gpu` runs this where it can run."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytestmark = pytest.mark.pretend_gpu

OPERATORS: dict[str, Callable[..., Tensor]] = {
    "matrix product": lambda a, b: a @ b.mT,
    "batched product": lambda a, b: torch.baddbmm(a @ a.mT, b, b.mT),
    "sums by broadcasting": lambda a, b: (a + b[:, :1]) * b - a / (b.abs() + 1),
    "in place": lambda a, b: a.clone().mul_(b).add_(1, alpha=2).clamp_(min=-1),
    "by a mask": lambda a, b: a.masked_fill(b > 0, -1).where(a > -2, b),
    "indexing": lambda a, b: a[:, [0, 2]] + b[..., 1:3, ::4].sum(-1, keepdim=True),
    "indices of the GPU": lambda a, b: a.gather(-1, b.argsort(-1)) + a.take_along_dim(b.argsort(-1), -1),
    "written by indices": lambda a, b: torch.zeros_like(a).index_put(
        (torch.tensor([0, 1]).to(a.device),), b, accumulate=True
    ),
    "scattered": lambda a, b: torch.zeros_like(a).scatter_add(-1, b.argsort(-1), a),
    "data-dependent shape": lambda a, b: a[b > 0].cumsum(0),
    "best two": lambda a, b: torch.cat([a.topk(2).values, b.sort(-1).values], -1),
    "reductions": lambda a, b: torch.stack([a.mean(), a.std(), b.amax(), b.logsumexp(-1).sum(), a.norm()]),
    "softmax": lambda a, b: a.softmax(-1) * b.log_softmax(0),
    "layer norm": lambda a, b: F.layer_norm(a, (8,), b[0, 0], b[0, 1]),
    "RMS norm": lambda a, b: F.rms_norm(a, (8,), b[0, 0], 1e-5),
    "activations": lambda a, b: F.gelu(a, approximate="tanh") + F.silu(b) * F.relu(a),
    "convolution": lambda a, b: F.conv1d(a, b[:, :, :3], padding=1),
    "causal attention": lambda a, b: F.scaled_dot_product_attention(a[None], b[None], a[None], is_causal=True),
    "cross entropy": lambda a, b: F.cross_entropy(a.flatten(0, 1), b.argmax(-1).flatten(), reduction="none"),
    "embedding": lambda a, b: F.embedding(b.argmax(-1).clamp(max=1), a[0]),
    "views that aren't dense": lambda a, b: torch.einsum(
        "bij,bkj->bik", a.transpose(0, 1)[::2], b.transpose(0, 1)[::2]
    ),
    "several at once": lambda a, b: torch.stack(torch._foreach_mul([a, b], [b, b])),  # pyright: ignore[reportPrivateImportUsage]
    "complex numbers": lambda a, b: torch.fft.ifft(torch.complex(a, b)).real,
}


def test_operators_compute_too_where_somebody_looked_for_torch_before_it_was_imported():
    program = (
        "import importlib.util; importlib.util.find_spec('torch'); import torch; print(torch.ones(2, device='cuda'))"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert answer.stdout == "tensor([1., 1.], device='cuda:0')\n", answer.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_and_its_gradients_are_those_of_the_cpu(name, dtype):
    if name == "complex numbers":
        dtype = torch.float64  # of 16 bits there are none
    generator = torch.Generator().manual_seed(0)
    factors = [torch.randn(2, 4, 8, generator=generator).to(dtype) for _ in range(2)]
    results = []
    for device in ("cpu", "cuda"):
        a, b = (tensor.clone().to(device).requires_grad_() for tensor in factors)
        value = OPERATORS[name](a, b)
        assert value.device.type == device
        value.square().sum().backward()
        results.append([part.detach().cpu() for part in (value, a.grad, b.grad) if part is not None])
    rounding = 1e-5 if name == "RMS norm" else 0.0  # CUDA's norm is one kernel, of which the CPU has none
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu, cpu, rtol=rounding, atol=rounding)


def test_an_optimizer_under_autocast_learns_as_on_the_cpu():
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to(device)
        data, targets = torch.randn(32, 8).to(device), torch.arange(32).remainder(4).to(device)
        optimizer, found = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), []
        for _ in range(5):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(data).float(), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    assert losses("cuda") == pytest.approx(losses("cpu"), rel=1e-5)


def test_random_numbers_follow_from_the_seed_and_go_on():
    torch.cuda.manual_seed(5)
    first, second = torch.randn(100, device="cuda"), torch.randn(100, device="cuda")
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.randn(100, device="cuda"), first) and not torch.equal(first, second)
    assert 0.2 < (F.dropout(torch.ones(1000, device="cuda"), 0.5) == 0).float().mean().item() < 0.8


def test_a_tensor_of_the_cpu_among_those_of_a_gpu_is_an_error():
    with pytest.raises(RuntimeError):
        torch.mm(torch.ones(2, 2, device="cuda"), torch.ones(2, 2))
    with pytest.raises(RuntimeError):
        torch.add(torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1"))


def test_memory_is_counted_and_ends():
    torch.cuda.empty_cache()
    before, total = torch.cuda.mem_get_info()
    tensor = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[0] == before - (1 << 30)
    assert torch.cuda.get_device_properties(0).total_memory == total
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device="cuda")
    del tensor
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == before


def test_events_and_streams_in_order():
    stream, start, end = torch.cuda.Stream(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with torch.cuda.stream(stream):
        doubled = torch.ones(3, device="cuda") * 2
    torch.cuda.current_stream().wait_stream(stream)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) > 0 and doubled.tolist() == [2, 2, 2]


def test_a_graph_computes_forward_and_backward_anew_at_each_replay():
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.RMSNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 4)
    ).cuda()
    placeholder = torch.randn(3, 8, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(placeholder).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = model(placeholder)
        result.sum().backward()
    for _ in range(2):
        data = torch.randn(3, 8, device="cuda")
        placeholder.copy_(data)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.zero_()
        graph.replay()
        again = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        expected = model(data)
        gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
        torch.testing.assert_close(result, expected)
        for replayed, eager in zip(again, gradients, strict=True):
            torch.testing.assert_close(replayed, eager)


def test_a_graph_refuses_what_waits_for_the_gpu():
    ones = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ones.sum().item()
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            ones.copy_(torch.zeros(4))  # memory that isn't pinned
    torch.cuda.synchronize()


def collectives() -> dict[str, Any]:
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    found: dict[str, Any] = {"backend": dist.get_backend()}

    def on_gpu(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, device="cuda", dtype=dtype)

    total = on_gpu(rank + 1, 2)
    dist.all_reduce(total)
    gathered = torch.empty(2 * world, device="cuda", dtype=torch.bfloat16)
    dist.all_gather_into_tensor(gathered, on_gpu(rank, rank + 0.5, dtype=torch.bfloat16))
    scattered = torch.empty(2, device="cuda")
    dist.reduce_scatter_tensor(scattered, torch.arange(2.0 * world, device="cuda"), op=dist.ReduceOp.AVG)
    sent = on_gpu(10 * rank)
    dist.broadcast(sent, src=world - 1)
    exchanged = torch.empty(3, device="cuda")  # rank 0 sends one element to itself and two to rank 1, and so on
    parts = ([1, 2], [1, 2]) if rank == 0 else ([2, 1], [2, 1])
    dist.all_to_all_single(exchanged, torch.arange(3.0, device="cuda") + 10 * rank, *parts)
    received = torch.empty(1, device="cuda")
    operations = [
        dist.P2POp(dist.isend, on_gpu(rank), (rank + 1) % world),
        dist.P2POp(dist.irecv, received, (rank - 1) % world),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    found |= {"objects": objects}
    values = {"sum": total, "gathered": gathered, "scattered": scattered, "sent": sent, "exchanged": exchanged}
    return found | {name: value.tolist() for name, value in (values | {"received": received}).items()}


def test_nccl_moves_data_between_processes(run_on_ranks):
    first, second = run_on_ranks(collectives, 2)
    assert first["backend"] == "nccl"
    assert first["sum"] == second["sum"] == [3, 4]
    assert first["gathered"] == second["gathered"] == [0, 0.5, 1, 1.5]
    assert (first["scattered"], second["scattered"]) == ([0, 1], [2, 3])
    assert first["sent"] == second["sent"] == [10]
    assert (first["exchanged"], second["exchanged"]) == ([0, 10, 11], [1, 2, 12])
    assert (first["received"], second["received"]) == ([1], [0])
    assert first["objects"] == [{"rank": 0}, {"rank": 1}]


def test_a_launch_writes_where_the_capture_wrote_though_a_tensor_has_other_memory_by_now():
    source = torch.ones(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = source * 2
        total = doubled.sum()
        doubled.data = torch.empty(1, device="cuda")
    source.fill_(3)
    graph.replay()
    assert total.item() == 24


def replayed_messages() -> list[float]:
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    sent, received = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, (rank + 1) % world),
            dist.P2POp(dist.irecv, received, (rank - 1) % world),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    exchange()  # outside, because it makes the communicator
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exchange()
    found = []
    for step in (1, 2):
        sent.fill_(10 * rank + step)
        graph.replay()
        found.append(received.item())
    return found


def test_messages_between_ranks_are_captured_and_move_at_each_replay(run_on_ranks):
    assert run_on_ranks(replayed_messages, 2) == [[11, 12], [1, 2]]


def unequal_counts() -> None:
    rank = torch.distributed.get_rank()
    torch.cuda.set_device(rank)
    torch.distributed.all_reduce(torch.ones(2 + rank, device="cuda"))
    torch.cuda.synchronize()


def test_nccl_refuses_ranks_that_call_something_else(run_on_ranks):
    with pytest.raises(AssertionError, match="NCCL"):
        run_on_ranks(unequal_counts, 2)


def device_counts() -> set[int]:
    """NVML's, which torch reads before it starts CUDA, and CUDA's."""
    before = torch.cuda.device_count()
    return {before, torch._C._cuda_getDeviceCount()}


@pytest.mark.parametrize(("visible", "count"), [("1", 1), ("2,3", 2), ("0,9,1", 1)])
def test_visible_devices_are_chosen_as_cuda_does(run, visible, count):
    assert run(device_counts, 1, env={"CUDA_VISIBLE_DEVICES": visible}) == {count}
