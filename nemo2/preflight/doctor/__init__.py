# SPDX-License-Identifier: Apache-2.0
"""The examination of an installation: missing packages and their cost, versions that break, what this machine can run."""
