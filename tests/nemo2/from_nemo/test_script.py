# SPDX-License-Identifier: Apache-2.0
"""NeMo 2.0's scripts with nemo2's imports."""

import ast
import inspect
import json
import subprocess
import sys
from importlib import import_module
from typing import Any

import pytest
from megatron.core.optimizer import OptimizerConfig
from typer.testing import CliRunner

from nemo2 import llm
from nemo2.base.errors import ConfigError
from nemo2.callbacks import JitConfig
from nemo2.cli.app import app
from nemo2.config.aliases import gone
from nemo2.from_nemo import names as nemo_names
from nemo2.from_nemo.names import REASONS_OF_MODULES
from nemo2.from_nemo.script import translated
from tools import nemo_page

SCRIPT = '''\
"""A script."""
import os, torch
from nemo import lightning as nl
from nemo.collections import llm
import nemo.lightning as lightning
from nemo.collections.llm.recipes import llama3_8b, llama3_70b as big
from nemo.collections.llm.recipes.precision.mixed_precision import (
    bf16_mixed,
    fp16_mixed as half,
)
from nemo.lightning.pytorch.callbacks import ModelCheckpoint, GarbageCollectionCallback
from nemo.utils.exp_manager import TimingCallback
from nemo.utils import logging
from nemo.collections.llm.gpt.model.llama import Llama3Config8B, LlamaModel


def late():
    from nemo.lightning.pytorch.optim import CosineAnnealingScheduler, MegatronOptimizerModule
    return CosineAnnealingScheduler(max_steps=3), MegatronOptimizerModule

logging.info("%s", os.sep)
made = nl.MegatronStrategy(
    tensor_model_parallel_size=2,
)
same = llm.LlamaModel is LlamaModel
'''


def test_imports_are_rewritten_and_every_other_line_stays():
    done = translated(SCRIPT)
    assert done.left == []
    old, new = SCRIPT.splitlines(), done.text.splitlines()
    assert [line for line in new if "import" not in line] == [
        line
        for number, line in enumerate(old)
        if "import" not in line and not (old.index("    bf16_mixed,") <= number <= old.index("    bf16_mixed,") + 2)
    ]
    namespace: dict = {}
    exec(compile(done.text, "script", "exec"), namespace)
    assert namespace["made"].tensor_model_parallel_size == 2 and namespace["same"] is True
    assert namespace["big"].__name__ == "nemo2.recipes.llama3_70b" and namespace["late"]()[0].max_steps == 3


def test_what_needs_a_hand_is_listed_by_line_with_its_reason(tmp_path):
    file = tmp_path / "script.py"
    file.write_text(
        "import nemo_run as run\nfrom nemo import lightning as nl\nfrom nemo.collections.llm import HyenaModel, pretrain\n"
        "f = nl.teardown\nimport nemo.core\ntry:\n    from nemo.collections.llm import T5Model\nexcept ImportError:\n    pass\n"
        "from nemo_run.config import Config, Cfg\nrun.Partial(run.Cfg)\nfrom nemo_run.__main__ import app\n"
    )
    done = CliRunner().invoke(app, ["translate", str(file), "--output", str(tmp_path / "new.py")])
    assert done.exit_code == 1 and "nemo_run.__main__" not in sys.modules
    for words in (
        ":3: HyenaModel: not a decoder-only text model",
        ":4: nl.teardown: nemo2 has no teardown; internal to the strategy",
        ":5: import nemo.core: nemo2 has no such module",
        ":7: T5Model: not a decoder-only text model",
        ":10: Cfg: the installed nemo_run.config has no Cfg",
        ":11: run.Cfg: nemo_run has no Cfg",
    ):
        assert f"script.py{words}" in done.stderr, done.stderr
    text = (tmp_path / "new.py").read_text()
    assert "# from nemo.collections.llm import HyenaModel\nfrom nemo2.llm import pretrain" in text and ast.parse(text)


WITHOUT_EFFECT = """\
import nemo_run as run
from nemo import lightning as nl
from nemo.lightning import io
s = nl.MegatronStrategy(tensor_model_parallel_size=1, store_optimizer_states=False)
c = run.Config(nl.MegatronStrategy, precision=1, sequence_parallel=False)
e = nl.MegatronStrategy(enable_nemo_ckpt_io=True)
d = nl.MegatronStrategy(
    pipeline_model_parallel_size=1,
    # \u00e4
    find_unused_parameters=True,
    params_dtype="bf16"
)
class Own(object, io.ConnectorMixin):
    pass
class Other(io.IOMixin, io.ConnectorMixin, object): pass
"""


def test_what_nemo_took_without_using_it_is_taken_out_and_told(tmp_path):
    file, new = tmp_path / "script.py", tmp_path / "new.py"
    file.write_text(WITHOUT_EFFECT)
    done = CliRunner().invoke(app, ["translate", str(file), "--output", str(new)])
    assert done.exit_code == 0, "nothing is left to do"
    for words in (
        ":4: removed MegatronStrategy(store_optimizer_states=...): NeMo 2.0 accepts this argument",
        ":5: removed MegatronStrategy(precision=...): dtypes belong to the precision plugin",
        ":10: removed MegatronStrategy(find_unused_parameters=...)",
        ":13: removed the base class ConnectorMixin of Own: llm.import_ckpt",
    ):
        assert f"script.py{words}" in done.stderr, done.stderr
    text = new.read_text()
    assert len(text.splitlines()) == len(WITHOUT_EFFECT.splitlines()), "lines keep their numbers"
    assert "nl.MegatronStrategy(tensor_model_parallel_size=1)\n" in text and "nl.MegatronStrategy()\n" in text
    assert "run.Config(nl.MegatronStrategy, sequence_parallel=False)" in text
    assert "    # find_unused_parameters=True,\n    # params_dtype" in text
    namespace: dict = {}
    exec(compile(text, "script", "exec"), namespace)
    assert [one.__name__ for one in namespace["Own"].__bases__] == ["object"]
    assert [one.__name__ for one in namespace["Other"].__bases__] == ["IOMixin", "object"]


def test_what_nemo_took_as_an_attribute_of_the_strategy_is_taken_out_too():
    removed, left = "r.trainer.strategy.store_optimizer_states = True", "s.strategy.own = s.strategy.ckpt_type = 1"
    text = f"def edit(r):\n    {removed}  # as in NeMo\n{left}\n"
    assert translated(text).text == text.replace(removed, "pass")


FOLLOWED = """\
import nemo_run as run
from nemo import lightning as L2
from nemo.lightning import MegatronStrategy as MS
S = L2.MegatronStrategy
a = S(store_optimizer_states=True, x=1)
b = run.Config(MS, precision=2)
made = MS()
made.store_optimizer_states = True
def edit(recipe):
    s = recipe.trainer.strategy
    s.hidden_size = 8
    setattr(recipe.trainer.strategy, "overlap_grad_reduce", True)
    setattr(s, "store_optimizer_states", True)
    setattr(recipe, "hidden_size", 9)
"""


def test_a_strategy_behind_another_name_and_setattr_are_followed():
    done = translated(FOLLOWED)
    assert done.text.splitlines()[4:] == [
        "a = S(x=1)",
        "b = run.Config(MS)",
        "made = MS()",
        "pass",
        "def edit(recipe):",
        "    s = recipe.trainer.strategy",
        "    recipe.model.config.hidden_size = 8",
        '    setattr(recipe.trainer.strategy.ddp, "overlap_grad_reduce", True)',
        "    pass",
        '    setattr(recipe, "hidden_size", 9)',
    ]
    assert [line for line, _ in done.taken_out] == [5, 6, 8, 11, 12, 13]
    assert [line for line, _ in done.left] == [5], "x is no argument of the strategy"


def test_a_name_that_means_several_things_is_not_followed():
    text = "from torch import nn as S\nT = S.M\nT = nl.MegatronStrategy\nS(precision=1)\nT(precision=1)\n"
    assert translated(text) == (text, [], [])


def test_earlier_names_of_lightning_are_rewritten():
    done = translated(
        "import os, pytorch_lightning as pl\nimport pytorch_lightning.callbacks\n"
        "from pytorch_lightning.loggers import (\n    TensorBoardLogger as Board,\n)\nfrom lightning_fabric import *\n"
    )
    assert done.text.splitlines() == [
        "import os",
        "import lightning.pytorch as pl",
        "import lightning.pytorch as pytorch_lightning",
        "from lightning.pytorch.loggers import TensorBoardLogger as Board",
        "from lightning.fabric import *",
    ]
    assert (done.left, done.taken_out) == ([], [])


UNKNOWN = """\
from functools import partial
import nemo_run as run
from nemo.collections import llm
config = llm.Llama3Config8B(
    num_layers=2,
    hiden_size=8,
)
data = run.Config(llm.SquadDataModule, seq_length=8, pad_to_max_length=True, packed_sequence_size=8)
make = partial(llm.llama3_8b.pretrain_recipe, num_node=1)
run.Config(llm.MixtralConfig8x7B, async_tensor_model_parallel_allreduce=True)
run.Config(str, num_node=1, **config)
strategy = nl.MegatronStrategy(pipeline_parallel_size=2, store_optimizer_states=(
    True))
strategy.precision = (
    1)
"""


def test_arguments_that_nemo2_lacks_are_listed_with_the_fix():
    done = translated(UNKNOWN)
    assert done.taken_out == []
    for (line, told), (number, words) in zip(
        done.left,
        (
            (6, "Llama3Config8B has no parameter 'hiden_size'; did you mean 'hidden_size'"),
            (8, "SquadDataModule has no parameter 'packed_sequence_size': set packed_sequence_specs"),
            (8, "SquadDataModule has no parameter 'pad_to_max_length': set dataset_kwargs"),
            (9, "pretrain_recipe has no parameter 'num_node'; did you mean 'num_nodes'"),
            (10, "MixtralConfig8x7B has no parameter 'async_tensor_model_parallel_allreduce': Megatron-Core"),
            (12, "MegatronStrategy has no parameter 'pipeline_parallel_size'; did you mean 'pipeline_model"),
            (12, "remove MegatronStrategy(store_optimizer_states=...)"),
            (14, "remove strategy.precision"),
        ),
        strict=True,
    ):
        assert line == number and words in told


def test_several_edits_of_one_line_leave_the_rest_of_it_alone():
    text = (
        "a = nl.MegatronStrategy(precision=1, x=2); r.recipe.trainer.strategy.overlap_grad_reduce = "
        "recipe.strategy.overlap_grad_reduce = True; b = nl.MegatronStrategy(x=3, precision=4)\n"
    )
    done = translated(text)
    assert done.text == (
        "a = nl.MegatronStrategy(x=2); r.recipe.trainer.strategy.ddp.overlap_grad_reduce = "
        "recipe.trainer.strategy.ddp.overlap_grad_reduce = True; b = nl.MegatronStrategy(x=3)\n"
    )
    assert len(done.taken_out) == 4


def test_a_file_that_is_no_python_is_refused(tmp_path):
    (tmp_path / "no.py").write_text("def (")
    done = CliRunner().invoke(app, ["translate", str(tmp_path / "no.py")])
    assert done.exit_code != 0 and "can't be read as Python" in f"{done.exception}{done.stderr}"


NAMES = [name for names in nemo_page.sections().values() for name in names]


def arguments_and_annotations(found: type) -> set[str]:
    annotated = {name for base in found.__mro__ for name in vars(base).get("__annotations__", ())}
    return annotated | inspect.signature(found).parameters.keys()


def test_every_public_name_of_nemo_is_there_renamed_or_gone_with_its_reason():
    found = {name: nemo_names.find(name) for name in NAMES}
    assert len(found) == len(NAMES) > 1000, "no name twice"
    assert [name for name, one in found.items() if one.status == "unknown"] == []
    for name, one in found.items():
        if one.status in ("works", "renamed"):
            owner, _, member = one.name.rpartition(".")
            value = getattr(import_module(one.home), owner or member)
            if isinstance(value, type) and owner:
                assert member in dir(value) or member in arguments_and_annotations(value), name
            else:
                assert not owner or callable(getattr(value, member)), name
        else:
            assert len(one.reason) > 10, name
    assert sum(one.status == "works" for one in found.values()) >= 800


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("nemo.collections.vlm", "nemo.collections"),
        ("nemo.collections.llm.modelopt.speculative", "nemo.collections.llm.modelopt"),
        ("nemo.utils.get_rank", "nemo.utils.get_rank"),
    ],
)
def test_an_unknown_name_has_the_reason_of_its_module(module, reason):
    [(line, told)] = translated(f"from {module} import no_such_name\n").left
    assert (line, told) == (1, f"no_such_name: {REASONS_OF_MODULES[reason]}")


def test_a_recipe_of_nemos_first_release_leads_to_its_name_of_today():
    [(line, told)] = translated("from nemo.collections import llm\nllm.nemotron4_22b.pretrain_recipe()\n").left
    assert line == 2 and told.endswith("use nemo2.recipes.nemotron3_22b")


def test_what_is_called_gone_is_gone():
    # So that the table is changed when they come.
    for name in nemo_names.GONE:
        owner, _, member = name.rpartition(".")
        there = hasattr(named_class(owner), member) if owner[:1].isupper() else nemo_names._home(name) is not None
        assert not there, f"{name} is there: take it off the list"


def test_the_page_has_the_table_as_it_is():
    text = nemo_page.PAGE.read_text()
    assert nemo_page.page(text) == text, "python -m tools.nemo_page"


@pytest.mark.parametrize("library", ["huggingface", "null", "byte-level", "megatron"])
def test_tokenizers_by_nemos_names(library):
    from nemo2.data import get_nmt_tokenizer

    arguments = {
        "huggingface": {"model_name": "a/b"},
        "null": {"vocab_size": 10},
        "megatron": {"vocab_file": "v", "merges_file": "m"},
    }.get(library, {})
    made = get_nmt_tokenizer(library, **arguments)
    kind = {"huggingface": "AutoTokenizer", "null": "NullTokenizer", "megatron": "GPT2BPETokenizer"}
    assert type(made).__name__ == kind.get(library, "ByteTokenizer")
    if library == "null":
        assert (made.vocab_size, made.eos_id) == (11, 10), "NeMo's vocabulary is one id larger than it is told"
    for needed in arguments:
        with pytest.raises(Exception, match=f"needs .*{needed}"):
            get_nmt_tokenizer(library, **{name: value for name, value in arguments.items() if name != needed})


LEFT_OUT = {
    "MegatronParallel": {
        "fsdp": "wrap_chunk is what wraps",
        "convert_module_fn": "transform is applied to each chunk",
    },
}
"""Parameters that NeMo's signatures have and ours don't, with the reason. Those of `register_gone` have theirs there."""
SIGNATURES = json.loads((nemo_page.ROOT / "tools" / "nemo_signatures.json").read_text())


def test_positional_calls_mean_the_same():
    assert len(SIGNATURES) >= 60
    for name, theirs in SIGNATURES.items():
        found = nemo_names.find(name)
        assert found.status == "works", name
        ours = getattr(import_module(found.home), found.name)
        mine = list(inspect.signature(ours).parameters)
        shared = [one for one in theirs if one not in LEFT_OUT.get(name, {}) and gone(ours, one) is None]
        assert [one for one in shared if one not in mine] == [], f"{name} lacks parameters of NeMo's"
        if shared == theirs:
            assert mine[: len(theirs)] == theirs, f"{name}: NeMo's order"
    for name, missing in LEFT_OUT.items():
        ours = nemo_names.find(name)
        assert not missing.keys() & inspect.signature(getattr(import_module(ours.home), ours.name)).parameters.keys()


BASES = json.loads((nemo_page.ROOT / "tools" / "nemo_bases.json").read_text())
"""NeMo's classes of the signatures above, and what ``isinstance`` says there: names of NeMo's, or "module:name" of libraries."""
NOT_OF = {
    "ConnectorMixin": "llm.import_ckpt and llm.export_ckpt",
    "ModuleMatcher": "a part of PEFT itself",
    "AsyncCompatibleCheckpointIO": "every checkpoint IO saves in the background",
    "lightning.pytorch.callbacks:ModelCheckpoint": "Lightning's Checkpoint: names, links and removals are of whole directories",
    "lightning.pytorch.strategies:FSDPStrategy": "parameters are sharded below Megatron-Core's data-parallel wrapper",
    "lightning.pytorch.strategies:ModelParallelStrategy": "parameters are sharded below Megatron-Core's data-parallel wrapper",
}
"""Bases that aren't ours, with the reason."""
NO_CALLBACKS = {"LoRA": ("ModelTransform", "lightning.pytorch:Callback")}
"""PEFT is an argument of llm.finetune, or a model's transform; it needs no callback."""


def named_class(name: str) -> type:
    home, _, own = name.rpartition(":")
    found = nemo_names.find(name)
    return getattr(import_module(home or found.home), own if home else found.name)


def test_isinstance_says_what_it_says_of_nemos_objects():
    assert len(BASES) >= 50
    for name, theirs in BASES.items():
        ours = named_class(name)
        for base in theirs:
            if base in NOT_OF or base in NO_CALLBACKS.get(name, ()):
                continue
            assert issubclass(ours, named_class(base)), f"{name} is no {base}"
    assert not issubclass(dict, named_class("IOMixin")), "only what remembers its arguments"


_TINY = llm.LlamaConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "MegatronMixedPrecision": ("bf16-mixed",),
    "MockDataModule": (16,),
    "PreTrainingDataModule": (["x"],),
    "FineTuningDataModule": ("x",),
    "ChatDataModule": ("x",),
    "MegatronDataSampler": (16,),
    "GarbageCollectionCallback": (1, 1),
    "NsysCallback": (1, 2),
    "GPTModel": (_TINY,),
    "LlamaModel": (_TINY,),
    "MixtralModel": (_TINY,),
    "DeepSeekModel": (_TINY,),
    "MambaModel": (_TINY,),
    "MegatronOptimizerModule": (OptimizerConfig(lr=1e-3),),
    "NoamAnnealingScheduler": (8,),
    "JitTransform": (JitConfig(),),
    "LayerFreezer": ({"decoder": 1},),
    "PytorchProfilerCallback": (1, 2),
}
"""What a class can't be made without."""
BY_NAME = {"RestoreConfig": {"path": "x"}}
LIVE = sorted({name for name in SIGNATURES if isinstance(named_class(name), type)} - {"MegatronParallel"})
"""NeMo's classes; one is made of a model on ranks: tests/nemo2/mcore/parallel."""
NOT_KEPT = {
    "MegatronMixedPrecision": "dtype_config has what it made of them",
    "MockDataModule": "vocab_file and merges_file are its tokenizer's",
}
"""Classes of NeMo's that don't keep all of their arguments either."""
FIXED = {
    "MegatronStrategy": "is read only when the strategy is created",
    "FSDP2Strategy": "has no setter",
}
"""Classes with arguments that can't be set any more, and what is said of them."""
FREE = ("MaskedTokenLossReduction",)
"""Torch modules, which keep what a script sets."""


@pytest.mark.parametrize("name", [*LIVE, "OptimizerMonitor"])
def test_arguments_are_attributes_of_the_live_object_and_a_name_that_means_nothing_is_refused(name):
    assert len(LIVE) > 50
    live = named_class(name)(*ARGUMENTS.get(name, ()), **BY_NAME.get(name, {}))
    shared = inspect.signature(type(live)).parameters.keys() & set(SIGNATURES.get(name, ()))
    unreadable = [argument for argument in shared if not hasattr(live, argument)]
    assert unreadable == [] or name in NOT_KEPT, f"arguments of {name} that can't be read"
    fixed = []
    for argument in sorted(shared - set(unreadable)):
        value = getattr(live, argument)
        try:
            setattr(live, argument, value)
        except (AttributeError, ConfigError) as error:
            assert FIXED.get(name, "no reason") in str(error)
            fixed.append(argument)
        assert getattr(live, argument) == value
    assert len(fixed) < len(shared) or not shared, f"nothing of {name} can be set"
    argument = next(iter(sorted(shared)), None)
    if name in FREE:
        return
    if argument is not None:
        with pytest.raises(AttributeError, match=f"did you mean .*{argument}|no parameter '{argument}_'"):
            setattr(live, f"{argument}_", 1)
    else:
        with pytest.raises(AttributeError, match="has no parameter 'no_such_thing'"):
            live.no_such_thing = 1


@pytest.mark.nightly  # ten seconds of imports
def test_a_field_of_the_model_on_the_strategy_is_moved_in_a_process_that_has_loaded_no_model():
    line = "recipe.trainer.strategy.hidden_size = 8"
    code = f"from nemo2.from_nemo.script import translated; print(translated({line!r}).text)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "recipe.model.config.hidden_size = 8"
