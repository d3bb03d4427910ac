# SPDX-License-Identifier: Apache-2.0
"""What no model can do anything with is told in a paragraph, before a weight is read: the checkpoints here have none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo2 import llm
from nemo2.base.errors import CheckpointError, ConfigError, Nemo2Error
from support import small_chats, small_runs
from support.described_models import described

HUB_NAME = "someone/tokenizer"
LENGTH = 24


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return described(tmp_path / "run", small_chats.make_tokenizer(tmp_path / "tokenizer"), seq_length=LENGTH)


def on_the_hub(cache: Path, commit: str, vocab_size: int) -> Any:
    """The tokenizer of a name on the hub, whose files are those of ``commit`` from now on."""
    from nemo2.data.tokenizer import AutoTokenizer

    repository = cache / f"models--{HUB_NAME.replace('/', '--')}"
    small_chats.make_tokenizer(repository / "snapshots" / commit, vocab_size=vocab_size)
    (repository / "refs").mkdir(exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    # Without it transformers asks for more files than a tokenizer has.
    (repository / "snapshots" / commit / "config.json").write_text("{}")
    return AutoTokenizer(HUB_NAME, local_files_only=True)


@pytest.fixture
def of_another_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose tokenizer is a name on the hub, which stands for other files since."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    place = described(tmp_path / "run", on_the_hub(tmp_path / "hub", "a" * 40, 320), seq_length=LENGTH)
    from nemo2.checkpoint.tokenizers import refuse_another_tokenizer
    from nemo2.hugging_face.checkpoint import Checkpoint

    refuse_another_tokenizer(place, Checkpoint.open(place).model().tokenizer)  # the same so far
    on_the_hub(tmp_path / "hub", "b" * 40, 310)
    return place


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ([], "at least one prompt"),
        (["ab", ""], "Prompt 2 of 2 has no tokens"),
        (
            ["ab " * LENGTH],
            f"The prompt has .* tokens, .* may have {LENGTH} tokens together. Shorten the prompt to at most {LENGTH - 1}",
        ),
    ],
)
def test_prompts_that_no_model_goes_on_from_are_refused_before_it_is_loaded(checkpoint, prompts, words):
    with pytest.raises(ConfigError, match=words) as caught:
        llm.generate(str(checkpoint), prompts=prompts)
    assert "\n" not in str(caught.value)


USES: dict[str, Callable[[Path, Path], Any]] = {
    "generate": lambda place, folder: llm.generate(str(place), prompts=["ab"]),
    "chat": lambda place, folder: talk(place),
    "perplexity": lambda place, folder: llm.perplexity(str(place), [str(folder / "text.txt")]),
    "prune": lambda place, folder: llm.prune(str(place), str(folder / "small"), llm.PruningConfig(drop_layers=[1])),
    "serve and export": lambda place, folder: put(place, folder),
    "restore": lambda place, folder: restored(place),
}


def talk(place: Path) -> None:
    from nemo2.llm.chat import conversation
    from nemo2.llm.inference import GenerationOptions

    with conversation(str(place), GenerationOptions()):
        pass


def put(place: Path, folder: Path) -> None:
    from nemo2.hugging_face.tokenizers import put_tokenizer

    put_tokenizer(place, folder)


def restored(place: Path) -> None:
    from nemo2.checkpoint.tokenizers import take_tokenizer

    take_tokenizer(str(place), small_runs.build_llama())


@pytest.mark.parametrize("use", USES)
def test_a_tokenizer_that_is_not_the_models_is_refused(of_another_tokenizer, tmp_path, use):
    (tmp_path / "text.txt").write_text("ab")
    words = (
        r"AutoTokenizer\('someone/tokenizer'\) is not the tokenizer that the model of .* was trained with .*vocabulary "
    )
    with pytest.raises(CheckpointError, match=words) as caught:
        USES[use](of_another_tokenizer, tmp_path)
    assert "\n" not in str(caught.value)


def test_files_of_a_tokenizer_that_were_changed_are_told_by_their_hash(checkpoint, tmp_path):
    file = checkpoint / "context" / "tokenizer" / "tokenizer.json"
    told = json.loads(file.read_text())
    told["model"]["merges"].reverse()
    file.write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match="damaged: .*tokenizer.json"):
        llm.generate(str(checkpoint), prompts=["ab"])


def test_a_token_that_the_tokenizer_does_not_have_is_refused(tmp_path):
    from nemo2.models.generate import read_prompts

    with pytest.raises(ConfigError, match="The prompt has the token id 99999, but the tokenizer's ids range from 0 to"):
        read_prompts(small_chats.make_tokenizer(tmp_path), [[1, 99999]])


def test_what_is_there_to_write_to_and_to_read_is_looked_at_first(checkpoint, tmp_path):
    with pytest.raises(ConfigError, match="is a directory"):
        llm.generate(str(checkpoint), prompts=["ab"], output_path=str(tmp_path))
    for name, text in {"none": None, "empty": "", "broken": "{", "null": '{"input": null}'}.items():
        if text is not None:
            (tmp_path / name).write_text(text)
        with pytest.raises(Nemo2Error, match=f"{name}.*(can't be read|is empty|must be a JSON object)"):
            llm.generate(str(checkpoint), input_dataset=str(tmp_path / name))
    with pytest.raises(ConfigError, match="tasks is empty: name at least one"):
        llm.evaluate(str(checkpoint), [])
    with pytest.raises(ConfigError, match="task_folder='.*none': the folder doesn't exist"):
        llm.evaluate(str(checkpoint), ["mine"], task_folder=str(tmp_path / "none"))


def test_a_server_is_not_asked_for_more_than_the_model_reads(checkpoint):
    from nemo2.llm.engines import ServingOptions
    from nemo2.llm.serving import plan_serving

    def plan(length: int) -> Any:
        return plan_serving(
            str(checkpoint), ServingOptions(max_length=length, dtype="bf16"), engine="vllm", print_only=True
        )

    assert str(LENGTH) in plan(LENGTH).command
    with pytest.raises(ConfigError, match=f"max_length={LENGTH + 1}: the model reads only {LENGTH} tokens"):
        plan(LENGTH + 1)


OF_WRONG_TYPES: dict[str, Callable[[Any], Any]] = {
    "random_seed": lambda value: llm.generate("nowhere", prompts=["ab"], random_seed=value),
    "add_BOS": lambda value: llm.generate("nowhere", prompts=["ab"], add_BOS=value),
    "trust_remote_code": lambda value: llm.generate("nowhere", prompts=["ab"], trust_remote_code=value),
    "prompts": lambda value: llm.generate("nowhere", prompts=[value]),
    "stop": lambda value: llm.generate("nowhere", prompts=["ab"], stop=[value]),
    "on_text": lambda value: llm.generate("nowhere", prompts=["ab"], on_text=value),
    "temperature": lambda value: llm.generate("nowhere", prompts=["ab"], temperature=[value]),  # pyright: ignore
    "overwrite": lambda value: llm.import_ckpt(source="nowhere", output_path="out", overwrite=value),
    "output_path": lambda value: llm.export_ckpt("nowhere", output_path=[value]),  # pyright: ignore
    "load_connector": lambda value: llm.export_ckpt("nowhere", load_connector=value),
    "legacy_ckpt": lambda value: llm.peft.merge_lora("nowhere", "out", legacy_ckpt=value),
    "pruning_config": lambda value: llm.prune("nowhere", "out", value),
    "PruningConfig.target_num_layers": lambda value: llm.PruningConfig(target_num_layers=value),
    "PruningConfig.drop_layers": lambda value: llm.PruningConfig(drop_layers=[value]),
    "export_config": lambda value: llm.ptq("nowhere", value),
    "forward_loop": lambda value: llm.ptq("nowhere", llm.ExportConfig("out"), forward_loop=value),
    "DistillationConfig.logit_kl_topk": lambda value: llm.DistillationConfig(logit_kl_topk=value),
    "files": lambda value: llm.perplexity("nowhere", value),
    "max_input_len": lambda value: llm.deploy("nowhere", max_input_len=value),
}


@pytest.mark.parametrize("name", OF_WRONG_TYPES)
def test_values_of_a_wrong_type_are_refused_first_and_by_name(name):
    for value in (2.5, {"drop_layers": [1]}) if name != "add_BOS" else ("no", None):
        with pytest.raises(ConfigError, match=rf"^{name}(\[0\])?=") as caught:
            OF_WRONG_TYPES[name](value)
        assert caught.value.rule == "values-have-their-types"


def test_trainers_batches_and_dtypes_are_refused_before_a_model_is_loaded(tmp_path):
    (tmp_path / "text.txt").write_text("ab")
    texts = [str(tmp_path / "text.txt")]
    for call, name in (
        (lambda: llm.perplexity("nowhere", texts, trainer="x"), "trainer"),  # pyright: ignore[reportArgumentType]
        (lambda: llm.peft.merge_lora("nowhere", "out", trainer="x"), "trainer"),  # pyright: ignore[reportArgumentType]
        (lambda: llm.perplexity("nowhere", texts, max_batch_size=0), "max_batch_size"),
        (lambda: llm.evaluate("nowhere", ["arc"], max_batch_size=-1), "max_batch_size"),
        (lambda: llm.generate("nowhere", prompts=["ab"], max_batch_size=0), "max_batch_size"),
        (lambda: llm.generate("nowhere", prompts=["ab"], params_dtype=torch.int8), "params_dtype"),
        (lambda: llm.deploy("nowhere", num_gpus=0), "num_gpus"),
    ):
        with pytest.raises(ConfigError, match=f"^{name}="):
            call()


def test_a_stride_beyond_the_model_is_refused_before_it_is_loaded(checkpoint, tmp_path):
    (tmp_path / "text.txt").write_text("ab")
    with pytest.raises(ConfigError, match="stride=25 must lie between 1 and 24"):
        llm.perplexity(str(checkpoint), [str(tmp_path / "text.txt")], stride=LENGTH + 1)
