# SPDX-License-Identifier: Apache-2.0
"""Known noise is filtered by name; everything else gets through."""

import logging
import warnings

from nemo2.noise import quiet_known_warnings


def test_only_the_named_warnings_are_silent():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        quiet_known_warnings()
        warnings.warn("Apex is not installed. Falling back to Torch Norm", stacklevel=1)
        warnings.warn("Apex is installed, and something is wrong with it", stacklevel=1)
    assert [str(item.message) for item in shown] == ["Apex is installed, and something is wrong with it"]


def test_advertisements_are_dropped_and_messages_kept(caplog):
    quiet_known_warnings()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    with caplog.at_level(logging.INFO, logger=logger.name):
        logger.propagate = True
        logger.info("💡 Tip: install something")
        logger.info("`Trainer.fit` stopped: `max_steps=8` reached.")
    assert [record.message for record in caplog.records] == ["`Trainer.fit` stopped: `max_steps=8` reached."]
