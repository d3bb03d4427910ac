# SPDX-License-Identifier: Apache-2.0
"""Fits the planner's constants to published speeds: a robust maximum of the posterior of measurements and guesses.

Every constant is fitted as a logarithm (a fraction as a logit, so that it stays below 1). Its guess in
`nemo2.preflight.planner.constants.PRIORS` is the prior, with the guess's uncertainty as its width. Rows of one project have
common errors, so n rows count as n / (1 + (n - 1) / 10) independent rows (Kish's design effect). Needs only numpy.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from bench.planner.rows import Row
from nemo2.preflight.planner.constants import PRIORS, Constants, Share
from nemo2.preflight.planner.step_time import predict

NOISE = 0.08
"""Standard deviation of what is not modelled, of a logarithm of a speed: runs of one layout differ by up to 5 %."""
ALIKE = 0.1
"""Correlation of the errors of one project's rows."""
_NAMES = tuple(PRIORS)
_STEP = 0.02


class Fit(NamedTuple):
    """Fitted constants as the optimiser sees them, and how errors change with each there."""

    at: np.ndarray
    jacobian: np.ndarray

    @property
    def constants(self) -> Constants:
        return constants_at(self.at)


def error(row: Row, constants: Constants) -> float:
    """The logarithm of predicted over measured tokens per second."""
    return math.log(predict(row.shape, row.job, constants).tokens_per_second_per_gpu / row.measured)


def errors_of(rows: Sequence[Row], constants: Constants) -> np.ndarray:
    return np.array([error(row, constants) for row in rows])


def constants_at(at: np.ndarray) -> Constants:
    return Constants.of(values_at(at))


def values_at(at: np.ndarray) -> dict[str, float]:
    """The constants by name, `at` so many standard deviations from their guesses."""
    return {name: _moved(name, float(x)) for name, x in zip(_NAMES, at, strict=True)}


def _moved(name: str, deviations: float) -> float:
    prior = PRIORS[name]
    value, spread = prior.value, prior.spread
    if not isinstance(prior, Share):
        return value * math.exp(deviations * math.log(spread))
    # One deviation multiplies a small value by the spread. Of a value near 1, it multiplies the distance from 1.
    logit = math.log(value / (1 - value)) + deviations * math.log(spread) / (1 - value)
    return 1 / (1 + math.exp(-logit))


def fit(rows: Sequence[Row], *, weights: np.ndarray | None = None, rounds: int = 12) -> Fit:
    """The constants that these rows and the guesses ask for together."""
    at = np.zeros(len(_NAMES))
    weights = row_weights(rows) if weights is None else weights
    jacobian = np.zeros((len(rows), len(_NAMES)))
    for _ in range(rounds):
        errors = errors_of(rows, constants_at(at))
        jacobian = _jacobian(rows, at, errors)
        step = _step(at, errors, jacobian, weights)
        at = _searched(at, step, lambda x: _cost(x, errors_of(rows, constants_at(x)), weights))
        if np.abs(step).max() < 0.05:
            break
    return Fit(at, jacobian)


def refit(rows: Sequence[Row], everything: Fit, keep: np.ndarray, *, rounds: int = 4) -> Fit:
    """The constants without the rows that ``keep`` (booleans) leaves out.

    It starts where all rows are fitted, which the result does not depend on: the same cost, with its one minimum near, is
    followed until it no longer falls. The slopes of ``everything`` are used for it, taken anew on the way where more than
    one row in fifty is left out.
    """
    chosen = [row for row, kept in zip(rows, keep, strict=True) if kept]
    weights, at, jacobian = row_weights(chosen), everything.at, everything.jacobian[keep]
    for index in range(rounds):
        errors = errors_of(chosen, constants_at(at))
        if index == 1 and len(chosen) < 0.98 * len(rows):
            jacobian = _jacobian(chosen, at, errors)
        step = _step(at, errors, jacobian, weights)
        at = _searched(at, step, lambda x: _cost(x, errors_of(chosen, constants_at(x)), weights))
        if np.abs(step).max() < 0.05:
            break
    return Fit(at, jacobian)


def row_weights(rows: Sequence[Row]) -> np.ndarray:
    count = Counter(row.family for row in rows)
    return np.array([1 / (1 + ALIKE * (count[row.family] - 1)) for row in rows])


def left_out(rows: Sequence[Row], everything: Fit, group: Callable[[Row], str]) -> np.ndarray:
    """Errors of each group's rows with constants that were fitted without them."""
    errors = np.zeros(len(rows))
    names = [group(row) for row in rows]
    for name in sorted(set(names)):
        keep = np.array([other != name for other in names])
        constants = refit(rows, everything, keep).constants
        for index in np.flatnonzero(~keep).tolist():
            errors[index] = error(rows[index], constants)
    return errors


def _cost(at: np.ndarray, errors: np.ndarray, weights: np.ndarray) -> float:
    """Soft absolute errors and squared deviations from the guesses."""
    squares = (errors / NOISE) ** 2
    return float((weights * 2 * (np.sqrt(1 + squares) - 1)).sum() + (at**2).sum())


def _step(at: np.ndarray, errors: np.ndarray, jacobian: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """One Gauss-Newton step on the reweighted squares."""
    robust = weights / np.sqrt(1 + (errors / NOISE) ** 2) / NOISE**2
    normal = jacobian.T @ (robust[:, None] * jacobian) + np.eye(len(at))
    return -np.linalg.solve(normal, jacobian.T @ (robust * errors) + at)


def _searched(at: np.ndarray, step: np.ndarray, cost: Callable[[np.ndarray], float]) -> np.ndarray:
    """The longest part of the step along which the cost falls."""
    step = step * min(1.0, 1.5 / max(1e-9, float(np.abs(step).max())))
    before = cost(at)
    for share in (1.0, 0.5, 0.25, 0.1):
        if cost(at + share * step) < before:
            return at + share * step
    return at


def _jacobian(rows: Sequence[Row], at: np.ndarray, errors: np.ndarray) -> np.ndarray:
    columns = []
    for index in range(len(at)):
        moved = at.copy()
        moved[index] += _STEP
        columns.append((errors_of(rows, constants_at(moved)) - errors) / _STEP)
    return np.stack(columns, axis=1)


def summary(errors: Iterable[float]) -> tuple[float, float, float]:
    """Median with its sign, median size, and share within 15 %, of logarithms."""
    values = np.expm1(np.asarray(list(errors)))
    return float(np.median(values)), float(np.median(np.abs(values))), float((np.abs(values) <= 0.15).mean())
