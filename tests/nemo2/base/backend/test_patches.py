# SPDX-License-Identifier: Apache-2.0
"""Every function of another library that nemo2 replaces, and whether the library still needs it.

A test here fails when a library has mended what a replacement is for, or another module replaces something.
"""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from support.modules import modules

OTHERS = {
    "nemo2.checkpoint.reading": {"megatron.core.dist_checkpointing.strategies.torch._get_filesystem_reader"},
    "nemo2.checkpoint.untrusted": {"torch.load"},
    "nemo2.checkpoint.writing": {
        "megatron.core.dist_checkpointing.strategies.filesystem_async._results_queue",
        "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlanner",
        "torch.utils.serialization.config.save.compute_crc32",
    },
    "nemo2.base.backend.cpu_patches": {"torch.Tensor.type"},
    "nemo2.base.backend.results_queue": {"megatron.core.dist_checkpointing.strategies.filesystem_async._results_queue"},
    "nemo2.base.backend.te_version": {"megatron.core.utils._te_version"},
    "nemo2.config.located": {"fiddle._src.history._location_provider"},
    "nemo2.config.tree": {"fiddle._src.signatures.SignatureInfo.signature_binding"},
    "nemo2.data.index_cache": {"numpy.load", "numpy.save"},
    "nemo2.data.hub": {"huggingface_hub.constants.HF_HUB_OFFLINE"},
    "nemo2.llm.evaluation.task_files": {"lm_eval.utils.env"},
    "nemo2.launch.experiment": {"sky.utils.common_utils.dump_yaml_str"},
    "nemo2.models.fused_gradients": {"megatron.core.tensor_parallel.layers._grad_accum_fusion_available"},
    "nemo2.preflight.rehearse.tracker": {"torch.UntypedStorage.resize_"},
    "nemo2.report.trace.recorder": {"torch._C._distributed_c10d.ProcessGroup"},
}
"""Replacements outside the tables of `Patch`, by the module that makes them. It says why."""

# ------------------------------------------------------------------------------------------------ what needs a patch


def raises(work: Callable[[], Any]) -> bool:
    try:
        work()
    except (AssertionError, RuntimeError):
        return True
    return False


def source(target: str) -> str:
    """The code of a patch's target: of the function, or of the module if it is a constant."""
    from nemo2.base.backend.patching import Patch

    owner, name = Patch(target=target, replacement=None, why="").resolve()
    value = getattr(owner, name)
    return inspect.getsource(value if inspect.isfunction(value) or inspect.isclass(value) else owner)


def still_noted_for_later(set_state: Callable[[torch.Tensor], None]) -> bool:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    set_state(state)
    return not torch.equal(torch.get_rng_state(), state)


def needs() -> dict[str, bool]:
    """Whether each target that a table replaces still has the fault that its row names. Called without patches."""
    from megatron.core import jit, optimizer
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from megatron.core.optimizer import distrib_optimizer
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils

    from nemo2.base.backend.cpu import _patches
    from nemo2.base.backend.cpu_patches import _FACTORIES
    from nemo2.base.backend.te_absent import kernel_patches

    gloo: Any = torch.distributed.distributed_c10d.ProcessGroupGloo
    cuda, tensor, x = torch.cuda, torch.Tensor, torch.ones(1)
    without_cuda = torch.version.cuda is None  # builds with CUDA have these without a GPU
    moe, rng, megatron = (
        "megatron.core.transformer.moe.moe_utils",
        "megatron.core.tensor_parallel.random",
        "megatron.core",
    )
    fsdp, files = f"{megatron}.distributed.fsdp.mcore_fsdp_adapter", f"{megatron}.dist_checkpointing"
    called = calls_with_a_device(Path(inspect.getfile(jit)).parent)
    arguments: dict[str, Any] = {"arange": (1,), "full": ((1,), 0), "tensor": (1,), "empty_like": (x,)}

    def factory(name: str) -> Any:
        return x.new_empty if name == "Tensor.new_empty" else getattr(torch, name)

    return {
        "torch.cuda:current_device": raises(cuda.current_device),
        "torch.cuda:synchronize": raises(cuda.synchronize),
        "torch.cuda:Stream": raises(cuda.Stream),
        "torch.cuda:Event": raises(lambda: cuda.Event().record()),
        "torch.cuda:stream": raises(lambda: cuda.stream(cuda.Stream())),
        "torch.cuda:current_stream": raises(cuda.current_stream),
        "torch.cuda:default_stream": raises(cuda.default_stream),
        "torch.cuda:is_current_stream_capturing": raises(cuda.is_current_stream_capturing),
        "torch.cuda.nvtx:range_push": not without_cuda or raises(lambda: cuda.nvtx.range_push("")),
        "torch.cuda.nvtx:range_pop": not without_cuda or raises(cuda.nvtx.range_pop),
        "torch.cuda.nvtx:range": not without_cuda or raises(lambda: cuda.nvtx.range("").__enter__()),
        "torch.cuda:manual_seed": still_noted_for_later(lambda _: cuda.manual_seed(1)),
        "torch.cuda:get_rng_state": raises(cuda.get_rng_state),
        "torch.cuda.random:get_rng_state": raises(cuda.random.get_rng_state),
        "torch.cuda:set_rng_state": still_noted_for_later(cuda.set_rng_state),
        **{
            f"torch:{name}": raises(lambda name=name: factory(name)(*arguments.get(name, (1,)), device="cuda"))
            and name.split(".")[-1] in called
            for name in _FACTORIES
        },
        "torch:Tensor.to": raises(lambda: x.to("cuda")),
        "torch:Tensor.cuda": raises(x.cuda),
        "torch:Tensor.pin_memory": raises(x.pin_memory),
        "torch:Tensor.record_stream": raises(lambda: tensor.record_stream(x, torch.Stream(device="cpu"))),
        f"{megatron}.jit:jit_fuser": hasattr(jit.jit_fuser(lambda x: x), "_torchdynamo_orig_callable"),
        f"{rng}:_set_cuda_rng_state": still_noted_for_later(random._set_cuda_rng_state),
        f"{rng}:CheckpointWithoutOutput.__init__": bool(random.CheckpointWithoutOutput(fp8=False).fp8),
        **only(">=0.17", {f"{rng}:_get_share_storage": lambda: "load_inline" in source(f"{rng}:_get_share_storage")}),
        f"{moe}:maybe_move_tensor_to_cpu": torch.is_tensor(moe_utils.maybe_move_tensor_to_cpu(x, as_numpy=True)),
        f"{megatron}.tensor_parallel.mappings:_gather_along_first_dim": True,  # a test of two ranks asks gloo
        f"{megatron}.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.__init__": "current_device()"
        in source(f"{megatron}.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding.__init__"),
        "torch.distributed.device_mesh:DeviceMesh.from_group": bool(
            re.search(r'from_group\([^)]*"cuda"', source(f"{fsdp}:FullyShardedDataParallel"))
        ),
        "torch.distributed.distributed_c10d:ProcessGroupGloo.__init__": gloo._Options()._threads > 1,
        **only(
            "<0.19",
            {
                f"{megatron}.transformer.multi_latent_attention:HAVE_TE": lambda: multi_latent_attention.HAVE_TE,
                f"{fsdp}:TELinear": lambda: "(TELinear,)" in source(f"{fsdp}:FullyShardedDataParallel"),
            },
        ),
        **{
            f"{megatron}.optimizer.{name}": "torch.cuda."
            in source(f"{megatron}.optimizer.{name.removesuffix('.__init__')}")
            for name in (
                "optimizer:Float16OptimizerWithFloat16Params.__init__",
                "distrib_optimizer:DistributedOptimizer.__init__",
                "clip_grads:clip_grad_by_total_norm_fp32",
            )
        },
        f"{moe}:te_general_gemm": "te_general_gemm is not None" in inspect.getsource(moe_utils),
        **{patch.target: "transformer_engine" in inspect.getsource(patch.resolve()[0]) for patch in kernel_patches()},
        f"{megatron}.optimizer:Adam": optimizer.Adam is torch.optim.AdamW,
        f"{megatron}.optimizer:CPUAdam": optimizer.CPUAdam is optimizer.Adam,
        f"{megatron}.optimizer:USING_PYTORCH_OPTIMIZER": optimizer.USING_PYTORCH_OPTIMIZER,
        f"{megatron}.optimizer.distrib_optimizer:Adam": distrib_optimizer.Adam is torch.optim.Adam,
        f"{megatron}.optimizer.distrib_optimizer:HAVE_APEX_OR_TE": not distrib_optimizer.HAVE_APEX_OR_TE,
        f"{megatron}.optimizer.distrib_optimizer:USING_APEX_OPTIMIZER": not distrib_optimizer.USING_APEX_OPTIMIZER,
        **{
            patch.target: "spawn" in source(patch.target)
            for patch in _patches()
            if patch.target.endswith("get_write_results_queue")
        },
        f"{files}.mapping:ShardedTensor.init_data": inspect.signature(ShardedTensor.init_data)
        .parameters["init_fn"]
        .default
        is torch.empty,
    }


def only(versions: str, rows: dict[str, Callable[[], bool]]) -> dict[str, bool]:
    from megatron.core import __version__

    applies = Version(__version__) in SpecifierSet(versions, prereleases=True)
    return {target: still() for target, still in rows.items()} if applies else {}


def calls_with_a_device(folder: Path) -> set[str]:
    """The last names of functions that a folder's files call with a device or page-locked memory."""
    calls = (node for file in folder.rglob("*.py") for node in ast.walk(ast.parse(file.read_text())))
    return {
        node.func.attr
        for node in calls
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and any(keyword.arg in ("device", "pin_memory") for keyword in node.keywords)
    }


def asked() -> tuple[dict[str, bool], list[str]]:
    from megatron.core import __version__

    from nemo2.base.backend.cpu import _patches

    return needs(), [patch.target for patch in _patches() if patch.applies_to(__version__)]


def test_every_replaced_function_still_needs_it(run_on_ranks: Any) -> None:
    ((needed, replaced),) = run_on_ranks(asked, 1, init_process_group=False)
    assert sorted(needed) == sorted(replaced), "a row without a reason to stay, or a reason without a row"
    assert [target for target, still in needed.items() if not still] == [], "mended: remove the row"


def gathers_uneven_shards() -> bool:
    import torch.distributed as dist

    shards = [torch.ones(2), torch.ones(3)]
    return not raises(lambda: dist.all_gather([torch.empty(2), torch.empty(3)], shards[dist.get_rank()]))


def test_gloo_still_gathers_no_shards_of_different_lengths(run_on_ranks: Any) -> None:
    assert run_on_ranks(gathers_uneven_shards, 2) == [False, False]


# ------------------------------------------------------------------------------------------------ who replaces what


def replaced_by(file: Path) -> Iterator[str]:
    """The attributes of other packages' modules and classes that a file sets."""
    tree = ast.parse(file.read_text())
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    own = {argument.arg for node in ast.walk(tree) if isinstance(node, ast.arguments) for argument in node.args}
    for node in ast.walk(tree):
        targets = (
            [target for target in node.targets if isinstance(target, ast.Attribute)]
            if isinstance(node, ast.Assign)
            else ()
        )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr":
            targets = node.args[:1] if isinstance(node.args[0], ast.Name) else ()
        paths = [ast.unparse(target) for target in targets]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "replaced":
            paths = [f"{ast.unparse(node.args[0])}.{keyword.arg}" for keyword in node.keywords]
        for path in paths:
            first, dot, rest = path.partition(".") if path.replace(".", "").isidentifier() else ("self", "", "")
            package = names.get(first, "nemo2").split(".")[0]
            if first not in own and (dot or isinstance(node, ast.Call)) and package not in ("nemo2", "sys", "os"):
                yield f"{names[first]}{dot}{rest}"


def test_nobody_else_replaces_anything() -> None:
    found = {module: set(replaced_by(file)) for module, file in modules().items()}
    assert {module: names for module, names in found.items() if names} == OTHERS
