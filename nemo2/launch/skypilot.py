# SPDX-License-Identifier: Apache-2.0
"""What nemo-run 0.11 lacks for SkyPilot."""


def mend_dry_runs() -> None:
    """Have nemo-run's dry run find the function that prints a task.

    SkyPilot 0.10.3 moved it to `sky.utils.yaml_utils`. nemo-run 0.11.1 follows in its submission and not in its dry run, which
    ends in an AttributeError.
    """
    from sky.utils import common_utils, yaml_utils

    if not hasattr(common_utils, "dump_yaml_str"):
        common_utils.dump_yaml_str = yaml_utils.dump_yaml_str
