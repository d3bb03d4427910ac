# SPDX-License-Identifier: Apache-2.0
"""Transformer Engine as far as its tables tell (`facts.py`), with layers that compute in plain PyTorch.

What a version refuses is refused here with its words: unknown arguments, userbuffers started twice or without a process group,
layers built before the start, buffers asked for that aren't there or have another size. Everything else of the package is
absent, so that Megatron-Core falls back where it can.
"""

import builtins
import enum
import inspect
import json
import pickle
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TABLES = Path(__file__).parent
VERSIONS = sorted(
    (path.stem for path in TABLES.glob("*.json")), key=lambda text: [int(part) for part in text.split(".")]
)
RUN = tuple(version for version in VERSIONS if not version.startswith(("2.3.", "2.4.", "2.9.", "2.17.")))
"""Versions over which whole runs go; 2.3 and 2.4 lie before and behind two changes that tables alone tell, 2.9 is the oldest that
Megatron-Core 0.16.1 takes, and the tables of 2.17 and of the newest are the same but for parameters that no run passes."""


def table(version: str) -> dict[str, Any]:
    return json.loads((TABLES / f"{version}.json").read_text())


def refuse(words: str | None) -> None:
    """Raise what a table says; None is no refusal."""
    if words is not None:
        kind, _, message = words.partition(": ")
        raise getattr(builtins, kind)(message)


class Version:
    """One version at work in this process: its table, its buffers, and what was asked of it, in order."""

    def __init__(self, version: str) -> None:
        self.table = table(version)
        self.buffers: dict[Any, SimpleNamespace] | None = None
        self.log: list[Any] = []

    def bind(self, name: str, given: dict[str, Any]) -> None:
        """Whether these keywords are parameters of what the version calls ``name``."""
        listed = self.table["signatures"][f"transformer_engine.pytorch.{name}"]
        known = {one.partition("=")[0] for one in listed}
        if unknown := given.keys() - known:
            raise TypeError(f"{name}() of {self.table['version']} has no {', '.join(sorted(unknown))}")

    # ------------------------------------------------------------------------------------------------- userbuffers

    def initialize(self, **given: Any) -> None:
        facts = self.table["userbuffers"]
        if not torch.distributed.is_initialized():
            refuse(facts["without_process_group"])
        if self.buffers is not None:
            refuse(facts["twice"])
        if given.get("bootstrap_backend") not in (None, "nccl", "gloo", "mpi"):
            refuse(facts["unknown_backend"])
        sets = given.get("quantization_modes") or [Mode.FP8 if given.get("use_fp8") else Mode.NONE]
        settings = given.get("ub_cfgs")
        per_set = settings if isinstance(settings, list) else [settings] * len(sets)
        self.buffers = {}
        scattered: set[str] = set()
        for mode, chosen in zip(sets, per_set, strict=True):
            self._add(mode, chosen or {}, scattered, tuple(given["shape"]))
        self.log.append(("start", {name: value for name, value in given.items() if name != "ub_cfgs"}, settings))

    def _add(self, mode: Any, chosen: dict[str, Any], scattered: set[str], shape: tuple[int, ...]) -> None:
        facts = self.table["userbuffers"]
        assert self.buffers is not None
        for gemm, entry in chosen.items():
            method = entry.get("method")
            if method is not None:
                refuse(facts["methods"][gemm][method])
            if gemm in ("qkv_dgrad", "fc1_dgrad") and method not in (None, "bulk"):
                if gemm.replace("dgrad", "wgrad") in chosen:
                    refuse(facts["beside_wgrad"])
                if gemm in scattered:
                    refuse(facts["two_modes"]["scattered dgrad"])
                scattered.add(gemm)
            if entry.get("atomic_gemm") and mode is not Mode.FP8:
                refuse(facts["atomic_in_16_bits"])
        for gemm, (_, _, bits) in facts["buffers"][mode.value].items():
            self.buffers[gemm, mode] = SimpleNamespace(shape=shape, bits=bits, scattered=gemm in scattered)

    def destroy(self) -> None:
        self.buffers = None
        self.log.append(("destroy",))

    def ask(self, gemm: str, *, scatter: bool, tokens: int) -> None:
        """As a layer does for the buffer of a GEMM over so many tokens."""
        if self.buffers is None:
            refuse(self.table["userbuffers"]["asked_before_start"])
        assert self.buffers is not None
        buffer = self.buffers[gemm, Mode.NONE]
        assert buffer.shape[0] == tokens, f"the buffer of {gemm} is for {buffer.shape[0]} tokens, and {tokens} come"
        if gemm in ("qkv_dgrad", "fc1_dgrad"):
            assert buffer.scattered == scatter, f"{gemm}: scattered={buffer.scattered}, asked to scatter={scatter}"
        self.log.append(("ask", gemm))

    # ------------------------------------------------------------------------------------------------------ layers

    def switches(self, layer: str, cut: str | None, given: dict[str, Any]) -> dict[str, bool]:
        """Which of a layer's switches are on, as the version decides it when the layer is built."""
        if not given.get("sequence_parallel") or cut is None:
            return {}
        on: dict[str, bool] = {}
        facts = self.table["layers"][layer]
        for flag in [name for name, value in given.items() if name.startswith("ub_") and value is True]:
            if self.buffers is None:
                refuse(facts[f"{cut} {flag}"]["before_start"])
            on |= dict.fromkeys(facts[f"{cut} {flag}"]["on"], True)
        if on.get("ub_overlap_rs_dgrad"):
            on |= {name: False for name in ("ub_bulk_dgrad", "ub_bulk_wgrad") if name in on}
        self.log.append(("build", given.get("ub_name"), tuple(sorted(name for name, value in on.items() if value))))
        return on

    def buffers_of(self, file: str, switch: str) -> list[str]:
        """Suffixes of what a switch makes a layer look for. The wgrads that ride on another's ring are theirs alone."""
        short = switch.removesuffix("_fprop").removesuffix("_dgrad") if switch.startswith("ub_overlap_ag") else switch
        found = [line.split()[1] for line in self.table["asked_for"][file] if line.split()[0] in (switch, short)]
        end = "_fprop" if switch.endswith("_fprop") else "_wgrad" if switch.endswith("wgrad") else "_dgrad"
        return [suffix for suffix in dict.fromkeys(found) if suffix == end]


class Mode(enum.Enum):
    NONE = "none"
    FP8 = "fp8"


current: Version


class _Module(nn.Module):
    """The base of every layer of theirs: a state beside its tensors that says nothing without fp8, with no bytes or with a pickle
    of None."""

    def get_extra_state(self) -> Tensor:
        if not current.table["extra_states"]["Linear"]["bytes"]:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(pickle.dumps(None)), dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        if state is None:  # in all versions
            return
        if not len(state):
            refuse(current.table["extra_states"]["Linear"]["empty"])
        else:
            assert pickle.loads(state.numpy().tobytes()) is None


class Linear(_Module):
    kind = "Linear"

    def __init__(self, in_features: int, out_features: int, **given: Any) -> None:
        super().__init__()
        current.bind(self.kind, given)
        self.cut, self.tp_size = given["parallel_mode"], given["tp_size"]
        self.sequence_parallel, self.ub_name = given["sequence_parallel"], given.get("ub_name")
        self.parallel_mode, self.use_bias = self.cut, given.get("bias", True)
        self.in_features = in_features // (self.tp_size if self.cut == "row" else 1)
        self.out_features = out_features // (self.tp_size if self.cut == "column" else 1)
        for name, value in current.switches(self.kind, self.cut, given).items():
            setattr(self, name, value)
        self.return_bias = given.get("return_bias", False)
        self.weight = nn.Parameter(torch.empty(self.out_features, self.in_features, dtype=given["params_dtype"]))
        tracker = given.get("get_rng_state_tracker")
        with tracker().fork() if tracker is not None else nullcontext(), torch.no_grad():
            given["init_method"](self.weight)
        if self.cut is not None:
            self.weight.tensor_model_parallel, self.weight.partition_stride = True, 1  # pyright: ignore
            self.weight.partition_dim = 0 if self.cut == "column" else 1  # pyright: ignore
        # Without a bias Transformer Engine's layer has an empty tensor there, and not None.
        self.bias = torch.empty(0, dtype=given["params_dtype"])
        if self.use_bias:
            del self.bias
            self.bias = nn.Parameter(torch.zeros(self.out_features, dtype=given["params_dtype"]))

    def forward(self, x: Tensor, is_first_microbatch: Any = None) -> Any:
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            gather_from_sequence_parallel_region,
            reduce_from_tensor_model_parallel_region,
            reduce_scatter_to_sequence_parallel_region,
        )

        whole = x.shape[0] * (self.tp_size if self.cut == "column" else 1)
        tokens = whole * x.shape[1]
        for switch in [name for name, value in vars(self).items() if name.startswith("ub_") and value is True]:
            file = "linear" if self.kind == "Linear" else "layernorm_linear"
            for suffix in current.buffers_of(file, switch):
                scatter = switch in ("ub_overlap_rs_dgrad", "ub_overlap_rs_fprop")
                current.ask(f"{self.ub_name}{suffix}", scatter=scatter, tokens=tokens)
        split = self.sequence_parallel
        if self.cut == "column":
            x = gather_from_sequence_parallel_region(x) if split else copy_to_tensor_model_parallel_region(x)
        out = F.linear(x, self.weight)
        if self.cut == "row":
            out = (
                reduce_scatter_to_sequence_parallel_region(out)
                if split
                else reduce_from_tensor_model_parallel_region(out)
            )
        if not self.use_bias:
            return out
        return (out, self.bias) if self.return_bias else out + self.bias


class LayerNormLinear(Linear):
    kind = "LayerNormLinear"

    def __init__(self, in_features: int, out_features: int, **given: Any) -> None:
        super().__init__(in_features, out_features, **given)
        self.eps, self.shift = given["eps"], float(given.get("zero_centered_gamma", False))
        self.layer_norm_weight = nn.Parameter(torch.full((in_features,), 1 - self.shift, dtype=given["params_dtype"]))
        self.layer_norm_weight.sequence_parallel = given["sequence_parallel"]  # pyright: ignore
        self.normalization = given["normalization"]
        self.return_layernorm_output = given.get("return_layernorm_output", False)
        self.return_layernorm_output_gathered = given.get("return_layernorm_output_gathered", False)
        if self.normalization == "LayerNorm":
            self.layer_norm_bias = nn.Parameter(torch.zeros(in_features, dtype=given["params_dtype"]))
            self.layer_norm_bias.sequence_parallel = given["sequence_parallel"]  # pyright: ignore

    def forward(self, x: Tensor, is_first_microbatch: Any = None) -> Any:
        bias = getattr(self, "layer_norm_bias", None)
        normed = _norm(x, self.layer_norm_weight + self.shift, bias, self.eps, self.normalization)
        out = super().forward(normed, is_first_microbatch)
        if not self.return_layernorm_output:
            return out
        assert not self.return_layernorm_output_gathered, "Megatron-Core asks for this rank's part"
        return (*out, normed) if self.return_bias and self.use_bias else (out, normed)


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    if kind == "LayerNorm":
        return F.layer_norm(x.float(), (x.shape[-1],), weight.float(), None if bias is None else bias.float(), eps).to(
            x.dtype
        )
    return F.rms_norm(x.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype)


class _Norm(_Module):
    kind = "RMSNorm"

    def __init__(self, normalized_shape: Any = None, eps: float = 1e-5, hidden_size: Any = None, **given: Any) -> None:
        super().__init__()
        hidden_size = hidden_size or normalized_shape
        self.eps, self.shift = eps, float(given.get("zero_centered_gamma", False))
        self.weight = nn.Parameter(torch.full((hidden_size,), 1 - self.shift, dtype=given["params_dtype"]))
        self.weight.sequence_parallel = given["sequence_parallel"]  # pyright: ignore
        self.bias = None
        if self.kind == "LayerNorm":
            self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=given["params_dtype"]))
            self.bias.sequence_parallel = given["sequence_parallel"]  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        return _norm(x, self.weight + self.shift, self.bias, self.eps, self.kind)


class RMSNorm(_Norm):
    pass


class LayerNorm(_Norm):
    kind = "LayerNorm"


class GroupedLinear(_Module):
    """Experts of a rank, each with a weight and a bias of its own."""

    def __init__(self, num_gemms: int, in_features: int, out_features: int, **given: Any) -> None:
        super().__init__()
        current.bind("GroupedLinear", given)
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, given["bias"], given["return_bias"]
        self.fp8, self.fp8_calibration, self.fp8_meta = False, False, {"fp8_checkpoint": False}
        for index in range(num_gemms):
            weight = nn.Parameter(torch.empty(out_features, in_features, dtype=given["params_dtype"]))
            with torch.no_grad():
                given["init_method"](weight)
            setattr(self, f"weight{index}", weight)
            setattr(self, f"bias{index}", torch.empty(0, dtype=given["params_dtype"]))
            if self.use_bias:
                delattr(self, f"bias{index}")
                setattr(self, f"bias{index}", nn.Parameter(torch.zeros(out_features, dtype=given["params_dtype"])))

    def init_fp8_metadata(self, num_gemms: int) -> None:
        assert num_gemms == self.num_gemms

    def forward(self, x: Tensor, m_splits: list[int], is_first_microbatch: Any = None) -> Any:
        parts = enumerate(x.split(m_splits))
        out = torch.cat([F.linear(part, getattr(self, f"weight{index}")) for index, part in parts])
        assert not self.use_bias
        return (out, None) if self.return_bias else out


class DotProductAttention(_Module):
    def __init__(self, num_attention_heads: int, kv_channels: Any, **given: Any) -> None:
        super().__init__()
        current.bind("DotProductAttention", given)
        self.given = given
        if given.get("softmax_type") == "learnable":
            self.softmax_offset = nn.Parameter(torch.zeros(num_attention_heads // given["tp_size"]))
        if current.table["extra_states"]["DotProductAttention"]["without"] is None:
            self.register_load_state_dict_post_hook(_not_missed)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None, **given: Any) -> Tensor:
        q, k, v = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        causal = "causal" in str(given.get("attn_mask_type") or self.given.get("attn_mask_type"))
        scale = self.given.get("softmax_scale")
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, scale=scale)
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


def _not_missed(module: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith("core_attention._extra_state")]


class FP8GlobalStateManager:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def is_first_fp8_module() -> bool:
        return False


@contextmanager
def fp8_autocast(enabled: bool = True, **given: Any) -> Any:
    assert not enabled, "the stand-in computes in 16 bits"
    yield


def _on_a_gpu(*args: Any, **given: Any) -> Any:
    raise AssertionError("a kernel, which this machine's backend replaces")


def install() -> None:
    """Put the package among the modules; before Megatron-Core is imported, which takes its classes as bases."""
    base = {"UserBufferQuantizationMode": Mode, "TransformerEngineBaseModule": _Module}
    layers = {
        one.__name__: one for one in (Linear, LayerNormLinear, RMSNorm, LayerNorm, GroupedLinear, DotProductAttention)
    }
    contexts = dict.fromkeys(("fp8_autocast", "fp8_model_init", "quantized_model_init"), fp8_autocast)
    fp8 = {"FP8GlobalStateManager": FP8GlobalStateManager, **contexts}
    recipes = ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling", "MXFP8BlockScaling", "NVFP4BlockScaling")
    routing = ("fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss", "fused_topk_with_score_function")
    permuting = ("moe_permute", "moe_permute_with_probs", "moe_sort_chunks_by_index", "moe_unpermute")
    permuting += ("moe_sort_chunks_by_index_with_probs",)
    tracker = {"CudaRNGStatesTracker": type("CudaRNGStatesTracker", (), {})}
    for name, members in (
        ("transformer_engine", {"__version__": VERSIONS[-1]}),
        ("transformer_engine.common", {}),
        ("transformer_engine.common.recipe", {one: type(one, (), {}) for one in (*recipes, "Format")}),
        ("transformer_engine.pytorch", layers | fp8),
        ("transformer_engine.pytorch.fp8", fp8),
        ("transformer_engine.pytorch.ops", {"Sequential": nn.Sequential, "FusibleOperation": nn.Module}),
        ("transformer_engine.pytorch.distributed", tracker | {"activation_recompute_forward": nullcontext}),
        ("transformer_engine.pytorch.module", {}),
        ("transformer_engine.pytorch.module.base", base),
        ("transformer_engine.pytorch.tensor", {"QuantizedTensor": type("QuantizedTensor", (), {})}),
        ("transformer_engine.pytorch.float8_tensor", {"Float8Tensor": type("Float8Tensor", (), {})}),
        ("transformer_engine.pytorch.attention", {"apply_rotary_pos_emb": _on_a_gpu}),
        ("transformer_engine.pytorch.attention.rope", {"apply_rotary_pos_emb": _on_a_gpu}),
        ("transformer_engine.pytorch.router", dict.fromkeys(routing, None)),
        ("transformer_engine.pytorch.permutation", dict.fromkeys(permuting, _on_a_gpu)),
    ):
        module = ModuleType(name)
        module.__path__ = []
        module.__spec__ = __import__("importlib.machinery").machinery.ModuleSpec(name, None, is_package=True)
        vars(module).update(members)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def as_on_a_gpu() -> dict[str, bool]:
    """Layers are Transformer Engine's, their overlap may be on; the rest stays a CPU's. Gives the switch: ``["on"]``."""
    import nemo2.base.backend.cpu as cpu
    import nemo2.base.backend.cpu_patches as patches
    import nemo2.base.backend.extras as extras

    switch = {"on": True}
    extras.have_te = lambda: switch["on"]
    overrides, replaced = cpu.CpuBackend.config_overrides, patches.megatron_patches

    def fewer(self: Any) -> Any:
        kept = dict(overrides(self))
        for name in ("tp_comm_overlap", "transformer_impl") if switch["on"] else ():
            kept.pop(name, None)
        return kept

    cpu.CpuBackend.config_overrides = fewer
    # What takes Transformer Engine for absent.
    patches.megatron_patches = lambda: tuple(
        one for one in replaced() if not one.target.endswith((":TELinear", "multi_latent_attention:HAVE_TE"))
    )
    torch.cuda.current_device = lambda: 0
    return switch


def use(version: str) -> Version:
    """From here on the stand-in is this version."""
    global current
    current = Version(version)
    sys.modules["transformer_engine"].__dict__["__version__"] = version
    base: Any = sys.modules["transformer_engine.pytorch.module.base"]
    listed = current.table["signatures"]["transformer_engine.pytorch.module.base.initialize_ub"]
    chosen = current

    def initialize_ub(**given: Any) -> None:
        chosen.initialize(**given)

    kind = inspect.Parameter.KEYWORD_ONLY
    initialize_ub.__dict__["__signature__"] = inspect.Signature(
        [inspect.Parameter(one.partition("=")[0], kind) for one in listed]
    )
    base.initialize_ub, base.destroy_ub = initialize_ub, lambda: chosen.destroy()
    import megatron.core.utils as megatron_utils
    from packaging.version import Version as Number

    megatron_utils._te_version = Number(version)
    return current
