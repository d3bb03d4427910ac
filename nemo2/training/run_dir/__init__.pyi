# SPDX-License-Identifier: Apache-2.0
from nemo2.training.run_dir.directory import RunDirectory as RunDirectory
from nemo2.training.run_dir.environment import write_environment as write_environment
from nemo2.training.run_dir.faults import install_fault_hook as install_fault_hook
from nemo2.training.run_dir.logger import NeMoLogger as NeMoLogger
from nemo2.training.run_dir.metrics import JSONLLogger as JSONLLogger
from nemo2.training.run_dir.progress import MegatronProgressBar as MegatronProgressBar
from nemo2.training.run_dir.progress import ProgressPrinter as ProgressPrinter
from nemo2.training.run_dir.progress import make_progress as make_progress
from nemo2.training.run_dir.records import read_metrics as read_metrics
from nemo2.training.run_dir.report import write_report as write_report
from nemo2.training.run_dir.run_folder import RunFolder as RunFolder
