# SPDX-License-Identifier: Apache-2.0
"""Reads a run's directory: metrics, checkpoints, curves. Works during the run, and needs no torch. Each rank of a run returns
its directory, so the report and its pictures are imported where they are used."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from nemo2.base.errors import DataError
from nemo2.checkpoint.directory import Manifest, finished
from nemo2.checkpoint.foreign_files import read_yaml
from nemo2.training.run_dir.records import EFFECTIVE_FILE, METRICS_FILE, REPORT_FILE, by_step_done, read_metrics, series

if TYPE_CHECKING:
    import pandas

TRAINING_LOSS, VALIDATION_LOSS = "reduced_train_loss", "val_loss"


class Chart(str):
    """A chart as SVG text, which a notebook displays."""

    def _repr_svg_(self) -> str:
        return str(self)

    def save(self, path: str | Path) -> Path:
        """Write the chart to an ``.svg`` file. Returns the path."""
        path = Path(path)
        if path.suffix != ".svg":
            raise DataError(f"{path}: charts are saved as SVG. Use a file name that ends in .svg.")
        path.write_text(self, encoding="utf-8")
        return path


class RunFolder(type(Path())):
    """The path of a run's directory, as `nemo2.llm.pretrain` returns it, with access to the run's files."""

    @property
    def records(self) -> list[dict[str, Any]]:
        """The run's logged values: a mapping for each record of ``metrics.jsonl``. Empty before the first logged
        step."""
        return read_metrics(self) if (self / METRICS_FILE).is_file() else []

    @property
    def metrics(self) -> "pandas.DataFrame":
        """The run's logged values, indexed by ``step`` (from zero), with a column for each name. NaN: the step didn't
        log it.

        Raises:
            ImportError: pandas isn't installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "run.metrics requires pandas. Run `pip install pandas`, or use run.records, a list of dictionaries."
            ) from error
        frame = pandas.DataFrame(self.records)
        # A validation writes its own record for the step that trained. Both become one row.
        return frame.groupby("step").last() if "step" in frame else frame

    @property
    def steps(self) -> int:
        """The number of finished training steps: those of the newest record or, if it has more, of a checkpoint. A
        run logs only every ``trainer.log_every_n_steps`` steps."""
        from nemo2.training.run_dir.report import finished_steps

        return finished_steps(self, self.records)

    @property
    def planned_steps(self) -> Optional[int]:
        """The number of steps at which training ends. None: unknown."""
        from nemo2.training.run_dir.effective import planned_steps

        return planned_steps(self.effective)

    @property
    def effective(self) -> dict[str, Any]:
        """The effective configuration, from ``effective_config.yaml``. {} before the first step."""
        from nemo2.training.run_dir.report import read_mapping

        return read_mapping(self / EFFECTIVE_FILE, read_yaml)

    @property
    def checkpoints(self) -> list[Path]:
        """The finished checkpoints, oldest step first."""
        return [path for path, _ in finished(self / "checkpoints")]

    @property
    def last_checkpoint(self) -> Optional[Path]:
        """The finished checkpoint of the latest step. None: no checkpoint is finished."""
        return next(reversed(self.checkpoints), None)

    @property
    def best_checkpoint(self) -> Optional[Path]:
        """The finished checkpoint with the lowest validation loss, or training loss if none was validated. None: no
        checkpoint is finished.

        Among checkpoints with equal losses, or without losses, it is the latest.
        """
        saved = finished(self / "checkpoints")
        if not saved:
            return None
        name = next((one for one in (VALIDATION_LOSS, TRAINING_LOSS) if any(one in m.metrics for _, m in saved)), "")

        def rank(item: tuple[Path, Manifest]) -> float:
            loss = item[1].finite_metric(name)
            return math.inf if loss is None else loss

        return min(reversed(saved), key=rank)[0]

    @property
    def report(self) -> Path:
        """The path of ``report.html``, which is written if it doesn't exist.

        Raises:
            DataError: the run has logged nothing.
        """
        from nemo2.training.run_dir.report import write_report

        path = self / REPORT_FILE
        return path if path.is_file() else write_report(self)

    def plot(self, *names: str) -> Chart:
        """Plot curves over steps. A notebook displays the chart, and ``save`` writes it to a file.

        Args:
            names: Names in `records`, such as ``grad_norm``. Without names: the training and the validation loss.

        Raises:
            DataError: the run hasn't logged one of the metrics.
        """
        from nemo2.report.pictures.svg import standalone

        records = self.records
        numbers = {name for record in records for name, value in record.items() if isinstance(value, int | float)}
        known = sorted(numbers - {"step"})
        if missing := [name for name in names if name not in known]:
            raise DataError(
                f"{self} has no metric {', '.join(missing)}. Its metrics: {', '.join(known) or 'none yet'}."
            )
        return Chart(standalone(curves([(name, self, name) for name in names or (TRAINING_LOSS, VALIDATION_LOSS)])))


def curves(lines: Sequence[tuple[str, RunFolder, str]], *, title: str = "", width: int = 760) -> str:
    """Curves of runs over steps as an ``<svg>`` element. Each line is a label, a run, and the name of a metric."""
    from nemo2.report.pictures.charts import Series, line_chart
    from nemo2.training.run_dir.report import resumed_marks

    names = list(dict.fromkeys(name for _, _, name in lines))
    drawn = [
        Series(
            name=label,
            points=by_step_done(series(run.records, name)),
            smooth=True,
            markers=name == VALIDATION_LOSS,
            raw=len(lines) < 3,
        )
        for label, run, name in lines
    ]
    label = names[0] if len(names) == 1 else "loss" if all("loss" in name for name in names) else "value"
    runs = list(dict.fromkeys(run for _, run, _ in lines))
    marks = resumed_marks(runs[0]) if len(runs) == 1 else []  # marks of several runs look alike
    return line_chart(title or ", ".join(names), drawn, y_label=label, width=width, marks=marks)
