# SPDX-License-Identifier: Apache-2.0
"""Factories of executors that recipes share."""
