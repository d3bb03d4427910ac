# SPDX-License-Identifier: Apache-2.0
"""Values have the types of their parameters.

These rules are applied before all others. The others read the settings as numbers and parts, so they wait until every value
has its type.
"""

from collections.abc import Iterator

from nemo2.base.names import shortened
from nemo2.config.arguments import misplaced_text
from nemo2.config.value_types import misfits
from nemo2.config.walk import iterate_nodes, set_at
from nemo2.preflight.checks.facts import Facts
from nemo2.preflight.checks.rule import Topic
from nemo2.training.run_dir.environment import holds_secret

TYPES = Topic("Types", needs_sizes=False)


@TYPES.rule("values-have-their-types")
def _types(facts: Facts) -> Iterator[str]:
    """A setting that takes a number, True or False must not hold text or a list, a whole number must not be a fraction, and a
    part must not be a number.

    Otherwise: Text is true wherever it is tested: sequence_parallel="no" switches sequence parallelism on. Elsewhere
    the run ends in a TypeError that names no setting.
    """
    for path, node in iterate_nodes(facts.recipe):
        for name, value, expected in misfits(node.__fn_or_cls__, node.__arguments__):
            where = set_at(node, name) if name in node.__arguments__ else ""
            shown = "'...'" if isinstance(value, str) and holds_secret(value) else shortened(repr(value))
            place = f"{path}.{name}".removeprefix(".")
            place = place.removeprefix("trainer.") if place.startswith("trainer.strategy.") else place
            yield f"{place}={shown}: takes {expected}, not {type(value).__name__}{where}."


@TYPES.rule("parts-are-no-text")
def _text(facts: Facts) -> Iterator[str]:
    """A plugin, callback, optimizer, schedule, logger, model or data module must be an object or its configuration,
    not its name as text.

    Otherwise: The first call on the text fails on every rank.
    """
    for path, node in iterate_nodes(facts.recipe):
        yield from misplaced_text(node.__fn_or_cls__, node.__arguments__, of=f"{path}." if path else "")
