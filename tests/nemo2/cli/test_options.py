# SPDX-License-Identifier: Apache-2.0
"""The options of all commands: one meaning each, and none that is taken and then ignored."""

import ast
import dataclasses
import inspect
import json
import re
import shlex
import subprocess
import textwrap
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import which
from typing import Any, get_args

import pytest
import typer

import nemo2
from nemo2.cli import adapter, check, evaluate, flags, launching
from nemo2.cli.app import FIRST, VERBS, app
from nemo2.cli.commands import MOVED, rules_of
from nemo2.cli.run_names import last_started, run_called
from nemo2.config.overrides import in_shell
from support.nightly import each_case

SHARED = ("gpus", "nodes", "devices", "performance", "data", "overrides", "as_json", "executor", "run_name", "trackers")
WRITTEN = (flags.Output, flags.Prefix, flags.Html, flags.Folder, flags.FileOrFolder)
"""What is written: `nemo2.base.files.output_file` refuses a place for a file, `nemo2.base.files.write_file` makes its folders."""
SHAPED = ("show", "check", "plan", "rehearse", "pretrain", "finetune", "evaluate")
"""Commands that take a recipe and look at it on a machine."""
ANOTHER_MEANING = {("cluster test", "nodes"), ("data preview", "overrides"), ("show", "executor")}
HOMES = (launching, flags, evaluate, check)
"""The modules with the functions that verbs hand their `options` to."""
_RUNS = "a run: `nemo2 runs` and its metrics.jsonl have its data"
NO_DATA = {**dict.fromkeys(("pretrain", "finetune", "distill"), _RUNS), "serve": "the server takes the process's place"}
"""Commands without --json, and why."""


def commands() -> dict[str, Callable[..., Any]]:
    """Every command by its words, with typer's signature."""
    return {words: adapter.as_command(verb) for words, verb in VERBS.items()}


def typer_commands() -> dict[str, Any]:
    """Every command by its words, as typer has it."""

    def of(command: Any, words: str) -> Iterator[tuple[str, Any]]:
        if not hasattr(command, "commands"):
            yield words.strip(), command
        for name, inner in getattr(command, "commands", {}).items():
            yield from of(inner, f"{words} {name}")

    return dict(of(typer.main.get_command(app), ""))


def annotation(parameter: inspect.Parameter) -> tuple[Any, Any]:
    kind, info = get_args(parameter.annotation)
    return kind, {name: value for name, value in vars(info).items() if name not in ("default", "rich_help_panel")}


def test_what_commands_share_is_the_same_in_all_of_them():
    found, shared = typer_commands(), {}
    assert set(found) == set(VERBS) and len({words.split()[0] for words in VERBS}) <= 20
    assert len(FIRST) == 8 and set(FIRST) <= {words.split()[0] for words in VERBS}
    for words, command in found.items():
        options = {one.name: one.opts for one in command.params if one.opts[0].startswith("-")}
        assert options.get("output", ["--output", "-o"]) == ["--output", "-o"], words
        assert options.get("source", ["--from"]) == ["--from"] and options.get("html", ["--html"]) == ["--html"], words
        assert ("as_json" in options) is (words not in NO_DATA), f"nemo2 {words}: --json, or a line in NO_DATA"
        written = [one for one in inspect.signature(VERBS[words]).parameters.items() if one[0] in ("output", "html")]
        hints = typing.get_type_hints(VERBS[words], include_extras=True)
        assert all(hints[name] in WRITTEN for name, _ in written), (
            f"nemo2 {words}: a file or folder is written by one rule"
        )
        assert all(one.help for one in command.params), f"nemo2 {words}: each parameter has a line in Args"
        assert "\n" not in command.help.replace("\n\n", ""), f"nemo2 {words}: a paragraph folds at the terminal's width"
        assert command.help and command.epilog.startswith(f"Example: nemo2 {words}"), words
        for name, parameter in inspect.signature(as_typed(words)).parameters.items():
            if name in SHARED and (words, name) not in ANOTHER_MEANING:
                first = shared.setdefault(name, annotation(parameter))
                assert annotation(parameter) == first, f"nemo2 {words}: {name} is its own"
    assert NO_DATA.keys() <= found.keys() and shared.keys() == set(SHARED)


def test_advice_names_options_to_who_types_a_command_and_fields_to_a_program():
    from nemo2.base.advice import again, for_the_command_line, new_name

    assert "log.name" in new_name() and "--name" not in new_name()
    with for_the_command_line(["pretrain", "a b", "--devices", "2"]):
        assert "--name" in new_name() and "log.name" not in new_name()
        assert again() == "nemo2 pretrain 'a b' --devices 2"
    assert "--name" not in new_name()


def test_a_file_to_write_gets_its_folders_and_a_folder_the_files_name(tmp_path, command):
    (tmp_path / "folder").mkdir()
    for place, file in (("new/own_b.py", "new/own_b.py"), ("folder", "folder/own_a.py")):
        command("new-recipe own_a --from llama_tiny --output", tmp_path / place)
        assert (tmp_path / file).is_file()
    for words in ("show llama_tiny -o", "generate RUN --prompt x --html"):
        assert "new.py/ is a directory" in command(words, "new.py/", code=2).err


@pytest.mark.parametrize("words", VERBS)
def test_a_misspelled_option_gets_the_nearest_of_its_command(words, command):
    spellings = (name for one in typer_commands()[words].params for name in (*one.opts, *one.secondary_opts))
    option = max((name for name in spellings if name.startswith("--")), key=len, default="--help")
    told = command(words, option[:-1], code=2).err
    assert f"has no option {option[:-1]}; did you mean {option!r}" in told and told.count("--help") == 1


def as_typed(words: str) -> Callable[..., Any]:
    return commands()[words]


def test_a_verb_is_called_from_python_with_the_same_meaning(capsys, command):
    result = VERBS["list"]("llama_tiny")
    assert capsys.readouterr().out == "" and result.exit_code == 0
    assert command("list llama_tiny --json").json == result.data
    assert command("list llama_tiny").out == f"{result.text}\n"
    for words, verb in VERBS.items():
        first = [one for one in inspect.signature(verb).parameters.values() if one.default is one.empty]
        assert all(one.kind is not one.KEYWORD_ONLY or one.name in ("output", "parent", "teacher") for one in first), (
            words
        )


@pytest.mark.parametrize("words", VERBS)
def test_help_of_every_command_fits_a_terminal(words, command):
    text = command(words, "--help").out
    assert max(map(len, text.splitlines())) <= 80 and "<bool>" not in text


@pytest.mark.parametrize("words", each_case(VERBS))
def test_help_and_version_are_asked_of_every_command_in_the_same_way(words, command):
    assert command(words, "-h") == command(f"help {words}") == command(words, "--help")
    assert command(words, "--version").out.count("\n") == 1


def test_help_of_all_commands_is_a_word_too(command):
    assert command("--help") == command("help") and command("cluster --help") == command("help cluster")


@pytest.mark.parametrize("words", MOVED)
def test_an_old_spelling_is_an_error_of_one_sentence_with_the_new(words, command):
    name, _, option = words.partition(" ")
    told = command(name, *(["x", option, "y"] if option else []), code=2).err
    assert MOVED[words] in told and told.count("\n") == 1
    assert words not in VERBS and not any(one.startswith(f"{words} ") for one in VERBS)
    for new in re.findall(r"nemo2 ([a-z]+(?: [a-z]+)?)", MOVED[words]):
        assert new in VERBS or new.split()[0] in VERBS, new


def test_the_reference_has_a_table_of_the_flags_of_several_commands():
    from tools.site.commands import shared_flags

    _, _, *rows = shared_flags()
    having = {
        flag.strip(" `"): cell.replace("\N{NO-BREAK SPACE}", " ").strip()
        for _, flag, cell, _ in (row.split("|") for row in rows)
    }
    assert {"--gpus", "--nodes", "--devices", "--performance", "--json", "--executor", "--output"} <= set(having)
    assert set(having["--json"].split(", ")) == {*commands()} - {*NO_DATA}


@pytest.mark.parametrize("command", SHAPED)
def test_whatever_looks_at_a_recipe_takes_its_machine_and_its_mode(command):
    assert {"gpus", "nodes", "devices", "performance"} <= inspect.signature(commands()[command]).parameters.keys()


@pytest.mark.parametrize("command", commands())
def test_each_option_is_read_or_refused_however_the_command_goes_on(command):
    function = VERBS[command]
    [body] = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(body, ast.FunctionDef)
    options = set(inspect.signature(commands()[command]).parameters)
    rules = list(refusals(body))
    rules += [(rule.__name__, option, others) for rule, option, others in rules_of(getattr(function, "groups", ()))]
    named = {name for _, option, others in rules for name in (option, *others)}
    assert named <= options, f"no options of nemo2 {command}: {named - options}"
    for taken, read in ways(body.body):
        for unread in options - read - {"as_json"}:
            assert is_refused(unread, taken, rules), (
                f"nemo2 {command}: nobody reads {unread} where {taken or 'nothing'} holds; read it, or refuse it with "
                "only_with or not_with"
            )


def refusals(body: ast.FunctionDef) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    for node in ast.walk(body):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("only_with", "not_with"):
            option, *others = (ast.literal_eval(argument) for argument in node.args)
            yield node.func.id, option, tuple(others)


def is_refused(unread: str, taken: dict[str, bool], rules: list[tuple[str, str, tuple[str, ...]]]) -> bool:
    return any(
        unread in others
        and (taken.get(option) is (kind == "not_with") if option in taken else False)
        or (kind == "only_with" and unread in others and is_refused(option, taken, rules))
        for kind, option, others in rules
    )


def ways(statements: list[ast.stmt]) -> Iterator[tuple[dict[str, bool], set[str]]]:
    """Each way through a command that ends without an error: the options whose presence decides it, and what is read on it."""
    taken: dict[str, bool] = {}
    read: set[str] = set()
    for place, statement in enumerate(statements):
        if isinstance(statement, ast.Expr) and ast.unparse(statement).startswith("refuse_all_but("):
            return  # what isn't read is refused
        if isinstance(statement, ast.If) and any(isinstance(one, ast.Return) for one in ast.walk(statement)):
            rest = statements[place + 1 :]
            yes, no = decided(statement.test)
            for choice, branch in ((yes, statement.body), (no, statement.orelse)):
                ends = bool(branch) and isinstance(branch[-1], ast.Return)
                for deeper, more in ways([*branch, *([] if ends else rest)]):
                    yield {**taken, **choice, **deeper}, read | names_in([statement.test]) | more
            return
        read |= names_in([statement])
    yield taken, read


def decided(test: ast.expr) -> tuple[dict[str, bool], dict[str, bool]]:
    """What a condition on one option says of its presence, where it holds and where it doesn't."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yes, no = decided(test.operand)
        return no, yes
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
        return {}, {name: False for part in test.values for name in decided(part)[1]}
    if isinstance(test, ast.Name):
        return {test.id: True}, {test.id: False}
    if (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and isinstance(test.ops[0], ast.IsNot | ast.Is)
    ):
        given = isinstance(test.ops[0], ast.IsNot)
        return {test.left.id: given}, {test.left.id: not given}
    return {}, {}


def names_in(statements: list[Any]) -> set[str]:
    """Options that these statements read: by their names, as a field of `options`, or by handing `options` to a function of
    a module of `HOMES` that does."""
    nodes = [node for statement in statements for node in ast.walk(statement)]
    found = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "options":
            found.add(node.attr)
        elif isinstance(node, ast.Call) and any(one.arg == "options" for one in node.keywords):
            assert isinstance(node.func, ast.Name)
            home = next(module for module in HOMES if hasattr(module, node.func.id))
            [function] = ast.parse(inspect.getsource(getattr(home, node.func.id))).body
            found |= names_in([function])
    return found


def test_options_that_are_handed_over_are_read_where_they_are_read():
    assert {"run_name", "directory", "accept_changes"} <= names_in(ast.parse("logged(x, options=options)").body)
    assert "nodes" not in names_in(ast.parse("logged(x, options=options)").body)
    fields = {field.name for field in dataclasses.fields(launching.TrainingOptions)}
    assert fields <= names_in(ast.parse("launched(logged(x, options=options), options=options)").body)


def test_the_walk_finds_an_option_that_a_way_ignores():
    def command(a: bool, b: int, c: int) -> None:
        if a:
            print(b)
            return
        print(c)

    [body] = ast.parse(textwrap.dedent(inspect.getsource(command))).body
    assert isinstance(body, ast.FunctionDef)
    assert [(taken, read - {"print"}) for taken, read in ways(body.body)] == [
        ({"a": True}, {"a", "b"}),
        ({"a": False}, {"a", "c"}),
    ]


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ("--gpus H100x64", (8, 8)),
        ("--gpus 64", (8, 8)),
        ("--gpus 64 --nodes 4", (4, 16)),
        ("--gpus 64 --devices 4", (16, 4)),
        ("--nodes 3 --devices 4", (3, 4)),
    ],
)
def test_the_machine_of_an_option_is_the_recipes(options, shape, command):
    lines = command(f"show llama3_8b --flat {options}").out.splitlines()
    assert {f"trainer.num_nodes={shape[0]}", f"trainer.devices={shape[1]}"} <= set(lines)


def test_performance_mode_is_within_reach_and_diff_says_what_it_changes(command):
    steps = command("show llama3_8b --diff llama3_8b --performance --json").json
    assert any(step["path"].startswith("trainer.callbacks") for step in steps)
    command("check llama3_8b --performance --gpus H100")


def test_json_is_plain_values_that_any_reader_takes(capsys):
    adapter.print_json({"a": [float("nan"), 1.5, float("inf")], "b": Path("x"), "c": (1, None, True)})
    text = capsys.readouterr().out

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(text, parse_constant=refuse) == {"a": [None, 1.5, None], "b": "x", "c": [1, None, True]}
    adapter.print_json({"a": 1}, on_a_line=True)
    assert capsys.readouterr().out == '{"a": 1}\n'


def test_explain_tells_its_layers_as_json(command):
    told = command("show llama3_8b --explain max_steps trainer.max_steps=7 --gpus H100x16 --json").json
    [setting] = [one for one in told["settings"] if one["path"] == "trainer.max_steps"]
    assert setting["value"] == 7 and setting["layers"][-1]["requested"] and told["ranks"] == 16


@pytest.mark.parametrize(
    "words",
    [
        "llama_tiny --trainer.max_steps 7",
        "--trainer.max_steps=7 llama_tiny",
        "--gpus H100x2 llama_tiny --trainer.max_steps=8 trainer.max_steps=7",
        "--gpus H100x2 llama_tiny trainer.max_steps=8 --trainer.max_steps=7",
    ],
)
def test_a_change_may_have_dashes_and_stand_anywhere_and_of_two_the_last_counts(words, command):
    assert "trainer.max_steps=7" in command(f"show --flat {words}").out.splitlines()


def words_of(text: str, shell: str) -> list[str]:
    """What a shell makes of a text of words."""
    command = [shell, "-fc" if shell == "zsh" else "-c", f"printf '%s\\n' {text}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("shell", [name for name in ("bash", "zsh") if which(name)])
def test_printed_changes_survive_the_shell(shell, command):
    changes = [
        "a='{model}--{step:.2f}'",
        "a=it's",
        "a='$HOME'",
        "a='x`y`'",
        "a='b!c'",
        "a=['x', \"y\"]",
        "a=b c",
        "a[0]=~",
    ]
    text = in_shell(changes)
    assert text.startswith("\"a='{model}--{step:.2f}'\" ")  # not 'a='"'"'{model}...
    assert words_of(text, shell) == changes

    def shown(*words: str) -> list[str]:
        lines = command("show llama3_8b --performance --flat", *words).out.splitlines()
        return [line for line in lines if "_target_" not in line]

    printed = shown("log.name=a name's", "trainer.limit_val_batches=0.5")
    assert any("callbacks[1]." in line for line in printed)
    words = words_of(" ".join(printed), shell)
    assert words == [one for line in printed for one in shlex.split(line)]
    assert shown(*words) == printed


def test_a_run_is_found_by_its_name(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    command("show llama_tiny trainer.max_steps=7 --output mine.json")
    recipe = (tmp_path / "mine.json").read_text()
    folders = [f"runs/first/2026-01-0{day}_00-00-00" for day in (1, 2)]
    for folder in (*folders, "jobs/first/first_1"):  # a Slurm job's folder has the recipe too
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "recipe.json").write_text(recipe)
    (tmp_path / "jobs/first/first_1/job.sh").touch()
    found = run_called("first")
    assert found is not None and found.name == "first" and found.parent.name == "runs"
    assert (newest := last_started(found)) is not None and newest.name == "2026-01-02_00-00-00"
    checkpoint = f"{folders[1]}/checkpoints/last"
    (tmp_path / checkpoint).mkdir(parents=True)
    for name in ("first", "runs/first", "first/2026-01-01_00-00-00", checkpoint):
        assert "trainer.max_steps=7" in command("show --flat", name).out
    for line, words in (
        ("runs report first", ["metrics.jsonl"]),
        ("generate second --prompt a", ["second does not exist: give a run's directory, or one of these names: first"]),
        ("generate meta-llama/Llama-3.2-1B --prompt a", ["hf://meta-llama/Llama-3.2-1B"]),
        ("generate runs/frist --prompt a", ["did you mean runs/first?", "hf://"]),
        ("pretrain runs/first:lora --dryrun", [":lora"]),
    ):
        printed = command(line, code=2)
        places = [printed.err.index(word) for word in words]
        assert places == sorted(places) and printed.out == ""  # no prompt without an answer
    (tmp_path / "runs" / "flat").mkdir()  # a run without a folder per start
    (tmp_path / "runs" / "flat" / "recipe.json").write_text(recipe)
    assert "one of these names: first, flat" in command("generate second --prompt a", code=2).err
    (tmp_path / "more" / "first").mkdir(parents=True)
    (tmp_path / "more" / "first" / "recipe.json").write_text(recipe)
    assert "names runs in several directories: more/first, runs/first" in command("show first", code=2).err


def test_a_run_that_was_started_in_a_process_of_the_users_own_is_found_and_has_no_recipe(
    tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "direct" / "2026-01-01_00-00-00"
    folder.mkdir(parents=True)
    (folder / "environment.json").write_text("{}")
    (folder / "metrics.jsonl").write_text('{"step": 1, "reduced_train_loss": 2.5}\n')
    assert "direct" in command("runs list").out and "2.5" in command("runs tail direct").out
    words = "has no recipe.json, because the run was started in a process of the user's own"
    assert words in command("show direct", code=2).err


@pytest.mark.parametrize("words", ["--version", "version", "--debug --version", "-v version"])
def test_the_version_is_printed_whatever_it_is_asked_with(command, words):
    assert command(words) == (f"{nemo2.__version__}\n", "")


def test_tokens_and_gpus_are_read_as_people_write_them(command):
    first, second = (
        command(f"plan llama_tiny --json --gpus {gpus} --tokens {tokens}").json
        for gpus, tokens in (("2xH100", "1B"), ("H100x2", "1e9"))
    )
    assert first == second
