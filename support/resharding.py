# SPDX-License-Identifier: Apache-2.0
"""Checkpoints saved in one layout and loaded in another: the pairs and their comparison. `make reshard` runs all of
them.

Each source trains three steps, saves, and trains ten more: the uninterrupted run. Each target loads what was saved, saves
it again before its first step, and trains the same ten. The two checkpoints are read whole, with torch's own reader of the
format and without Megatron-Core, and compared tensor by tensor: parameters, both moments of Adam, fp32 main parameters.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo2.mcore.parallel.layout import SIZE_FIELDS
from support import small_runs

STOP, STEPS = 3, 13
MODEL = {"num_layers": 4, "num_query_groups": 4}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_aux_loss_coeff": 0.0,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}
_COPY = "optimizer.copy."
_BUFFERS = "optimizer.distributed."
"""A distributed optimizer's buffers as they are (``ckpt_parallel_save_optim=False``): between parameters there is memory that
nobody has written."""
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
SHARDED = ("fsdp1", "fsdp2", "mfsdp")
"""`FSDPStrategy`, `FSDP2Strategy` and `MegatronStrategy(fsdp="megatron")`."""


@dataclass(frozen=True)
class Cut:
    """A layout in short form: ``Cut(4, "tp2 pp2 sp")``. ``do`` is the distributed optimizer. The precision is fp32, or
    bf16 with ``bf16``."""

    world: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.text or 'dp'} on {self.world}"

    @property
    def distributed(self) -> bool:
        return bool({"do", "mfsdp"} & set(self.text.split()))

    @property
    def precision(self) -> str:
        return "bf16-mixed" if "bf16" in self.text.split() else "32"

    def strategy(self) -> dict[str, Any]:
        """Arguments of the strategy for `small_runs.build_trainer`."""
        words = self.text.split()
        if "fsdp1" in words or "fsdp2" in words:
            import nemo2 as nl

            return {"strategy": (nl.FSDPStrategy if "fsdp1" in words else nl.FSDP2Strategy)()}
        options: dict[str, Any] = {"sequence_parallel": True} if "sp" in words else {}
        for word in words:
            name = word.rstrip("0123456789")
            if name in SIZE_FIELDS:
                options[SIZE_FIELDS[name]] = int(word.removeprefix(name))
        return options | ({"fsdp": "megatron"} if "mfsdp" in words else {})


@dataclass(frozen=True)
class Pair:
    """``exact``: the same layout, with dropout; losses and all else are to be equal to the last bit."""

    saved: Cut
    loaded: Cut
    moe: bool = False
    exact: bool = False

    def __str__(self) -> str:
        kind = "MoE" if self.moe else "dense"
        return f"{kind}: {self.saved} -> {self.loaded}{', dropout' if self.exact else ''}"

    @property
    def source(self) -> tuple[Cut, bool, bool]:
        return self.saved, self.moe, self.exact


def _pairs() -> list[Pair]:
    one = Cut(1)
    dense = [
        (one, Cut(2, "tp2")),
        (one, Cut(2, "pp2 vp2")),
        (one, Cut(4, "do")),
        (Cut(2, "tp2"), Cut(2, "pp2")),
        (Cut(2, "pp2"), Cut(2, "tp2 sp")),
        (Cut(2, "cp2"), Cut(2, "tp2")),
        (Cut(2, "do"), one),
        (Cut(2, "do"), Cut(4, "do")),
        (Cut(2, ""), Cut(2, "do")),
        (Cut(2, "do"), Cut(2, "")),
        (Cut(4, "tp2 pp2"), Cut(4, "do")),
        (Cut(4, "do"), Cut(4, "tp2 pp2")),
        (Cut(4, "tp4"), Cut(4, "pp4")),
        (Cut(4, "pp4"), Cut(4, "cp2 do")),
        (Cut(2, "pp2 vp2"), Cut(4, "tp2 cp2 sp")),
        (Cut(2, "pp2 vp2"), Cut(4, "pp4")),
        (Cut(4, "tp2 do"), Cut(4, "pp2 do")),
        (Cut(4, "tp2 cp2 sp"), one),
    ]
    sharded = [
        (Cut(2, "tp2 do"), Cut(2, "fsdp2")),
        (Cut(2, "fsdp2"), Cut(2, "tp2 do")),
        (Cut(2, "fsdp2"), Cut(4, "pp2 do")),
        (Cut(2, "pp2"), Cut(4, "fsdp2")),
        (Cut(2, "do"), Cut(2, "fsdp1")),
        (Cut(2, "fsdp1"), Cut(2, "pp2 vp2")),
        (Cut(4, "tp2 pp2"), Cut(2, "mfsdp")),
        (Cut(2, "mfsdp"), Cut(2, "tp2 sp")),
        (Cut(2, "mfsdp"), one),
        (Cut(2, "fsdp2"), Cut(4, "fsdp2")),
        (Cut(2, "fsdp2"), Cut(2, "mfsdp")),
        (Cut(2, "mfsdp"), Cut(2, "fsdp1")),
    ]
    experts = [
        (one, Cut(2, "ep2")),
        (Cut(2, "ep2"), one),
        (Cut(4, "ep4 do"), Cut(2, "ep2 do")),
        (Cut(4, "pp2 ep2"), Cut(4, "tp2 ep2 sp")),
        (Cut(2, "tp2 etp1 ep2 sp"), Cut(2, "tp2 etp2 sp")),
        (Cut(2, "tp2 etp2 sp"), Cut(4, "ep4")),
        (Cut(2, "ep2 do"), Cut(4, "pp2 ep2 do")),
        (Cut(2, "pp2"), Cut(4, "ep4 do")),
    ]
    half = [
        (Cut(2, "fsdp2 bf16"), Cut(2, "tp2 do bf16")),
        (Cut(2, "do bf16"), Cut(2, "fsdp2 bf16")),
        (Cut(2, "fsdp1 bf16"), Cut(2, "pp2 bf16")),
        (Cut(2, "tp2 bf16"), Cut(2, "mfsdp bf16")),
        (Cut(2, "pp2 bf16"), Cut(2, "do bf16")),
        (Cut(2, "do bf16"), Cut(2, "tp2 bf16")),
    ]
    same = [
        Cut(2, "fsdp1"),
        Cut(2, "fsdp2"),
        Cut(2, "mfsdp"),
        Cut(2, "do"),
        Cut(2, "tp2 sp"),
        Cut(2, "pp2 vp2"),
        Cut(2, "cp2"),
        Cut(4, "tp2 pp2 sp"),
    ]
    return [
        *(Pair(saved, loaded) for saved, loaded in [*dense, *sharded]),
        *(Pair(saved, loaded, moe=True) for saved, loaded in experts),
        *(Pair(saved, loaded) for saved, loaded in half),
        *(Pair(cut, cut, exact=True) for cut in same),
        Pair(Cut(2, "ep2 do"), Cut(2, "ep2 do"), moe=True, exact=True),
    ]


PAIRS = _pairs()


@dataclass
class Outcome:
    """The outcome of a pair. ``loss`` is the largest relative difference over the ten steps."""

    pair: str
    loss: float
    exact: bool
    allowed: float = 1e-6
    parameters: int = 0
    moments: int = 0
    different: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        same = self.parameters > 8 and self.moments >= 2 * self.parameters and not self.different
        return same and (self.loss == 0.0 if self.exact else self.loss <= self.allowed)


def save(cut: Cut, moe: bool, exact: bool, directory: str) -> list[float]:
    """Train, save at `STOP` into ``directory/step=3``, and train on. Returns the losses after the save."""
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint

    keep = ModelCheckpoint(
        dirpath=directory, filename="{step}", every_n_train_steps=STOP, save_top_k=-1, save_last=False, verbose=False
    )
    return _fit(cut, moe, exact, callbacks=[keep])["losses"][STOP:]


def load(cut: Cut, moe: bool, exact: bool, directory: str, again: str) -> list[float]:
    """Load ``directory/step=3``, save it to ``again`` in the new layout, and train on. Returns the losses."""
    import lightning.pytorch as pl

    class SaveAgain(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert trainer.global_step == STOP
            trainer.save_checkpoint(again)

    return _fit(cut, moe, exact, callbacks=[SaveAgain()], ckpt_path=f"{directory}/step={STOP}")["losses"]


def _fit(cut: Cut, moe: bool, exact: bool, **options: Any) -> dict[str, Any]:
    small_runs.release()
    config = MODEL | (MOE if moe else {}) | (DROPOUT if exact else {})
    model = small_runs.build_llama(
        distributed=cut.distributed, schedule=small_runs.cosine(STEPS, warmup_steps=2), lr=3e-3, **config
    )
    data = small_runs.TokenData(size=128)
    return small_runs.fit(model, data, max_steps=STEPS, precision=cut.precision, **cut.strategy(), **options)


def compare(pair: Pair, directory: str, again: str, expected: list[float], losses: list[float]) -> Outcome:
    """Compare the files of both checkpoints and the losses of both runs, in one process without process groups."""
    assert len(expected) == len(losses) == STEPS - STOP, (expected, losses)
    worst = max(abs(a - b) / abs(a) for a, b in zip(expected, losses, strict=True))
    outcome = Outcome(str(pair), worst, pair.exact, 1e-6 if pair.loaded.precision == "32" else 1e-2)
    return compare_files(outcome, Path(directory) / f"step={STOP}", Path(again))


def compare_files(outcome: Outcome, *checkpoints: Path) -> Outcome:
    """Add the comparison of two checkpoints' tensors to ``outcome``."""
    both = [whole_tensors(path) for path in checkpoints]
    if any(_BUFFERS in name for tensors in both for name in tensors):
        both = [{name: one for name, one in tensors.items() if "optimizer." not in name} for tensors in both]
    saved, loaded = map(_comparable, both)
    for name in sorted(saved.keys() | loaded.keys()):
        if name not in saved or name not in loaded:
            outcome.different.append(f"{name} is only in {'the saved' if name in saved else 'the loaded'} one")
        elif not _equal(saved[name], loaded[name]):
            outcome.different.append(name)
        elif name.startswith("optimizer."):
            outcome.moments += name.startswith(("optimizer.state.exp_avg.", "optimizer.state.exp_avg_sq."))
        else:
            outcome.parameters += 1
    return outcome


def whole_tensors(checkpoint: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint by its name in the file, whole."""
    return read_tensors(checkpoint / "weights")


def read_tensors(folder: str | Path) -> dict[str, Any]:
    """Whole tensors by name. With torch alone, so that Megatron-Core's resharding is not checked against itself."""
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(folder)
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state


def _comparable(tensors: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's fp32 parameters under one name. One that keeps none of its own (fp32, not distributed) has the
    model's. Without the count of updates, which some strategies keep with each parameter and others in plain data: a wrong
    one makes other losses."""
    copies = {
        name.replace("optimizer.state.fp32_param.", _COPY).replace("optimizer.state.param.", _COPY): value
        for name, value in tensors.items()
        if not name.startswith("optimizer.state.step.")
    }
    own = {f"{_COPY}{name}": value for name, value in tensors.items() if not name.startswith("optimizer.")}
    found = own | copies
    for name, value in tensors.items():
        copy = found.get(f"{_COPY}{name}")
        # 16-bit parameters are compared by their copies, which they have to be roundings of.
        if copy is not None and copy.dtype != value.dtype and _equal(copy.to(value.dtype), value):
            found[name] = copy
    return found


def _equal(a: Any, b: Any) -> bool:
    import torch

    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
