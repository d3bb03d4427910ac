# SPDX-License-Identifier: Apache-2.0
"""The snippet of NeMo's documents on communication overlap, imports ours, run shrunk through nemo-run's own `run`."""

import os
import subprocess

import yaml

from nemo2.training.run_dir.records import read_metrics

SCRIPT = """
from functools import partial

import nemo_run as run

from nemo2 import llm
from nemo2.callbacks import MegatronCommOverlapCallback

recipe = partial(llm.llama3_8b.pretrain_recipe)()
recipe.strategy.ddp_config.overlap_grad_sync = False
recipe.strategy.ddp_config.overlap_param_gather = False
recipe.trainer.callbacks = [cb for cb in recipe.trainer.callbacks if not isinstance(cb, MegatronCommOverlapCallback)]
recipe.trainer.callbacks.append(MegatronCommOverlapCallback(tp_comm_overlap=False))

config = recipe.model.config
config.num_layers, config.hidden_size, config.ffn_hidden_size, config.num_attention_heads = 2, 64, 128, 8
recipe.data.seq_length, recipe.data.global_batch_size = 64, 4
recipe.trainer.devices, recipe.trainer.max_steps, recipe.trainer.limit_val_batches = 2, 2, 0
recipe.trainer.log_every_n_steps = 1
recipe.optim.lr_scheduler.warmup_steps = 1
recipe.log.explicit_log_dir = "run"

if __name__ == "__main__":
    run.run(recipe, executor=run.LocalExecutor(launcher="torchrun", ntasks_per_node=2))
"""


def test_the_documents_snippet_runs_shrunk_and_what_it_sets_is_what_runs(tmp_path, warm_commands):
    (tmp_path / "script.py").write_text(SCRIPT.replace('"run"', repr(str(tmp_path / "run"))))
    environment = os.environ | warm_commands | {"NEMORUN_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["python", "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert (tmp_path / "run" / "metrics.jsonl").is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [0, 1]
    effective = yaml.safe_load((tmp_path / "run" / "effective_config.yaml").read_text())
    ddp = effective["ddp"]
    assert ddp["overlap_grad_reduce"] is False and ddp["overlap_param_gather"] is False
    callbacks = [entry for entry in effective["callbacks"] if entry["class"].endswith("MegatronCommOverlapCallback")]
    assert len(callbacks) == 1
