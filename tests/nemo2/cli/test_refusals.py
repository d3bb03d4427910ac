# SPDX-License-Identifier: Apache-2.0
"""Commands that can't be meant: one message, exit code 2, nothing on standard output and nothing written."""

import pytest

from support import saved_checkpoints

REFUSED = {
    # names
    "nothing": "error: nemo2 has no command 'nothing'",
    "runs taill x": "error: nemo2 runs has no command 'taill'; did you mean 'tail'?",
    "show llama3_8": "did you mean 'llama3_8b'",
    "show llama3_8 --diff llama_tiny": "did you mean 'llama3_8b'",
    "show empty --diff llama_tiny": "no recipe 'empty'",
    "show ./empty --diff llama_tiny": "./empty is a directory without a recipe.json",
    "show .": ". is a directory without a recipe.json",
    "show ./taken.py": "taken.py cannot be imported: ModuleNotFoundError: No module named 'nemo' (taken.py:1)",
    "pretrain llama_tiny ./taken.py": "'./taken.py': not a change of the form path=value",
    "show none.json": "none.json: there is no such file",
    "show llama_tiny:lorra": "'lorra' is not a method of fine-tuning; did you mean 'lora'",
    "finetune llama3_8b_16k --dryrun": "llama3_8b_16k has no fine-tuning recipe",
    "finetune llama3_9b --dryrun": "There is no recipe 'llama3_9b'",
    "pretrain llama_tiny --executor slurm": "neither a profile of this name",
    "list llama9_8b": "did you mean",
    "data preview no_such_recipe": "no_such_recipe: there is no file, folder, data set or recipe of this name",
    # places
    "generate /no/such --prompt a": "/no/such does not exist",
    "runs report /no/such": "give a run's directory, or the name of a run below",
    "data preview gone.jsonl": "gone.jsonl: there is no such file",
    "show llama_tiny gone.jsonl": "gone.jsonl is no change of the recipe, and there is no such file",
    "finetune --from hf://x/y no_such.jsonl": "no such file",
    "finetune --from hf://x/y chats.jsonl": "--data chats.jsonl",
    "finetune llama_tiny chats.jsonl": "--data chats.jsonl",
    "pretrain llama_tiny chats.jsonl": "chats.jsonl is no change of the recipe",
    "check llama_tiny chats.jsonl": "--data chats.jsonl",
    "pretrain llama_tiny --data chats.jsonl --dryrun": "nemo2 finetune",
    "new-recipe taken --from llama_tiny": "taken.py exists: use another name",
    "show llama_tiny -o taken.py": "taken.py exists: use another name",
    "translate taken.py --output taken.py": "taken.py exists: use another name, or delete what is there.",
    "distill student --teacher other -o taken.json": "taken.json exists: use another name",
    "show llama_tiny -o my-run.py": "must be a Python file",
    "show llama3_8b --output layout.png --layout": "a layout is written to a .html or .svg file",
    "new-recipe llama3_8b --from llama_tiny": "'llama3_8b' is a shipped recipe",
    "new-recipe json --from llama_tiny": "'json' is an installed Python module",
    "new-recipe a-b --from llama_tiny": "'a-b' is not a valid recipe name",
    "new-recipe own_x --from llama3-8b": "did you mean 'llama3_8b'",
    **{
        f"{line} {place}": place.partition("/")[0]
        for line in ("rehearse llama_tiny --html", "show llama_tiny --output", "plan llama_tiny --search --html")
        for place in ("empty", "empty/", "taken.py/below.html")
    },
    # what is missing
    "show": "error: nemo2 show needs NAME. For example: nemo2 show llama3_8b",
    "new-recipe mine": "error: nemo2 new-recipe needs --from. For example:",
    "runs tail": "error: nemo2 runs tail needs RUN. For example: nemo2 runs tail llama_tiny",
    "list a b": "error: 'b': nemo2 list takes no such argument. For example:",
    "list --family": "error: Option '--family' requires an argument",
    "generate .": "needs a prompt",
    "data prepare x --output y": "either --tokenizer PATH or --train-bpe N",
    "prune . --output x": "prune needs a size to keep: --layers",
    "finetune llama_tiny --peft lorra --devices 2": "lora",
    # values
    "pretrain llama_tiny --devices 0": "error: --devices 0: must be at least 1.",
    "plan llama_tiny --headroom=3": "error: --headroom 3: must be at most 0.9.",
    "plan llama_tiny --tokens many": "error: --tokens many: must be a number of tokens, such as 1T.",
    "serve x --engine tgi": "error: --engine tgi: must be one of 'vllm', 'transformers'.",
    "--show-completion tcsh": "error: --show-completion tcsh: must be one of 'bash', 'zsh', 'fish'.",
    "finetune llama3_8b --peft lore --dryrun": "--peft lore: must be one of 'lora', 'dora', 'full'",
    "list --layout cpp=2": "'cpp=2' is not a size such as pp or cp=2; did you mean 'cp'",
    "list --layout cp=two": "'cp=two': a size is a whole number, such as cp=2.",
    "list --max-gpus 1 --min-params 100B": "No recipe passes all filters",
    "show mixtral_8x7b --layout --rank 64": "must be 0 to 63",
    "show llama3_70b --layout --world-size 36": "does not divide the world of 36 ranks. Run on 64 ranks",
    "show llama3_70b --layout --microbatches 6": "Use 4 or 8",
    "show llama3_8b --gpus H100x12": "12 GPUs are not whole nodes of 8",
    "data preview squad --split training": "--split training: must be one of 'train', 'validation', 'test'",
    "data preview llama_tiny": "its data is a StdlibDataModule, which has no loss masks",
    "data preview llama_tiny:lora": "llama_tiny:lora has tokenizer='model'",
    "data preview squad data.seq_length=4": "write the settings of a data set in brackets",
    "data preview squad --data x.jsonl": "--data x.jsonl: write the settings of a data set in brackets",
    "pretrain llama3_8b --data no/such": "there is no no/such.bin. `nemo2 data prepare TEXT --output no/such",
    "pretrain llama_tiny --data no/such": "there is no no/such.bin. `nemo2 data prepare TEXT --output no/such",
    "pretrain llama3_8b data.paths=x": "To train on yours, pass --data PATH",
    "pretrain llama_tiny data.paths=x": "To train on yours, pass --data PATH",
    # changes of the recipe
    "show llama_tiny max_steps": "'max_steps': not a change of the form path=value",
    "show llama_tiny trainer.max_steps 5": "of the form path=value, such as trainer.max_steps=5.",
    "show llama_tiny trainer.max_step=7 data.seq_length=x": "did you mean 'max_steps'",
    "show llama_tiny --max-steps 5": "Write trainer.max_steps=5 or optim.lr_scheduler.max_steps=5",
    "pretrain llama_tiny max_steps=100": "pretrain has no parameter 'max_steps'. Write trainer.max_steps=100",
    "pretrain llama_tiny seq_length=16": "Write data.seq_length=16",
    "pretrain llama_tiny --trainer.max_steps": "a change needs a value: --trainer.max_steps VALUE, or trainer.max_steps=VALUE",
    "pretrain llama_tiny --max-steps 100": "no such option. Write trainer.max_steps=100 or optim.lr_scheduler.max_steps=100",
    "pretrain llama_tiny --no-such 1": "To change a field of the recipe, write its path, for example trainer.max_steps=100",
    "pretrain llama_tiny --device 2": "did you mean '--devices'",
    "finetune --from x --data y --chat-template plain": "Write data.dataset_kwargs.chat_template=plain",
    # contradictions
    "finetune llama3_8b:full --peft lora --dryrun": "llama3_8b:full sets full, and --peft sets lora",
    "pretrain llama_tiny log.name=mine --name yours": "--name yours contradicts log.name=mine",
    "plan llama3_8b --seq 64 data.seq_length=32": "--seq 64 contradicts data.seq_length=32",
    "plan llama3_8b --global-batch 8 data.global_batch_size=16": "--global-batch 8 contradicts data.global_batch_size=16",
    "pretrain llama_tiny trainer.devices=4 --devices 2": "--devices 2 contradicts trainer.devices=4",
    "check llama3_8b --gpus H100x64 --nodes 4 --devices 8": "64 GPUs aren't 4 nodes of 8",
    "check llama3_8b trainer.num_nodes=3 --gpus H100x64": "64 GPUs aren't 3 nodes of 21",
    "check llama3_8b --gpus H100x64 --devices 6": "64 GPUs can't be split into nodes of 6",
    "data preview chats.jsonl data.seq_length=3 --seq-length 4": "--seq-length 4 contradicts data.seq_length=3",
    "evaluate empty/mine resume.resume_if_exists=False --recipe llama_tiny --dryrun":
        "empty/mine contradicts resume.resume_if_exists=False: leave one of them out.",
    "evaluate empty/mine resume.restore_config.path=/x --recipe llama_tiny --dryrun":
        "empty/mine contradicts resume.restore_config.path=/x: leave one of them out.",
    "evaluate empty/mine --from empty --recipe llama_tiny": "mine and --from empty both name the weights",
    "generate . --prompt a --prompts b": "--prompt 'a' and --prompts b: leave one of them out.",
    "prune . --output x --layers 2 --drop 1": "--layers and --drop both choose the layers",
    # options that nothing would read
    "data preview llama_tiny:lora --seq-length 8": "--seq-length 8: llama_tiny:lora is not a file",
    "data preview llama_tiny:lora --chat-template x": "--chat-template x: llama_tiny:lora is not a file",
    "generate . --prompt a --json --output x": "--output is not read with --json",
    "generate . --prompt a --overwrite": "--overwrite is read with --output only: leave it out, or add --output.",
    "generate . --prompt a -o chats.jsonl": "chats.jsonl exists: use another name, or --overwrite.",
    "evaluate . --tasks a -o chats.jsonl": "chats.jsonl exists: use another name, or --overwrite.",
    "plan llama_tiny --html page.html": "--html is read with --search only",
    "plan llama_tiny --search --tokens 1e9": "--tokens is not read with --search",
    "plan llama_tiny --cost-per-gpu-hour 2": "--cost-per-gpu-hour is read with --tokens only",
    "rehearse llama_tiny --steps 3": "--steps is read with --tiny only",
    "rehearse llama_tiny --tiny --headroom 0.1 --json": "--headroom, --json are not read with --tiny: leave them out",
    "show llama_tiny --flat --who": "--who is not read with --flat",
    "check --rules --nodes 2": "--nodes is not read with --rules",
    "check llama_tiny --here --gpus H100": "--gpus is not read with --here",
    "show llama_tiny --layout --rank 1 --json": "--json is not read with --rank",
    "generate x --prompt a --top-k 3": "--top-k is read with --temperature only",
    "evaluate x --text a --limit 3": "--limit is read with --tasks only",
    "show llama_tiny --diff llama_tiny --python --json": "--json is not read with --python",
    # values that are empty, as from a variable of the shell
    "pretrain llama_tiny --dir=": "--dir: the value is empty. Write one, or leave the option out.",
    "pretrain llama_tiny --data ''": "--data: the value is empty",
    "generate --from= --prompt a": "--from: the value is empty",
    "generate '' --prompt a": "nemo2 generate has an empty argument. Write it, or leave it out.",
    "generate '' --system '' --chat": "nemo2 generate has an empty argument",
    "pretrain llama_tiny --detach": "a run on this machine ends with its command",
    "pretrain llama_tiny --gpus H100x2": "--gpus H100: the run would start on this machine's CPUs",
}  # fmt: skip
"""What is said, by the command. In the folder are ``empty/``, ``taken.py``, ``taken.json`` and ``chats.jsonl``; and the
checkpoint ``empty/mine``, if the command names it."""


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_meant_is_one_message_and_exit_code_2(line, command, monkeypatch, tmp_path):
    monkeypatch.setattr("nemo_run.config._NEMORUN_HOME", str(tmp_path / "empty"))
    monkeypatch.chdir(tmp_path)  # runs of other commands, whose names an error would list, lie in the repository
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # a recipe that fails in its import leaves Python's cache
    (tmp_path / "empty").mkdir()
    if "empty/mine" in line:
        saved_checkpoints.saved(tmp_path / "empty" / "mine", 3)
    files = {
        "taken.py": "import nemo\n",
        "taken.json": "{}",
        "chats.jsonl": '{"messages": [{"role": "user", "content": "a"}]}\n',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    printed = command(line, code=2)
    told = " ".join(printed.err.split())
    assert REFUSED[line] in told and "Traceback" not in told and printed.out == ""
    assert {path.name for path in tmp_path.iterdir()} == {"empty", *files}
    assert all((tmp_path / name).read_text() == text for name, text in files.items())
