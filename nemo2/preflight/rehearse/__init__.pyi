# SPDX-License-Identifier: Apache-2.0
from nemo2.preflight.rehearse.counts import CollectiveCount as CollectiveCount
from nemo2.preflight.rehearse.counts import FlopCount as FlopCount
from nemo2.preflight.rehearse.counts import MemoryCount as MemoryCount
from nemo2.preflight.rehearse.counts import RankRehearsal as RankRehearsal
from nemo2.preflight.rehearse.counts import Rehearsal as Rehearsal
from nemo2.preflight.rehearse.counts import Verdict as Verdict
from nemo2.preflight.rehearse.job import rehearse as rehearse
