# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning as a script calls it: adapters are saved alone, resumed in another layout, merged, and generate text."""

from pathlib import Path
from typing import Any

import pytest

from support import small_runs

STEPS = 4
PROMPTS = ["def main("]


def parts(directory: str, *, max_steps: int, base: str | None = None) -> dict[str, Any]:
    small_runs.release()
    data = small_runs.random_bytes()
    model = small_runs.build_llama(distributed=True, vocab_size=None, gated_linear_unit=True, num_query_groups=4)
    model.tokenizer = data.tokenizer
    return small_runs.run_arguments(
        directory,
        model=model,
        data=data,
        base=base,
        checkpoints=small_runs.keep(every_n_train_steps=2, save_top_k=-1),
        max_steps=max_steps,
        callbacks=[small_runs.Recorder()],
    )


def method(kind: str = "LoRA") -> Any:
    from nemo2.llm import peft

    return peft.PEFT_STR2CLS[kind](dim=4, alpha=8, lora_B_init_method="normal")


def run(directory: str, *, kind: str = "LoRA", **options: Any) -> dict[str, Any]:
    from nemo2.llm import api

    wanted = parts(directory, **options)
    place = api.finetune(**wanted, peft=method(kind))
    recorder = next(one for one in wanted["trainer"].callbacks if isinstance(one, small_runs.Recorder))
    return {"losses": recorder.losses, "place": str(place)}


def refusal(adapters: str, target: str) -> str:
    from nemo2.base.errors import Nemo2Error
    from nemo2.llm import peft

    with pytest.raises(Nemo2Error) as error:
        peft.merge_lora(adapters, target)
    return str(error.value)


def one_process(directory: str) -> dict[str, Any]:
    from nemo2.checkpoint.directory import read_manifest
    from nemo2.hugging_face.checkpoint import find_checkpoint
    from nemo2.llm import api, peft

    found: dict[str, Any] = {}
    base = str(find_checkpoint(Path(api.pretrain(**parts(f"{directory}/base", max_steps=2)))))
    found["base"] = base
    for kind in ("LoRA", "DoRA"):
        found[kind] = run(f"{directory}/{kind}", kind=kind, max_steps=STEPS, base=base)
        last = find_checkpoint(Path(found[kind]["place"]))
        manifest = read_manifest(last)
        assert manifest is not None
        found[kind] |= {
            "checkpoint": str(last),
            "bytes": sum(size for name, size in manifest.files.items() if name.startswith("weights/")),
            "part_of": manifest.part_of,
        }
        small_runs.release()
        (exported := Path(directory, f"{kind} merged")).mkdir()
        (exported / "config.json").touch()
        merged = peft.merge_lora(found[kind]["place"], exported, overwrite=True)
        found[kind]["hidden"] = [str(path) for path in Path(directory).glob(".*")]
        found[kind]["refused"] = [
            refusal(found[kind]["place"], str(merged)),  # there is something already
            refusal(str(merged), f"{directory}/{kind} twice"),
        ]
        paths = {"adapter": last, "merged": merged, "base": base}
        found[kind]["answers"] = {name: answers(str(path)) for name, path in paths.items()}
    # Stopped after two steps and resumed from adapters and base.
    found["stopped"] = run(f"{directory}/again", max_steps=2, base=base)["losses"]
    found["resumed"] = run(f"{directory}/again", max_steps=STEPS, base=base)["losses"]
    return found


def answers(path: str, **layout: Any) -> list[tuple[list[int], list[float]]]:
    from nemo2.llm import api

    small_runs.release()
    small_runs.quiet()
    trainer = small_runs.build_trainer(max_steps=1, **layout) if layout else None
    found = api.generate(path, trainer, prompts=[*PROMPTS, "a"], max_new_tokens=12, temperature=0.0)
    return [(one.token_ids, one.log_probs) for one in found]


def in_two_ranks(paths: dict[str, str]) -> dict[str, Any]:
    return {kind: answers(path, tensor_model_parallel_size=2) for kind, path in paths.items()}


@pytest.fixture(scope="module")
def runs(run_on_ranks, tmp_path_factory) -> dict[str, Any]:
    return run_on_ranks(one_process, 1, str(tmp_path_factory.mktemp("finetuned")), timeout=240)[0]


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
def test_checkpoints_hold_what_is_trained_name_the_base_and_say_the_same_merged_into_it_once(runs, kind):
    base, found = Path(runs["base"]), runs[kind]["answers"]
    whole = sum(file.stat().st_size for file in (base / "weights").rglob("*") if file.is_file())
    assert runs[kind]["bytes"] < 0.7 * whole
    assert runs[kind]["part_of"] == str(base)
    assert_same(found["adapter"], found["merged"])
    assert found["adapter"][0] != found["base"][0]
    assert runs[kind]["hidden"] == [], "what was replaced is deleted"
    there, twice = runs[kind]["refused"]
    assert "exists: use" in there
    assert "does not come from a PEFT run" in twice


def test_a_run_goes_on_from_its_adapters_bit_by_bit(runs):
    assert [*runs["stopped"], *runs["resumed"]] == runs["LoRA"]["losses"]


def assert_same(found: list[tuple[list[int], list[float]]], expected: list[tuple[list[int], list[float]]]) -> None:
    for (tokens, log_probs), (others, theirs) in zip(found, expected, strict=True):
        assert tokens == others
        assert log_probs == pytest.approx(theirs, abs=1e-5)


def test_adapters_over_their_base_say_it_on_two_ranks_too(run_on_ranks, runs):
    for found in run_on_ranks(in_two_ranks, 2, {kind: runs[kind]["checkpoint"] for kind in ("LoRA", "DoRA")}):
        for kind, told in found.items():
            assert_same(told, runs[kind]["answers"]["merged"])
