# SPDX-License-Identifier: Apache-2.0
"""Factories that recipes share: where they run."""
