# SPDX-License-Identifier: Apache-2.0
"""Training that begins with released weights, by each path that names them, with a vocabulary that the ranks don't divide."""

from typing import Any

import pytest
import torch

from support import small_runs
from tests.nemo2.hugging_face.test_api import SIZES, TEMPLATE, make_tokenizer

VOCABULARY = 67
ADAPTED = "DoRA"


def trained(paths: dict[str, str], tp: int, cache: str, logs: str) -> dict[str, Any]:
    """Losses of two steps from each path, and the model's tokenizer."""
    import os

    import lightning.pytorch as pl

    from nemo2 import AutoResume, NeMoLogger, RestoreConfig, llm

    os.environ["NEMO_MODELS_CACHE"] = cache
    small_runs.quiet()
    found = {}
    for name, path in paths.items():
        small_runs.release()
        recorder = small_runs.Recorder()
        sizes = {"num_layers": 2, "ffn_hidden_size": 64, "kv_channels": 8, "layernorm_epsilon": 1e-6}
        model = small_runs.build_llama(**sizes, vocab_size=None, rotary_base=10000)
        model.model_transform = llm.peft.DoRA(dim=4) if name == ADAPTED else None
        options = {"tensor_model_parallel_size": tp, "sequence_parallel": tp > 1}
        trainer = small_runs.build_trainer(max_steps=2, callbacks=[recorder], **options)
        resume = AutoResume(restore_config=RestoreConfig(path=path))
        log = NeMoLogger(log_dir=logs, name=f"{name}_{tp}", ckpt=None)
        assert isinstance(model, pl.LightningModule)
        llm.pretrain(model, small_runs.TokenData(), trainer, log=log, resume=resume)
        tokenizer: Any = model.tokenizer
        template = None if tokenizer is None else tokenizer.tokenizer.chat_template
        found[name] = {"losses": recorder.losses, "template": template}
    return found


@pytest.fixture(scope="module")
def begun(run_on_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from nemo2.checkpoint.tokenizers import read_tokenizer
    from support.released_models import import_release

    root = tmp_path_factory.mktemp("starting")
    torch.manual_seed(2)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": VOCABULARY}, tie_word_embeddings=False))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(root / "released")
    make_tokenizer(root / "released", VOCABULARY)
    tokenizer = read_tokenizer(root / "released")
    imported = import_release(root / "released", root / "models" / "org" / "name", tokenizer=tokenizer)
    paths = {"hf": f"hf://{root / 'released'}", "nemo": "nemo://org/name", "folder": str(imported)}
    paths[ADAPTED] = paths["hf"]
    arguments = (paths, str(root / "models"), str(root / "logs"))
    runs: dict[Any, Any] = {tp: run_on_ranks(trained, tp, paths, tp, *arguments[1:], timeout=300)[0] for tp in (1, 2)}
    batch = small_runs.global_batch(0)
    logits = model(batch["tokens"], use_cache=False).logits
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    mask = batch["loss_mask"].flatten()
    runs["expected"] = float((each * mask).sum() / mask.sum())
    return runs


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("path", ["hf", "nemo", "folder"])
def test_each_path_begins_with_the_released_weights(begun: Any, path: str, tp: int) -> None:
    """With transformers' loss, and the same after a step, although rows pad the vocabulary, and more of them at TP 2."""
    first, second = begun[tp][path]["losses"]
    assert first == pytest.approx(begun["expected"], rel=2e-6)
    assert second == pytest.approx(begun[1]["hf"]["losses"][1], rel=1e-5)
    assert abs(second - first) > 1e-3


@pytest.mark.parametrize("tp", [1, 2])
def test_an_adapter_that_reads_the_weights_begins_with_the_released_ones(begun: Any, tp: int) -> None:
    assert begun[tp][ADAPTED]["losses"][0] == pytest.approx(begun["expected"], rel=2e-6)


@pytest.mark.parametrize("path", ["hf", "nemo", "folder"])
def test_the_tokenizer_comes_along(begun: Any, path: str) -> None:
    assert begun[1][path]["template"] == begun[2][path]["template"] == TEMPLATE
