# SPDX-License-Identifier: Apache-2.0
"""Pruned models: what contributes nothing goes first, and what is left loads, trains on and is exported."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo2.base.advice import for_the_command_line
from nemo2.base.errors import ConfigError, OutputExists
from support import answering_runs, small_runs

SIZES = {"num_layers": 3, "num_query_groups": 2}
PROMPTS = ["It returns", "Name three colours of the sky"]
IDLE_NEURONS, IDLE_LAYER = [3, 4, 40], 1
TO: dict[str, dict[str, Any]] = {
    "same": {
        "target_num_attention_heads": 2,
        "target_num_query_groups": 1,
        "target_ffn_hidden_size": 61,
        "target_num_layers": 2,
    },
    "dropped": {"drop_layers": [IDLE_LAYER + 1]},
    "narrow": {"target_hidden_size": 24, "target_num_query_groups": 1, "target_num_attention_heads": 2},
}


def silenced(path: str, target: str) -> None:
    """The model of a checkpoint with a layer, a group of heads and some neurons that contribute nothing."""
    from nemo2.hugging_face.checkpoint import Checkpoint, find_checkpoint
    from nemo2.training.strategies.set_up import set_up

    model = Checkpoint.open(path).model()
    trainer = small_runs.build_trainer(max_steps=1)
    with set_up(trainer, model, checkpoint=find_checkpoint(Path(path))) as parallel, torch.no_grad():
        for place, layer in enumerate(parallel.unwrapped[0].decoder.layers):  # pyright: ignore
            if place == IDLE_LAYER:
                layer.self_attention.linear_proj.weight.zero_()
                layer.mlp.linear_fc2.weight.zero_()
                continue
            rows = layer.self_attention.linear_qkv.weight.view(2, 4, 8, -1)
            rows[0, -1].zero_()  # the values of the first group
            for half in layer.mlp.linear_fc1.weight.chunk(2):
                half[IDLE_NEURONS] = 0
        trainer.save_checkpoint(target, weights_only=True)
    small_runs.release()


def pruned(directory: str) -> dict[str, Any]:
    from nemo2 import llm
    from nemo2.data.mock import MockDataModule
    from nemo2.hugging_face.checkpoint import Checkpoint, find_checkpoint

    run = answering_runs.save(f"{directory}/whole", config=SIZES)
    silenced(run, f"{directory}/silenced")
    found: dict[str, Any] = {"answers": {"silenced": answers(f"{directory}/silenced")}}
    for name, to in TO.items():
        source = run if name == "narrow" else f"{directory}/silenced"
        data = MockDataModule(answering_runs.SEQ, num_workers=0) if name == "narrow" else None  # of GPT-2's vocabulary
        samples = 10**9 if name == "dropped" else 4  # nothing is measured
        place = llm.prune(source, f"{directory}/{name}", llm.PruningConfig(**to), num_train_samples=samples, data=data)
        small_runs.release()
        config = Checkpoint.open(place).model().config
        found[name] = (config.num_layers, config.hidden_size, config.ffn_hidden_size, config.num_attention_heads)
        found["answers"][name] = answers(str(place))
    found["run"], found["directory"] = run, directory
    found["on"] = trained_on(directory)
    found["exported"] = exported(find_checkpoint(Path(f"{directory}/on")), directory)
    return found


def answers(path: str, trainer: Any = None) -> list[tuple[list[int], list[float]]]:
    from nemo2 import llm

    made = llm.generate(path, trainer, PROMPTS, max_new_tokens=8, temperature=0.0)
    small_runs.release()
    return [(answer.token_ids, answer.log_probs) for answer in made]


def trained_on(directory: str) -> list[float]:
    """Losses of a narrow model that is trained on, from what was pruned."""
    from nemo2.hugging_face.checkpoint import Checkpoint
    from nemo2.llm import api

    model = Checkpoint.open(f"{directory}/narrow").model()
    recorder = small_runs.Recorder()
    parts = small_runs.run_arguments(
        directory,
        name="on",
        model=model,
        data=small_runs.random_bytes(seq_length=answering_runs.SEQ, tokenizer=model.tokenizer, global_batch_size=4),
        base=f"{directory}/narrow",
        max_steps=3,
        callbacks=[recorder],
    )
    api.train(**parts, optim=small_runs.build_llama(lr=1e-2).optim)
    small_runs.release()
    return recorder.losses


def exported(checkpoint: Path, directory: str) -> dict[str, Any]:
    import transformers

    from nemo2 import llm

    folder = llm.export_ckpt(str(checkpoint), "hf", f"{directory}/hf")
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPTS[0], return_tensors="pt", add_special_tokens=False)
    made = model.generate(**ids, max_new_tokens=8, do_sample=False)[0][ids["input_ids"].size(1) :]
    return {"theirs": made.tolist(), "ours": answers(str(checkpoint))[0][0]}


@pytest.fixture(scope="module")
def models(run_on_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_on_ranks(pruned, 1, str(tmp_path_factory.mktemp("pruned")), timeout=280)[0]


def test_layers_heads_and_neurons_that_contribute_nothing_go_first(models):
    assert models["same"] == (2, 32, 61, 2)
    assert models["dropped"] == (2, 32, 64, 4)
    for name in ("same", "dropped"):
        for (tokens, log_probs), (expected, theirs) in zip(
            models["answers"][name], models["answers"]["silenced"], strict=True
        ):
            assert tokens == expected
            assert log_probs == pytest.approx(theirs, abs=1e-5)


def test_a_pruned_model_trains_on_and_is_exported(models):
    assert models["narrow"] == (3, 24, 64, 2)
    assert len(models["on"]) == 3 and all(math.isfinite(loss) for loss in models["on"])
    assert models["exported"]["theirs"] == models["exported"]["ours"]


def pruned_on_two_ranks(run: str, directory: str) -> dict[str, Any]:
    """Answers of what was pruned in several layouts, as if Transformer Engine were there."""
    from nemo2 import llm
    from nemo2.models.layers import spec

    small_runs.quiet()
    found = {}
    for layout, name, sizes in (
        ("PP 2", "same", {"pp_size": 2, "num_layers_in_last_pipeline_stage": 1}),
        ("PP 2", "narrow", {"pp_size": 2, "num_layers_in_first_pipeline_stage": 1}),
        ("DP 2", "narrow", {}),
        ("TP 2", "dropped", {"tp_size": 2}),
    ):
        source = run if name == "narrow" else f"{directory}/silenced"
        target, to = f"{directory}/{name}, {layout}", llm.PruningConfig(**TO[name])
        without, spec.have_te = spec.have_te, lambda: True
        try:
            llm.prune(source, target, to, devices=2, num_train_samples=4, **sizes)
        finally:
            spec.have_te = without
        small_runs.release()
        found[layout, name] = answers(target, small_runs.build_trainer(max_steps=1))
    return found


def test_every_layout_keeps_the_same_parts(run_on_ranks, models):
    for found in run_on_ranks(pruned_on_two_ranks, 2, models["run"], models["directory"], timeout=280):
        for (layout, name), made in found.items():
            for (tokens, log_probs), (expected, theirs) in zip(made, models["answers"][name], strict=True):
                assert tokens == expected, (layout, name)
                assert log_probs == pytest.approx(theirs, abs=1e-5), (layout, name)


@pytest.mark.parametrize(
    ("to", "layout", "words"),
    [
        ({}, {}, "sets no size"),
        ({"target_hidden_size": 33}, {}, "target_hidden_size=33: must be from 1 to 32"),
        ({"target_num_layers": 1, "drop_layers": [1]}, {}, "set the same thing"),
        ({"drop_layers": [3]}, {}, "must be from 1 to 2"),
        ({"drop_layers": [2, 1]}, {}, "a layer must remain"),
        ({"drop_layers": [1, 1]}, {}, "name each layer once"),
        ({"target_num_attention_heads": 3}, {}, "target_num_attention_heads=3 leaves 2 query groups"),
        ({"target_num_query_groups": 1}, {}, "target_num_query_groups=1 leaves 4 heads.*to at most 2"),
        ({"target_mamba_num_heads": 1}, {}, "no Mamba layers"),
        (
            {"target_ffn_hidden_size": 8},
            {"tp_size": 2, "pp_size": 2},
            "tp_size=2 splits each.*Set pp_size=4 and tp_size=1",
        ),
        ({"drop_layers": [1]}, {"tp_size": 1, "pp_size": 2}, "more than the 1 layers that remain. Set pp_size to 1"),
    ],
)
def test_sizes_and_layouts_that_cannot_be_are_refused(to, layout, words):
    from nemo2.llm.pruned import PruningConfig, Sizes

    with pytest.raises(ConfigError, match=words):
        Sizes(small_runs.build_llama().config, PruningConfig(**to)).refuse_layout(**layout)


@pytest.mark.parametrize("pattern", [None, 2, [1, 0, 1, 1]])
def test_layers_that_are_left_have_their_windows_and_positions(pattern):
    from nemo2.llm.pruned import PruningConfig, Sizes
    from nemo2.models.conversion.settings import windowed_layers
    from nemo2.models.llama import LlamaConfig

    whole = LlamaConfig(
        num_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=64, window_size=(3, 0),
        window_attn_skip_freq=pattern, no_rope_freq=pattern,
    )  # fmt: skip
    left = Sizes(whole, PruningConfig(drop_layers=[2])).config([0, 2, 3])
    for layers in (windowed_layers, lambda config: config.no_rope_freq or [0] * config.num_layers):
        assert layers(left) == [layers(whole)[layer] for layer in (0, 2, 3)]


def test_errors_name_what_was_typed():
    from nemo2.llm.pruned import PruningConfig, Sizes

    config = small_runs.build_llama().config
    for to, option in (({"drop_layers": [3, 4]}, "--drop 3,4: "), ({"target_num_layers": 3}, "--layers 3: ")):
        with for_the_command_line(["prune"]), pytest.raises(ConfigError, match=f"^{option}"):
            Sizes(config, PruningConfig(**to))


def test_what_is_not_pruned_is_refused(tmp_path):
    from nemo2 import llm
    from nemo2.llm.pruned import Sizes

    with pytest.raises(ConfigError, match="legacy_ckpt=True: nemo2 prunes models with their own tokenizer"):
        llm.prune("run", str(tmp_path / "new"), llm.PruningConfig(drop_layers=[1]), legacy_ckpt=True)
    with pytest.raises(ConfigError, match="num_train_samples=0: must be a whole number of at least 1"):
        llm.prune("run", str(tmp_path / "new"), llm.PruningConfig(drop_layers=[1]), num_train_samples=0)
    with pytest.raises(ConfigError, match="sets no size"):
        Sizes(small_runs.build_llama().config, llm.PruningConfig(drop_layers=[]))
    with pytest.raises(OutputExists, match="overwrite=True"):
        llm.prune("run", str(tmp_path), llm.PruningConfig(drop_layers=[1]))
