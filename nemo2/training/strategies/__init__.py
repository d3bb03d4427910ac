# SPDX-License-Identifier: Apache-2.0
"""The parts of strategies, lower first. `nemo2.training.strategy` beside this folder is `MegatronStrategy` itself.

    world                     timeouts, seeds, loaders: facts of the ranks
    metrics                   what a step reports beside its loss
    base                      Lightning's hooks, which all strategies share
    live_settings             the arguments of `MegatronStrategy` as attributes
    megatron_config           checks of the arguments of `MegatronStrategy`
    set_up                    a trainer and a model without a loop
    distillation              a teacher beside the model
    torch_sharded             base of the strategies in `fsdp` and `fsdp2`, whose models torch shards

`MegatronStrategy` is one level up because recipes and checkpoints use that path.
"""
