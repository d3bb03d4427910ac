# SPDX-License-Identifier: Apache-2.0
"""The rules that a recipe must keep, judged before anything runs: every broken rule at once, with its arithmetic.

`check_recipe` raises, `find_problems` lists; `RULES` is the table that both go through, and the documentation with them. No
process group is made, and no file is opened but to see that it is there.
"""

from nemo2.checks.find import check_recipe, find, find_problems
from nemo2.checks.nearest import nearest_layouts
from nemo2.checks.rule import Problem, Rule
from nemo2.checks.table import RULES, TOPICS

__all__ = ["RULES", "TOPICS", "Problem", "Rule", "check_recipe", "find", "find_problems", "nearest_layouts"]
