# SPDX-License-Identifier: Apache-2.0
from nemo2.launch.plugins import *
