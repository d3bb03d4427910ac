# SPDX-License-Identifier: Apache-2.0
"""Forms of a checkpoint: in which shape a model and its optimizer are written, and how they are read back.

A strategy has one (`nemo2.strategies.checkpoints`). A form is one file with a subclass of `form.Form`:

    megatron       Megatron-Core's sharded state
    pieces         rows of parameters that are sharded over data-parallel ranks; what the three below have in common
    dtensors       of torch's ``fully_shard``
    flat           of torch's FullyShardedDataParallel
    megatron_fsdp  of Megatron-FSDP
"""
