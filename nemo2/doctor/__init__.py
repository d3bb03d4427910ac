# SPDX-License-Identifier: Apache-2.0
"""The examination of an installation: missing packages and their cost, versions that break, what this machine can run."""

from nemo2.doctor.examination import examine
from nemo2.doctor.finding import Finding, State, report

__all__ = ["Finding", "State", "examine", "report"]
