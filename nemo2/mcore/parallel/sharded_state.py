# SPDX-License-Identifier: Apache-2.0
"""The name under which each tensor of a chunk is stored, and its part of the whole tensor: Megatron-Core's sharded
state.

Megatron-Core stacks the layers of a model in one tensor. The names don't depend on the chunk's kind of layers
(`nemo2.mcore.parallel.norm_names`). Tensors of the original model keep their original description, wherever a transform has
moved them. Tensors that a transform has added are stored by their full names, layer by layer.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, Optional, cast

from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn

from nemo2.base.variables import environment
from nemo2.mcore.parallel.norm_names import renamed_norms
from nemo2.mcore.parallel.transform import Transformed, full_parameter_names, record_of

_EXTRA = "._extra_state"
_LEAVE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def sharded_state(core: nn.Module, metadata: Optional[dict[str, Any]] = None) -> dict[str, Any]:
    """Megatron-Core's sharded state of a chunk without wrappers, by the names in ``core.state_dict()`` after
    "module."."""
    own, record = _described(core, metadata), record_of(core)
    if record is None:
        return own
    from nemo2.mcore.parallel.added_state import added

    plain, renamed = _as_built(core, record, metadata)
    by_tensor = {id(leaf.data): leaf for leaf in plain.values() if _is_tensor(leaf)}
    state = {}
    for name, leaf in own.items():
        if name in plain and plain[name].key == leaf.key:
            state[name] = leaf
        elif _is_tensor(leaf):
            state[name] = by_tensor.get(id(leaf.data)) or by_layer(added(leaf, by_tensor))
        else:
            state[name] = plain.get(renamed.get(name, ""), leaf)
    return state


def is_empty_state(name: str, value: Any) -> bool:
    """Whether a Transformer Engine layer stored nothing beside its tensors. From 2.4 on it then stores zero bytes,
    which older versions fail to unpickle."""
    return name.endswith(_EXTRA) and isinstance(value, Tensor) and value.numel() == 0


def states_may_be_unpickled() -> AbstractContextManager[None]:
    """A context in which layers accept the states of delayed scaling, which are pickles. From 2.20 on Transformer
    Engine rejects them otherwise. A checkpoint's states were checked when they were read
    (`nemo2.checkpoint.untrusted`)."""
    return environment({_LEAVE: "1"})


def keys_of(leaf: Any) -> set[str]:
    """The keys under which a leaf of a sharded state is stored: of a tensor that is stored in parts, as a Mamba mixer's
    first projection is, those of the parts."""
    parts = leaf.build() if isinstance(leaf, ShardedTensorFactory) else leaf
    return {part.key for part in leaves(parts, ShardedTensor, ShardedObject)}


def added_keys(core: nn.Module) -> frozenset[str]:
    """The keys of the tensors that a transform has added to this chunk, which has no wrapper."""
    record = record_of(core)
    if record is None:
        return frozenset()
    plain = set().union(*map(keys_of, _as_built(core, record, None)[0].values()))
    return frozenset().union(*map(keys_of, sharded_state(core).values())) - plain


def part_of(core: nn.Module, state: dict[str, Any], keep: Callable[[str, bool], bool]) -> dict[str, Any]:
    """The tensors of a chunk's sharded ``state`` that ``keep(full name, whether it is trained)`` selects, layer by
    layer."""
    names = full_parameter_names(core)
    return {
        name: by_layer(leaf)
        for name, leaf in state.items()
        if _is_tensor(leaf) and keep(names[name.removeprefix("module.")], bool(leaf.data.requires_grad))
    }


def frozen_keys(state: dict[str, Any]) -> set[str]:
    """The keys under which this rank's part of a chunk's sharded ``state`` has frozen parameters."""
    return {leaf.key for leaf in state.values() if _is_tensor(leaf) and not leaf.data.requires_grad}


def unstacked(state: dict[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """A chunk's sharded ``state`` with separate layers for these ``keys``."""
    return {name: by_layer(leaf) if _is_tensor(leaf) and leaf.key in keys else leaf for name, leaf in state.items()}


def by_layer(leaf: Any) -> Any:
    """A leaf of a sharded state with the layer in its name, in place of Megatron-Core's stack of all layers. A stack
    must be complete, whereas a part of a model need not be."""
    if isinstance(leaf, ShardedTensorFactory):
        build, stacked_key = leaf.build_fn, leaf.key
        first = next(leaves(leaf.build(), ShardedTensor), None)
        if first is None:
            return leaf
        own_key = key_by_layer(stacked_key, first.global_offset, bool(first.prepend_axis_num))

        def build_by_layer(key: str, *arguments: Any) -> Any:
            # The optimizer's state has the same factories under longer keys: "optimizer.state.exp_avg." and the
            # parameter's key.
            return _mapped(by_layer, build(key.removesuffix(own_key) + stacked_key, *arguments))

        return replace(leaf, key=own_key, build_fn=build_by_layer)
    if not isinstance(leaf, ShardedTensor) or (key := _key_by_layer(leaf)) == leaf.key:
        return leaf
    return replace(
        leaf,
        key=key,
        global_shape=leaf.global_shape[1:],
        global_offset=leaf.global_offset[1:],
        axis_fragmentations=None if leaf.axis_fragmentations is None else leaf.axis_fragmentations[1:],
        prepend_axis_num=leaf.prepend_axis_num - 1,
    )


def _described(core: nn.Module, metadata: Optional[dict[str, Any]]) -> dict[str, Any]:
    # Megatron-Core adds process groups to the metadata that it receives. The caller's metadata go into the checkpoint.
    state = cast(Any, core).sharded_state_dict(prefix="module.", metadata=dict(metadata or {}))
    leaves = [leaf for leaf in state.values() if _is_tensor(leaf)]
    renamed = renamed_norms({leaf.key for leaf in leaves})
    for leaf in leaves:
        leaf.key = renamed.get(leaf.key, leaf.key)
    wrappers = {
        f"module.{path}.": module for path, module in core.named_modules() if hasattr(type(module), "layer_attribute")
    }
    return {_with_wrappers(name, wrappers): leaf for name, leaf in state.items()} if wrappers else state


def _with_wrappers(name: str, wrappers: Mapping[str, Any]) -> str:
    """The name in ``state_dict()`` of a tensor that the wrapper of its layer describes under the layer's own name, as
    `nemo2.models.peft.adapter.Adapted` does."""
    head = next((head for head in wrappers if name.startswith(head)), None)
    if head is None or name.removeprefix(head).partition(".")[0] in wrappers[head]._modules:
        return name
    return f"{head}{wrappers[head].layer_attribute}.{name.removeprefix(head)}"


def _as_built(
    core: nn.Module, record: Transformed, metadata: Optional[dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The chunk before its transform, described with its current parameters, and the original names of its modules'
    extra states, by their current names."""
    now = {id(module): path for path, module in core.named_modules()}
    with _tree_as_built(record):
        plain = _described(record.before, metadata)
        before = {id(module): path for path, module in record.before.named_modules()}
    renamed = {
        f"module.{now[module]}{_EXTRA}": f"module.{path}{_EXTRA}" for module, path in before.items() if module in now
    }
    return plain, renamed


@contextmanager
def _tree_as_built(record: Transformed) -> Iterator[None]:
    now = [(module, module._modules, module._parameters) for module, _, _ in record.tree]
    for module, children, parameters in record.tree:
        module._modules, module._parameters = children, parameters
    try:
        yield
    finally:
        for module, children, parameters in now:
            module._modules, module._parameters = children, parameters


def key_by_layer(key: str, offset: tuple[int, ...], stacked: bool) -> str:
    """The key with the number of the layer, if layers are ``stacked`` under it along the first axis."""
    head, layers, rest = key.partition("layers.")
    return f"{head}{layers}{offset[0]}.{rest}" if stacked and layers and not rest.split(".")[0].isdigit() else key


def _key_by_layer(leaf: ShardedTensor) -> str:
    return key_by_layer(leaf.key, leaf.global_offset, bool(leaf.prepend_axis_num))


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, ShardedTensor | ShardedTensorFactory)


def leaves(tree: Any, *kinds: type) -> Iterator[Any]:
    """The leaves of a sharded state, at any depth, that are of one of ``kinds``."""
    if isinstance(tree, kinds):
        yield tree
    elif isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(value, *kinds)


def _mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _mapped(function, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_mapped(function, value) for value in tree)
    return function(tree)
