# SPDX-License-Identifier: Apache-2.0
"""Model families: a file each, with its sizes, its Lightning module and where every number comes from."""
