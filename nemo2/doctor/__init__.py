# SPDX-License-Identifier: Apache-2.0
"""What is installed, what each missing part costs, which versions break, and what this machine can run."""

from nemo2.doctor.examination import examine
from nemo2.doctor.finding import Finding, State, report

__all__ = ["Finding", "State", "examine", "report"]
