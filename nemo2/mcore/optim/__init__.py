# SPDX-License-Identifier: Apache-2.0
"""Optimizers and learning-rate schedules."""
