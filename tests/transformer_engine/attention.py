# SPDX-License-Identifier: Apache-2.0
"""The ways of exchanging keys and values that a version's attention supports under context parallelism, with other
settings.

The functions are called as the attention module calls them, for two ranks and cuDNN's kernels. A refusal is an error
that says that the version doesn't support something. There is no refusal if the version proceeds to a kernel.
"""

import sys
from typing import Any
from unittest.mock import MagicMock

import torch

WAYS = ("p2p", "all_gather", "a2a", "a2a+p2p")
BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "packed sequences": {"qkv_format": "thd", "attn_mask_type": "padding_causal"},
    "a window": {"window_size": (16, 0)},
    "a learnt sink": {"softmax_type": "learnable"},
    "a bias": {"attn_bias_type": "post_scale_bias", "attn_bias": torch.zeros(1, 2, 32, 64)},
    "three heads": {"heads": 3},
    "heads of 12": {"channels": 12},
    "odd sequences": {"sequence": 31},
}


def attention() -> dict[str, dict[str, str | None]]:
    """The refusal, or None, by other settings and by way of exchange."""
    return {beside: {way: _refusal(way, **options) for way in WAYS} for beside, options in BESIDE.items()}


def exchange_groups() -> dict[str, str | None]:
    """The module's reaction to groups that are set after it was built, belong to another exchange, or are removed."""
    module = next(one for name, one in list(sys.modules.items()) if _has_it(name, one))
    layer: Any = sys.modules["transformer_engine"].pytorch.DotProductAttention(4, 8)
    group: Any = torch.distributed.group.WORLD

    def placed(given: Any, ranks: Any, way: str) -> None:
        layer.set_context_parallel_group(given, ranks, None, way)
        assert layer.cp_group is given and layer.cp_comm_type == way
        if given is not None:
            _call(module, given, way)

    asked = {
        "after it was built": (group, [0, 1], "p2p"),
        "of another exchange, later": (group, [0, 1], "all_gather"),
        "none, later": (None, None, "p2p"),
    }
    return {name: _refusal_of(lambda given=given: placed(*given)) for name, given in asked.items()}


def _call(module: Any, group: Any, way: str) -> None:
    function: Any = vars(module)["attn_forward_func_with_cp"]
    query = torch.zeros(32, 1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    lengths = torch.tensor([0, 64], dtype=torch.int32)
    function(
        *(True, query, query, query, lengths, lengths, 64, 64, lengths, lengths, 0.0, group, [0, 1], MagicMock(), way),
        qkv_format="sbhd",
        attn_mask_type="causal",
        use_fused_attention=True,
        softmax_scale=1.0,
    )


def _refusal_of(call: Any) -> str | None:
    try:
        call()
    except (AssertionError, ValueError, NotImplementedError) as error:
        words = " ".join(str(error).split())
        asked = any(one in words for one in ("support", "divisible", "multiple", "requires", "must be"))
        return f"{type(error).__name__}: {words}"[:240] if asked else None
    except Exception:  # a kernel answered with nothing: the questions lie before it
        return None
    return None


def _refusal(way: str, *, heads: int = 4, channels: int = 8, sequence: int = 32, **options: Any) -> str | None:
    module = next(one for name, one in list(sys.modules.items()) if _has_it(name, one))
    function: Any = vars(module)["attn_forward_func_with_cp"]
    if options.get("softmax_type") and "softmax_type" not in function.__code__.co_varnames:
        return "TypeError: no argument softmax_type"
    packed = options.get("qkv_format") == "thd"
    shape = (sequence, heads, channels) if packed else (sequence, 1, heads, channels)
    query, key, value = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    lengths = torch.tensor([0, sequence * 2], dtype=torch.int32)
    group: Any = torch.distributed.group.WORLD
    given = {"qkv_format": "sbhd", "attn_mask_type": "causal", "use_fused_attention": True, "softmax_scale": 1.0}
    vars(module)["get_distributed_world_size"] = lambda group=None: 2
    vars(module)["get_distributed_rank"] = lambda group=None: 0
    for name in ("isend", "irecv", "batch_isend_irecv", "all_to_all_single", "all_gather_into_tensor"):
        setattr(torch.distributed, name, _there_is_no_other_rank)

    def call() -> None:
        function(
            *(True, query, key, value, lengths, lengths, sequence * 2, sequence * 2, lengths, lengths, 0.0),
            *([group, group] if way == "a2a+p2p" else group, [0, 1], MagicMock(), way),
            **(given | options),
        )

    return _refusal_of(call)


def _there_is_no_other_rank(*args: Any, **kwargs: Any) -> Any:
    raise ConnectionError


def _has_it(name: str, module: Any) -> bool:
    function = getattr(module, "attn_forward_func_with_cp", None)
    return name.startswith("transformer_engine.pytorch") and getattr(function, "__module__", None) == name
