# SPDX-License-Identifier: Apache-2.0
"""The format of a folder: ours, NeMo 2.0's, Megatron's, Hugging Face's, or nothing that is known."""

import functools
import json
import os
import shlex
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from typer.testing import CliRunner

from nemo2.base.errors import CheckpointError, SecurityError
from nemo2.checkpoint.metadata import read_metadata
from nemo2.checkpoint.nemo_context import load_nemo_model
from nemo2.checkpoint.paths import missing
from nemo2.cli.app import app
from nemo2.from_nemo.recipe import recipe_of
from nemo2.hugging_face.checkpoint import Checkpoint
from nemo2.hugging_face.identify import identify
from support import small_runs
from support.foreign_checkpoints import MODEL_YAML, nemo, torch_dist

NAME = "llama--val_loss=2.53-step=20-consumed_samples=160-last"
# Torch says on every call that it was told to work without ranks.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def safetensors(file: Path, **shapes: list[int]) -> Path:
    header, place = {}, 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * shape[1]
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * place)
    return file


def test_a_nemo_checkpoint_is_known_by_its_folders_and_its_model_by_name(tmp_path):
    found = identify(nemo(tmp_path / NAME))
    assert (found.kind, found.step, found.problems) == ("NeMo 2.0", 20, [])
    assert (found.parameters, found.dtypes, found.weights_only) == (12, ["float32"], False)
    assert found.layout == "tp2"
    assert "model: LlamaModel(LlamaConfig), known to nemo2" in found.notes
    assert f"nemo2 translate {tmp_path / NAME} --output recipe.py" in found.commands[0]
    assert f"resume.restore_config.path={tmp_path / NAME}" in found.commands[1]
    # The folder that holds several stands for the newest.
    nemo(tmp_path / NAME.replace("step=20", "step=30"))
    assert identify(tmp_path).step == 30


def test_additions_of_nemos_alone_are_told_with_the_way_to_a_whole_model(tmp_path):
    folder = nemo(tmp_path / NAME)
    (folder / "weights" / "adapter_metadata.json").write_text('{"model_ckpt_path": "/models/base"}')
    found = identify(folder)
    told = "only the adapters of a PEFT fine-tuning over the weights of /models/base"
    assert any(told in note for note in found.notes), found.notes
    assert [line.split()[1] for line in found.commands] == ["translate"], "nothing reads its weights"
    assert told in str(missing(str(folder)))
    with pytest.raises(CheckpointError, match="only the adapters of a PEFT fine-tuning.*llm.peft.merge_lora"):
        Checkpoint.open(folder).tensors()
    translated = recipe_of(folder)
    assert translated.recipe.resume is None and told in str(translated.left[-1]), "the recipe doesn't start from them"


def test_a_nemo_model_is_rebuilt_from_plain_values_and_runs_no_name_of_the_file(tmp_path):
    model = load_nemo_model(nemo(tmp_path / NAME))
    assert type(model).__name__ == "LlamaModel"
    assert (model.config.num_layers, model.config.hidden_size, model.config.num_query_groups) == (2, 32, 2)
    assert model.config.tensor_model_parallel_size == 1, "how NeMo cut it is no part of the model"


def test_what_a_nemo_model_computes_is_read_though_it_is_no_plain_value(tmp_path, caplog):
    function = "  activation_func:\n    _target_: {}\n    _call_: false\n  window_size: [3, 0]\n  vocab_size: 64"
    for number, (name, wanted) in enumerate(
        {"torch._C._nn.gelu": "gelu", "nemo.collections.llm.fn.quick_gelu": "quick_gelu", "mine.own": "silu"}.items()
    ):
        text = MODEL_YAML.replace("  vocab_size: 64", function.format(name))
        config = load_nemo_model(nemo(tmp_path / str(number), text)).config
        assert config.activation_func.__name__ == wanted and config.window_size == (3, 0)
        assert ("config.activation_func=mine.own: nemo2 does not know this function" in caplog.text) == (
            wanted == "silu"
        )


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        ("_target_: os.system\ncommand: 'mkdir RAN'\n", SecurityError, "only NeMo's language models"),
        ("_target_: nemo.lightning.run.plugins.X\n", SecurityError, "only NeMo's language models"),
        ("_target_: [1]\n", SecurityError, "only NeMo's language models"),
        ("_target_: nemo.collections.llm.gpt.model.llama.LlamaModel\n", CheckpointError, "it has no config"),
        (
            MODEL_YAML.replace("nemo.collections.llm.gpt.model.llama.LlamaConfig", "subprocess.Popen"),
            SecurityError,
            "only NeMo's language models",
        ),
        ("!!python/object/apply:os.mkdir [RAN]\n", CheckpointError, "is not YAML with plain data"),
        ("- 1\n", CheckpointError, "does not describe a model"),
        (MODEL_YAML.replace("LlamaModel", "BERTModel"), CheckpointError, "BERTModel, which nemo2 does not have"),
        (
            MODEL_YAML.replace("hidden_size: 32", "hidden_size: x"),
            CheckpointError,
            "hidden_size='x': must be a whole number",
        ),
        (
            MODEL_YAML.replace("seq_length: 16", "layernorm_epsilon: 1e-05"),  # text in YAML, without a point
            CheckpointError,
            "config.layernorm_epsilon='1e-05': must be a number",
        ),
    ],
)
def test_a_context_that_cannot_be_used_is_a_named_error(tmp_path, monkeypatch, content, error, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        load_nemo_model(nemo(tmp_path / NAME, content))
    assert not (tmp_path / "RAN").exists()


@pytest.mark.parametrize(("file", "kind"), [("run_config.yaml", "Megatron-Bridge"), (None, "Megatron-LM")])
def test_an_iteration_of_megatron_is_found_through_its_tracker(tmp_path, file, kind):
    torch_dist(tmp_path / "iter_0000100")
    torch_dist(tmp_path / "iter_0000200")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100\n")
    if file:
        model = "_target_: megatron.bridge.models.llama.Llama3ModelProvider8B\n  tensor_model_parallel_size: 2\n"
        (tmp_path / "iter_0000100" / file).write_text(f"model:\n  {model}  pipeline_model_parallel_size: 1\n")
    found = identify(tmp_path)
    assert (found.kind, found.step, found.problems) == (kind, 100, [])
    assert found.layout == ("tp2" if file else "written by 1 rank")
    assert (found.parameters, found.weights_only) == (12, False)
    shard = next((tmp_path / "iter_0000100").glob("*.distcp"))
    shard.unlink()
    assert identify(tmp_path).problems == [f"iter_0000100/{shard.name} is missing"]
    assert found.path == tmp_path / "iter_0000100"


def test_a_legacy_checkpoint_is_named_with_what_converts_it(tmp_path):
    for rank in ("mp_rank_00", "mp_rank_01"):
        (tmp_path / "iter_0000007" / rank).mkdir(parents=True)
        (tmp_path / "iter_0000007" / rank / "model_optim_rng.pt").write_bytes(b"x")
    found = identify(tmp_path / "iter_0000007")
    assert (found.kind, found.step) == ("Megatron-LM (legacy)", 7)
    assert "2 model-parallel ranks" in (found.layout or "")


def test_a_model_of_hugging_face_is_read_by_its_headers(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    file = safetensors(tmp_path / "model.safetensors", a=[2, 3], b=[4, 5])
    found = identify(tmp_path)
    assert (found.kind, found.parameters, found.dtypes, found.problems) == ("Hugging Face", 26, ["bfloat16"], [])
    os.truncate(file, 100)
    [problem] = identify(tmp_path).problems
    assert "cut off" in problem or "not a safetensors file" in problem, "what an import would say"


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_shard_that_metadata_needs_is_missed(tmp_path, damage):
    path = nemo(tmp_path / NAME)
    [shard] = (path / "weights").glob("*.distcp")
    if damage == "missing":
        shard.unlink()
    else:
        os.truncate(shard, 10)
    [problem] = identify(path).problems
    assert f"weights/{shard.name}" in problem
    assert identify(path).commands == []


def test_the_commands_that_are_named_exist(tmp_path):
    """A folder of every format."""
    import typer

    iteration, hugging_face = tmp_path / "iter_0000100", tmp_path / "hf"
    torch_dist(iteration)
    hugging_face.mkdir()
    (hugging_face / "config.json").write_text("{}")
    safetensors(hugging_face / "model.safetensors", a=[2, 3])
    ours = tmp_path / "our own"
    torch_dist(ours / "weights")
    manifest = {"step": 1, "consumed_samples": 8, "layout": {}, "files": {}, "hashes": {}}
    known = typer.main.get_command(app).commands.keys()  # pyright: ignore[reportAttributeAccessIssue]
    named = []
    for weights_only in (True, False):
        (ours / "manifest.json").write_text(json.dumps({**manifest, "weights_only": weights_only}))
        for path in (ours, nemo(tmp_path / f"{NAME}{weights_only}"), iteration, hugging_face):
            named += (words := [shlex.split(line, comments=True) for line in identify(path).commands])
            assert all(word.endswith(str(path)) for line in words for word in line if str(tmp_path) in word)
    commands = [words[1] for words in named if words[0] == "nemo2"]
    assert {"generate", "evaluate", "pretrain"} <= set(commands) <= known
    assert all(words[0] == "nemo2" for words in named)


def test_other_folders_are_nothing_that_is_known(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint that nemo2 recognizes.*NeMo 2\.0.*Hugging Face"):
        identify(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        identify(tmp_path / "no")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"nemo2 import {tmp_path}"):
        identify(tmp_path)


class SaveAsNeMo(pl.Callback):
    """Writes what NeMo 2.0 writes, by the calls of Megatron-Core that it makes (``save_checkpoint`` in NeMo's
    nemo/lightning/pytorch/strategies/megatron_strategy.py and nemo/lightning/io/pl.py; ``context`` in io/mixin.py)."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
        from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

        # The name of NeMo's default, the distributed optimizer, in its checkpoints. Megatron-Core has since dropped the
        # writing of that form, so that the optimizer here is another.
        metadata = {"distrib_optim_sharding_type": "fully_sharded_model_space"}
        chunk = trainer.strategy.megatron_parallel.unwrapped[0]
        sharded = chunk.sharded_state_dict(prefix="module.", metadata=dict(metadata))
        optimizer = trainer.strategy.optimizers[0].mcore_optimizer
        checkpoint = {
            "epoch": 0,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": pl.__version__,
            "state_dict": OrderedDict(),
            "loops": trainer._checkpoint_connector._get_loops_state_dict(),
            "callbacks": {"ModelCheckpoint": {"monitor": "val_loss", "best_model_score": torch.tensor(2.53)}},
            "optimizer_states": {},
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "PreTrainingDataModule": {"consumed_samples": 16},
            "sharded_state_dict": sharded,
            "optimizer": [optimizer.sharded_state_dict(sharded)],
        }
        weights = self.path / "weights"
        if trainer.is_global_zero:
            weights.mkdir(parents=True)
            (self.path / "context").mkdir()
            (self.path / "context" / "model.yaml").write_text(MODEL_YAML)
            (self.path / "context" / "io.json").write_text('{"root": {"pyref": {"module": "os", "name": "system"}}}')
        torch.distributed.barrier()
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        writing = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy("torch_dist", 1), group, False)
        dist_checkpointing.save(checkpoint, str(weights), writing, content_metadata=metadata)


def run_and_checkpoint(directory: str, nemo_path: str) -> None:
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint

    keep = ModelCheckpoint(
        dirpath=f"{directory}/checkpoints", filename="{step}", every_n_train_steps=1, save_top_k=-1, verbose=False,
        save_optim_on_train_end=True, save_last=False,
    )  # fmt: skip
    small_runs.fit(
        small_runs.build_llama(), max_steps=2, callbacks=[keep, SaveAsNeMo(nemo_path)],
        tensor_model_parallel_size=2,
    )  # fmt: skip


def started_from_nemo(directory: str, path: str, *, translated: bool = False) -> list[float]:
    """The weights of a NeMo checkpoint, and with them the first loss; with the model of `nemo2 translate`, or rebuilt alone."""
    import fiddle

    from nemo2.checkpoint.auto_resume import RestoreConfig
    from nemo2.from_nemo.recipe import recipe_of

    recipe = recipe_of(Path(path)).recipe if translated else None
    model: Any = load_nemo_model(path) if recipe is None else fiddle.build(recipe.model)
    restore = RestoreConfig(path=path) if recipe is None else fiddle.build(recipe.resume.restore_config)
    model.optim = small_runs.build_llama().optim
    losses = small_runs.fit(model, max_steps=1, restore_config=restore)["losses"]
    if not translated:
        again: Any = load_nemo_model(path)
        again.optim = small_runs.build_llama().optim
        with pytest.raises(CheckpointError, match=r"NeMo 2\.0, and nemo2 reads its weights, not its optimizer state"):
            small_runs.fit(again, max_steps=1, restore_config=RestoreConfig(path=path, load_optim_state=True))
    return losses


def test_ours_is_told_in_full_and_a_nemo_checkpoint_of_the_same_weights_loads(run_on_ranks, tmp_path):
    theirs = tmp_path / NAME
    run_on_ranks(run_and_checkpoint, 2, str(tmp_path / "run"), str(theirs))
    found = identify(tmp_path / "run")
    assert (found.kind, found.step, found.consumed_samples, found.problems) == ("nemo2", 2, 16, [])
    assert found.layout == "tp2 over 2 ranks"
    # 2 layers: q, k, v and proj, a gated pair and down, two norms; embedding, output, last norm.
    layer = 32 * (32 + 2 * 16) + 32 * 32 + 32 * 128 + 64 * 32 + 2 * 32
    assert found.parameters == 2 * layer + 2 * 64 * 32 + 32
    assert any("nemo2 generate" in command for command in found.commands)
    result = CliRunner().invoke(app, ["show", str(tmp_path / "run"), "--checkpoint", "--verify"])
    assert result.exit_code == 0, result.output
    assert "all SHA-256 hashes match" in result.output and "whole       yes" in result.output

    # The same training, written by NeMo's calls; with the names of Transformer Engine's layers, which NeMo builds.
    described = identify(theirs)
    assert (described.kind, described.step, described.layout, described.problems) == ("NeMo 2.0", 20, "tp2", [])
    assert (described.parameters, described.weights_only) == (found.parameters, False)
    stored = read_metadata(theirs / "weights").state_dict_metadata
    layers = "module.decoder.layers"
    assert {
        f"{layers}.self_attention.linear_qkv.layer_norm_weight",
        f"{layers}.mlp.linear_fc1.layer_norm_weight",
    } <= set(stored)
    first = run_on_ranks(started_from_nemo, 1, str(tmp_path), str(theirs))[0]
    with pytest.raises(CheckpointError, match=r"io\.json is not a fiddle configuration"):
        recipe_of(theirs)
    (theirs / "context" / "io.json").unlink()
    assert (
        run_on_ranks(functools.partial(started_from_nemo, translated=True), 1, str(tmp_path), str(theirs))[0] == first
    )
    fresh = run_on_ranks(started_from_ours, 1, str(found.path))[0]
    assert first == fresh

    shard = sorted((found.path / "weights").glob("*.distcp"))[0]
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    assert CliRunner().invoke(app, ["show", str(found.path)]).exit_code == 0, "sizes tell nothing"
    result = CliRunner().invoke(app, ["show", str(found.path), "--verify", "--json"])
    assert result.exit_code == 2
    assert "SHA-256 differs" in json.loads(result.output)["problems"][0]


def started_from_ours(path: str) -> list[float]:
    from nemo2.checkpoint.auto_resume import RestoreConfig

    return small_runs.fit(small_runs.build_llama(), max_steps=1, restore_config=RestoreConfig(path=path))["losses"]
