# SPDX-License-Identifier: Apache-2.0
"""Forms of a checkpoint: how a model and its optimizer are written and read.

Each strategy has a form (`nemo2.training.strategies.base`). A form is one file with a subclass of `form.Form`:

    megatron       Megatron-Core's sharded state
    shards         rows of parameters that are sharded over data-parallel ranks; the base of the two below
    dtensors       for torch's ``fully_shard`` and FullyShardedDataParallel
    megatron_fsdp  for Megatron-FSDP
"""
