# SPDX-License-Identifier: Apache-2.0
"""NeMo 2.0's names and defaults, written as a NeMo script writes them after its imports are changed."""

from importlib import import_module
from typing import Any

import pytest

from nemo2.base.errors import ConfigError
from nemo2.config import Config

nl: Any = import_module("nemo2")  # by its text: NeMo's paths aren't in the stubs
llm: Any = import_module("nemo2.llm")
callbacks: Any = import_module("nemo2.callbacks")


def test_module_paths_lead_to_nemo2s_classes():
    assert nl.pytorch.callbacks.PEFT is llm.peft.PEFT
    assert nl.pytorch.callbacks.ModelCheckpoint is nl.ModelCheckpoint
    assert nl.pytorch.callbacks.model_checkpoint.ModelCheckpoint is nl.ModelCheckpoint
    assert nl.pytorch.callbacks.garbage_collection.GarbageCollectionCallback is callbacks.GarbageCollectionCallback
    assert nl.pytorch.plugins.mixed_precision.MegatronMixedPrecision is nl.MegatronMixedPrecision
    assert nl.pytorch.optim.CosineAnnealingScheduler is nl.lr_scheduler.CosineAnnealingScheduler
    assert nl.pytorch.optim.megatron.MegatronOptimizerModule is nl.MegatronOptimizerModule
    assert nl.resume.AutoResume is nl.AutoResume
    assert nl.fabric.Fabric is nl.Fabric
    assert nl.megatron_parallel.MegatronParallel.__name__ == "MegatronParallel"
    assert llm.gpt.model.llama.LlamaModel is llm.gpt.model.LlamaModel is llm.LlamaModel
    assert llm.gpt.data.mock.MockDataModule is llm.MockDataModule
    assert llm.fn.activation.quick_gelu is llm.fn.quick_gelu
    assert llm.distillation.DistillationConfig is llm.DistillationConfig
    assert llm.peft.lora.LoRA is llm.peft.LoRA
    assert llm.recipes.run.executor.torchrun(2).env_vars == {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}


def test_an_unknown_path_is_an_error_with_the_nearest_names():
    with pytest.raises(AttributeError, match=r"nemo\.lightning\.pytorch\.callback: .*'callbacks'"):
        _ = nl.pytorch.callback
    with pytest.raises(AttributeError, match="no name 'pytorchs'"):
        _ = nl.pytorchs
    assert "pytorch" not in dir(nl)


@pytest.mark.parametrize(
    ("model", "config"),
    [
        ("MistralModel", "MistralConfig7B"), ("MixtralModel", "MixtralConfig8x7B"), ("MambaModel", "SSMConfig"),
        ("DeepSeekModel", "DeepSeekV2Config"), ("ChatGLMModel", "ChatGLMConfig"), ("NemotronModel", "NemotronConfig"),
        ("LlamaNemotronModel", "Llama31NemotronNano8BConfig"),
    ],
)  # fmt: skip
def test_a_model_without_a_config_has_nemos(model, config):
    assert type(getattr(llm, model)().config) is getattr(llm, config)
    node = Config(getattr(llm, model))
    assert node.config.__fn_or_cls__ is getattr(llm, config)
    node.config.seq_length = 64
    assert node.config.seq_length == 64  # an edited default is kept


def test_a_config_that_nemo_makes_without_sizes_is_refused_where_it_would_be_built():
    config = llm.GemmaConfig(num_layers=18)
    assert config.kv_channels == 256
    for without_sizes in (config, llm.SSMConfig()):
        with pytest.raises(ConfigError, match="no default sizes: set hidden_size"):
            without_sizes.configure_model(None)


def test_the_tokenizer_of_a_hybrid_can_be_read():
    named = llm.NVIDIAMambaHybridConfig8B()
    assert (named.tokenizer_library, named.tokenizer_name) == ("megatron", "GPTSentencePieceTokenizer")
    assert named.mapping_type == "nvidia-hybrid" and llm.BaseMambaConfig370M.mapping_type == "base"


def test_an_alias_can_be_read_and_set_on_a_live_config():
    config = llm.NemotronConfig(bias_dropout_add_fusion=True)
    assert config.bias_dropout_add_fusion and config.bias_dropout_fusion
    config.bias_dropout_add_fusion = False
    assert not config.bias_dropout_fusion
