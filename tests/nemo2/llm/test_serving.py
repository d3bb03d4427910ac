# SPDX-License-Identifier: Apache-2.0
"""Checkpoints handed over to servers: what they are told, and what is exported for them. ``tests/serving`` asks a server."""

import contextlib
import io
import json
import os
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo2.base.errors import CheckpointError, ConfigError
from support import answering_runs


def planned(directory: str) -> dict[str, Any]:
    """Runs of a model and of additions over it, and how each is served."""
    from nemo2.checkpoint.directory import read_manifest
    from nemo2.cli import main
    from nemo2.hugging_face.checkpoint import find_checkpoint
    from nemo2.llm import peft
    from nemo2.llm.engines import ServingOptions
    from nemo2.llm.serving import plan_serving

    os.environ["NEMO2_EXPORTS_CACHE"] = f"{directory}/exports"
    run = answering_runs.save(f"{directory}/base")
    base = str(find_checkpoint(Path(run)))
    made = {"dim": 4, "alpha": 8, "lora_B_init_method": "normal"}
    adapted = {
        kind: answering_runs.save(f"{directory}/{kind}", transform=peft.PEFT_STR2CLS[kind](**made), base=base)
        for kind in ("LoRA", "DoRA")
    }
    found: dict[str, Any] = {"printed": {}, "errors": {}, "base": base, "run": run}
    for name, arguments in {
        "model": f"{run} --engine vllm",
        "two": f"{run} --engine vllm -tp 2 --max-length 50 --name mine --dtype bf16",
        "also": f"{run} --engine vllm --also=--enforce-eager",
        "transformers": f"{run} --engine transformers --port 8123",
        "LoRA": f"{adapted['LoRA']} --engine vllm",
        "merged": f"{adapted['LoRA']} --engine vllm --merge",
        "DoRA": f"{adapted['DoRA']} --engine vllm",
        "LoRA in transformers": f"{adapted['LoRA']} --engine transformers",
    }.items():
        out, told = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(told):
            code = main(["serve", *arguments.split(), "--print"])
        assert code == 0, told.getvalue()
        found["printed"][name] = out.getvalue().splitlines(), told.getvalue()
    found["written by --print"] = Path(f"{directory}/exports").exists()
    for name, arguments in {
        "name": f"{run} --engine transformers --name ../mine",
        "heads": f"{run} --engine vllm -tp 3",
        "tp": f"{run} --engine transformers -tp 2",
        "length": f"{run} --engine transformers --max-length 5",
        "merge": f"{run} --engine vllm --merge",
    }.items():
        told = io.StringIO()
        with contextlib.redirect_stderr(told):
            assert main(["serve", *arguments.split(), "--print"]) == 2
        found["errors"][name] = told.getvalue()
    served = {
        kind: plan_serving(path, ServingOptions(), engine="vllm", print_only=True) for kind, path in adapted.items()
    }
    for one in served.values():
        one.prepare()
    found["folders"] = {kind: [str(form.folder) for form in one.forms] for kind, one in served.items()}
    times = [Path(folder).stat().st_mtime_ns for folder in found["folders"]["LoRA"]]
    served["LoRA"].prepare()
    found["again"] = times == [Path(folder).stat().st_mtime_ns for folder in found["folders"]["LoRA"]]
    found["after"] = served["LoRA"].text()
    manifest = read_manifest(Path(base))
    found["digest"] = "" if manifest is None else manifest.digest
    return found


@pytest.fixture(scope="module")
def plans(run_on_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_on_ranks(planned, 1, str(tmp_path_factory.mktemp("serving")), timeout=240)[0]


def test_vllm_is_told_what_its_own_defaults_would_get_wrong(plans):
    (export, serve), told = plans["printed"]["model"]
    assert shlex.split(export)[:3] == ["nemo2", "export", plans["base"]]
    folder = shlex.split(export)[-1]
    assert plans["digest"][:16] in folder
    program, *words = shlex.split(serve)
    assert Path(program).name == "vllm" and words[:2] == ["serve", folder]
    options = dict(zip(words[2::2], words[3::2], strict=True))
    assert options["--dtype"] == "float32", "vLLM would take float16 for float32 weights"
    assert options["--host"] == "127.0.0.1", "vLLM would listen at every address"
    assert options["--max-model-len"] == str(answering_runs.SEQ)
    assert f"At most {answering_runs.SEQ} tokens" in told
    two = shlex.split(plans["printed"]["two"][0][-1])
    assert two[two.index("--tensor-parallel-size") + 1] == "2" and two[two.index("--max-model-len") + 1] == "50"
    assert two[two.index("--served-model-name") + 1] == "mine" and two[two.index("--dtype") + 1] == "bfloat16"
    assert shlex.split(plans["printed"]["also"][0][-1])[-1] == "--enforce-eager"


def test_additions_are_loaded_beside_their_base_where_vllm_can_and_merged_elsewhere(plans):
    (export, adapters, serve), told = plans["printed"]["LoRA"]
    words = shlex.split(serve)
    module = json.loads(words[words.index("--lora-modules") + 1])
    assert "export_lora" in adapters and module["path"] in adapters
    assert words[2] == shlex.split(export)[-1] and module["base_model_name"] == f"{module['name']}-base"
    assert words[words.index("--max-lora-rank") + 1] == "8", "vLLM's choices begin at 8"
    assert "the base alone" in told
    for name, why in {
        "merged": "--merge requests",
        "DoRA": "vLLM doesn't load DoRA",
        "LoRA in transformers": "has no argument for adapters",
    }.items():
        lines, told = plans["printed"][name]
        assert [shlex.split(line)[1] for line in lines if line.startswith("nemo2 ")] == ["export", "export"]
        assert " serve " in lines[-1]
        assert why in told and "lora" not in lines[-1].replace("LoRA", "")


def test_forms_are_made_once(plans):
    assert not plans["written by --print"]
    base, adapters = map(Path, plans["folders"]["LoRA"])
    assert {"config.json", "tokenizer.json"} <= {file.name for file in base.iterdir()}
    assert {file.name for file in adapters.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert (Path(*plans["folders"]["DoRA"]) / "model.safetensors").exists()
    assert plans["again"]
    assert len(plans["after"].splitlines()) == 1, "what is there needs no command"
    assert sorted(file.name for file in base.parent.iterdir()) == sorted(
        Path(folder).name for folders in plans["folders"].values() for folder in folders
    )


def test_transformers_own_parser_takes_what_it_is_told(plans):
    from transformers.cli.transformers import app

    lines, told = plans["printed"]["transformers"]
    _, directory, _, program, verb, *words = shlex.split(lines[-1])
    link = shlex.split(lines[-2])
    assert link[:2] == ["ln", "-sfn"] and link[2] == shlex.split(lines[0])[-1]
    assert link[3] == f"{directory}/{words[0]}", "requests address the model by the path that the server is given"
    assert words[0] == Path(plans["run"]).name, "the name of the run"
    assert Path(program).name == "transformers"
    commands: Any = app
    parsed = commands.commands[verb].make_context(verb, list(words)).params
    assert parsed["force_model"] == words[0] and parsed["dtype"] == "float32"
    assert (parsed["host"], parsed["port"]) == ("127.0.0.1", 8123)


def test_what_an_engine_cannot_do_is_told(plans):
    assert (
        "does not divide the 4 attention heads of the model, which vLLM splits. Set it to one of 1, 2, 4."
        in plans["errors"]["heads"]
    )
    assert "--name '../mine'" in plans["errors"]["name"]
    assert "-tp 2: `transformers serve` has no such argument" in plans["errors"]["tp"]
    assert "--max-length 5" in plans["errors"]["length"]
    assert "has no adapters to merge" in plans["errors"]["merge"]


def test_an_engine_that_is_missing_is_told_with_what_installs_it(monkeypatch, tmp_path):
    import sys

    from nemo2.llm import engines

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(
        ConfigError, match=r"the program `vllm` does not exist \(pip install vllm\); the program `transformers`"
    ):
        engines.chosen(None)
    with pytest.raises(ConfigError, match="engine='triton': must be one of vllm, transformers"):
        engines.chosen("triton")
    for name in ("vllm", "transformers"):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        program = tmp_path / "elsewhere" / name
        program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    assert engines.chosen(None) == "vllm"
    (tmp_path / "elsewhere" / "vllm").unlink()
    assert engines.chosen(None) == "transformers"
    with pytest.raises(ConfigError, match=r"vllm.*engine=None.*transformers"):
        engines.chosen("vllm")


def test_an_option_that_the_server_lacks_is_refused_before_the_export(monkeypatch, tmp_path):
    from nemo2.llm import engines
    from nemo2.llm.engines import ServingOptions

    program = tmp_path / "transformers"
    program.write_text("#!/bin/sh\necho '  --host TEXT  --compile / --no-compile  Enable torch.compile'\n")
    program.chmod(0o755)
    monkeypatch.setattr(engines, "_program", lambda engine: str(program))
    engines.refuse_unknown_options("transformers", ServingOptions(further=["--no-compile", "--host=::", "value"]))
    with pytest.raises(ConfigError, match="--compil: .*did you mean '--compile'"):
        engines.refuse_unknown_options("transformers", ServingOptions(further=["--compil"]))
    program.write_text("#!/bin/sh\nexit 1\n")  # without a list of options, the server itself refuses
    engines.refuse_unknown_options("transformers", ServingOptions(further=["--compil"]))


def test_an_address_that_cannot_be_used_is_refused_before_the_checkpoint_is_read():
    import socket

    from nemo2.llm.engines import ServingOptions
    from nemo2.llm.serving import plan_serving

    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            plan_serving("/nowhere", ServingOptions(port=port))
    with pytest.raises(ConfigError, match="192.0.2.1:8000"):
        plan_serving("/nowhere", ServingOptions(host="192.0.2.1", port=8000))
    with pytest.raises(CheckpointError, match="/nowhere"):
        plan_serving("/nowhere", ServingOptions(port=port))


def test_nemos_deploy_refuses_what_no_engine_has_and_leads_to_the_same(monkeypatch):
    from nemo2 import llm
    from nemo2.llm import serving

    for name, value in {"triton_grpc_port": 9, "start_fastapi_server": False, "num_nodes": 2}.items():
        with pytest.raises(ConfigError, match=f"{name}={value!r}: deploy starts"):
            llm.deploy("somewhere", **{name: value})
    with pytest.raises(ConfigError, match="num_gpus=4 must be tensor_parallelism_size"):
        llm.deploy("somewhere", num_gpus=4)
    with pytest.raises(CheckpointError):
        llm.deploy("/nowhere", backend="transformers")
    asked: list[Any] = []

    class Plan:
        command = ("true",)
        directory = None

        def prepare(self) -> None:
            asked.append("prepared")

    monkeypatch.setattr(serving.engines, "chosen", lambda engine: "vllm")
    model = type("Model", (), {"config": type("Config", (), {"seq_length": 512})})
    opened = SimpleNamespace(model=lambda: model)
    monkeypatch.setattr(serving.Checkpoint, "open", lambda path: opened)
    monkeypatch.setattr(
        serving, "plan_serving", lambda path, given, engine: (asked.append((path, given, engine)), Plan())[1]
    )
    llm.deploy("run", tensor_parallelism_size=2, num_gpus=2, dtype="bfloat16", max_input_len=100, max_output_len=20)
    path, given, engine = asked[0]
    assert (path, engine, asked[1]) == ("run", None, "prepared")
    assert (given.tensor_parallel_size, given.dtype, given.max_length, given.port) == (2, "bf16", 120, 8080)


def test_a_command_that_is_only_told_needs_no_engine(monkeypatch):
    from nemo2.llm import engines

    monkeypatch.setattr(engines, "_missing", lambda engine: f"there is no {engine}")
    assert engines.chosen(None, print_only=True) == "vllm"
    assert engines.chosen("transformers", print_only=True) == "transformers"
    with pytest.raises(
        ConfigError, match="there is no vllm; there is no transformers. To only see the command, use .*print_only=True"
    ):
        engines.chosen(None)


def test_adapters_beside_modules_that_were_trained_in_full_are_merged():
    from nemo2.llm.engines import why_vllm_takes_no_adapters
    from nemo2.models.peft import LoRA

    for modules, why in (["output_layer"], "trained in full (output_layer)"), (None, "None"):
        model = SimpleNamespace(
            model_transform=LoRA(modules_to_save=modules), config=SimpleNamespace(num_moe_experts=None)
        )
        assert why in str(why_vllm_takes_no_adapters(model))


@pytest.mark.parametrize("kind", ["model", "merged", "adapters"])
def test_printed_commands_keep_paths_with_blanks(monkeypatch, kind):
    from nemo2.llm.exported import Form

    monkeypatch.setattr(Form, "folder", property(lambda self: Path("/an export/it's")))
    commands = Form(checkpoint=Path("/my run/a;b"), kind=kind, dtype="bf16").commands
    words = [word for command in commands for word in shlex.split(command)]
    if kind == "adapters":
        called: list[Any] = []
        exec(
            words[2].partition("; ")[2],
            {"llm": SimpleNamespace(peft=SimpleNamespace(export_lora=lambda *a: called.extend(a)))},
        )
        words = called
    assert "/my run/a;b" in words and words[-1] == "/an export/it's"


@pytest.mark.parametrize(
    "options",
    [{"port": 0}, {"port": 70000}, {"host": ""}, {"tensor_parallel_size": 0}, {"pipeline_parallel_size": -2}, {"max_length": 0},
     {"further": "--compile"}],
)  # fmt: skip
def test_options_out_of_range_are_refused_by_name(options):
    from nemo2.llm.engines import ServingOptions

    with pytest.raises(ConfigError, match=f"{next(iter(options))}="):
        ServingOptions(**options)
