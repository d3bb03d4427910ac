# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as other programs write them, as small as they can be, and a pickle that runs something."""

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import save

MODEL_YAML = """\
_target_: nemo.collections.llm.gpt.model.llama.LlamaModel
config:
  _target_: nemo.collections.llm.gpt.model.llama.LlamaConfig
  num_layers: 2
  hidden_size: 32
  ffn_hidden_size: 64
  num_attention_heads: 4
  num_query_groups: 2
  seq_length: 16
  vocab_size: 64
  tensor_model_parallel_size: 2
  params_dtype:
    _target_: torch.bfloat16
    _call_: false
  forward_step_fn:
    _target_: nemo.collections.llm.gpt.model.base.gpt_forward_step
    _call_: false
optim: null
tokenizer: null
"""


def torch_dist(folder: Path, **tensors: Any) -> Path:
    save(tensors or {"module.w": torch.ones(3, 4), "optimizer.state.exp_avg.module.w": torch.ones(3, 4)},
         checkpoint_id=str(folder), no_dist=True)  # fmt: skip
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"content_metadata": {}}, folder / "common.pt")
    return folder


def nemo(folder: Path, model_yaml: str | bytes = MODEL_YAML) -> Path:
    torch_dist(folder / "weights")
    (folder / "context").mkdir()
    (folder / "context" / "model.yaml").write_bytes(model_yaml.encode() if isinstance(model_yaml, str) else model_yaml)
    return folder


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)
