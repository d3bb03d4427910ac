# SPDX-License-Identifier: Apache-2.0
"""The parts of strategies, lower first; `nemo2.strategy` beside this folder is `MegatronStrategy` itself.

    world                     processes, Megatron-Core's groups, random streams, loaders
    stepping                  one step under Lightning's loops
    checkpoints               Lightning's hooks for saving and loading; `nemo2.checkpoint.forms` knows the forms
    megatron_config           what `MegatronStrategy` makes of its arguments
    torch_sharded             models that torch shards: `fsdp` and `fsdp2` say how

`MegatronStrategy` stands one level up because recipes and checkpoints name it by that path.
"""
