# SPDX-License-Identifier: Apache-2.0
"""Front doors are cheap to open, and every name they promise exists for Python, completion and type checkers."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from support.modules import doors
from tools import recipe_stub

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "lightning", "megatron", "nemo_run", "fiddle", "numpy", "transformers")


def run_python(code: str, cwd: Path) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=True, timeout=240).stdout


LIGHT = """
import sys
from nemo2.cli import script  # every rank of a launch imports it
print(*(name for name in sys.modules if name.startswith("nemo2.cli.")))
from nemo2.cli import main
import nemo2, nemo2.llm as llm, nemo2.callbacks, nemo2.recipes as recipes, nemo2.config, nemo2.data
import nemo2.training.run_dir.progress_line, nemo2.training.run_dir.records, nemo2.training.run_dir.report
[recipes.get(name).RECIPE.parameters for name in recipes.names()]
dir(llm), hasattr(llm, "no_such_name")
for line in (
    "--help",
    "list",
    "runs list",
    "cluster list",
    "cluster add mine kind=slrm",
    "check llama_tiny --gpus H1000",
    "pretrain llama_tiny --from no_such_run",
):
    main(line.split())
    heavy = [name for name in sys.modules if name.startswith({heavy!r})]
    assert not heavy, (line, heavy)
"""


def test_front_doors_commands_and_reports_import_nothing_heavy(tmp_path):
    """One process: what one of them imports, the others have."""
    assert run_python(LIGHT.replace("{heavy!r}", repr(HEAVY)), tmp_path).split("\n")[0] == ""


RANK = """\
import sys
import fiddle as fdl
from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer
fdl.build(ZlibJSONSerializer().deserialize(open("recipe").read()))()
print(*(m for m in sys.modules if m.startswith("nemo2.")))
"""
FOR_NO_RANK = (
    *("nemo2.cli.", "nemo2.launch", "nemo2.from_nemo", "nemo2.hugging_face", "nemo2.preflight.planner"),
    *("nemo2.preflight.rehearse", "nemo2.preflight.explain", "nemo2.models.walker", "nemo2.models.conversion"),
    *("nemo2.training.strategies.fsdp", "nemo2.training.strategies.torch_sharded", "nemo2.checkpoint.changes"),
    *("nemo2.checkpoint.shards", "nemo2.config.policy", "nemo2.config.overrides", "nemo2.config.factories"),
    *("nemo2.checkpoint.optimizer_forms", "nemo2.mcore.overlap", "nemo2.mcore.parallel.stored_names"),
    "nemo2.models.hybrid_pattern",
)


def test_a_rank_imports_what_it_runs(tmp_path):
    from nemo_run.core.serialization.zlib_json import ZlibJSONSerializer

    from nemo2.recipes import llama_tiny

    recipe = llama_tiny.pretrain_recipe(dir=str(tmp_path), name="rank")
    recipe.trainer.devices = recipe.trainer.strategy.tensor_model_parallel_size = 1
    recipe.trainer.strategy.sequence_parallel = False
    recipe.trainer.max_steps, recipe.data.seq_length, recipe.data.global_batch_size = 1, 32, 8
    (tmp_path / "recipe").write_text(ZlibJSONSerializer().serialize(recipe))
    imported = run_python(RANK, tmp_path).split("\n")[-2].split()
    assert [name for name in imported if name.startswith(FOR_NO_RANK)] == []
    assert len(imported) <= 210  # of rank 0, whose report the others don't write


DOORS = doors("nemo2", "recipes", "callbacks")


@pytest.mark.parametrize("package", DOORS)
def test_every_promised_name_exists_and_completion_offers_it(package):
    module = import_module(package)
    assert module.__all__ and set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        assert getattr(module, name) is not None


PROMISED = [f"{package}.{name}" for package in DOORS for name in import_module(package).__all__]
NAMES = [*(f"import {package}" for package in DOORS), *PROMISED, "nemo2.llm.LlamaModul", "nemo2.llm.get"]
SCRIPT = """\
# pyright: strict, reportUnusedExpression=false, reportMissingTypeStubs=false
from datetime import timedelta

import fiddle as fdl

import nemo2 as nl
from nemo2 import llm, recipes
from nemo2.callbacks import GarbageCollectionCallback, MegatronCommOverlapCallback
from nemo2.recipes import qwen3_8b

recipe = llm.llama3_8b.pretrain_recipe(dir="runs", name="mine", num_nodes=2)
recipe.trainer.max_steps = 1000
recipe.trainer.max_stepz = 1000  # typo
recipe.trainer.val_check_interval = 0.25
recipe.trainer.limit_val_batches = None
recipe.trainer.strategy.tensor_model_parallel_size = 4
recipe.strategy.ddp_config.overlap_grad_sync = False
recipe.strategy.ddp_config.overlap_grads = False  # typo
recipe.trainer.plugins.grad_reduce_in_fp32 = True
recipe.trainer.plugins.params_dtype = "bf16"
recipe.trainer.callbacks.append(MegatronCommOverlapCallback(tp_comm_overlap=False))
recipe.trainer.callbacks.append(nl.Config(GarbageCollectionCallback, 100))
recipe.optim.config.lr = 1e-4
recipe.optim.lr_scheduler.warmup_steps = 100
recipe.log.ckpt.train_time_interval = timedelta(minutes=5)
llm.llama3_8b.finetune_recipe(num_node=1)  # typo
recipe.model.config.num_layers = 4
print(recipe.model.config.hiden_size)  # typo
recipe.data.global_batch_size = recipe.data.micro_batch_size * 8
recipe.data = nl.Config(llm.PreTrainingDataModule, paths=["corpus"], seq_length=8192)
recipe.trainer.strategy = nl.Config(nl.FSDP2Strategy, data_parallel_size=8)
recipe.resume.restore_config = nl.RestoreConfig(path="weights")

tuned = llm.llama3_8b.finetune_recipe(peft_scheme="dora")
tuned.peft.dim = 16
tuned.resume.restore_config.path = "weights"
short = qwen3_8b.pretrain_recipe(tensor_parallelism=2, max_steps=10)
named = recipes.get("mixtral_8x7b").pretrain_recipe(num_nodes=4)
named.trainer.num_nodes = 8
copy = fdl.build(recipe.clone().model.config)
"""
READ = {
    "recipe": "Pretraining[LlamaModel[Llama3Config8B], MockDataModule]",
    "recipe.model": "LlamaModel[Llama3Config8B]",
    "recipe.model.config.hidden_size": "int",
    "recipe.trainer.strategy": "MegatronStrategy",
    "recipe.trainer.strategy.context_parallel_size": "int",
    "recipe.strategy.ddp_config.overlap_grad_reduce": "bool",
    "recipe.optim.config.weight_decay": "float",
    "recipe.data.seq_length": "int",
    "recipe.log.ckpt.every_n_train_steps": "int | None",
    "recipe.resume.resume_if_exists": "bool",
    "recipe.trainer.callbacks": "list[Any]",
    "tuned": "Finetuning[LlamaModel[Llama3Config8B], SquadDataModule]",
    "tuned.peft": "DoRA | LoRA",
    "short.model.config": "Qwen3Config8B",
    "named.log": "NeMoLogger",
    "nl.Config(nl.AutoResume)": "Config[AutoResume]",
    "llm.llama3_8b.model().config": "Llama3Config8B",
    "llm.llama3_8b.trainer(max_steps=10).max_steps": "int",
    "copy": "Llama3Config8B",
}


OF_EDITORS = pytest.mark.nightly
"""By day the stubs are those that the recipes give, whichever editor reads them."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, str, str]]]:
    """What pyright says of two files in a folder elsewhere: line, severity and message, by the file."""
    folder = tmp_path_factory.mktemp("user")
    told = "".join(f"reveal_type({one})\n" for one in READ)
    for name, text in (("names.py", "\n".join(NAMES)), ("script.py", SCRIPT + told)):
        (folder / name).write_text(f"{text}\n")
    rules = {"reportUnusedExpression": False, "reportMissingModuleSource": False, "extraPaths": [str(ROOT)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(rules))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    told_of: dict[str, list[tuple[int, str, str]]] = {"names.py": [], "script.py": []}
    for one in json.loads(done.stdout)["generalDiagnostics"]:
        told_of[Path(one["file"]).name].append((one["range"]["start"]["line"], one["severity"], one["message"]))
    return told_of


@OF_EDITORS
def test_a_type_checker_knows_every_promised_name_and_no_other(found):
    assert [line for line, _, _ in found["names.py"]] == [len(NAMES) - 2, len(NAMES) - 1], found["names.py"]


@OF_EDITORS
def test_a_type_checker_finds_the_typos_of_a_script_and_nothing_else(found):
    lines = SCRIPT.splitlines()
    typos = [number for number, line in enumerate(lines) if line.endswith("# typo")]
    assert (len(lines), len(typos)) == (40, 4)
    errors = [(line, message) for line, severity, message in found["script.py"] if severity == "error"]
    assert sorted({line for line, _ in errors}) == typos, errors
    for wrong in ("max_stepz", "overlap_grads", "hiden_size", "num_node"):
        assert any(f'"{wrong}"' in message for _, message in errors), errors


@OF_EDITORS
def test_what_is_read_of_a_recipe_has_a_type(found):
    told = [message for _, severity, message in found["script.py"] if severity == "information"]
    assert told == [f'Type of "{one}" is "{kind}"' for one, kind in READ.items()]


@OF_EDITORS
def test_jedi_completes_the_fields_of_a_recipe(tmp_path):
    import jedi  # of ipykernel

    here = jedi.InterpreterEnvironment()  # no process of its own
    project = jedi.Project(tmp_path, added_sys_path=[str(ROOT)])
    begun = "from nemo2 import llm\nrecipe = llm.llama3_8b.pretrain_recipe()\n"
    for typed, field, about in (
        ("recipe.trainer.max_s", "max_steps", "Default: `-1`."),
        ("recipe.strategy.context_p", "context_parallel_size", "Default: `1`."),
        ("recipe.log.ckpt.save_t", "save_top_k", "Default: `3`."),
        ("recipe.strategy.ddp_config.overlap_grad_s", "overlap_grad_sync", "The same as `overlap_grad_reduce`."),
    ):
        [offered] = jedi.Script(
            begun + typed, path=tmp_path / "script.py", project=project, environment=here
        ).complete()
        assert (offered.name, offered.docstring()) == (field, about)


def test_the_stubs_of_the_recipes_are_current():
    for file, text in recipe_stub.texts().items():
        assert file.read_text() == text, "run `make fmt`"


def test_an_unknown_name_is_answered_with_the_nearest_once_somebody_reads_the_error(monkeypatch):
    import nemo2

    with monkeypatch.context() as without:
        without.setattr("nemo2.base.names.nearest", None)
        assert not hasattr(nemo2, "MegatronStrategie")
    with pytest.raises(AttributeError, match="nemo2 has no name 'MegatronStrategie'; did you mean 'MegatronStrategy'"):
        nemo2.MegatronStrategie  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def use_an_entry_point() -> None:
    assert "nemo2.llm.api" not in sys.modules
    from nemo2 import llm

    before = llm.api
    assert before is sys.modules["nemo2.llm.api"]
    assert llm.pretrain is not None
    assert llm.api is before and llm.api.export_ckpt is llm.export_ckpt and llm.api.pretrain is llm.pretrain


def test_nemos_llm_api_has_the_same_names_before_and_after_an_entry_point_is_used(run_on_ranks):
    run_on_ranks(use_an_entry_point, 1, init_process_group=False)
