# SPDX-License-Identifier: Apache-2.0
"""The rules, with one file per topic."""
