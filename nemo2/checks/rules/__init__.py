# SPDX-License-Identifier: Apache-2.0
"""The rules, a file for each thing they are about."""
