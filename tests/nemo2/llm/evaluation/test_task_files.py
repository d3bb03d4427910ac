# SPDX-License-Identifier: Apache-2.0
"""A stranger's folder of lm-eval tasks runs nothing, unless its user says so."""

import pytest

from nemo2.base.errors import SecurityError
from nemo2.llm.evaluation.task_files import refuse_code

PLAIN = """task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}} Answer:"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{metric: acc}]
"""


def test_a_folder_of_plain_tasks_goes_through(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "_base.yaml").write_text(PLAIN)
    (tmp_path / "sub" / "mine.yaml").write_text("include: ../_base.yaml\ntask: other\n")
    refuse_code(tmp_path, metrics={"acc"})


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("process_docs: !function evil.run", "!function"),
        ("doc_to_text: !!python/object/apply:os.system ['touch mark']", "python/object/apply"),
        ("class: !function evil.Task", "!function"),
        ("class: evil.Task", "class: 'evil.Task', and lm-eval imports and calls the named class"),
        ("custom_dataset: evil", "lm-eval calls the named function"),
        ("use_prompt: prompts.yaml:x", "creates Python objects"),
        ("include: /elsewhere/task.yaml", "only .yaml and .yml files inside the task folder"),
        ("include: ../outside.yaml", "only .yaml and .yml files inside the task folder"),
        ("include: hidden", "only .yaml and .yml files inside the task folder"),
        ("include: [fine.yaml, hidden.txt]", "only .yaml and .yml files inside the task folder"),
        ("dataset_path: ./rows.py", "datasets library runs that script"),
        ("dataset_path: pandas", "reads pickles"),
        ("dataset_kwargs: {trust_remote_code: true}", "runs the data set's script"),
        ("metric_list: [{metric: acc, hf_evaluate: true}]", "a script from the hub"),
        ("metric_list: [{metric: ./evil.py}]", "would load a script of that name"),
        ("metadata: [" + "[" * 500 + "]" * 500 + "]", "levels deep"),
    ],
)
def test_what_would_run_code_is_refused_with_its_file_named(tmp_path, line, what):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')\nrun = Task = print\n")
    field = line.partition(":")[0]
    kept = [one for one in PLAIN.splitlines() if one.partition(":")[0] != field]
    (tmp_path / "mine.yaml").write_text("\n".join([*kept, line, ""]))
    with pytest.raises(SecurityError) as caught:
        refuse_code(tmp_path, metrics={"acc"})
    assert what in str(caught.value)
    assert "mine.yaml" in str(caught.value) and "trust_tasks=True" in str(caught.value)
    assert not (tmp_path / "mark").exists()


def test_a_data_folder_with_a_script_is_refused(tmp_path):
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "rows.py").write_text("")
    (tmp_path / "mine.yaml").write_text(PLAIN.replace("dataset_path: json", f"dataset_path: {tmp_path / 'rows'}"))
    with pytest.raises(SecurityError, match="datasets library runs that script"):
        refuse_code(tmp_path)
