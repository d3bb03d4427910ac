# SPDX-License-Identifier: Apache-2.0
"""The overlap callback's rules as a table: layouts and settings against what Megatron-Core's configurations then say.

The expected column was written from NeMo 2.0's documented rules and Megatron-LM's assertions (arguments.py), by hand.
"""

import re
from types import SimpleNamespace
from typing import Any, Optional

import pytest

from nemo2.base.errors import ConfigError
from nemo2.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback
from nemo2.config.provenance import adjust, adjustments, note_explicit_fields
from nemo2.mcore.parallel import fsdp
from nemo2.mcore.parallel.ddp_config import DistributedDataParallelConfig, OptimizerConfig
from nemo2.mcore.parallel.layout import Layout
from nemo2.mcore.settle import Machine
from nemo2.mcore.settle.overlap import DEFAULT_BUCKET_SIZE, Decision, overlap
from nemo2.mcore.settle.run_settings import RunSettings
from nemo2.mcore.settle.settling import leave_one_bucket
from nemo2.models.llama import LlamaConfig
from nemo2.training.strategy import MegatronStrategy

M = DEFAULT_BUCKET_SIZE

LETTERS = {
    "T": ("model", "tp_comm_overlap"),
    "P": ("model", "overlap_p2p_comm"),
    "B": ("model", "batch_p2p_comm"),
    "E": ("model", "defer_embedding_wgrad_compute"),
    "R": ("ddp", "overlap_grad_reduce"),
    "G": ("ddp", "overlap_param_gather"),
    "A": ("ddp", "align_param_gather"),
    "S": ("optim", "overlap_param_gather_with_optimizer_step"),
}
"""A letter for each switch that is on; a switch without a letter in a row's answer is off."""

# layout and optimizer | callback's arguments | settings elsewhere | what is on | bucket size
TABLE = """
dp8                     |                                          |                            | RG   | M
dp2                     |                                          |                            | RG   | M
dp1                     |                                          |                            |      | -
dp1 cp2                 |                                          |                            | RG   | M
dp1 cp8                 |                                          |                            | RG   | M
dp4 cp2                 |                                          |                            | RG   | M
dp8 zero                |                                          |                            | RG   | M
dp8 plain               |                                          |                            |      | -
dp1 plain               |                                          |                            |      | -
dp8 pp4                 |                                          |                            | BRG  | M
dp8 pp2                 |                                          |                            | BRG  | M
dp1 pp2                 |                                          |                            | B    | -
dp1 pp4 vp2             |                                          |                            | P    | -
dp8 pp4 vp2             |                                          |                            | PRGA | M
dp8 pp2 vp2             |                                          |                            | PRGA | M
dp8 pp4 vp1             |                                          |                            | BRG  | M
dp8 pp4 vp2 plain       |                                          |                            | P    | -
dp8 pp4 plain           |                                          |                            | B    | -
dp8 tp2                 |                                          |                            | RG   | M
dp8 tp2 sp              |                                          |                            | RG   | M
dp1 tp8 sp              |                                          |                            |      | -
dp8                     | tp_comm_overlap=1                        |                            | RG   | M
dp8 tp2                 | tp_comm_overlap=1                        |                            | RG   | M
dp8 tp2 sp              | tp_comm_overlap=1                        |                            | TRG  | M
dp8 tp2 sp no-te        | tp_comm_overlap=1                        |                            | RG   | M
dp8 tp2 sp              | tp_comm_overlap=0                        |                            | RG   | M
dp8 tp2 sp              |                                          | model.tp_comm_overlap=1    | TRG  | M
dp8 tp2 sp no-te        |                                          | model.tp_comm_overlap=1    | RG   | M
dp1 tp4 sp              | tp_comm_overlap=1                        |                            | T    | -
dp2 tp4 sp cp2 pp4 vp5  | tp_comm_overlap=1                        |                            | TPRGA| M
dp2 tp4 sp cp2 pp4      | tp_comm_overlap=1                        |                            | TBRG | M
dp8 tp2 sp plain        | tp_comm_overlap=1                        |                            | T    | -
dp8                     | overlap_p2p_comm=1                       |                            | RG   | M
dp8                     | overlap_p2p_comm=1 batch_p2p_comm=0      |                            | RG   | M
dp8                     | batch_p2p_comm=1                         |                            | RG   | M
dp8 pp4                 | batch_p2p_comm=0                         |                            | RG   | M
dp8 pp4 vp2             | overlap_p2p_comm=1 batch_p2p_comm=0      |                            | PRGA | M
dp8 pp4 vp2             | overlap_p2p_comm=0                       |                            | BRGA | M
dp8 pp4 vp2             | batch_p2p_comm=1                         |                            | BRGA | M
dp8 pp4 vp2             | overlap_p2p_comm=0 batch_p2p_comm=0      |                            | RGA  | M
dp8 pp4 vp2             |                                          | model.overlap_p2p_comm=0   | BRGA | M
dp8 pp2 vp4             | overlap_p2p_comm=1                       |                            | PRGA | M
dp8                     | overlap_grad_reduce=0                    |                            |      | M
dp8                     | overlap_param_gather=0                   |                            | R    | M
dp8                     | overlap_grad_reduce=0 overlap_param_gather=0 |                        |      | M
dp8                     | overlap_grad_reduce=1 overlap_param_gather=1 |                        | RG   | M
dp1                     | overlap_grad_reduce=1 overlap_param_gather=1 |                        |      | -
dp8 plain               | overlap_grad_reduce=1                    |                            | R    | -
dp8 plain               | overlap_param_gather=1                   |                            |      | -
dp8                     |                                          | ddp.overlap_grad_reduce=0  |      | M
dp8                     |                                          | ddp.overlap_grad_sync=0    |      | M
dp8                     |                                          | ddp.overlap_param_gather=0 | R    | M
dp8                     |                                          | ddp.overlap_param_sync=0   | R    | M
dp8                     |                                          | ddp.overlap_grad_reduce=0 ddp.overlap_param_gather=0 | | M
dp8                     |                                          | optim.overlap_param_gather=0 | R  | M
dp1                     |                                          | ddp.overlap_grad_reduce=1  |      | -
dp8 plain               |                                          | ddp.overlap_grad_reduce=1  | R    | -
dp8                     | overlap_grad_reduce=0                    | ddp.overlap_grad_reduce=0  |      | M
dp8                     | bucket_size=7                            |                            | RG   | 7
dp8                     |                                          | ddp.bucket_size=7          | RG   | 7
dp8                     | bucket_size=7                            | ddp.bucket_size=7          | RG   | 7
dp8                     | bucket_size=7 overlap_grad_reduce=0      |                            |      | -
dp1                     | bucket_size=7                            |                            |      | -
dp8 plain               | bucket_size=7 overlap_grad_reduce=1      |                            | R    | 7
dp8 plain               | bucket_size=7                            |                            |      | -
dp8 plain               |                                          | ddp.bucket_size=7          |      | -
dp8 plain               |                                          | ddp.bucket_size=7 ddp.overlap_grad_reduce=1 | R | 7
dp8                     | align_param_gather=1                     |                            | RG   | M
dp8 pp4                 | align_param_gather=1                     |                            | BRG  | M
dp8 pp4 vp2             | align_param_gather=1                     |                            | PRGA | M
dp8 pp4 vp2             | align_param_gather=0                     |                            | PRG  | M
dp8 pp4 vp2             | overlap_param_gather=0                   |                            | PR   | M
dp8 pp4 vp2             | overlap_grad_reduce=0                    |                            | P    | M
dp1 pp4 vp2             | align_param_gather=1                     |                            | P    | -
dp8                     | overlap_param_gather_with_optimizer_step=1 |                          | RG   | M
dp8 pp4 vp2             | overlap_param_gather_with_optimizer_step=1 |                          | PRGAS| M
dp8 pp4 vp2 plain       | overlap_param_gather_with_optimizer_step=1 |                          | P    | -
dp8                     | defer_embedding_wgrad_compute=1          |                            | RG   | M
dp8 pp4                 | defer_embedding_wgrad_compute=1          |                            | BRG  | M
dp8 pp4 fused           | defer_embedding_wgrad_compute=1 wgrad_deferral_limit=22 |             | BERG | M
dp8 pp4 vp2 fused       | defer_embedding_wgrad_compute=1 wgrad_deferral_limit=50 |             | PERGA| M
dp8 fused               | defer_embedding_wgrad_compute=1 wgrad_deferral_limit=22 |             | RG   | M
"""
ROWS = [[cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines()]


def parsed(text: str) -> dict[str, Any]:
    values = dict(item.split("=") for item in text.split())
    return {name: int(value) if name.endswith(("size", "limit")) else value == "1" for name, value in values.items()}


def a_run(layout: str, elsewhere: str = "") -> tuple[Any, Any]:
    """Trainer and module as far as the callback looks at them, with Megatron-Core's own configurations.

    ``plain`` is a run without the distributed optimizer, ``zero`` one where it was set in ``optim.config``.
    """
    sizes = {name: int(size) for name, size in re.findall(r"\b(dp|tp|pp|vp|cp)(\d+)", layout)}
    dp = sizes.pop("dp")
    cut = Layout(**sizes, sp="sp" in layout.split())
    given: dict[str, dict[str, Any]] = {"ddp": {}, "model": {}, "optim": {}}
    for path, value in parsed(elsewhere).items():
        owner, _, name = path.partition(".")
        given[owner][name] = value
    model = LlamaConfig(num_layers=20, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, **given["model"])
    model.gradient_accumulation_fusion = "fused" in layout
    if "zero" in layout:
        optim = OptimizerConfig(lr=1e-3, use_distributed_optimizer=True, **given["optim"])
    else:
        optim = OptimizerConfig(lr=1e-3, **given["optim"])
        optim.use_distributed_optimizer = "plain" not in layout
    ddp = DistributedDataParallelConfig(**given["ddp"])
    world = dp * cut.tp * cut.pp * cut.cp
    missing = "transformer_engine is not installed" if "no-te" in layout else None
    machine = Machine(model="h100", transformer_engine=None if missing else "2.9", te_missing=missing, apex=True)
    strategy = SimpleNamespace(layout=cut, ddp_config=ddp, data_sampler=SimpleNamespace(seq_len=64, micro_batch_size=1))
    strategy.run_settings = lambda module: RunSettings(
        parallelism=SimpleNamespace(**cut.fields()),  # pyright: ignore[reportArgumentType]
        ddp_config=strategy.ddp_config,
        optimizer_config=module.optim.config,
        model_config=module.config,
        machine=machine,
    )
    trainer = SimpleNamespace(strategy=strategy, world_size=world, is_global_zero=True)
    return trainer, SimpleNamespace(config=model, optim=SimpleNamespace(config=optim))


def decided(layout: str, callback: Optional[MegatronCommOverlapCallback] = None, elsewhere: str = "") -> Any:
    """The decisions of a callback in a run, and the sentences that it logs."""
    trainer, module = a_run(layout, elsewhere)
    sentences: list[str] = []
    decisions = overlap(
        trainer.strategy.run_settings(module),
        [callback or MegatronCommOverlapCallback()],
        world_size=trainer.world_size,
        data_sampler=trainer.strategy.data_sampler,
        say=lambda words, *values: sentences.append(words % values),
    )
    return decisions, sentences


@pytest.mark.parametrize(
    ("layout", "callback", "elsewhere", "on", "bucket"), ROWS, ids=[" ".join(filter(None, row[:3])) for row in ROWS]
)
def test_effective_values(layout: str, callback: str, elsewhere: str, on: str, bucket: str) -> None:
    trainer, module = a_run(layout, elsewhere)
    MegatronCommOverlapCallback(**parsed(callback)).setup(trainer, module, "fit")
    configs = {"model": module.config, "ddp": trainer.strategy.ddp_config, "optim": module.optim.config}
    found = {letter for letter, (owner, name) in LETTERS.items() if getattr(configs[owner], name)}
    assert found == set(on)
    assert configs["ddp"].bucket_size == {"M": M, "-": None}.get(bucket, bucket if bucket in "M-" else int(bucket))
    assert configs["optim"].overlap_param_gather == configs["ddp"].overlap_param_gather, "one switch, two places"


# layout | callback's arguments | settings elsewhere | what contradicts | what
CONTRADICTIONS = """
dp8 | overlap_grad_reduce=0 | ddp.overlap_grad_reduce=1 | overlap_grad_reduce of callback | overlap_grad_reduce of ddp
dp8 | overlap_grad_reduce=0 | ddp.overlap_grad_sync=1 | overlap_grad_reduce of callback | overlap_grad_reduce of ddp
dp8 | GATHER=1 | ddp.GATHER=0 | GATHER of callback | GATHER of ddp
dp8 | GATHER=1 | optim.GATHER=0 | GATHER of callback | GATHER of optim
dp8 | GATHER=1 | ddp.GATHER=1 optim.GATHER=0 | GATHER of callback | GATHER of optim
dp8 |  | ddp.GATHER=1 optim.GATHER=0 | GATHER of ddp | GATHER of optim
dp8 | align_param_gather=1 | ddp.align_param_gather=0 | align_param_gather of callback | align_param_gather of ddp
dp8 | bucket_size=6 | ddp.bucket_size=5 | bucket_size of callback | bucket_size of ddp
dp8 | tp_comm_overlap=1 | model.tp_comm_overlap=0 | tp_comm_overlap of callback | tp_comm_overlap of model
dp8 pp4 | batch_p2p_comm=1 | model.batch_p2p_comm=0 | batch_p2p_comm of callback | batch_p2p_comm of model
dp8 pp4 vp2 | overlap_p2p_comm=1 | model.overlap_p2p_comm=0 | overlap_p2p_comm of callback | overlap_p2p_comm of model
dp8 pp4 | wgrad_deferral_limit=6 | model.wgrad_deferral_limit=5 | wgrad_deferral_limit of callback | wgrad_deferral_limit of model
dp8 pp4 | DEFER=1 | model.DEFER=0 | DEFER of callback | DEFER of model
dp8 pp4 vp2 | STEP=1 | optim.STEP=0 | STEP of callback | STEP of optim
dp8 pp4 vp2 | overlap_p2p_comm=1 batch_p2p_comm=1 |  | overlap_p2p_comm of callback | batch_p2p_comm of callback
dp8 pp4 vp2 | overlap_p2p_comm=1 | model.batch_p2p_comm=1 | overlap_p2p_comm of callback | batch_p2p_comm of model
dp8 | GATHER=1 overlap_grad_reduce=0 |  | GATHER of callback | overlap_grad_reduce of callback
dp8 | GATHER=1 | ddp.overlap_grad_reduce=0 | GATHER of callback | overlap_grad_reduce of ddp
dp8 plain | GATHER=1 | ddp.DIST=0 | GATHER of callback | DIST of ddp
dp8 pp4 vp2 | align_param_gather=1 | ddp.GATHER=0 | align_param_gather of callback | GATHER of ddp
dp8 pp4 vp2 | STEP=1 GATHER=0 |  | STEP of callback | GATHER of callback
dp8 pp2 vp2 | overlap_p2p_comm=0 |  | overlap_p2p_comm of callback | VP of strategy
dp8 pp2 vp2 | batch_p2p_comm=1 |  | batch_p2p_comm of callback | VP of strategy
"""
LONG = {
    "GATHER": "overlap_param_gather",
    "DIST": "use_distributed_optimizer",
    "STEP": "overlap_param_gather_with_optimizer_step",
    "DEFER": "defer_embedding_wgrad_compute",
    "VP": "virtual_pipeline_model_parallel_size",
}
for _short, _long in LONG.items():
    CONTRADICTIONS = CONTRADICTIONS.replace(_short, _long)
REFUSED = [[cell.strip() for cell in line.split("|")] for line in CONTRADICTIONS.strip().splitlines()]


@pytest.mark.parametrize(("layout", "callback", "elsewhere", "first", "second"), REFUSED, ids=lambda cell: cell)
def test_contradictions_name_both_sources_and_their_lines(
    layout: str, callback: str, elsewhere: str, first: str, second: str
) -> None:
    trainer, module = a_run(layout, elsewhere)
    with pytest.raises(ConfigError) as refused:
        MegatronCommOverlapCallback(**parsed(callback)).setup(trainer, module, "fit")
    pattern = " contradicts ".join(said(*place.split(" of ")) for place in (first, second))
    assert re.search(pattern, str(refused.value)), str(refused.value)


def said(name: str, owner: str) -> str:
    """How a message names a setting, with its value and line."""
    line = rf" \({re.escape(__file__)}:\d+\)"
    return {
        "callback": rf"MegatronCommOverlapCallback\({name}=\w+\){line}",
        "ddp": rf"strategy\.ddp_config\.{name}=\w+{line}",
        "model": rf"model\.config\.{name}=\w+{line}",
        "optim": rf"optim\.config\.{name}=\w+{line}",
        "strategy": rf"strategy\.{name}=\w+",
    }[owner]


def test_all_contradictions_are_told_at_once() -> None:
    trainer, module = a_run("dp8", "ddp.bucket_size=5 ddp.overlap_grad_reduce=1")
    callback = MegatronCommOverlapCallback(bucket_size=6, overlap_grad_reduce=False)
    with pytest.raises(ConfigError) as refused:
        callback.setup(trainer, module, "fit")
    assert len(str(refused.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ("dp8", "tensor_model_parallel_size is 1"),
        ("dp8 tp2", "sequence_parallel is off"),
        ("dp8 tp2 sp no-te", "transformer_engine is not installed"),
    ],
)
def test_tensor_overlap_is_turned_off_with_the_first_obstacle(layout: str, reason: str) -> None:
    decisions, _ = decided(layout, MegatronCommOverlapCallback(tp_comm_overlap=True))
    assert decisions["tp_comm_overlap"] == (False, reason, False)


@pytest.mark.parametrize(("layout", "count"), [("dp1 tp2 sp", 0), ("dp1", 1)])
def test_auto_is_never_told_as_without_effect(layout: str, count: int) -> None:
    callback = MegatronCommOverlapCallback(tp_comm_overlap=True, tp_comm_overlap_cfg="auto")
    _, sentences = decided(layout, callback)
    assert len(sentences) == count and not any("tp_comm_overlap_cfg" in sentence for sentence in sentences)


SHARDED = ("overlap_grad_reduce", "overlap_param_gather")


@pytest.mark.parametrize(
    ("sharding", "name"),
    [
        ("optim_grads_params", "overlap_grad_reduce"),
        ("optim_grads_params", "overlap_param_gather"),
        ("optim_grads", "overlap_grad_reduce"),
    ],
)
def test_what_megatron_fsdp_always_overlaps_is_not_turned_off(sharding: str, name: str) -> None:
    def buffers(**fields: Any) -> DistributedDataParallelConfig:
        return DistributedDataParallelConfig(data_parallel_sharding_strategy=sharding, **fields)

    with pytest.raises(ConfigError, match=rf"strategy\.ddp_config\.{name}=False with strategy\.fsdp='megatron'"):
        MegatronStrategy(fsdp="megatron", ddp=buffers(**{name: False}))
    trainer, module = a_run("dp8")
    trainer.strategy.ddp_config = MegatronStrategy(fsdp="megatron", ddp=buffers()).ddp_config
    with pytest.raises(ConfigError, match=rf"Callback\({name}=False\) .*: strategy\.fsdp='megatron' always"):
        MegatronCommOverlapCallback(**{name: False}).setup(trainer, module, "fit")
    MegatronCommOverlapCallback().setup(trainer, module, "fit")
    assert getattr(trainer.strategy.ddp_config, name) is True


def test_where_megatron_fsdp_shards_states_only_the_user_decides() -> None:
    off = dict.fromkeys(SHARDED, False)
    ddp = DistributedDataParallelConfig(data_parallel_sharding_strategy="optim", **off)
    trainer, module = a_run("dp8")
    trainer.strategy.ddp_config = MegatronStrategy(fsdp="megatron", ddp=ddp).ddp_config
    MegatronCommOverlapCallback(**off).setup(trainer, module, "fit")
    assert {name: getattr(trainer.strategy.ddp_config, name) for name in SHARDED} == off


def test_what_megatron_fsdp_overlaps_wrongly_stays_off_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp, "not_overlapped", lambda sharding: "it is wrong here")
    on = "ddp.use_megatron_fsdp=1"
    decisions, _ = decided("dp8", elsewhere=on)
    assert decisions["overlap_grad_reduce"] == Decision(False, "it is wrong here")
    assert decisions["overlap_param_gather"].value is False
    for callback, elsewhere in ((None, f"{on} ddp.overlap_grad_reduce=1"), ("overlap_grad_reduce=1", on)):
        with pytest.raises(ConfigError, match=r"overlap_grad_reduce=True.*: it is wrong here"):
            decided("dp8", MegatronCommOverlapCallback(**parsed(callback or "")), elsewhere)
    assert decided("dp1", elsewhere=on)[0]["overlap_grad_reduce"].value is False


@pytest.mark.parametrize("asked", ["overlap_p2p_comm=1", "overlap_p2p_comm=1 batch_p2p_comm=0"])
def test_overlapped_messages_without_virtual_stages_are_refused_as_megatron_core_would(asked: str) -> None:
    trainer, module = a_run("dp8 pp4")
    with pytest.raises(
        ConfigError, match=r"overlap_p2p_comm=True\) \(.*:\d+\) contradicts strategy\.pipeline_model_parallel_size=4"
    ) as refused:
        MegatronCommOverlapCallback(**parsed(asked)).setup(trainer, module, "fit")
    assert refused.value.rule == "overlapped-messages-are-between-chunks"


def test_a_number_of_buckets_is_not_contradicted_by_a_default_size() -> None:
    trainer, module = a_run("dp8")
    note_explicit_fields(trainer.strategy.ddp_config, {"num_buckets": 4})  # a field of newer versions
    MegatronCommOverlapCallback().setup(trainer, module, "fit")
    assert trainer.strategy.ddp_config.bucket_size is None
    with pytest.raises(ConfigError, match=r"bucket_size=5\) .* contradicts strategy\.ddp_config\.num_buckets=4"):
        MegatronCommOverlapCallback(bucket_size=5).setup(trainer, module, "fit")


def test_settings_of_something_that_is_off_count_for_nothing() -> None:
    name = "userbuffers_bf16_h100_h8192_tp4_mbs1_seqlen8192"
    decisions, _ = decided("dp8", MegatronCommOverlapCallback(tp_comm_overlap_cfg=name, wgrad_deferral_limit=22))
    assert decisions["tp_comm_overlap_cfg"] == (None, "tp_comm_overlap is off", False)
    assert decisions["wgrad_deferral_limit"] == (0, "defer_embedding_wgrad_compute is off", False)


@pytest.mark.parametrize(("reduced", "size"), [(False, None), (True, 1000)])
def test_only_overlapped_reductions_keep_their_buckets(reduced: bool, size: Optional[int]) -> None:
    sentences: list[str] = []
    ddp = DistributedDataParallelConfig(bucket_size=1000, overlap_grad_reduce=reduced)
    run = RunSettings(parallelism=Layout(), ddp_config=ddp)  # pyright: ignore[reportArgumentType]
    leave_one_bucket(run, say=lambda words, *values: sentences.append(words % values))
    assert ddp.bucket_size == size
    if size is None:
        [sentence] = sentences
        assert sentence.startswith(f"strategy.ddp_config.bucket_size=1000 ({__file__}:")
        assert adjustments(ddp)["bucket_size"][-1].why.startswith("overlap_grad_reduce is off")


def test_a_bucket_size_that_nobody_set_goes_without_a_word() -> None:
    ddp = DistributedDataParallelConfig()
    adjust(ddp, "bucket_size", 1000, why="a callback's default")
    run = RunSettings(parallelism=Layout(), ddp_config=ddp)  # pyright: ignore[reportArgumentType]
    leave_one_bucket(run, say=lambda *_: pytest.fail("nobody requested it"))
    assert ddp.bucket_size is None
