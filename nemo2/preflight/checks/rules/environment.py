# SPDX-License-Identifier: Apache-2.0
"""Variables of the processes that contradict the recipe."""

from collections.abc import Iterator

from nemo2.base.backend.attention_variables import left_by_a_model
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic

ENVIRONMENT = Topic("Environment variables")
_WANTED = {
    "flash": {"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
    "fused": {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "1", "NVTE_UNFUSED_ATTN": "0"},
    "unfused": {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "1"},
    "local": {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"},
    "auto": {"NVTE_FLASH_ATTN": "1", "NVTE_FUSED_ATTN": "1", "NVTE_UNFUSED_ATTN": "1"},
}
"""The variables that Megatron-Core's LanguageModule sets for each attention backend. It asserts that variables which
are already set have these values."""


@ENVIRONMENT.rule("attention-is-chosen-once", megatron_refuses=True)
def _attention(facts: Facts) -> Iterator[str]:
    """`NVTE_FLASH_ATTN`, `NVTE_FUSED_ATTN` and `NVTE_UNFUSED_ATTN` must agree with `attention_backend` or be unset.

    Otherwise: Megatron-Core raises an AssertionError when it builds the model.
    """
    backend = facts.of_model("attention_backend")
    name = getattr(backend, "name", backend)
    for variable, value in _WANTED.get(str(name), {}).items():
        current = facts.environment.get(variable)
        if current is not None and current != value and not left_by_a_model(variable, current):
            yield (
                f"{variable}={current} contradicts model.config.attention_backend={name}, for which Megatron-Core sets "
                f"this variable to {value}. Unset the variable, and choose the backend with "
                "model.config.attention_backend (flash, fused, unfused, local or auto)."
            )


def _segments_may_not_be_registered() -> bool:
    """Whether expandable segments exclude registered buffers. Megatron-Core 0.19 allows both from torch 2.11 on."""
    import inspect

    from megatron.core.distributed import DistributedDataParallelConfig
    from packaging.version import Version
    from torch import __version__ as installed

    if "is_torch_min_version" not in inspect.getsource(DistributedDataParallelConfig.__post_init__):
        return True
    return Version(Version(installed).base_version) < Version("2.11.0a0")


@ENVIRONMENT.rule("registered-buffers-do-not-move", in_force=_segments_may_not_be_registered)
def _segments(facts: Facts) -> Iterator[str]:
    """Registered communication buffers (`nccl_ub`) cannot be used with expandable memory segments.

    Otherwise: Megatron-Core rejects the configuration of the gradient buffers.
    """
    if not getattr(facts.ddp, "nccl_ub", False):
        return
    if "expandable_segments:True" in facts.environment.get("PYTORCH_CUDA_ALLOC_CONF", "").split(","):
        yield (
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True with strategy.ddp_config.nccl_ub=True: registered "
            "buffers cannot be in memory that grows. Remove expandable_segments:True, or set "
            "strategy.ddp.nccl_ub=False."
        )


@ENVIRONMENT.rule("ucc-overlaps-over-several-connections")
def _ucc(facts: Facts) -> Iterator[str]:
    """Pipeline communication over UCC requires that `CUDA_DEVICE_MAX_CONNECTIONS` is not 1.

    Otherwise: Megatron-Core raises an AssertionError when it creates the process groups.
    """
    over = facts.of_strategy("pipeline_model_parallel_comm_backend")
    if over == "ucc" and facts.layout.pp > 1 and facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield (
            "CUDA_DEVICE_MAX_CONNECTIONS=1 with strategy.pipeline_model_parallel_comm_backend='ucc': UCC needs a "
            "separate queue for its messages. Unset the variable, or set the backend to None."
        )


@ENVIRONMENT.rule("timeout-is-a-number")
def _timeout(facts: Facts) -> Iterator[str]:
    """`TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC` must be a whole number of seconds.

    Otherwise: Every rank raises ValueError.
    """
    seconds = facts.environment.get("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC")
    if seconds and not seconds.strip().isdigit():
        yield f"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC={seconds}: must be a whole number of seconds, e.g. 600."


@ENVIRONMENT.rule("deterministic-everywhere")
def _deterministic(facts: Facts) -> Iterator[str]:
    """Where Transformer Engine computes the attention, `deterministic_mode` requires
    `NVTE_ALLOW_NONDETERMINISTIC_ALGO=0`.

    Otherwise: Megatron-Core raises an error when it builds the first attention layer.
    """
    if facts.machine.capability is None or not facts.of_model("deterministic_mode"):
        return
    value = facts.environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    if value != "0":
        yield (
            f"model.config.deterministic_mode=True with NVTE_ALLOW_NONDETERMINISTIC_ALGO={value}: Transformer Engine "
            "may use algorithms whose results differ from run to run. Set the environment variable "
            "NVTE_ALLOW_NONDETERMINISTIC_ALGO=0."
        )
