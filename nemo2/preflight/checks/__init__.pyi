# SPDX-License-Identifier: Apache-2.0
from nemo2.preflight.checks.find import check_recipe as check_recipe
from nemo2.preflight.checks.find import find_problems as find_problems
from nemo2.preflight.checks.rule import Problem as Problem
from nemo2.preflight.checks.rule import Rule as Rule
