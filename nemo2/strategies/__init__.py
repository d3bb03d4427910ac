# SPDX-License-Identifier: Apache-2.0
"""What `nemo2.strategy.MegatronStrategy` is made of, and the strategies beside it."""
