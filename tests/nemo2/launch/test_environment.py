# SPDX-License-Identifier: Apache-2.0
"""Launch-time variables: a table over GPU generation, layout and FSDP; what contradicts them is said."""

import re
from contextlib import nullcontext

import pytest

from nemo2.launch import launch
from nemo2.launch.environment import CONNECTIONS, Ranks, launch_variables, objections, ranks_of
from nemo2.recipes import llama_tiny

HOPPER, BLACKWELL, AMPERE = (9, 0), (10, 0), (8, 0)


@pytest.mark.parametrize(
    ("capability", "sizes", "value"),
    [
        (HOPPER, {}, None),
        (HOPPER, {"tensor_parallel": 2}, "1"),
        (HOPPER, {"context_parallel": 2}, "1"),
        (HOPPER, {"pipeline_parallel": 4}, None),
        (AMPERE, {"tensor_parallel": 8, "context_parallel": 2}, "1"),
        (HOPPER, {"fsdp": True}, None),
        (HOPPER, {"fsdp": True, "tensor_parallel": 2}, None),
        (BLACKWELL, {}, None),
        (BLACKWELL, {"tensor_parallel": 2}, "32"),
        (BLACKWELL, {"context_parallel": 4}, "32"),
        (BLACKWELL, {"pipeline_parallel": 4}, None),
        ((10, 3), {"tensor_parallel": 2}, "32"),
        (BLACKWELL, {"fsdp": True, "context_parallel": 2}, "32"),
        (BLACKWELL, {"fsdp": True}, None),
    ],
)
def test_the_number_of_queues_follows_from_gpu_and_layout(capability, sizes, value):
    variable = launch_variables(Ranks(capability, **sizes)).get(CONNECTIONS)
    assert (variable.value if variable else None) == value


@pytest.mark.parametrize(
    ("capability", "sizes", "given", "words"),
    [
        (HOPPER, {"tensor_parallel": 2}, "8", "=8 in the environment contradicts 1, .*: 2 tensor-parallel ranks"),
        (BLACKWELL, {"context_parallel": 2}, "1", "=1 in the environment contradicts 32"),
        (HOPPER, {"fsdp": True, "tensor_parallel": 2}, "1", "FSDP's gathers wait in one queue"),
        (BLACKWELL, {}, "1", "only delays kernels"),
        (HOPPER, {"tensor_parallel": 2}, "1", None),
        (HOPPER, {}, "1", None),
        (HOPPER, {}, "8", None),
    ],
)
def test_a_contradicting_environment_is_told(capability, sizes, given, words):
    said = objections(Ranks(capability, **sizes), {CONNECTIONS: given})
    if words is None:
        assert said == []
    else:
        [sentence] = said
        assert re.search(words, sentence), sentence


def test_experts_that_drop_no_tokens_get_memory_that_grows():
    allocator, register = "PYTORCH_CUDA_ALLOC_CONF", "NCCL_GRAPH_REGISTER"
    found = launch_variables(Ranks(HOPPER, varying_sizes=True))
    assert found[allocator].value == "expandable_segments:True"
    assert register not in found
    assert launch_variables(Ranks(HOPPER, varying_sizes=True, graphs=True))[register].value == "0"
    assert allocator not in launch_variables(Ranks(HOPPER, varying_sizes=True, registered_buffers=True))
    assert allocator not in launch_variables(Ranks(HOPPER, graphs=True))
    buffers = launch_variables(Ranks(HOPPER, registered_buffers=True)).keys()
    assert {"NCCL_NVLS_ENABLE", "NCCL_CTA_POLICY"} <= buffers and allocator not in buffers
    [sentence] = objections(Ranks(HOPPER, varying_sizes=True, graphs=True), {register: "1"})
    assert f"{register}=1 in the environment contradicts" in sentence


def test_norms_leave_room_where_communication_runs_beside_them():
    assert launch_variables(Ranks(HOPPER, world_size=1)) == {}
    found = launch_variables(Ranks(HOPPER, world_size=8, overlapped=True))
    margins = {name: variable.value for name, variable in found.items() if "MARGIN" in name}
    assert margins == {"NVTE_FWD_LAYERNORM_SM_MARGIN": "16", "NVTE_BWD_LAYERNORM_SM_MARGIN": "16"}
    assert found["TORCH_NCCL_HIGH_PRIORITY"].value == "1"


def test_a_recipe_tells_what_they_follow_from():
    recipe = llama_tiny.pretrain_recipe()
    recipe.strategy.tensor_model_parallel_size = 2
    recipe.strategy.ddp_config.overlap_grad_sync = True
    recipe.strategy.ddp_config.nccl_ub = True
    ranks = ranks_of(recipe, capability=HOPPER, devices=4, nodes=2)
    assert ranks == Ranks(HOPPER, tensor_parallel=2, world_size=8, overlapped=True, registered_buffers=True)


def test_a_recipe_of_experts_tells_whether_they_drop_tokens():
    from nemo2 import llm

    recipe = llm.mixtral_8x7b.pretrain_recipe()
    assert ranks_of(recipe, capability=HOPPER, devices=8, nodes=8)[-2:] == (True, False)
    recipe.model.config.moe_pad_expert_input_to_capacity = True
    recipe.model.config.cuda_graph_impl = "local"
    assert ranks_of(recipe, capability=HOPPER, devices=8, nodes=8)[-2:] == (False, True)


def test_torchs_sharding_has_its_variables_too():
    import nemo2 as nl
    from nemo2.config import Config

    recipe = llama_tiny.pretrain_recipe()
    recipe.trainer.strategy = Config(nl.FSDP2Strategy, context_parallel_size=2)
    ranks = ranks_of(recipe, capability=BLACKWELL, devices=4, nodes=2)
    assert ranks == Ranks(BLACKWELL, context_parallel=2, world_size=8, fsdp=True)
    assert launch_variables(ranks)[CONNECTIONS].value == "32"
    recipe.trainer.strategy = Config(nl.FSDPStrategy)
    ranks = ranks_of(recipe, capability=HOPPER, devices=8, nodes=1)
    assert ranks == Ranks(HOPPER, world_size=8, fsdp=True)
    [sentence] = objections(ranks, {CONNECTIONS: "1"})
    assert "FSDP" in sentence
    recipe.trainer.strategy = "auto"  # Lightning's own
    assert ranks_of(recipe, capability=HOPPER, devices=8, nodes=1) is None


def test_the_launcher_sets_them_in_the_ranks_environment_and_a_dry_run_says_why(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path))
    monkeypatch.delenv(CONNECTIONS, raising=False)
    recipe = llama_tiny.pretrain_recipe()
    recipe.strategy.tensor_model_parallel_size = 2
    launch(recipe, devices=2, dryrun=True, gpu="H100")
    shown = capsys.readouterr()
    assert f"{CONNECTIONS}=1" in shown.out and "because" in shown.out
    assert f"  {CONNECTIONS}=1: 2 tensor-parallel ranks exchange beside computation" in shown.out
    launch(recipe, devices=2, dryrun=True, gpu="B200")
    assert f"{CONNECTIONS}=32" in capsys.readouterr().out
    monkeypatch.setenv(CONNECTIONS, "8")
    launch(recipe, devices=2, dryrun=True, gpu="H100")
    shown = capsys.readouterr()
    assert f"warning: {CONNECTIONS}=8 in the environment contradicts" in shown.err
    assert f"  {CONNECTIONS}=8: from the environment" in shown.out and f"{CONNECTIONS}=1" not in shown.out
    monkeypatch.delenv(CONNECTIONS)
    launch(recipe, devices=2, dryrun=True, env={CONNECTIONS: "4"}, gpu="H100")
    assert f"{CONNECTIONS}=4" in capsys.readouterr().out


@pytest.mark.parametrize("in_profile", [False, True])
def test_a_variable_of_this_launch_is_judged_as_one_of_the_profile(monkeypatch, tmp_path, capsys, in_profile):
    import nemo_run

    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path))
    recipe = llama_tiny.pretrain_recipe()
    recipe.strategy.tensor_model_parallel_size = 2
    variables = {CONNECTIONS: "4"}
    tunnel = nemo_run.LocalTunnel(job_dir=str(tmp_path))
    executor = nemo_run.SlurmExecutor(
        account="a", time="1:00:00", tunnel=tunnel, env_vars=variables if in_profile else {}
    )
    launch(recipe, executor, devices=2, gpu="H100", env={} if in_profile else variables, dryrun=True)
    shown = capsys.readouterr()
    assert f"warning: {CONNECTIONS}=4 in the environment contradicts 1" in shown.err
    assert f"export {CONNECTIONS}=4" in shown.out and f"{CONNECTIONS}=4: from the environment" in shown.out


@pytest.mark.parametrize("allowed", ["0", "1"])
def test_the_rules_read_the_variables_of_the_launch(monkeypatch, tmp_path, capsys, allowed):
    import nemo_run

    from nemo2.base.errors import ConfigError

    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path))
    recipe = llama_tiny.pretrain_recipe()
    recipe.model.config.deterministic_mode = True
    tunnel = nemo_run.LocalTunnel(job_dir=str(tmp_path))
    executor = nemo_run.SlurmExecutor(account="a", time="1:00:00", tunnel=tunnel)
    env = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": allowed}
    with nullcontext() if allowed == "0" else pytest.raises(ConfigError, match="NONDETERMINISTIC_ALGO=1: "):
        launch(recipe, executor, devices=2, gpu="H100", env=env, dryrun=True)


def test_a_machine_without_gpus_gets_none(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("NEMORUN_HOME", str(tmp_path))
    recipe = llama_tiny.pretrain_recipe()
    recipe.strategy.tensor_model_parallel_size = 2
    launch(recipe, devices=2, dryrun=True)
    assert CONNECTIONS not in capsys.readouterr().out
