# SPDX-License-Identifier: Apache-2.0
"""Imported where tests run: files aren't flushed to the disk, because nothing that a test writes has to outlive its machine. A
checkpoint is twenty flushes, each of some milliseconds in which nobody computes."""

import os

os.fsync = lambda fd: None
