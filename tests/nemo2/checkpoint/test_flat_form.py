# SPDX-License-Identifier: Apache-2.0
"""What torch's flat parameters are read into goes back to the model, with the states that its layers keep beside tensors."""

import os
from typing import Any

import torch
from torch import nn


class Layer(nn.Linear):
    """Takes its state as Transformer Engine 2.20 does: with a leave to unpickle."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.arange(3, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None:
        if os.environ.get("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE") != "1":
            raise RuntimeError("Refusing to load pickled FP8 extra state")
        assert state.tolist() == [0, 1, 2]


def there_and_back() -> list[float]:
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import FullyShardedDataParallel

    from nemo2.checkpoint.forms.dtensors import FlatForm

    wrapped = FullyShardedDataParallel(Layer(2, 2), use_orig_params=True, device_id=torch.device("cpu"))
    form: Any = object.__new__(type("Form", (FlatForm,), {"_wrapped": wrapped}))
    state = get_model_state_dict(wrapped)
    with torch.no_grad():
        getattr(state["weight"], "_local_tensor", state["weight"]).fill_(3.0)
    form._states = (state, {})
    form.finish_reading(model=True, optimizer=False)
    assert "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE" not in os.environ
    with FullyShardedDataParallel.summon_full_params(wrapped):
        return wrapped.module.weight.flatten().tolist()


def test_layers_get_their_own_states_back(run_on_ranks):
    assert run_on_ranks(there_and_back, 1)[0] == [3.0] * 4
