# SPDX-License-Identifier: Apache-2.0
"""Training runs, one after the other, in a process of their own: the options of each are a line of JSON on stdin, what it leaves
to compare a line on stdout.

A process that has seen the GPU can't train on the CPU any more, so each side of a comparison is a process of this script.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

# Widths that tensor cores and fp8 take: multiples of 16 everywhere.
WIDE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 16,
    "vocab_size": 64,
}


def main() -> None:
    # Before the first request, while the other side trains.
    import nemo2.mcore.optim.megatron
    import nemo2.models.llama
    import nemo2.training.strategy  # noqa: F401
    from support import small_runs

    for line in sys.stdin:
        print("RUN " + json.dumps(train(**json.loads(line))), flush=True)
        small_runs.release()


def train(
    *,
    steps: int,
    precision: str = "bf16_mixed",
    save: str | None = None,
    load: str | None = None,
    asynchronous: bool = False,
    graphs: str = "none",
    softcap: float | None = None,
    lr: float = 1e-3,
) -> dict[str, Any]:
    """``precision``: a factory of `nemo2.recipes.precision.mixed_precision`. ``save``: a folder for a checkpoint of the last
    step, written ``asynchronous``ly or not. ``load``: a checkpoint to go on from. ``graphs``: `model.config.cuda_graph_impl`.
    ``softcap``: `model.config.attn_logit_softcapping`."""
    import fiddle as fdl
    import lightning.pytorch as pl
    import torch

    from nemo2 import ModelCheckpoint
    from nemo2.base.backend import get_backend
    from nemo2.models.layers import flex
    from nemo2.recipes.precision import mixed_precision
    from support import small_runs

    class Few(small_runs.Tokens):
        """Sixteen samples again and again, so that there is something to learn."""

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return super().__getitem__(index % 16)

    class FewData(small_runs.TokenData):
        def train_dataloader(self) -> torch.utils.data.DataLoader:
            return torch.utils.data.DataLoader(Few(self.size))

    plugin = getattr(mixed_precision, precision)()
    if plugin.first_last_layers_bf16:
        plugin.first_last_layers_bf16 = False  # the model has no other layers
    callbacks = []
    if save:
        callbacks.append(
            ModelCheckpoint(
                dirpath=save, every_n_train_steps=steps, save_optim_on_train_end=True, filename="{step}",
                save_last=False, monitor=None,
            )
        )  # fmt: skip
    seen = {}

    def inspect(trainer):
        module = trainer.strategy.megatron_parallel.module
        seen["layers"] = sorted({type(part).__module__.split(".")[0] for part in module.modules()})
        seen["backend"] = torch.distributed.get_backend()
        return seen

    class Captured(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            captured = trainer.strategy.megatron_parallel.graphs  # pyright: ignore[reportAttributeAccessIssue]
            seen["compiled"] = sum(shape[0] != "trial" for shape in flex._shapes)
            seen["captured"] = captured is not None and captured.captured

    callbacks.append(Captured())
    model = small_runs.build_llama(lr=lr, cuda_graph_impl=graphs, attn_logit_softcapping=softcap, **WIDE)
    record = small_runs.fit(
        model,
        FewData(size=small_runs.GBS * steps),
        max_steps=steps,
        ckpt_path=load,
        precision=fdl.build(plugin),
        callbacks=callbacks,
        inspect=inspect,
        ckpt_async_save=asynchronous,
    )
    return {"losses": record["losses"], "norms": record["grad_norms"], "device": get_backend().name} | seen


if __name__ == "__main__":
    main()
