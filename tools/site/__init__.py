# SPDX-License-Identifier: Apache-2.0
"""The documentation site: what of it is written from the code, and how pages that GitHub shows become pages of MkDocs."""
