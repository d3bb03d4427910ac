# SPDX-License-Identifier: Apache-2.0
"""Saving, finding and loading checkpoints."""
