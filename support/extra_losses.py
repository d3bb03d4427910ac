# SPDX-License-Identifier: Apache-2.0
"""What a coefficient of an extra loss does to the gradients, over masks, padding, packing and layouts.

Extra losses are those of routers and of multi-token prediction. The gradient of one is a difference: that of a step with its
coefficient minus that of the same step without. It is compared with the reference case of the same normalisation: one
process, every token trained, rows padded to the longest of a micro-batch. Each has two figures: the length of the
gradient over the reference's, and the norm of their difference over the reference's.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from support import gradients, moments, small_runs

LENGTHS = (12, 16, 8, 24, 20, 12, 16, 20)
"""Tokens of the samples of a step, multiples of 4 so that two context-parallel ranks can cut them. Pairs are a micro-batch."""
VOCAB, HIDDEN, PAD = 64, 32, 0
CONFIG: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": VOCAB,
    "seq_length": 96,
    "init_method_std": 0.2,
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
}
LOSSES: dict[str, dict[str, Any]] = {
    "load balancing": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1.0},
    "by sequence": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1.0},
    "over replicas": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 1.0},
    "z-loss": {"moe_z_loss_coeff": 1.0},
    "further token": {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0},
}
"""By name, the settings that turn an extra loss on. The further token's has no experts, so that it is alone."""
DENSE: dict[str, Any] = {"num_moe_experts": None, "moe_ffn_hidden_size": None}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step of the same eight samples."""

    name: str
    answers: bool = False
    """Train only on the last quarter of each sample."""
    length: int | None = None
    """The length of every row. None: that of the longest of the micro-batch."""
    packed: bool = False
    """The two samples of a micro-batch share a row."""
    per_token: bool = True
    """`calculate_per_token_loss`, as in fine-tuning."""
    ranks: int = 1
    strategy: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


_TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_PADDED: dict[str, Any] = {"answers": True, "length": 96}
CASES = (
    Case(name="every token"),
    Case(name="answers", answers=True),
    Case(name="answers, padded to 96", **_PADDED),
    Case(name="packed to 96, answers", packed=True, **_PADDED),
    Case(name="recomputed", config=_RECOMPUTED, **_PADDED),
    Case(name="DP 2, answers, padded to 96", ranks=2, **_PADDED),
    Case(name="TP 2, answers, padded to 96", ranks=2, strategy=_TP, **_PADDED),
    Case(name="CP 2, answers, padded to 96", ranks=2, strategy={"context_parallel_size": 2}, **_PADDED),
    Case(name="EP 2, answers, padded to 96", ranks=2, strategy={"expert_model_parallel_size": 2}, **_PADDED),
    Case(name="PP 2, answers, padded to 96", ranks=2, strategy={"pipeline_model_parallel_size": 2}, **_PADDED),
    Case(name="FSDP, answers, padded to 96", ranks=2, strategy={"fsdp2": True}, **_PADDED),
    Case(name="every token, mean of micro-batches", per_token=False),
    Case(name="answers, mean of micro-batches", per_token=False, answers=True),
    Case(name="padded to 96, mean of micro-batches", per_token=False, length=96),
)


def measure(case: Case, losses: list[str], folder: str) -> dict[str, tuple[float, float]]:
    """On each rank: by loss, the two figures of the module's docstring. The reference cases write their gradients into
    ``folder``, the others read them there."""
    figures = {}
    without: dict[bool, list[gradients.Piece]] = {}
    for loss in losses:
        path = path_of_reference(folder, case, loss)
        pieces = _difference(case, loss, path, without)
        if not path.exists():
            torch.save(gradients.whole_gradients(pieces), path)
        figures[loss] = _figures(pieces, torch.load(path))
    return figures


def path_of_reference(folder: str | Path, case: Case, loss: str) -> Path:
    """The reference's gradients, one file for the cases that must be equal: a further token's loss is another one with another
    mask."""
    mask = "answers" if case.answers and loss == "further token" else "every token"
    return Path(folder) / f"{loss}, {mask}, {'tokens' if case.per_token else 'micro-batches'}.pt"


REFERENCES = tuple(
    next(case for case in CASES if (case.per_token, case.answers) == kind)
    for kind in ((True, False), (True, True), (False, False), (False, True))
)
"""One process each, measured before others."""


def _difference(
    case: Case, loss: str, whole: Path, without: dict[bool, list[gradients.Piece]]
) -> list[gradients.Piece]:
    """This rank's pieces of the gradient of ``loss``. ``whole``: the file of the reference's. ``without``: the gradients of the
    step without an extra loss, which those of routers share."""
    further = "mtp_num_layers" in LOSSES[loss]
    base = CONFIG | (DENSE | {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.0} if further else {}) | case.config
    if further:
        case = replace(case, strategy={name: size for name, size in case.strategy.items() if "expert" not in name})
    weights = whole.parent / f"weights of {'further tokens' if further else 'experts'}"
    with_loss = _step(case, base | LOSSES[loss], weights, whole)
    if further not in without:
        without[further] = _step(case, base, weights, whole)
    return [
        replace(one, gradient=one.gradient.double() - other.gradient.double())
        for one, other in zip(with_loss, without[further], strict=True)
    ]


def _figures(pieces: list[gradients.Piece], whole: dict[gradients.Name, dict[str, Any]]) -> tuple[float, float]:
    own = []
    for piece in pieces:
        expected = whole[piece.name]["gradient"][piece.place].double()
        place = tuple((part.start, part.stop) for part in piece.place)
        apart = piece.gradient - expected
        own.append(((piece.name, place), float(piece.gradient.square().sum()), float(apart.square().sum())))
    everybodys: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everybodys, own)
    length: dict[Any, float] = {}
    error: dict[Any, float] = {}
    for key, squared, distance in (item for rank in everybodys for item in rank):
        length[key] = max(squared, length.get(key, 0.0))
        error[key] = max(distance, error.get(key, 0.0))
    norm = sum(float(entry["gradient"].double().square().sum()) for entry in whole.values()) ** 0.5
    return sum(length.values()) ** 0.5 / norm, sum(error.values()) ** 0.5 / norm


def _step(case: Case, config: dict[str, Any], weights: Path, whole: Path) -> list[gradients.Piece]:
    """The gradients of the first step from ``weights``, which the first run of all writes."""
    from nemo2.checkpoint.auto_resume import RestoreConfig

    model = small_runs.build_llama(
        calculate_per_token_loss=case.per_token, optimizer={"clip_grad": 0.0, "adam_beta1": 0.5}, **config
    )
    options: dict[str, Any] = dict(case.strategy)
    if weights.exists():
        options["restore_config"] = RestoreConfig(path=str(weights))
    if options.pop("fsdp2", False):
        from nemo2 import FSDP2Strategy

        strategy: Any = FSDP2Strategy(**options)
        options = {"strategy": strategy}
    recorder = _Gradients(weights, whole)
    small_runs.fit(model, _Data(case), **options, max_steps=1, callbacks=[recorder])
    small_runs.release()
    return recorder.pieces


class _Gradients(pl.Callback):
    def __init__(self, weights: Path, whole: Path) -> None:
        self.weights, self.whole = weights, whole
        self.pieces: list[gradients.Piece] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not self.weights.exists():
            state = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)
            trainer.strategy.save_checkpoint(state, self.weights, storage_options={"with_context": False})

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if moments.holds_gradients(trainer.strategy):
            pieces = gradients.pieces_of(trainer.strategy.megatron_parallel)
            self.pieces = [replace(piece, gradient=piece.gradient.clone()) for piece in pieces]

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if not self.pieces:
            self.pieces = list(moments.pieces_of(trainer.strategy, torch.load(self.whole), factor=0.5))


class _Samples(Dataset):
    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return len(LENGTHS) // (2 if self.case.packed else 1)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        from nemo2.data.finetuning.rows import row_of

        if self.case.packed:
            return row_of([_sample(self.case, 2 * index + one) for one in (0, 1)], packed=True, pad_id=PAD)
        return row_of([_sample(self.case, index)], pad_id=PAD)


def _sample(case: Case, index: int) -> tuple[np.ndarray, np.ndarray]:
    length = LENGTHS[index] + 1
    ids = np.random.default_rng(index).integers(1, VOCAB, length)
    return ids, np.arange(length) >= (3 * length // 4 if case.answers else 0)


class _Data(pl.LightningDataModule):
    def __init__(self, case: Case) -> None:
        from nemo2.data.sampler import MegatronDataSampler

        super().__init__()
        self.case, count = case, len(_Samples(case))
        self.data_sampler = MegatronDataSampler(
            seq_len=case.length or max(LENGTHS), micro_batch_size=1 if case.packed else 2, global_batch_size=count
        )

    def train_dataloader(self) -> DataLoader:
        from nemo2.data.finetuning.rows import Collate

        return DataLoader(_Samples(self.case), collate_fn=Collate(pad_id=PAD, length=self.case.length, multiple=4))
