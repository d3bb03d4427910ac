# SPDX-License-Identifier: Apache-2.0
"""The progress bar of a run on a terminal: steps, losses, speed, remaining time.

The rank itself uses it if it owns the terminal. The launching process uses it if the ranks' output goes to files.
"""

from collections.abc import Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from nemo2.base.counts import short_count

_SHORTEST_BAR = 8
_FIRST_TO_GO = ("lr", "elapsed", "bar", "speed", "task", "val", "eta")
"""Parts of the line that a narrow terminal leaves out, in this order. The steps and the loss stay."""


class TrainingBar:
    """A rich bar that advances only on logged steps.

    ``start`` may be called again after ``stop``. Other output appears above the bar.
    """

    def __init__(self, *, console: Console | None = None) -> None:
        self._console = console or Console()
        self._progress: Progress | None = None
        self._metrics: dict[str, float] = {}

    def start(self, *, total: int | None, completed: int = 0) -> None:
        """Show the bar. ``total`` is the number of steps, or None for a run without an end."""
        if self._progress is not None:
            return
        progress = Progress(_Line(self._console), console=self._console, refresh_per_second=4, expand=True)
        progress.add_task("training", total=total, completed=completed, metrics={})
        progress.start()
        self._progress = progress

    def update(self, *, completed: int, metrics: Mapping[str, float]) -> None:
        """Advance to ``completed`` finished steps and show the newest of ``metrics``."""
        if self._progress is not None:
            self._metrics.update(metrics)
            self._progress.update(self._progress.task_ids[0], completed=completed, metrics=dict(self._metrics))

    def describe(self, text: str) -> None:
        """Name the current activity, e.g. "validating"."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], description=text)

    def print(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    @property
    def is_shown(self) -> bool:
        return self._progress is not None

    def stop(self) -> None:
        """Stop the bar in its current state. Does nothing if it isn't shown."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class _Line(ProgressColumn):
    """All parts of the bar's line that fit on the terminal, each of them whole."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console
        self._columns: dict[str, ProgressColumn] = {
            "task": TextColumn("[bold]{task.description}"),
            "bar": BarColumn(bar_width=None),
            "steps": MofNCompleteColumn(),
        }
        self._times: dict[str, ProgressColumn] = {"elapsed": TimeElapsedColumn(), "eta": TimeRemainingColumn()}

    def render(self, task: Task) -> Table:
        """The line at the terminal's current width."""
        columns = {**self._columns, **self._times}
        parts = {name: columns[name](task) for name in self._columns}
        parts |= {name: Text(text) for name, text in summary(task.fields["metrics"]).items()}
        parts |= {name: columns[name](task) for name in self._times}
        if isinstance(parts["eta"], Text):
            parts["eta"] = Text("eta ") + parts["eta"]
        lengths = {name: part.cell_len if isinstance(part, Text) else _SHORTEST_BAR for name, part in parts.items()}
        for gone in _FIRST_TO_GO:
            if sum(lengths.values()) + len(lengths) - 1 <= self._console.width:
                break
            lengths.pop(gone, None)
        line = Table.grid(padding=(0, 1), expand="bar" in lengths)
        for name in lengths:
            line.add_column(no_wrap=True, ratio=1 if name == "bar" else None)
        line.add_row(*(parts[name] for name in lengths))
        return line


def summary(metrics: Mapping[str, float]) -> dict[str, str]:
    """The most watched metrics, as the parts of ``loss 2.413  val 2.502  lr 3.0e-04  12.4k tok/s``."""
    parts: dict[str, str] = {}
    if "reduced_train_loss" in metrics:
        parts["loss"] = f"loss {metrics['reduced_train_loss']:.4g}"
    if "val_loss" in metrics:
        parts["val"] = f"val {metrics['val_loss']:.4g}"
    if "lr" in metrics:
        parts["lr"] = f"lr {metrics['lr']:.1e}"
    if "tokens_per_second" in metrics:
        parts["speed"] = f"{short_count(metrics['tokens_per_second'])} tok/s"
    elif "train_step_timing in s" in metrics:
        parts["speed"] = f"{metrics['train_step_timing in s']:.3g} s/step"
    return parts
