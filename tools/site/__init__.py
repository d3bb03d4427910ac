# SPDX-License-Identifier: Apache-2.0
"""Builds the documentation site: pages generated from the code, and GitHub's pages converted for MkDocs."""
