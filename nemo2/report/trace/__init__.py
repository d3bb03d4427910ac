# SPDX-License-Identifier: Apache-2.0
"""Timelines of a step: communication and computation, recorded, read from torch's profiler, measured and drawn."""
