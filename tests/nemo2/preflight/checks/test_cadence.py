# SPDX-License-Identifier: Apache-2.0
"""Numbers and times of a trainer that would end a run, validate after every step or have no effect are refused by name."""

from datetime import timedelta
from typing import Any

import pytest

from nemo2 import llm
from nemo2.preflight.checks.find import find

TYPES, INTERVAL, EPOCH = "values-have-their-types", "validation-interval-is-a-count", "intervals-within-an-epoch-fit-it"
OVERFIT = "overfitting-has-one-number-of-batches"
SAMPLES = {"data.num_train_samples": 1536, "data.num_val_samples": 1024}  # three batches and two
ONCE_AN_EPOCH = {"trainer.check_val_every_n_epoch": 1}


def rules_of(changes: dict[str, Any]) -> list[str]:
    recipe: Any = llm.llama3_8b.pretrain_recipe()
    for path, value in changes.items():
        owner = recipe
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)
    return sorted({problem.rule for problem in find(recipe)})


@pytest.mark.parametrize(
    ("values", "rule"),
    [
        ({"max_epochs": (2.0, -2), "min_epochs": (-1,), "min_steps": (-1,)}, "steps-are-counts"),
        ({"num_sanity_val_steps": (-2,)}, "steps-are-counts"),
        ({"max_epochs": (True,), "min_epochs": (1.5,), "min_steps": (2.5,), "num_sanity_val_steps": (1.5,)}, TYPES),
        ({"val_check_interval": (0.0, 30.0, 1e308, timedelta(0), timedelta(seconds=-1), {}, "00:00:00:00")}, INTERVAL),
        ({"overfit_batches": (2.0, 1e308)}, OVERFIT),
        ({"overfit_batches": (None,), "reload_dataloaders_every_n_epochs": (None,)}, "lightning-agrees"),
        ({"accelerator": (None,)}, "lightning-agrees"),
        ({"num_nodes": (1.0,)}, "nodes-and-devices-are-counts"),
        ({"num_nodes": (True,)}, TYPES),
        ({"gradient_clip_val": (0, 0.0), "gradient_clip_algorithm": ("value",)}, "steps-are-megatron-cores"),
        ({"strategy": ("auto", "ddp")}, "strategy-settings-are-supported"),
        ({"callbacks": ([None], [[]]), "deterministic": ("no",), "plugins": ([None],)}, TYPES),
        ({"enable_checkpointing": (False,)}, "checkpoints-have-one-switch"),
    ],
)
def test_a_value_that_no_run_can_use_is_refused(values: dict[str, tuple[Any, ...]], rule: str) -> None:
    found = {(name, str(one)): rules_of({f"trainer.{name}": one}) for name, of in values.items() for one in of}
    assert {case: [rule] for case in found} == found


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"trainer.limit_train_batches": 0.3}, ["samples-for-a-step"]),
        ({"trainer.limit_train_batches": 0.34}, []),
        ({"trainer.limit_val_batches": 0.4}, ["samples-for-a-step"]),
        ({"trainer.overfit_batches": 0.3, "trainer.limit_val_batches": 0}, ["samples-for-a-step"]),
        ({"trainer.overfit_batches": 2}, []),
        ({"trainer.overfit_batches": 2, "trainer.limit_train_batches": 2}, [OVERFIT]),
        ({"trainer.val_check_interval": 4, **ONCE_AN_EPOCH}, [EPOCH]),
        ({"trainer.val_check_interval": 4, "trainer.limit_val_batches": 0, **ONCE_AN_EPOCH}, []),
        ({"trainer.val_check_interval": 3, **ONCE_AN_EPOCH}, []),
        ({"trainer.val_check_interval": 4}, []),
        ({"trainer.val_check_interval": 0.5}, []),
        ({"trainer.val_check_interval": 1.0}, []),
        ({"trainer.val_check_interval": {"hours": 1}}, []),
        ({"trainer.num_sanity_val_steps": -1, "trainer.max_epochs": -1}, []),
        ({"trainer.num_nodes": None, "trainer.gradient_clip_algorithm": "norm", "trainer.deterministic": "warn"}, []),
        ({"trainer.enable_checkpointing": False, "log.ckpt": None}, []),
    ],
)
def test_what_an_epoch_of_known_length_has_room_for(changes: dict[str, Any], rules: list[str]) -> None:
    assert rules_of(SAMPLES | changes) == rules
