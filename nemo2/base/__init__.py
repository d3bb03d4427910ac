# SPDX-License-Identifier: Apache-2.0
"""What every room uses: files, names, the place of a process, its ranks and its device."""
