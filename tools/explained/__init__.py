# SPDX-License-Identifier: Apache-2.0
"""The figures that explain what each parallelism does: drawn from what Megatron-Core, torch and nemo2 themselves say."""
