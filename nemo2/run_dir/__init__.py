# SPDX-License-Identifier: Apache-2.0
"""What a run writes about itself. Names are resolved on first use; reading a run's files needs no torch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo2.run_dir.directory import RunDirectory
    from nemo2.run_dir.effective import write_effective_config
    from nemo2.run_dir.environment import write_environment
    from nemo2.run_dir.faults import install_fault_hook
    from nemo2.run_dir.logger import NeMoLogger
    from nemo2.run_dir.metrics import JSONLLogger
    from nemo2.run_dir.progress import MegatronProgressBar, ProgressPrinter, make_progress
    from nemo2.run_dir.records import read_metrics
    from nemo2.run_dir.report import write_report

_HOMES = {
    "JSONLLogger": "metrics",
    "MegatronProgressBar": "progress",
    "NeMoLogger": "logger",
    "ProgressPrinter": "progress",
    "RunDirectory": "directory",
    "install_fault_hook": "faults",
    "make_progress": "progress",
    "read_metrics": "records",
    "write_effective_config": "effective",
    "write_environment": "environment",
    "write_report": "report",
}

__all__ = [
    "JSONLLogger",
    "MegatronProgressBar",
    "NeMoLogger",
    "ProgressPrinter",
    "RunDirectory",
    "install_fault_hook",
    "make_progress",
    "read_metrics",
    "write_effective_config",
    "write_environment",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
