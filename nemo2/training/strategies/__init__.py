# SPDX-License-Identifier: Apache-2.0
"""The parts of strategies, lower first. `nemo2.training.strategy` beside this folder is `MegatronStrategy` itself.

    world                     processes, Megatron-Core's groups, random streams, loaders
    stepping                  one step under Lightning's loops
    checkpoints               Lightning's hooks for saving and loading; `nemo2.checkpoint.forms` has the forms
    megatron_config           checks of the arguments of `MegatronStrategy`
    torch_sharded             base of the strategies in `fsdp` and `fsdp2`, whose models torch shards

`MegatronStrategy` is one level up because recipes and checkpoints use that path.
"""
