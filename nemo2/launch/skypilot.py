# SPDX-License-Identifier: Apache-2.0
"""Adds what nemo-run 0.11 lacks for SkyPilot."""


def mend_dry_runs() -> None:
    """Let nemo-run's dry run find the function that prints a task.

    SkyPilot 0.10.3 moved the function to `sky.utils.yaml_utils`. nemo-run 0.11.1 uses the new place in its submission
    but not in its dry run, which fails with an AttributeError.
    """
    from sky.utils import common_utils, yaml_utils

    if not hasattr(common_utils, "dump_yaml_str"):
        common_utils.dump_yaml_str = yaml_utils.dump_yaml_str
