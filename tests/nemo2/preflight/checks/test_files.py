# SPDX-License-Identifier: Apache-2.0
"""What ranks refuse about the files of this machine, the check refuses: token files, samples, tokenizers, weights and
folders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from nemo2 import llm, recipes
from nemo2.checkpoint.auto_resume import RestoreConfig
from nemo2.checkpoint.context import write_parts
from nemo2.checkpoint.directory import Manifest, write_manifest
from nemo2.config import Config
from nemo2.config.overrides import apply_overrides
from nemo2.data.finetuning.hf_dataset import HFDatasetDataModule
from nemo2.data.finetuning.module import ChatDataModule, FineTuningDataModule
from nemo2.data.finetuning.packing import PackedSequenceSpecs
from nemo2.data.prepare import prepare_data
from nemo2.data.pretraining import PreTrainingDataModule
from nemo2.data.tokenizer import AutoTokenizer, BPETokenizer, ByteTokenizer, NullTokenizer
from nemo2.preflight.checks.earlier import weights_alone
from nemo2.preflight.checks.find import find
from nemo2.training.run_dir.tracker_loggers import MLFlowTracker
from support.foreign_checkpoints import nemo
from support.small_chats import make_tokenizer, say, write_lines

SIZES: dict[str, Any] = {"seq_length": 128, "micro_batch_size": 8, "global_batch_size": 16}


def rules_of(recipe: Any) -> set[str]:
    return {problem.rule for problem in find(recipe, devices=2, local=True, chosen=True)}


def pretraining(root: Path, **changes: Any) -> Any:
    recipe: Any = recipes.get("llama_tiny").pretrain_recipe(dir=str(root / "runs"))
    settings = {"paths": str(root / "corpus"), "tokenizer": Config(ByteTokenizer), **SIZES, **changes}
    recipe.data = Config(PreTrainingDataModule, **settings)
    return recipe


def finetuning(root: Path, kind: Any = FineTuningDataModule, *, weights: Any = None, **changes: Any) -> Any:
    """A recipe for the samples in ``root``, which names no weights unless it gets some."""
    recipe: Any = recipes.get("llama_tiny").finetune_recipe(dir=str(root / "runs"), resume_path=weights)
    recipe.data = Config(kind, str(root), **{"tokenizer": Config(ByteTokenizer), **SIZES, **changes})
    return recipe


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    text = write_lines(tmp_path / "text.jsonl", [{"text": f"{number} " + "word " * 200} for number in range(200)])
    prepare_data([text], tmp_path / "corpus", tokenizer=ByteTokenizer())
    return tmp_path


def truncate(name: str, size: int) -> Callable[[Path], Any]:
    return lambda root: (root / name).write_bytes((root / name).read_bytes()[:size])


@pytest.mark.parametrize(
    ("damage", "changes", "rule"),
    [
        (lambda root: None, {}, None),
        (lambda root: (root / "corpus.bin").unlink(), {}, "data-is-there"),
        (lambda root: (root / "corpus.idx").unlink(), {}, "data-is-there"),
        (lambda root: (root / "index_cache").write_text("no folder"), {}, "log-directory-is-writable"),
        (truncate("corpus.idx", 40), {}, "data-is-there"),
        (truncate("corpus.bin", 100), {}, "data-is-there"),
        (lambda root: None, {"tokenizer": Config(NullTokenizer, vocab_size=50)}, "data-is-there"),
        (lambda root: None, {"tokenizer": None}, "text-has-a-tokenizer"),
        (lambda root: None, {"split": "1,0,0"}, "splits-have-data"),
        (lambda root: None, {"num_train_samples": 8}, "samples-for-every-step"),
        (lambda root: None, {"paths": "s3://bucket/corpus"}, "data-is-there"),
    ],
)  # fmt: skip
def test_token_files(corpus: Path, damage: Any, changes: Any, rule: str | None) -> None:
    damage(corpus)
    found = rules_of(pretraining(corpus, **changes))
    assert (rule in found) if rule else not found


CHAT = say(("user", "red"), ("assistant", "blue"))
PAIR = {"input": "red", "output": "blue"}


@pytest.mark.parametrize(
    ("kind", "records", "settings", "rule"),
    [
        (FineTuningDataModule, [PAIR] * 20, {}, None),
        (FineTuningDataModule, [], {}, "training-samples-are-there"),
        (FineTuningDataModule, [PAIR] * 15, {}, "training-samples-are-there"),
        (FineTuningDataModule, None, {}, "training-samples-are-there"),
        (FineTuningDataModule, [PAIR, "{no json"], {}, "training-samples-are-there"),
        (FineTuningDataModule, [{"question": "red"}] * 20, {}, "training-samples-are-there"),
        (FineTuningDataModule, [PAIR] * 20, {"prompt_template": "{input}"}, "training-samples-are-there"),
        (FineTuningDataModule, [PAIR] * 20, {"no_such": 1}, "data-module-accepts-its-arguments"),
        (FineTuningDataModule, [PAIR] * 2000 + [{"input": "red"}], {}, "training-samples-are-there"),
        (FineTuningDataModule, [{"input": "red", "output": ""}] * 9 + [PAIR] * 15, {}, "training-samples-are-there"),
        (FineTuningDataModule, [{"input": "red", "output": ""}] * 9 + [PAIR] * 16, {}, None),
        (FineTuningDataModule, [{"input": "red " * 200, "output": "blue"}] * 20, {"on_too_long": "skip"},
         "training-samples-are-there"),
        (ChatDataModule, [CHAT] * 2000 + [{"messages": "red"}], {}, "training-samples-are-there"),
        (HFDatasetDataModule, [PAIR] * 20, {}, None),
        (HFDatasetDataModule, [PAIR] * 15, {}, "training-samples-are-there"),
        (HFDatasetDataModule, [PAIR] * 2000 + [{"answer": "red"}], {}, "training-samples-are-there"),
        (ChatDataModule, [CHAT] * 20, {}, None),
        (ChatDataModule, [{"messages": [{"content": "red"}]}], {}, "training-samples-are-there"),
        (ChatDataModule, [PAIR] * 20, {}, "training-samples-are-there"),
    ],
)  # fmt: skip
def test_samples(tmp_path: Path, kind: Any, records: Any, settings: Any, rule: str | None) -> None:
    make_tokenizer(tmp_path / "tokenizer")
    if records is not None:
        write_lines(tmp_path / "training.jsonl", records)
    tokenizer = Config(AutoTokenizer, str(tmp_path / "tokenizer"))
    recipe = finetuning(tmp_path, kind, tokenizer=tokenizer, dataset_kwargs=settings or None)
    found = rules_of(recipe) - {"fine-tuning-begins-with-weights"}
    assert (rule in found) if rule else not found


@pytest.mark.parametrize(("training", "validation", "validates", "legal"), [
    (60, 64, True, False), (61, 64, True, True), (64, 8, True, False), (64, 8, False, True), (64, 0, True, True),
])  # fmt: skip
def test_packed_rows_fill_a_global_batch(
    tmp_path: Path, training: int, validation: int, validates: bool, legal: bool
) -> None:
    four_in_a_row = {"input": "a" * 20, "output": "b" * 10}
    for split, number in (("training", training), ("validation", validation)):
        if number:
            write_lines(tmp_path / f"{split}.jsonl", [four_in_a_row] * number)
    specs = Config(PackedSequenceSpecs, packed_sequence_size=128)
    recipe = finetuning(tmp_path, packed_sequence_specs=specs, micro_batch_size=1)
    recipe.trainer.limit_val_batches = 1 if validates else 0
    assert ("training-samples-are-there" not in rules_of(recipe)) == legal


@pytest.mark.parametrize("kind", [FineTuningDataModule, HFDatasetDataModule])
def test_early_stopping_without_validation_samples(tmp_path: Path, kind: Any) -> None:
    recipe = finetuning(tmp_path / "chats", kind)
    recipe.trainer.callbacks = [Config(EarlyStopping, monitor="val_loss")]
    for split, refused in (("nothing", False), ("training", True), ("validation", False)):
        write_lines(tmp_path / ("chats" if split != "nothing" else "") / f"{split}.jsonl", [PAIR] * 20)
        assert ("early-stopping-has-a-validation" in rules_of(recipe)) == refused


@pytest.mark.parametrize("field", ["index_mapping_dir", "packed_train_data_path", "packed_val_data_path"])
def test_folders_of_samples_are_writable(tmp_path: Path, field: str) -> None:
    write_lines(tmp_path / "training.jsonl", [PAIR] * 200)
    folder = {field: str(tmp_path / "training.jsonl")}
    specs = Config(PackedSequenceSpecs, packed_sequence_size=128, **(folder if field.startswith("packed") else {}))
    settings = None if field.startswith("packed") else folder
    recipe = finetuning(tmp_path, packed_sequence_specs=specs, dataset_kwargs=settings, micro_batch_size=1)
    assert "log-directory-is-writable" in rules_of(recipe)


def test_the_folder_of_samples_beside_the_data_is_writable(tmp_path: Path) -> None:
    write_lines(tmp_path / "training.jsonl", [PAIR] * 200)
    recipe = finetuning(tmp_path)
    assert "log-directory-is-writable" not in rules_of(recipe)
    (tmp_path / "index_cache").write_text("no folder")
    assert "log-directory-is-writable" in rules_of(recipe)


@pytest.mark.parametrize("named", [{}, {"pad_token": "<no such>"}])
def test_special_tokens_are_in_the_vocabulary(tmp_path: Path, named: dict[str, str]) -> None:
    make_tokenizer(tmp_path)
    write_lines(tmp_path / "training.jsonl", [PAIR] * 20)
    tokenizer = Config(BPETokenizer, path=str(tmp_path / "tokenizer.json"), **named)
    found = rules_of(finetuning(tmp_path, tokenizer=tokenizer))
    assert ("tokenizer-fits-the-vocabulary" in found) == bool(named)


def test_a_table_is_training_data_too(tmp_path: Path) -> None:
    (tmp_path / "training.csv").write_text("input,output\n" + "red,blue\n" * 20)
    assert "training-samples-are-there" not in rules_of(finetuning(tmp_path))


def weights_in(folder: Path, *, weights_only: bool = True, **sizes: int) -> Path:
    """A checkpoint without weights, as far as a check reads it."""
    shape = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8, "ffn_hidden_size": 768, **sizes}
    model = Config(llm.LlamaModel, config=Config(llm.LlamaConfig, **shape), tokenizer=Config(ByteTokenizer))
    write_parts(folder, {"model": model})
    write_manifest(folder, Manifest(step=1, consumed_samples=8, layout={}, settings={}, weights_only=weights_only))
    return folder


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"path": "nowhere"}, "checkpoint-to-resume-exists"),
        ({}, None),
        ({"hidden_size": 64}, "released-weights-fit"),
        ({"ffn_hidden_size": 512}, "released-weights-fit"),
    ],
)  # fmt: skip
def test_weights_to_start_from(tmp_path: Path, changes: dict[str, Any], rule: str | None) -> None:
    path = tmp_path / changes.pop("path") if "path" in changes else weights_in(tmp_path / "weights", **changes)
    write_lines(tmp_path / "training.jsonl", [PAIR] * 20)
    recipe = finetuning(tmp_path, weights=str(path))
    found = rules_of(recipe)
    assert (rule in found) if rule else not found, find(recipe, devices=2, local=True)


def test_a_run_that_must_resume_has_a_checkpoint_and_its_files_exist(tmp_path: Path) -> None:
    recipe: Any = recipes.get("llama_tiny").pretrain_recipe(dir=str(tmp_path / "runs"))
    recipe.resume.resume_ignore_no_checkpoint = False
    assert rules_of(recipe) == {"checkpoint-to-resume-exists"}
    recipe.resume.resume_ignore_no_checkpoint = True
    recipe.log.files_to_copy = [str(tmp_path / "nowhere")]
    assert rules_of(recipe) == {"log-directory-is-writable"}


@pytest.mark.parametrize("setting", ["log.ckpt.dirpath", "resume.resume_from_directory"])
def test_a_run_that_must_resume_finds_its_checkpoint_where_its_settings_say(tmp_path: Path, setting: str) -> None:
    recipe: Any = recipes.get("llama_tiny").pretrain_recipe(dir=str(tmp_path / "runs"))
    recipe.resume.resume_ignore_no_checkpoint = False
    owner, _, name = setting.rpartition(".")
    setattr(recipe.log.ckpt if owner == "log.ckpt" else recipe.resume, name, str(tmp_path / "kept"))
    assert rules_of(recipe) == {"checkpoint-to-resume-exists"}
    weights_in(tmp_path / "kept" / "step=1", weights_only=False)
    assert "checkpoint-to-resume-exists" not in rules_of(recipe)


def test_a_name_that_no_file_system_takes_is_refused(tmp_path: Path) -> None:
    recipe: Any = recipes.get("llama_tiny").pretrain_recipe(dir=str(tmp_path / ("x" * 300)))
    assert rules_of(recipe) == {"log-directory-is-writable"}


def test_a_tokenizer_file_that_is_missing_is_refused_where_the_run_starts(tmp_path: Path) -> None:
    prepare_data([__file__], tmp_path / "corpus", ByteTokenizer())
    recipe = pretraining(tmp_path, tokenizer=Config(BPETokenizer, path=str(tmp_path / "nowhere.json")))
    recipe.trainer.limit_val_batches = 0
    assert rules_of(recipe) == {"tokenizer-fits-the-vocabulary"}
    assert not find(recipe)


def test_a_logger_that_cannot_write_is_refused_unless_its_files_go_to_the_run(tmp_path: Path) -> None:
    recipe: Any = recipes.get("llama_tiny").pretrain_recipe(dir=str(tmp_path / "runs"))
    recipe.log.tensorboard = Config(TensorBoardLogger, save_dir="/dev/null/tb")
    assert rules_of(recipe) == set()
    recipe.log.extra_loggers = [Config(CSVLogger, save_dir="/dev/null/csv")]
    assert rules_of(recipe) == {"log-directory-is-writable"}
    recipe.log.extra_loggers, recipe.log.update_logger_directory = None, False
    assert rules_of(recipe) == {"log-directory-is-writable"}


@pytest.mark.parametrize(
    "setting",
    ["log.log_dir", "log.name", "log.version", "resume.resume_from_path", "data.directory",
     "model.tokenizer.pretrained_model_name", "log.extra_loggers[0].save_dir"],
)  # fmt: skip
def test_an_empty_path_or_name_is_refused(setting: str) -> None:
    recipe: Any = recipes.get("llama_tiny").pretrain_recipe()
    recipe.model.tokenizer = Config(AutoTokenizer, "gpt2")
    recipe.log.extra_loggers = [
        Config(TensorBoardLogger, save_dir="logs", name="", version=""),  # Lightning takes both
        Config(MLFlowTracker, tracking_uri=""),
    ]
    apply_overrides(recipe, [f"{setting}="])
    rule = "run-name-is-a-folder" if setting == "log.name" else "paths-are-written-out"
    assert rules_of(recipe) - {"logger-is-installed"} == {rule}


@pytest.mark.parametrize("explicit", [True, False])
def test_a_link_in_the_directory_of_the_run(tmp_path: Path, explicit: bool) -> None:
    recipe: Any = recipes.get("llama_tiny").pretrain_recipe(dir=str(tmp_path / "runs"), name="small")
    directory = tmp_path / ("own" if explicit else "runs/small/one")
    recipe.log.explicit_log_dir = str(directory) if explicit else None
    recipe.log.version = None if explicit else "one"
    directory.mkdir(parents=True)
    assert rules_of(recipe) == set()
    (directory / "metrics.jsonl").symlink_to(tmp_path / "elsewhere")
    assert rules_of(recipe) == {"log-directory-is-writable"}


@pytest.mark.parametrize("named", ["checkpoint", "run"])
@pytest.mark.parametrize("weights_only", [True, False])
def test_a_named_checkpoint_to_resume_has_an_optimizer_state(tmp_path: Path, named: str, weights_only: bool) -> None:
    checkpoint = weights_in(tmp_path / "checkpoints" / "step=1", weights_only=weights_only)
    recipe: Any = recipes.get("llama_tiny").pretrain_recipe(dir=str(tmp_path / "runs"))
    recipe.resume.resume_from_path = str(checkpoint if named == "checkpoint" else tmp_path)
    assert ("checkpoint-to-resume-exists" in rules_of(recipe)) == weights_only


def test_of_a_checkpoint_of_nemo_only_the_weights_are_read(tmp_path: Path) -> None:
    path = nemo(tmp_path / "nemo--step=3")
    recipe: Any = recipes.get("llama_tiny").pretrain_recipe(dir=str(tmp_path / "runs"))
    recipe.resume.restore_config = Config(RestoreConfig, path=str(path), load_model_state=True)
    assert not list(weights_alone(recipe))
    recipe.resume.restore_config.load_optim_state = True
    assert ["nemo2 reads its weights, not its optimizer state" in problem for problem in weights_alone(recipe)] == [
        True
    ]
    recipe.resume.restore_config, recipe.resume.resume_from_path = None, str(path)
    assert "checkpoint-to-resume-exists" in rules_of(recipe)
