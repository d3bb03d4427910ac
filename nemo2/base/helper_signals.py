# SPDX-License-Identifier: Apache-2.0
"""The signals that a rank's helper processes ignore."""

import signal

IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Launchers and Slurm send them to all processes of a rank. The rank handles them, and still needs its helper processes for
its last steps and its save. Each helper process ends with its rank."""
