# SPDX-License-Identifier: Apache-2.0
"""Userbuffer settings under the names of NeMo 2.0's recipes."""
