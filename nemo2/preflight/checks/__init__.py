# SPDX-License-Identifier: Apache-2.0
"""Checks a recipe against all rules before anything runs, and reports every broken rule at once, with its arithmetic.

`check_recipe` raises, `find_problems` lists. `RULES` is the table that both use, and the documentation too. No process
group is created. Files are not opened, except to see that they exist.
"""

from nemo2.preflight.checks.find import check_recipe, find, find_problems
from nemo2.preflight.checks.rule import Problem, Rule
from nemo2.preflight.checks.table import RULES, TOPICS

__all__ = ["RULES", "TOPICS", "Problem", "Rule", "check_recipe", "find", "find_problems"]
