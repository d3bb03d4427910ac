# SPDX-License-Identifier: Apache-2.0
"""Known noise is filtered by name; everything else gets through."""

import logging
import warnings

import pytest

from nemo2.base.noise import VERBOSE_VARIABLE, quiet_known_warnings, send_to


def test_only_the_named_warnings_are_silent():
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        quiet_known_warnings()
        warnings.warn("Apex is not installed. Falling back to Torch Norm", stacklevel=1)
        warnings.warn("Apex is installed, and something is wrong with it", stacklevel=1)
        for file in ("/lib/megatron/core/pool.py", "/home/megatron/mine.py"):
            compile(r"'\-'", file, "exec")
    assert [item.filename for item in shown] == [__file__, "/home/megatron/mine.py"]
    assert str(shown[0].message) == "Apex is installed, and something is wrong with it"


@pytest.mark.parametrize("name", ["lightning.pytorch.utilities.rank_zero", "lightning.pytorch.accelerators.cuda"])
@pytest.mark.parametrize("asked", [False, True])
def test_advertisements_are_dropped_set_up_goes_to_the_log_and_messages_are_shown(asked, name, caplog, monkeypatch):
    monkeypatch.setenv(VERBOSE_VARIABLE, "1" if asked else "")
    quiet_known_warnings()
    logger = logging.getLogger(name)
    log = Kept()
    send_to(Kept())  # what was said before this test
    send_to(None)
    set_up = ["GPU available: False, used: False", "-" * 100 + "\ndistributed_backend=gloo", "TPU available: False"]
    set_up.append("You are using a CUDA device ('NVIDIA H100') that has Tensor Cores.")
    set_up.append("`Trainer(limit_val_batches=1)` was configured so 1 batch will be used.")
    with caplog.at_level(logging.INFO, logger=logger.name):
        logger.propagate = True
        logger.info("💡 Tip: install something")
        for message in set_up[:2]:
            logger.info(message)
        send_to(log)
        for message in set_up[2:]:
            logger.info(message)
        logger.info("Resuming from step-8 (step 8); looked in checkpoints.")
        send_to(None)
    shown = [record.message for record in caplog.records]
    assert shown == [*(set_up if asked else []), "Resuming from step-8 (step 8); looked in checkpoints."]
    assert log.messages == ([] if asked else set_up)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
