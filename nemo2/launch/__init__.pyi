# SPDX-License-Identifier: Apache-2.0
from nemo2.launch.failure import RankFailure as RankFailure
from nemo2.launch.launcher import launch as launch
from nemo2.launch.launcher import run as run
from nemo2.launch.result import RunResult as RunResult
