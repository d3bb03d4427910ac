# SPDX-License-Identifier: Apache-2.0
"""Every place in the libraries under a run that turns text or bytes into something that is called, and why a stranger's recipe
or checkpoint doesn't get there. A place that a new version brings fails here until somebody has looked at it."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from nemo2.config.policy import NAMES_THAT_ARE_IMPORTED, SWITCHES_THAT_RUN_CODE

CALLS = {
    "import_module", "__import__", "eval", "exec", "compile", "exec_module", "spec_from_file_location", "run_path", "run_module",
    "load_inline", "CDLL", "load_library", "locate", "full_load", "unsafe_load", "Popen", "getoutput", "popen",
}  # fmt: skip
"""Whatever they are methods of."""
METHODS = {
    "pickle.load", "pickle.loads", "cloudpickle.load", "cloudpickle.loads", "dill.load", "dill.loads", "joblib.load",
    "yaml.load", "os.system", "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output",
    "torch.load", "numpy.load", "np.load", "torch.compile", "re.compile", "pattern.compile",
}  # fmt: skip
HARMLESS = {"torch.compile", "re.compile", "pattern.compile"}
SUSPECT = re.compile(
    r"import_module|__import__|eval\(|exec\(|compile\(|exec_module|spec_from_file|run_path|run_module|load_inline|CDLL|load_library"
    r"|locate\(|full_load|unsafe_load|Popen|getoutput|popen|pickle|dill|joblib|yaml|os\.system|subprocess|\.load\(|trust_remote_code"
)

VETTED = "a recipe's text: nemo2.config.policy looks at what it names"
DATA_ONLY = "a checkpoint's bytes: nemo2.checkpoint.untrusted reads them as data"
CACHE = "an index cache: nemo2.data.index_cache vouches for the files before they are opened"
FIXED = "the text stands in the library"
UNUSED = "nothing of nemo2 calls it"
OURS = "what this user's own launcher has written, or typed"

MEGATRON = {
    "datasets/blended_dataset.py": CACHE,
    "datasets/gpt_dataset.py": CACHE,
    "datasets/masked_dataset.py": CACHE,
    "datasets/utils.py": FIXED,
    "dist_checkpointing/serialization.py": DATA_ONLY,
    "dist_checkpointing/strategies/async_utils.py": FIXED,
    "dist_checkpointing/strategies/common.py": DATA_ONLY,
    "dist_checkpointing/strategies/nvrx.py": FIXED,
    "distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py": VETTED,
    "export/trtllm/trtllm_helper.py": UNUSED,
    "extensions/transformer_engine.py": DATA_ONLY,
    "fp8_utils.py": VETTED,
    "inference/unified_memory.py": FIXED,
    "models/audio/nemo_audio_checkpoint.py": UNUSED,
    "nccl_allocator.py": FIXED,
    "optimizer/distrib_optimizer.py": UNUSED,
    "optimizer/layer_wise_optimizer.py": UNUSED,
    "optimizer/optimizer.py": UNUSED,
    "package_info.py": FIXED,
    "quantization/quant_config.py": "yaml.SafeLoader",
    "resharding/nvshmem_copy_service/compat.py": FIXED,
    "safe_globals.py": CACHE,
    "tensor_parallel/random.py": FIXED,
    "tokenizers/megatron_tokenizer.py": UNUSED,
    "tokenizers/text/libraries/huggingface_tokenizer.py": UNUSED,
    "transformer/custom_layers/batch_invariant_kernels.py": FIXED,
    "transformer/experimental_attention_variant/dsa_kernels.py": FIXED,
    "transformer/spec_utils.py": VETTED,
}
LIGHTNING = {
    "__setup__.py": FIXED,
    "fabric/accelerators/registry.py": FIXED,
    "fabric/plugins/precision/utils.py": FIXED,
    "fabric/strategies/fsdp.py": UNUSED,
    "fabric/strategies/launchers/subprocess_script.py": OURS,
    "fabric/strategies/model_parallel.py": UNUSED,
    "fabric/strategies/xla.py": UNUSED,
    "fabric/strategies/xla_fsdp.py": UNUSED,
    "fabric/utilities/cloud_io.py": UNUSED,
    "fabric/utilities/load.py": UNUSED,
    "pytorch/accelerators/cuda.py": FIXED,
    "pytorch/cli.py": UNUSED,
    "pytorch/core/saving.py": UNUSED,
    "pytorch/demos/mnist_datamodule.py": UNUSED,
    "pytorch/strategies/fsdp.py": UNUSED,
    "pytorch/strategies/launchers/multiprocessing.py": OURS,
    "pytorch/strategies/launchers/subprocess_script.py": OURS,
    "pytorch/strategies/xla.py": UNUSED,
    "pytorch/utilities/deepspeed.py": UNUSED,
    "pytorch/utilities/imports.py": FIXED,
    "pytorch/utilities/upgrade_checkpoint.py": UNUSED,
}
NEMO_RUN = {
    "cli/api.py": OURS,
    "cli/cli_parser.py": OURS,
    "cli/lazy.py": OURS,
    "core/serialization/yaml.py": OURS,
    "package_info.py": FIXED,
} | dict.fromkeys(("core/execution/", "core/packaging/", "core/tunnel/", "run/"), OURS)
FIDDLE = {
    "_src/absl_flags/": UNUSED,
    "_src/experimental/lazy_imports.py": UNUSED,
    "_src/experimental/serialization.py": VETTED,
    "_src/testing/": UNUSED,
}
TORCH_CHECKPOINT = {
    "_experimental/checkpoint_reader.py": UNUSED,
    "_pg_transport.py": UNUSED,
    "default_planner.py": DATA_ONLY,
    "filesystem.py": DATA_ONLY,
    "format_utils.py": UNUSED,
}
REMOTE = "trust_remote_code, which a recipe and a checkpoint may not ask for"
TRANSFORMERS_AUTO = dict.fromkeys(("auto_factory.py", "configuration_auto.py", "tokenization_auto.py"), REMOTE) | {
    "feature_extraction_auto.py": UNUSED,
    "image_processing_auto.py": UNUSED,
    "processing_auto.py": UNUSED,
    "video_processing_auto.py": UNUSED,
}
"""What `AutoTokenizer` and the conversion of Hugging Face's weights call."""


@pytest.mark.parametrize(
    ("package", "known"),
    [
        ("megatron.core", MEGATRON),
        ("lightning", LIGHTNING),
        ("nemo_run", NEMO_RUN),
        ("fiddle", FIDDLE),
        ("torch.distributed.checkpoint", TORCH_CHECKPOINT),
        ("transformers.models.auto", TRANSFORMERS_AUTO),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_place_that_turns_text_into_code_has_been_looked_at(package, known):
    found = places(package)
    assert found, "the scan finds nothing: it is broken"
    new = {
        file: calls for file, calls in found.items() if not any(file == name or _within(file, name) for name in known)
    }
    assert not new, f"{package} runs what it is told to in places that nobody has looked at: {new}"


def test_what_recipes_may_give_as_text_is_what_the_libraries_resolve():
    for argument, resolver in NAMES_THAT_ARE_IMPORTED.items():
        module = re.match(r"[\w.]+?(?=\.(?:_\w+|[A-Z]\w*|import_module)\b)", resolver)
        assert module, argument
        spec = importlib.util.find_spec(module[0])
        origin = Path(str(spec.origin if spec else ""))
        text = "".join(
            file.read_text() for file in (origin.parent.glob("*.py") if origin.stem == "__init__" else [origin])
        )
        assert re.search(r"import_module\(|__import__\(", text), resolver
    assert "trust_remote_code" in SWITCHES_THAT_RUN_CODE


def test_transformers_runs_a_repositorys_code_behind_its_switch_only():
    """Of its own modules but one, none executes a file."""
    root = Path(str(importlib.util.find_spec("transformers").origin)).parent  # pyright: ignore[reportOptionalMemberAccess]
    executing = {
        file.name
        for file in root.glob("*.py")
        if any(".exec_module" in call for call in _calls(file.read_text(encoding="utf-8")))
    }
    assert executing == {"dynamic_module_utils.py"}


def test_the_scan_sees_each_kind_of_call():
    for text in (
        "x = importlib.import_module(name)",
        "pickle.loads(b)",
        "os.system(c)",
        "yaml.load(f, L)",
        "eval(s)",
        "np.load(p)",
    ):
        assert _calls(text), text
    assert not _calls("model.eval()\nre.compile('x')\nallocate(1)\nself.load(x)")


def places(package: str) -> dict[str, set[str]]:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations)))
    found = {}
    for file in sorted(root.rglob("*.py")):
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.name.endswith("_test.py") or not SUSPECT.search(text):
            continue
        if calls := _calls(text):
            found[file.relative_to(root).as_posix()] = calls
    return found


def _calls(text: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        if isinstance(function, ast.Name) and function.id in CALLS - {"compile"}:
            found.add(function.id)
        if isinstance(function, ast.Attribute):
            owner = function.value.id if isinstance(function.value, ast.Name) else ""
            name = f"{owner.lstrip('_')}.{function.attr}"
            if name in METHODS - HARMLESS or (function.attr in CALLS - {"eval", "compile", "exec"}):
                found.add(name)
        if any(keyword.arg in ("trust_remote_code", "allow_pickle") for keyword in node.keywords):
            found.add("trust_remote_code or allow_pickle")
    return found


def _within(file: str, folder: str) -> bool:
    return folder.endswith("/") and file.startswith(folder)
