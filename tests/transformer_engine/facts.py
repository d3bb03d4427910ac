# SPDX-License-Identifier: Apache-2.0
"""Checks of each version of Transformer Engine, measured: tests/transformer_engine/<version>.json, a table per wheel.

    pip download --no-deps -d wheels transformer-engine==2.17.0
    python -m tests.transformer_engine.facts wheels/*.whl

Each wheel's own Python code is imported (`sources.py`) and called, to find which calls are refused and with
which words, in which order calls may come, and which buffers exist then. No code is copied: a table holds names,
signatures and answers. The tests' stand-in answers from these tables, and `--check` compares them with the wheels.
"""

import argparse
import ast
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

ROOT = Path(__file__).resolve().parents[2]
TABLES = ROOT / "tests" / "transformer_engine"
GEMMS = ("qkv", "proj", "fc1", "fc2")
TOKENS, HIDDEN, TP = 16, 8, 2

CALLED = {
    "transformer_engine.pytorch": (
        "Linear",
        "LayerNormLinear",
        "LayerNormMLP",
        "GroupedLinear",
        "LayerNorm",
        "RMSNorm",
        "DotProductAttention",
        "fp8_autocast",
        "autocast",
        "fp8_model_init",
        "quantized_model_init",
        "make_graphed_callables",
        "CudaRNGStatesTracker",
        "checkpoint",
        "get_cpu_offload_context",
        "moe_permute",
        "moe_unpermute",
        "moe_sort_chunks_by_index",
        "parallel_cross_entropy",
    ),
    "transformer_engine.pytorch.module.base": ("initialize_ub", "destroy_ub", "get_dummy_wgrad", "get_workspace"),
    "transformer_engine.pytorch.optimizers": ("FusedAdam", "FusedSGD", "multi_tensor_applier"),
    "transformer_engine.pytorch.fp8": (
        "FP8GlobalStateManager",
        "check_fp8_support",
        "check_mxfp8_support",
        "FP8GlobalStateManager.add_fp8_tensors_to_global_buffer",
        "FP8GlobalStateManager.get_fp8_group",
        "FP8GlobalStateManager.get_fp8_recipe",
        "FP8GlobalStateManager.is_fp8_enabled",
        "FP8GlobalStateManager.reduce_and_update_fp8_tensors",
        "FP8GlobalStateManager.set_skip_fp8_weight_update_tensor",
        "fp8_autocast",
        "fp8_model_init",
    ),
    "transformer_engine.pytorch.graph": (
        "make_graphed_callables",
        "save_original_graph",
        "restore_fp8_tensors",
        "save_fp8_tensors",
        "set_capture_end",
        "set_capture_start",
    ),
    "transformer_engine.pytorch.distributed": (
        "CudaRNGStatesTracker",
        "activation_recompute_forward",
        "checkpoint",
        "gather_along_first_dim",
        "get_all_rng_states",
        "in_fp8_activation_recompute_phase",
        "is_fp8_activation_recompute_enabled",
        "reduce_scatter_along_first_dim",
    ),
    "transformer_engine.pytorch.attention": ("DotProductAttention", "apply_rotary_pos_emb", "FusedRoPEFunc"),
    "transformer_engine.pytorch.attention.rope": ("apply_rotary_pos_emb", "apply_fused_qkv_rotary_pos_emb"),
    "transformer_engine.pytorch.tensor": ("QuantizedTensor",),
    "transformer_engine.pytorch.float8_tensor": ("Float8Tensor", "Float8Tensor.make_like"),
    "transformer_engine.pytorch.tensor.utils": (
        "cast_master_weights_to_fp8",
        "post_all_gather_processing",
        "quantize_master_weights",
        "replace_raw_data",
    ),
    "transformer_engine.common.recipe": (
        "DelayedScaling",
        "Float8CurrentScaling",
        "Float8BlockScaling",
        "MXFP8BlockScaling",
        "NVFP4BlockScaling",
        "CustomRecipe",
        "Format",
    ),
    "transformer_engine.pytorch.cpp_extensions": ("cast_to_fp8", "general_gemm", "rmsnorm_fwd"),
    "transformer_engine.pytorch.cpu_offload": ("get_cpu_offload_context",),
    "transformer_engine.pytorch.cross_entropy": ("parallel_cross_entropy",),
    "transformer_engine.pytorch.ep": (
        "EpBuffer",
        "ep_bootstrap",
        "ep_combine",
        "ep_dispatch",
        "ep_finalize",
        "is_symm_backed",
        "symm_mem_alloc",
    ),
    "transformer_engine.pytorch.ops": (
        "AllReduce",
        "BasicLinear",
        "Bias",
        "GroupedLinear",
        "LayerNorm",
        "MakeExtraOutput",
        "RMSNorm",
        "ReduceScatter",
        "ScaledClampedQGeGLU",
        "ScaledSReLU",
        "ScaledSwiGLU",
        "Sequential",
    ),
    "transformer_engine.pytorch.utils": (
        "make_weak_ref",
        "nvtx_range_pop",
        "nvtx_range_push",
        "round_up_to_nearest_multiple",
    ),
    "transformer_engine_torch": ("thd_get_partitioned_indices",),
}
"""The functions and classes that Megatron-Core and nemo2 use, by module."""


# --------------------------------------------------------------------------------------------------------- one version


def measure(directory: Path) -> dict[str, Any]:
    """The table of one version, but for what steps say."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from tests.transformer_engine.sources import import_sources

    te = import_sources(directory)
    without_group = _outcome(lambda: _start())
    torch.distributed.init_process_group("fake", rank=0, world_size=TP, store=FakeStore())
    torch.distributed.new_group = lambda **kwargs: torch.distributed.group.WORLD
    for name in ("get_workspace", "get_cublas_workspace_size_bytes"):
        if hasattr(_base(), name):
            setattr(_base(), name, lambda: torch.zeros(1, dtype=torch.uint8))
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    return {
        "version": te.__version__,
        "signatures": dict(_signatures()),
        "userbuffers": {
            "without_process_group": without_group,
            "twice": _outcome(lambda: _start(), lambda: _start()),
            "after_destroy": _outcome(lambda: _start(), _base().destroy_ub, lambda: _start()),
            "other_size_after_destroy": _outcome(
                lambda: _start(), _base().destroy_ub, lambda: _base().initialize_ub([2 * TOKENS, HIDDEN], TP)
            ),
            "destroyed_twice": _outcome(lambda: _start(), _base().destroy_ub, _base().destroy_ub),
            "asked_after_destroy": _outcome(lambda: _start(), _base().destroy_ub, lambda: _ask("qkv_fprop")),
            "asked_before_start": _outcome(lambda: _ask("qkv_fprop")),
            "unknown_backend": _outcome(lambda: _start(bootstrap_backend="ucc")),
            "buffers": {mode: _buffers(mode) for mode in ("none", "fp8")},
            "methods": _methods(),
            "beside_wgrad": _outcome(
                lambda: _start(ub_cfgs={"fc1_dgrad": {"method": "pipeline"}, "fc1_wgrad": {"num_sm": 2}})
            ),
            "atomic_in_16_bits": _outcome(lambda: _start(ub_cfgs={"qkv_fprop": {"atomic_gemm": True}})),
            "two_modes": _two_modes(),
            "beside_a_delayed_wgrad": _outcome(
                lambda: _start(),
                lambda: _build(te.pytorch.Linear, "column", ub_bulk_wgrad=True, delay_wgrad_compute=True),
            ),
            "mxfp8_rows": _mxfp8_rows(),
        },
        "layers": {name: _layer(getattr(te.pytorch, name)) for name in ("Linear", "LayerNormLinear", "LayerNormMLP")},
        "asked_for": {
            name: sorted(_asked_for(directory, name)) for name in ("linear", "layernorm_linear", "layernorm_mlp")
        },
        "quantizers": _quantizers(),
        "extra_states": {name: _extra_state(name) for name in ("Linear", "LayerNormLinear", "DotProductAttention")},
    }


def measure_steps(directory: Path) -> dict[str, Any]:
    """The results of steps in each number format and of attention over several ranks. Runs in a separate process with
    another world."""
    from tests.transformer_engine.attention import attention, exchange_groups
    from tests.transformer_engine.backends import backends
    from tests.transformer_engine.graphs import graphs
    from tests.transformer_engine.sources import import_sources
    from tests.transformer_engine.steps import formats, prepare

    prepare(import_sources(directory).__version__)
    found = {"formats": formats(), "graphs": graphs()}  # before the exchanges, which leave no other rank
    _any_back_end()
    found |= {"attention": attention(), "exchange_groups": exchange_groups()}
    return found | {"backends": backends()}  # last, for flash-attn is there from here on


def _any_back_end() -> None:
    """Megatron-Core's choice for the steps stays in the environment of the process."""
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        os.environ.pop(name, None)


def _base() -> Any:
    return sys.modules["transformer_engine.pytorch.module.base"]


def _start(mode: str = "none", **options: Any) -> None:
    base = _base()
    modes = getattr(base, "UserBufferQuantizationMode", None)
    if modes is None:
        options.setdefault("use_fp8", mode == "fp8")
    else:
        options.setdefault("quantization_modes", [modes(mode)])
    base.initialize_ub([TOKENS, HIDDEN], TP, **options)


def _ask(name: str) -> Any:
    get_ub = _base().get_ub
    return get_ub(name, False) if "use_fp8" in inspect.signature(get_ub).parameters else get_ub(name)


def _outcome(*calls: Callable[[], Any]) -> str | None:
    """The refusal of the last call. None: it isn't refused. Buffers are destroyed before and after."""
    _base().destroy_ub()
    for call in calls[:-1]:
        call()
    try:
        calls[-1]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        _base().destroy_ub()
    return None


def _buffers(mode: str) -> dict[str, list[str]]:
    """For each GEMM, the kind of its buffer, its collective, and whether the buffer holds bytes."""
    _start(mode)
    found = {}
    for key, buffer in _base()._ub_communicators.items():
        kind = buffer.args[4] if type(buffer).__name__ == "CommOverlapP2P" else None
        found[key if isinstance(key, str) else key[0]] = [
            type(buffer).__name__,
            "either" if kind is None else kind.name,
            "8 bits" if buffer.is_fp8_ubuf() else "16 bits",
        ]
    _base().destroy_ub()
    return found


def _methods() -> dict[str, dict[str, str | None]]:
    names = [f"{gemm}_{part}" for gemm in GEMMS for part in ("fprop", "dgrad", "wgrad")]
    methods = ("ring_exchange", "pipeline", "bulk")
    return {
        name: {method: _outcome(lambda n=name, m=method: _start(ub_cfgs={n: {"method": m}})) for method in methods}
        for name in names
    }


def _two_modes() -> dict[str, str | None] | None:
    modes = getattr(_base(), "UserBufferQuantizationMode", None)
    if modes is None:
        return None
    both = [modes.FP8, modes.NONE]
    scattered = {"fc1_dgrad": {"method": "pipeline", "num_sm": 2}}
    atomic = {"qkv_fprop": {"atomic_gemm": True}, "proj_fprop": {"atomic_gemm": True, "method": "ring_exchange"}}

    def start(settings: Any) -> str | None:
        return _outcome(lambda: _start(quantization_modes=both, ub_cfgs=settings))

    return {
        "plain": start(None),
        "scattered dgrad": start(scattered),
        "scattered dgrad, its method said once": start([scattered, {"fc1_dgrad": {"num_sm": 2}}]),
        "atomic, in the first set only": start([atomic, {"proj_fprop": {"method": "ring_exchange"}}]),
    }


def _layer(cls: type) -> dict[str, Any]:
    """By sharding mode and switch: whether the layer is refused before and after the buffers are started, and the
    switches that are then on."""
    flags = [name for name in inspect.signature(cls).parameters if name.startswith("ub_") and name != "ub_name"]
    cuts = ("column", "row") if cls.__name__ == "Linear" else ("column",)
    table: dict[str, Any] = {}
    for cut in cuts:
        for flag in flags:

            def build(cut: str = cut, flag: str = flag) -> Any:
                return _build(cls, cut, **{flag: True})

            before = _outcome(build)
            after = _outcome(lambda: _start(), build)
            _start()
            on = sorted(name for name, value in vars(build()).items() if name.startswith("ub_") and value is True)
            _base().destroy_ub()
            table[f"{cut} {flag}"] = {"before_start": before, "after_start": after, "on": on}
    return table


def _build(cls: Any, cut: str, **flags: bool) -> Any:
    common: dict[str, Any] = {"device": "cpu", "params_dtype": torch.float32, "sequence_parallel": True, "tp_size": TP}
    if cls.__name__ == "LayerNormMLP":
        return cls(HIDDEN, 2 * HIDDEN, set_parallel_mode=True, **common, **flags)
    return cls(HIDDEN, 2 * HIDDEN, parallel_mode=cut, ub_name="qkv" if cut == "column" else "proj", **common, **flags)


def _extra_state(layer: str) -> dict[str, Any]:
    """The extra state of a layer that computes in 16 bits, and how it takes a checkpoint without that: inside a
    model, where its name is one that Megatron-Core gives."""
    from torch import nn

    cls = getattr(sys.modules["transformer_engine"].pytorch, layer)
    sizes = {} if layer == "DotProductAttention" else {"device": "cpu", "params_dtype": torch.float32}
    model = nn.ModuleDict({"core_attention": cls(2, 4, **sizes)})
    state = {name: value for name, value in model.state_dict().items() if not name.endswith("_extra_state")}
    kept = model["core_attention"].get_extra_state()  # pyright: ignore[reportCallIssue]
    size = None if kept is None else kept.numel() if isinstance(kept, torch.Tensor) else len(kept.getvalue())
    return {
        "bytes": size,
        "without": _outcome(lambda: model.load_state_dict(state)),
        "empty": _outcome(lambda: _take(model)),
    }


def _take(model: Any) -> None:
    model["core_attention"].set_extra_state(torch.empty(0, dtype=torch.uint8))


def _asked_for(directory: Path, name: str) -> Iterator[str]:
    """The buffer that a layer looks up for each switch ("ub_bulk_dgrad _dgrad"), from the conditions around the
    look-ups."""
    tree = ast.parse((directory / "transformer_engine/pytorch/module" / f"{name}.py").read_text())
    seen = set()

    def visit(node: ast.AST, switches: tuple[str, ...]) -> None:
        if isinstance(node, ast.If):
            asked = [part for part in ast.walk(node.test) if isinstance(part, (ast.Name, ast.Attribute))]
            names = [part.id if isinstance(part, ast.Name) else part.attr for part in asked]
            inside = tuple(one for one in names if one.startswith("ub_") and not one.startswith("ub_obj"))
            for child in node.body:
                visit(child, inside or switches)
            for child in node.orelse:
                visit(child, switches)
            return
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "get_ub":
            parts = [one.value for one in ast.walk(node.args[0]) if isinstance(one, ast.Constant)]
            seen.update(f"{switch} {part}" for switch in switches for part in parts)
        for child in ast.iter_child_nodes(node):
            visit(child, switches)

    visit(tree, ())
    return iter(seen)


def _quantizers() -> dict[str, str | None] | str:
    """Whether a quantizer's tensors can be sent in userbuffers, by quantizer. A sentence if a version states it for all
    of them."""
    base = _base()
    fill = getattr(base, "fill_userbuffers_buffer_for_all_gather", None)
    if fill is None:
        return "Comm+GEMM overlap is only supported with FP8 delayed scaling or per-tensor current scaling"
    tensors = __import__("transformer_engine.pytorch.tensor", fromlist=["*"])
    found = {}
    names = (
        "Float8Quantizer",
        "Float8CurrentScalingQuantizer",
        "MXFP8Quantizer",
        "Float8BlockQuantizer",
        "NVFP4Quantizer",
    )
    for name in names:
        cls = getattr(tensors, name, None) or _somewhere(name)
        if cls is None:
            continue
        comm = SimpleNamespace(with_cublasmp=lambda: False, is_fp8_ubuf=lambda: False)
        found[name] = None
        try:
            fill(comm, torch.zeros(2, 2), MagicMock(spec=cls), None)
        except Exception as error:  # any other: it got further than the question whether the format is known
            if "Unsupported quantizer" in str(error):
                found[name] = str(error).split("(")[0].strip()
    return found


def _mxfp8_rows() -> dict[str, str | None] | None:
    """Whether an MXFP8 tensor can be sent in userbuffers, by its number of rows. None: no such tensor can."""
    fill = getattr(_base(), "fill_userbuffers_buffer_for_all_gather", None)
    if fill is None:
        return None
    quantizer = MagicMock(spec=_somewhere("MXFP8Quantizer"), rowwise_usage=True, columnwise_usage=False)
    cls = _somewhere("MXFP8TensorStorage") or _somewhere("MXFP8TensorBase")
    found: dict[str, str | None] = {}
    for rows in (64, 128, 192, 256):
        tensor = MagicMock(spec=cls, _with_gemm_swizzled_scales=False)
        tensor.size, tensor._rowwise_scale_inv = lambda rows=rows: torch.Size((rows, 32)), torch.zeros(rows, 1)
        tensor._rowwise_data = None
        comm = MagicMock(with_cublasmp=lambda: False, is_fp8_ubuf=lambda: True)
        try:
            fill(comm, tensor, quantizer, None)
        except Exception as error:  # any other: it got further than the question
            found[str(rows)] = str(error).split(",")[0] if "divisible" in str(error) else None
        else:
            found[str(rows)] = None
    return found


def _somewhere(name: str) -> Any:
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("transformer_engine.pytorch.tensor") and hasattr(module, name):
            return getattr(module, name)
    return None


def _signatures() -> Iterator[tuple[str, list[str] | None]]:
    """The parameters with their defaults, by name of the function. None: the version lacks the function."""
    for module_name, names in CALLED.items():
        try:
            module = __import__(module_name, fromlist=["*"])
        except ImportError:
            module = None
        for name in names:
            found = module
            for part in name.split("."):
                found = getattr(found, part, None)
            yield f"{module_name}.{name}", None if found is None else _parameters(found)


def _parameters(found: Any) -> list[str]:
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError):
        return []
    plain = (type(None), bool, int, float, str)
    return [
        f"{'*' if one.kind is one.VAR_POSITIONAL else '**' if one.kind is one.VAR_KEYWORD else ''}{one.name}"
        + ("" if one.default is one.empty else f"={one.default!r}" if isinstance(one.default, plain) else "=...")
        for one in parameters
    ]


# --------------------------------------------------------------------------------------------------------- the tables


def table_of(wheel: Path) -> dict[str, Any]:
    """All parts, each in a process of its own, for a package is imported once."""
    from tests.transformer_engine.sources import unpack

    with tempfile.TemporaryDirectory() as scratch:
        directory = unpack(wheel, Path(scratch))
        found: dict[str, Any] = {}
        for part in PARTS:
            command = [
                sys.executable,
                "-W",
                "ignore",
                "-m",
                "tests.transformer_engine.facts",
                "--measure",
                str(directory),
                "--part",
                part,
            ]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
            if done.returncode:
                raise SystemExit(f"{wheel.name}: {done.stderr[-3000:]}")
            found |= json.loads(done.stdout.rsplit("\n", 2)[-2])
    return found


def _keep_states_of_other_cores(table: dict[str, Any], older: dict[str, Any]) -> None:
    """A state is as Transformer Engine wrote it under the installed Megatron-Core; those under others stay."""
    for recipe, answers in table["formats"].items():
        if "state" in answers:
            answers["state"] = older["formats"].get(recipe, {}).get("state", {}) | answers["state"]


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {"calls": measure, "steps": measure_steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="*", type=Path)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=PARTS, default="calls", help=argparse.SUPPRESS)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a table differs")
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(PARTS[arguments.part](arguments.measure)))
        return
    for wheel in arguments.wheels:
        table = table_of(wheel)
        path = TABLES / f"{table['version']}.json"
        if path.exists():
            _keep_states_of_other_cores(table, json.loads(path.read_text()))
        text = json.dumps(table, indent=1, sort_keys=True) + "\n"
        if arguments.check and (not path.exists() or path.read_text() != text):
            raise SystemExit(
                f"{path.name} is not what {wheel.name} says: python -m tests.transformer_engine.facts {wheel}"
            )
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
