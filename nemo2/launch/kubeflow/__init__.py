# SPDX-License-Identifier: Apache-2.0
"""Runs on Kubernetes, as jobs of Kubeflow Trainer."""
