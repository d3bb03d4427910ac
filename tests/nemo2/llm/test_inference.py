# SPDX-License-Identifier: Apache-2.0
"""Completions from a checkpoint: built from its context, in any layout, the same on every rank."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo2 import llm
from nemo2.cli import main
from support import small_runs

PROMPTS = ["ab", "longer one"]


def save(directory: str) -> None:
    """A Llama with a byte tokenizer, trained a little on two tensor-parallel ranks."""
    data = small_runs.random_bytes()
    model = small_runs.build_llama(vocab_size=None)
    model.tokenizer = data.tokenizer
    keep = small_runs.keep(f"{directory}/checkpoints")
    small_runs.fit(model, data, max_steps=2, callbacks=[keep], tensor_model_parallel_size=2)


def complete(
    path: str, *, layout: dict[str, Any] | None = None, output: str | None = None, **options: Any
) -> list[Any]:
    small_runs.quiet()
    trainer = small_runs.build_trainer(max_steps=1, **layout) if layout else None
    arguments = {"max_new_tokens": 4, "temperature": 0.0, **options}
    results = llm.generate(path=path, prompts=PROMPTS, trainer=trainer, output_path=output, **arguments)
    return [(result.prompt, result.text) for result in results]


LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32},
)


def save_and_complete(directory: str) -> list[Any]:
    save(directory)
    small_runs.release()
    found = []
    for layout in LAYOUTS:
        found.append(complete(f"{directory}/checkpoints/step=2", layout=layout))
        small_runs.release()
    return found


def in_one_process(directory: str) -> dict[str, Any]:
    """All that one process says of the checkpoint."""
    found: dict[str, Any] = {"alone": complete(directory, output=f"{directory}/out.jsonl"), "drawn": []}
    small_runs.release()
    for seed in (1, 1, 2):
        found["drawn"].append(complete(directory, temperature=1.0, random_seed=seed, max_new_tokens=8))
        small_runs.release()
    found["nemo's"] = complete_as_nemo(directory, directory)
    small_runs.release()
    return found | {"pipes": through_pipes(directory, directory)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def two(run_on_ranks, directory) -> list[list[Any]]:
    return run_on_ranks(save_and_complete, 2, str(directory))


@pytest.fixture(scope="module")
def one(run_on_ranks, directory, two) -> dict[str, Any]:
    return run_on_ranks(in_one_process, 1, str(directory))[0]


def test_a_checkpoint_answers_the_same_in_every_layout(one, two, directory):
    assert two == [[one["alone"]] * len(LAYOUTS)] * 2
    assert [prompt for prompt, _ in one["alone"]] == PROMPTS
    lines = [json.loads(line) for line in (directory / "out.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["text"]) for line in lines] == one["alone"]


def test_prompts_that_leave_less_room_than_the_requested_tokens_are_told(caplog):
    from nemo2.llm.inference import warn_of_short_answers

    warn_of_short_answers([[1] * 60, [1] * 4], max_new_tokens=4, max_sequence_length=64)
    assert not caplog.text
    warn_of_short_answers([[1] * 60, [1] * 4], max_new_tokens=10, max_sequence_length=64)
    assert "max_new_tokens=10: the model's sequences end at 64 tokens" in caplog.text
    assert "1 of 2 prompts can get fewer: 4 after the longest" in caplog.text


def complete_as_nemo(path: str, folder: str) -> dict[str, Any]:
    small_runs.quiet()
    params = SimpleNamespace(
        num_tokens_to_generate=4, temperature=1.0, top_k=1, top_p=0.0, return_log_probs=False, top_n_logprobs=0
    )
    file, out = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
    record = {"output": "expected", "id": 7, "note": "two\u2028lines"}
    file.write_text("".join(json.dumps({"input": one, **record}, ensure_ascii=False) + "\n" for one in PROMPTS))
    trainer = small_runs.build_trainer(max_steps=1)
    found: dict[str, Any] = {
        "positional": llm.generate(path, trainer, PROMPTS, inference_params=params, text_only=True)
    }
    small_runs.release()
    whole = found["positional"][0]
    stopping = SimpleNamespace(**{**vars(params), "stop_words": [whole[-1]]})
    found["stopped"] = whole, llm.generate(path, None, PROMPTS[:1], inference_params=stopping)[0].text
    small_runs.release()
    texts = llm.generate(path, input_dataset=str(file), inference_params=params, max_batch_size=1, output_path=str(out))
    found["file"] = [one.generated_text for one in texts]
    found["lines"] = [json.loads(line) for line in out.read_text().splitlines()]
    found["errors"] = []
    for broken in (
        {"prompts": PROMPTS, "input_dataset": str(file)},
        {"prompts": PROMPTS, "inference_params": params, "max_new_tokens": 3},
        {"prompts": PROMPTS, "trainer": PROMPTS},
        {"prompts": PROMPTS, "encoder_prompts": PROMPTS},
        {"prompts": PROMPTS, "inference_params": SimpleNamespace(**{**vars(params), "top_n_logprobs": 2})},
        {"prompts": PROMPTS, "inference_params": SimpleNamespace(**{**vars(params), "add_BOS": True})},
        {"prompts": PROMPTS, "trainer": trainer, "params_dtype": "bf16"},
        {"prompts": PROMPTS, "stop": "ab"},
        {"prompts": PROMPTS, "temperature": 1.0, "top_k": 2.5},
        {"prompts": PROMPTS, "stop": ["a", ""]},
        {"prompts": PROMPTS, "temperature": 0.0, "top_k": 3, "min_p": 0.1},
        {"prompts": PROMPTS, "top_p": 0.0},
        {"input_dataset": str(file), "output_path": str(file)},
    ):
        try:
            llm.generate(path, **broken)
        except Exception as error:
            found["errors"].append(str(error))
    return found


def test_nemos_signature_order_and_parameters_are_taken(one):
    found = one["nemo's"]
    assert found["positional"] == found["file"] == [text for _, text in one["alone"]], "top_k=1 is the likeliest token"
    assert [line["prediction"] for line in found["lines"]] == found["file"]
    whole, stopped = found["stopped"]
    assert stopped == whole[: whole.index(whole[-1])]
    assert all((line["label"], line["id"]) == ("expected", 7) and "output" not in line for line in found["lines"])
    for words, told in zip(
        (
            "one of them",
            "set the same thing",
            "takes a Trainer",
            "encoder-decoder",
            "top_n_logprobs=2",
            "add_BOS=True: nemo2 reads",
            "contradicts",
            "takes a list",
            "top_k=2.5: takes a whole number",
            "stop=''",
            "top_k=3 and min_p=0.1 would",
            "top_p=0.0: must",
            "is the file of the prompts",
        ),
        found["errors"],
        strict=True,
    ):
        assert words in told


def through_pipes(path: str, folder: str) -> dict[str, Any]:
    """Prompts of standard input, completed to standard output by the command."""

    def piped(text: str, *arguments: str) -> tuple[int, list[str]]:
        given, made = Path(folder) / "given", Path(folder) / "made"
        given.write_text(text)
        made.write_text("before\n")
        kept = [(place, os.dup(place)) for place in (0, 1)]
        for place, file in enumerate((given.open(), made.open("a"))):
            os.dup2(file.fileno(), place)
        try:
            code = main(["generate", path, "--max-new-tokens", "4", *arguments])
        finally:
            for place, before in kept:
                os.dup2(before, place)
        small_runs.release()
        return code, made.read_text().splitlines()

    small_runs.quiet()
    lines = "".join(json.dumps({"input": one, "id": 7}) + "\n" for one in PROMPTS)
    return {
        "lines": piped(lines, "--prompts", "-", "--output", "-"),
        "twice": piped(lines, path, "--prompts", "-", "--html", f"{folder}/page.html"),
        "empty": piped("", "--prompts", "-", "--output", "-"),
    }


def test_the_command_reads_lines_from_a_pipe_and_writes_nothing_else_into_the_next(one):
    alone, found = one["alone"], one["pipes"]
    code, (before, *lines) = found["lines"]
    assert code == 0 and before == "before", "`>> FILE` keeps what is in the file"
    records = [json.loads(line) for line in lines]
    assert [(record["input"], record["prediction"], record["id"]) for record in records] == [(*one, 7) for one in alone]
    assert found["twice"][0] == found["empty"][0] == 2


def test_sampling_follows_the_seed(one):
    first, same, other = one["drawn"]
    assert first == same != other
