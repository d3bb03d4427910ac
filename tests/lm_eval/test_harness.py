# SPDX-License-Identifier: Apache-2.0
"""lm-eval over our model and over transformers' with the same weights: the same numbers. ``make test-evaluate`` runs it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.evaluate
COMMON = """dataset_path: json
dataset_kwargs:
  data_files:
    test: {file}
test_split: test
"""
TASKS = {
    "own_choice": """output_type: multiple_choice
doc_to_text: "{{q}} Answer:"
doc_to_choice: choices
doc_to_target: gold
metric_list:
  - metric: acc
  - metric: acc_norm
""",
    "own_rolling": """output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list:
  - metric: byte_perplexity
  - metric: bits_per_byte
""",
    "own_texts": """output_type: generate_until
doc_to_text: "{{q}} Answer:"
doc_to_target: "{{choices[1]}}"
generation_kwargs:
  until: ["e"]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
  - metric: chrf
""",
}
TASKS |= {  # longer than the model reads
    "own_long_choice": TASKS["own_choice"].replace("{{q}}", "{{text * 4}}{{q}}"),
    "own_long_texts": TASKS["own_texts"].replace("{{q}}", "{{text * 4}}{{q}}"),
}
LENGTH = 96
LAYOUTS: dict[str, dict[str, Any]] = {"1": {}, "TP 2": {"tensor_model_parallel_size": 2}, "DP 2": {}}


def write(root: Path) -> None:
    """A model of transformers', a tokenizer of bytes, and tasks."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    fast: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = transformers.LlamaConfig(
        **sizes, vocab_size=258, max_position_embeddings=LENGTH, initializer_range=0.1, bos_token_id=0, eos_token_id=1
    )  # pyright: ignore
    transformers.LlamaForCausalLM(config).save_pretrained(root / "model")
    fast.save_pretrained(root / "model")
    rows = [
        {
            "q": f"What is {n} plus {n + 1}?",
            "choices": [str(2 * n), str(2 * n + 1), "none"],
            "gold": 1,
            "text": f"Line {n}. " * (3 + n),
        }
        for n in range(9)
    ]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "tasks").mkdir()
    for name, text in TASKS.items():
        (root / "tasks" / f"{name}.yaml").write_text(f"task: {name}\n" + COMMON.format(file=root / "rows.jsonl") + text)


def ours(root: str, layout: dict[str, Any]) -> dict[str, Any]:
    from nemo2.data.tokenizer import AutoTokenizer
    from nemo2.llm.evaluation.harness import evaluate_tasks
    from support import hf_parity as parity

    os.environ["HF_HUB_OFFLINE"] = "1"
    parity.start(**layout)
    released = parity.Released(Path(root) / "model")
    tokenizer = AutoTokenizer(f"{root}/model", local_files_only=True)
    chunk = released.chunk(released.config(**layout))
    return evaluate_tasks(chunk, tokenizer, list(TASKS), max_sequence_length=LENGTH, task_folder=Path(root) / "tasks")


def theirs(root: str) -> dict[str, Any]:
    os.environ["HF_HUB_OFFLINE"] = "1"
    write(Path(root))
    from lm_eval.evaluator import simple_evaluate  # pyright: ignore[reportMissingImports]
    from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    model = HFLM(pretrained=f"{root}/model", batch_size=1, max_length=LENGTH, device="cpu", dtype="float32")
    return simple_evaluate(model=model, tasks=list(TASKS), task_manager=TaskManager(include_path=f"{root}/tasks"))  # pyright: ignore


@pytest.fixture(scope="module")
def expected(run_on_ranks: Any, tmp_path_factory: Any) -> tuple[str, dict[str, Any]]:
    root = str(tmp_path_factory.mktemp("harness"))
    return root, run_on_ranks(theirs, 1, root, timeout=280)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tasks_have_the_numbers_of_lm_evals_own_class(run_on_ranks: Any, expected: Any, layout: str) -> None:
    root, results = expected
    for found in run_on_ranks(ours, 1 if layout == "1" else 2, root, LAYOUTS[layout], timeout=280):
        for task, metrics in results["results"].items():
            numbers = {
                name: value for name, value in metrics.items() if isinstance(value, float) and "stderr" not in name
            }
            assert numbers
            for name, value in numbers.items():
                assert found["results"][task][name] == pytest.approx(value, rel=1e-5), (task, name)


def test_an_unknown_task_is_told_the_nearest() -> None:
    from nemo2.base.errors import ConfigError
    from nemo2.llm.evaluation.harness import refuse_unknown

    with pytest.raises(ConfigError, match="lm-eval has no task 'arc_easi'; did you mean 'arc_easy'"):
        refuse_unknown(["arc_easi"], None)


@pytest.mark.parametrize("trusted", [False, True])
def test_tasks_of_a_folder_run_code_only_where_their_user_says_so(tmp_path: Path, trusted: bool) -> None:
    from nemo2.base.errors import SecurityError
    from nemo2.llm.evaluation.harness import refuse_unknown

    mark = tmp_path / "mark"
    (tmp_path / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\ndef rows(data): return data\n")
    text = COMMON.format(file=tmp_path / "rows.jsonl") + TASKS["own_choice"]
    (tmp_path / "mine.yaml").write_text(f"task: mine\nprocess_docs: !function evil.rows\n{text}")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "?", "choices": ["a", "b"], "gold": 0}) + "\n")
    try:
        known = refuse_unknown(["mine"], tmp_path, trust_tasks=trusted)
        known.load(["mine"])
    except SecurityError as error:
        assert not trusted and "!function" in str(error) and "mine.yaml" in str(error)
    assert mark.exists() == trusted


def test_prompts_of_a_folder_reach_nothing_of_pythons(tmp_path: Path) -> None:
    from jinja2.exceptions import SecurityError
    from lm_eval import utils  # pyright: ignore[reportMissingImports]

    from nemo2.llm.evaluation.harness import refuse_unknown

    (tmp_path / "mine.yaml").write_text("task: mine\n" + COMMON.format(file="x") + TASKS["own_choice"])
    refuse_unknown(["mine"], tmp_path)
    assert utils.apply_template("{{q|regex_replace('a', 'b')}}", {"q": "a"}) == "b"
    with pytest.raises(SecurityError):
        utils.apply_template(f"{{{{ cycler.__init__.__globals__.os.mkdir('{tmp_path}/mark') }}}}", {})
    assert not (tmp_path / "mark").exists()


# Of a run of ours


def interrupted(root: str) -> dict[str, Any]:
    """The results of a run's checkpoint; those of an evaluation that was interrupted and went on, and what both asked for."""
    from nemo2 import llm
    from nemo2.llm.evaluation import answers, harness
    from support import answering_runs, small_runs

    os.environ |= {"HF_HUB_OFFLINE": "1", "NEMO2_EXPORTS_CACHE": f"{root}/cache/exports"}
    run = answering_runs.save(f"{root}/run")
    answers._CHUNK = 2
    generate, asked, last = harness.generate, [], len(TASKS) * 100

    def counted(*arguments: Any, **settings: Any) -> Any:
        if len(asked) == last:
            raise KeyboardInterrupt
        asked.append(arguments[2])
        return generate(*arguments, **settings)

    def evaluated() -> dict[str, Any]:
        small_runs.release()
        asked.clear()
        return llm.evaluate(run, ["own_texts", "own_choice"], task_folder=f"{root}/tasks")["results"]

    harness.generate = counted
    found: dict[str, Any] = {"whole": evaluated(), "questions": len(asked)}
    last = 3
    try:
        evaluated()
    except KeyboardInterrupt:
        found["kept"] = [file.read_text().count("\n") for file in Path(f"{root}/cache/evaluations").iterdir()]
    last = 100
    found |= {"on": evaluated(), "asked": len(asked), "left": list(Path(f"{root}/cache/evaluations").iterdir())}
    return found


def test_an_interrupted_evaluation_goes_on_with_its_answers(run_on_ranks: Any, expected: Any) -> None:
    (found,) = run_on_ranks(interrupted, 1, expected[0], timeout=280)
    assert found["kept"] and found["kept"][0] >= 2
    assert found["asked"] == found["questions"] - 2, "the two that were written down aren't asked again"
    assert found["on"] == found["whole"]
    assert found["left"] == []


def trained(root: str) -> dict[str, Any]:
    """Figures of tasks after the last step of a run, and those of its checkpoint."""
    from nemo2 import llm
    from nemo2.callbacks import EvaluationCallback
    from nemo2.checkpoint.model_checkpoint import ModelCheckpoint
    from nemo2.data.mock import MockDataModule
    from nemo2.data.tokenizer import ByteTokenizer
    from nemo2.llm.evaluation import figures
    from nemo2.training.run_dir.logger import NeMoLogger
    from support import small_runs

    os.environ["HF_HUB_OFFLINE"] = "1"
    small_runs.quiet()
    data = MockDataModule(
        seq_length=LENGTH, tokenizer=ByteTokenizer(), micro_batch_size=2, global_batch_size=4, num_workers=0
    )
    model = small_runs.build_llama(vocab_size=None, seq_length=LENGTH)
    model.tokenizer = data.tokenizer
    tasks = {"tasks": list(TASKS), "task_folder": f"{root}/tasks", "limit": 4}
    trainer = small_runs.build_trainer(max_steps=2, trainer={"limit_val_batches": 0})
    trainer.callbacks.append(EvaluationCallback(**tasks))
    keep = ModelCheckpoint(filename="{step}", verbose=False)
    log = NeMoLogger(name="trained", log_dir=root, ckpt=keep, use_datetime_version=False)
    place = llm.pretrain(model=model, data=data, trainer=trainer, log=log)
    told = {name: float(value) for name, value in trainer.callback_metrics.items() if "evaluation/" in name}
    small_runs.release()
    after = small_runs.build_trainer(max_steps=1)
    return {"told": told, "after": figures.of_tasks(llm.evaluate(str(place), **tasks, trainer=after))}


def test_tasks_are_measured_during_training(run_on_ranks: Any, expected: Any, tmp_path: Path) -> None:
    (tmp_path / "tasks").symlink_to(Path(expected[0]) / "tasks")
    for found in run_on_ranks(trained, 1, str(tmp_path), timeout=280):
        assert len(found["told"]) >= len(TASKS)
        assert found["told"] == pytest.approx(found["after"], rel=1e-5)
