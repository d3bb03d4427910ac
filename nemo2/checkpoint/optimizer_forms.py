# SPDX-License-Identifier: Apache-2.0
"""Loads an optimizer's state into an optimizer of another form.

Megatron-Core's optimizers store the same tensors in dictionaries of different shapes, and load only their own shape:

plain         fp32 parameters: the moments, in ``state``
half          bf16 or fp16 parameters: the moments, and fp32 copies under ``optimizer.state.fp32_param.<name>``
distributed   sharded over data-parallel ranks: the moments, and fp32 copies under ``optimizer.state.param.<name>``

Strategies that shard parameters store the moments under the same names, and fp32 parameters under the model's
(`shards`).

With expert parallelism there are two optimizers in a chain, the second for the experts. The tensors have names by which
Megatron-Core finds them anywhere in a checkpoint. The state is therefore requested in the required shape under the
checkpoint's names. Values that aren't tensors (step, rates, betas) come from the saved groups.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor

from nemo2.base import ranks
from nemo2.base.errors import CheckpointError
from nemo2.checkpoint.foreign_files import NEMO_STATE, is_nemo
from nemo2.mcore.optim.lr_scheduler import LR_FACTOR

if TYPE_CHECKING:
    from nemo2.checkpoint.shards import Shard

Form = Literal["plain", "half", "distributed"]
_MAIN_PARAMETER = {"plain": "", "half": "optimizer.state.fp32_param.", "distributed": "optimizer.state.param."}
_IDENTIFIERS = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""Fields that distinguish the groups of one optimizer."""
_PEAKS = ("max_lr", "min_lr", "start_wd", "end_wd")
_MOMENTS = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
_STATE = "optimizer.state."
_STEP = "optimizer.state.step."
_COPIES = "fp32_from_fp16_params"
"""The entry of a "half" state with the fp32 copies of the parameters, as a list per group."""
_KINDS = ("optimizer", "is_expert_parallel")
"""Fields that tell in which optimizer of a chain a group is: "adam" beside muon, and the experts'."""
_OWN = (*_IDENTIFIERS, *_KINDS, *_PEAKS, "default_config", "params")


def forms_of(state: Any) -> list[Form]:
    """The form of each optimizer in a chain, from its sharded state or from the plain part of a saved one."""
    return [_form(part) for part in _chain(state)]


def moments(keys: Iterable[str]) -> set[str]:
    """The names of the moments among the keys of a checkpoint's tensors."""
    return {key.removeprefix(_STATE).partition(".")[0] for key in keys if key.startswith(_STATE)} & _MOMENTS


def under_saved_names(wanted: Any, saved: Any) -> Any:
    """``wanted``, the sharded state of this run's optimizer, with the names under which ``saved`` stores the fp32
    parameters."""
    here, there = (_MAIN_PARAMETER[forms_of(state)[0]] for state in (wanted, saved))
    for value in nested_values(wanted):
        if isinstance(value, ShardedTensor | ShardedTensorFactory) and here and value.key.startswith(here):
            value.key = there + value.key.removeprefix(here)
    return wanted


def completed(loaded: Any, wanted: Any, saved: Any) -> Any:
    """``loaded``, the tensors in the structure of ``wanted``, completed with the plain values that ``load_state_dict``
    expects.

    Raises:
        CheckpointError: a group of parameters has no counterpart in the saved state.
    """
    groups = _groups(saved)
    step, scaler = step_of(saved), scaler_of(saved)
    for part, template in zip(_chain(loaded), _chain(wanted), strict=True):
        inner, wanted_inner = part, template
        if _form(template) != "plain":
            inner, wanted_inner = part.setdefault("optimizer", {}), template["optimizer"]
        own = inner.get("param_groups") or [{} for _ in wanted_inner["param_groups"]]
        inner["param_groups"] = [
            _group(group, mine.get("params"), groups, step)
            for group, mine in zip(wanted_inner["param_groups"], own, strict=True)
        ]
        if "common_step" in wanted_inner.get("state", {}):
            inner["state"]["common_step"] = step
        if "param_state_sharding_type" in template:
            part["param_state_sharding_type"] = template["param_state_sharding_type"]
        if "grad_scaler" in template and scaler is not None:
            part["grad_scaler"] = scaler
    return loaded


def prepare_load(loaded: Any, whole: Any) -> Any:
    """``loaded`` as Megatron-Core's ``load_state_dict`` of ``whole`` requires it.

    Ranks without trained parameters, for which nothing was loaded, get empty entries. A constant loss scale has no state,
    and a dynamic one starts anew after it. The peaks of the rates and of the weight decay are those of ``whole``:
    Megatron-Core finds a saved group by them too (since 0.19), so that no run could be resumed with another learning rate.
    """
    for part, one in zip(_chain(loaded), _chained(whole), strict=False):
        if not part.get("grad_scaler", True):
            del part["grad_scaler"]
        inner = _inner(part)
        if _form(part) == "plain" or "optimizer" in part:
            inner.setdefault("state", {})
        copies = getattr(one, "fp32_from_float16_groups", None)
        if copies is not None and not any(copies):
            part.setdefault(_COPIES, [[] for _ in copies])
        groups = inner.get("param_groups", ()) if isinstance(inner, dict) else ()
        for kind in {_kind(group) for group in groups}:
            # Several groups of a kind differ in their peaks and factors alone, which are the run's.
            saved, own = ([group for group in of if _kind(group) == kind] for of in (groups, one.param_groups))
            for group, mine in zip(saved, own, strict=True) if len(saved) == len(own) else ():
                peaks = {name: mine.get(name) for name in _PEAKS}
                group.update({name: value for name, value in peaks.items() if value is not None or name in group})
    return loaded


def prepare_save(state: Any) -> Any:
    """``state`` of this rank's optimizer without what a checkpoint can't hold.

    Lists of fp32 copies in which no group has any: a checkpoint stores the plain values of one rank for all, and its
    empty lists couldn't be merged with the tensors of another rank. Classes, which Megatron-Core's
    ``HybridDeviceOptimizer`` keeps in its groups: the optimizer that loads the state has its own, and reading a class
    could run code.
    """
    for part in _chain(state):
        if not any(part.get(_COPIES, (True,))):
            del part[_COPIES]
        inner = _inner(part)
        inner = inner.data if isinstance(inner, ShardedObject) else inner
        for group in inner["param_groups"] if isinstance(inner, dict) else ():
            for name in [name for name, value in group.items() if callable(value)]:
                del group[name]
    return state


def with_step_of_all(state: Any) -> Any:
    """``state`` of this rank's optimizer, with the largest number of updates that any rank has counted. Every rank
    calls it.

    A group without parameters on a rank (a frozen pipeline stage, or a stage without experts) counts no updates there,
    and the checkpoint stores the unsharded values of one rank only. (State for the same layout only is stored for each
    rank: its groups are a ``ShardedObject`` per rank, and stay unchanged.)
    """
    # Each group of parameters counts updates (fused optimizers), or there is one count for all.
    counted = ranks.gather((any("step" in group for group in _groups(state)), step_of(state)))
    by_group = any(whether for whether, _ in counted)
    # The value is compared without conversion, because torch counts in a tensor.
    step = max((one for _, one in counted if one is not None), key=int, default=None)
    for part in _chain(state) if step is not None else ():
        if not isinstance(_inner(part), dict):
            continue
        if by_group:
            for group in _inner(part)["param_groups"]:
                group["step"] = step
        else:
            _inner(part).setdefault("state", {})["common_step"] = step
    return state


def refuse_nemo(saved: Any, path: Path) -> None:
    """Refuse an optimizer's state that NeMo 2.0 saved. Its plain part holds each optimizer in a list.

    Raises:
        CheckpointError: the state is NeMo 2.0's. The message says how to start from the weights alone.
    """
    if isinstance(saved, list) or is_nemo(path):
        raise CheckpointError(NEMO_STATE.format(path=path))


def step_of(saved: Any) -> Any:
    """The number of updates in the plain part of an optimizer's saved state. None: the optimizer didn't count them."""
    step = max((group["step"] for group in _groups(saved) if "step" in group), key=int, default=None)
    if step is None:
        inner = [_inner(part) for part in _chain(saved)]
        step = next((one.get("state", {}).get("common_step") for one in inner if isinstance(one, dict)), None)
    return step


def scaler_of(saved: Any) -> Optional[dict[str, Any]]:
    """The state of the loss scaler. None: there was none."""
    return next((part["grad_scaler"] for part in _chain(saved) if "grad_scaler" in part), None)


# ------------------------------------------------------------------------------------------------------ shards


def from_shards(wanted: Any, extras: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state saved as shards, converted for `under_saved_names` and `completed`: the plain form, with the
    groups of ``wanted``.

    Args:
        wanted: The sharded state of this run's optimizer.
        extras: The entries beside the shards: "step" and "loss_scaler".
    """
    step, scaler = extras.get("step"), extras.get("loss_scaler")
    counted = {} if step is None else {"step": step}  # SGD counts no updates
    groups = [
        {**{name: value for name, value in group.items() if name not in ("params", "step")}, **counted}
        for part in _chain(wanted)
        for group in _inner(part)["param_groups"]
    ]
    saved: dict[str, Any] = {"param_groups": groups, "state": {"common_step": step}}
    return {**saved, "grad_scaler": scaler} if scaler else saved


def into_shards(shards: "Sequence[Shard]", stored: Collection[str]) -> "list[Shard]":
    """The requests for reading ``shards`` of a model and its optimizer from a checkpoint with the tensors ``stored``.

    fp32 parameters are read from the optimizer's copies, if it had any. Step counts that aren't stored are left out;
    `set_steps` sets them.
    """
    requests = []
    for shard in shards:
        if shard.key.startswith(_STEP) and shard.key not in stored:
            continue
        requests.append(replace(shard, key=_main_parameter(shard.key, stored)))
    return requests


def read_main_parameters(model_state: Any, stored: Mapping[str, Any]) -> bool:
    """Let the sharded ``model_state`` read the optimizer's fp32 parameters in a checkpoint with the entries ``stored``, where the
    checkpoint's model has another dtype than this run's. Returns whether it reads any of them."""
    tensors = [value for value in nested_values(model_state) if isinstance(value, ShardedTensor | ShardedTensorFactory)]
    rounded = [
        one
        for one in tensors
        if one.data is not None and one.key in stored and stored[one.key].properties.dtype != one.data.dtype
    ]
    for tensor in rounded:
        tensor.key = _main_parameter(tensor.key, stored)
    return any(tensor.key.startswith("optimizer.") for tensor in rounded)


def _main_parameter(key: str, stored: Collection[str]) -> str:
    """The key of the optimizer's fp32 copy of a parameter, or ``key`` if there is none."""
    copies = (prefix + key for form, prefix in _MAIN_PARAMETER.items() if form != "plain")
    return next((copy for copy in copies if copy in stored), key)


def steps_done(optimizers: Iterable[Any]) -> Optional[int]:
    """The number of updates that torch's optimizers have made. None: they don't count them."""
    counts = [holder["step"] for optimizer in optimizers for holder in _counting(optimizer)]
    return int(max(counts)) if counts else None


def set_steps(optimizers: Iterable[Any], step: Optional[int]) -> None:
    """Let torch's optimizers continue to count from ``step``. None: they don't count."""
    if step is None:
        return
    for optimizer in optimizers:
        for holder in list(_counting(optimizer)) or optimizer.param_groups:
            count = holder.get("step")
            if isinstance(count, Tensor):
                count.fill_(step)
            else:
                holder["step"] = step


def forget_updates(optimizers: Iterable[Any]) -> None:
    """Reset torch's optimizers to their initial state for the current parameters: zero moments and no updates."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for name in _MOMENTS & state.keys():
                state[name].zero_()
        for holder in _counting(optimizer):
            holder["step"] = torch.zeros_like(holder["step"]) if isinstance(holder["step"], Tensor) else 0


def keep_settings(groups: Iterable[dict[str, Any]], own: Iterable[dict[str, Any]]) -> None:
    """Give loaded parameter groups the settings of the run, ``own``. Only the number of updates is the checkpoint's; a
    schedule sets the rate again."""
    for group, before in zip(groups, own, strict=True):
        group.pop(LR_FACTOR, None)  # groups that differ in it alone are taken for each other
        group.update({name: value for name, value in before.items() if name not in ("params", "step")})


def torch_optimizers(whole: Any) -> list[Any]:
    """The torch optimizers inside an optimizer of Megatron-Core, chained or not."""
    return [one.optimizer for one in _chained(whole) if getattr(one, "optimizer", None) is not None]


def _chained(whole: Any) -> Sequence[Any]:
    return getattr(whole, "chained_optimizers", [whole])


def _counting(optimizer: Any) -> Iterator[dict[str, Any]]:
    """The place of an optimizer's step count: with each parameter (torch's Adam) or with each group (fused
    optimizers)."""
    for holder in (*optimizer.state.values(), *optimizer.param_groups):
        if isinstance(holder, dict) and "step" in holder:
            yield holder


def _group(mine: dict[str, Any], params: Any, saved: list[dict[str, Any]], step: Any) -> dict[str, Any]:
    key = _identity(mine)
    for kinds in (_KINDS, _KINDS[:1], ()):
        for group in saved:
            if _identity(group) == key and all(group.get(kind) == mine.get(kind) for kind in kinds):
                kept = {name: value for name, value in group.items() if name not in _OWN}
                identity = {name: mine[name] for name in _OWN if name in mine and name != "params"}
                steps = {"step": step} if "step" in mine or "step" in group else {}
                return {**kept, **identity, **steps, **({} if params is None else {"params": params})}
    raise CheckpointError(
        f"The checkpoint's optimizer has no parameter group with {dict(zip(_IDENTIFIERS, key, strict=True))}, because "
        "it was trained with other learning-rate or weight-decay multipliers. Set the original multipliers, or set "
        "strategy.ckpt_load_optimizer=False."
    )


def _identity(group: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(name, group.get(f"pre_{name}")) for name in _IDENTIFIERS)


def _kind(group: dict[str, Any]) -> tuple[Any, ...]:
    return *_identity(group), group.get("is_expert_parallel")


def _form(part: dict[str, Any]) -> Form:
    if "param_state" in part or "param_state_sharding_type" in part:
        return "distributed"
    return "half" if "optimizer" in part else "plain"


def _groups(state: Any) -> list[dict[str, Any]]:
    inner = [_inner(part) for part in _chain(state)]
    return [group for one in inner if isinstance(one, dict) for group in one["param_groups"]]


def _inner(part: dict[str, Any]) -> dict[str, Any]:
    return part.get("optimizer", part)


def _chain(state: Any) -> list[dict[str, Any]]:
    """The optimizers of a chain, which are stored under their numbers. An optimizer outside a chain: only itself."""
    return [state[key] for key in sorted(key for key in state if isinstance(key, int))] or [state]
