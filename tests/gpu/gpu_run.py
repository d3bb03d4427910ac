# SPDX-License-Identifier: Apache-2.0
"""One training run in a process of its own, on the GPU or without it, and what it leaves to compare as JSON.

A process that has seen the GPU can't train on the CPU any more, so each side of a comparison is one call of this script.
"""

import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

# Widths that tensor cores and fp8 take: multiples of 16 everywhere.
WIDE = {
    "num_layers": 2,
    "hidden_size": 128,
    "ffn_hidden_size": 256,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 16,
    "vocab_size": 64,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "gpu"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument(
        "--precision", default="bf16_mixed", help="a factory of nemo2.recipes.precision.mixed_precision"
    )
    parser.add_argument("--save", help="folder for a checkpoint of the last step")
    parser.add_argument("--load", help="checkpoint to go on from")
    parser.add_argument("--asynchronous", action="store_true")
    parser.add_argument("--graphs", default="none", help="model.config.cuda_graph_impl")
    parser.add_argument("--softcap", type=float, help="model.config.attn_logit_softcapping")
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print("RUN " + json.dumps(run(options)))


def run(options: argparse.Namespace) -> dict:
    import fiddle as fdl
    import lightning.pytorch as pl
    import torch

    from nemo2 import ModelCheckpoint
    from nemo2.base.backend import get_backend
    from nemo2.models.layers import flex
    from nemo2.recipes.precision import mixed_precision
    from support import small_runs

    if options.device == "gpu" and not torch.cuda.is_available():
        raise SystemExit("there is no GPU")

    class Few(small_runs.Tokens):
        """Sixteen samples again and again, so that there is something to learn."""

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            return super().__getitem__(index % 16)

    class FewData(small_runs.TokenData):
        def train_dataloader(self) -> torch.utils.data.DataLoader:
            return torch.utils.data.DataLoader(Few(self.size))

    callbacks = []
    if options.save:
        callbacks.append(
            ModelCheckpoint(
                dirpath=options.save, every_n_train_steps=options.steps, save_optim_on_train_end=True, filename="{step}",
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
            graphs = trainer.strategy.megatron_parallel.graphs  # pyright: ignore[reportAttributeAccessIssue]
            seen["compiled"] = sum(shape[0] != "trial" for shape in flex._shapes)
            seen["captured"] = graphs is not None and graphs.captured

    callbacks.append(Captured())
    model = small_runs.build_llama(
        lr=options.lr, cuda_graph_impl=options.graphs, attn_logit_softcapping=options.softcap, **WIDE
    )
    record = small_runs.fit(
        model,
        FewData(size=small_runs.GBS * options.steps),
        max_steps=options.steps,
        ckpt_path=options.load,
        precision=fdl.build(getattr(mixed_precision, options.precision)()),
        callbacks=callbacks,
        inspect=inspect,
        ckpt_async_save=options.asynchronous,
    )
    return {"losses": record["losses"], "norms": record["grad_norms"], "device": get_backend().name} | seen


if __name__ == "__main__":
    main()
