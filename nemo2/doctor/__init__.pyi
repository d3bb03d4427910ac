# SPDX-License-Identifier: Apache-2.0
from nemo2.doctor.examination import examine as examine
from nemo2.doctor.finding import Finding as Finding
from nemo2.doctor.finding import State as State
from nemo2.doctor.finding import checked as checked
from nemo2.doctor.finding import report as report
