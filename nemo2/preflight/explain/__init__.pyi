# SPDX-License-Identifier: Apache-2.0
from nemo2.preflight.explain.fields import Explanation as Explanation
from nemo2.preflight.explain.fields import explain as explain
from nemo2.preflight.explain.fields import explain_all as explain_all
