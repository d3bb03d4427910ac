# SPDX-License-Identifier: Apache-2.0
"""What ran when: communication and computation of a step, recorded, read from torch's profiler, measured and drawn."""
