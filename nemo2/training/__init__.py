# SPDX-License-Identifier: Apache-2.0
"""A run: strategies, trainer, Fabric, and the directory that a run writes."""
