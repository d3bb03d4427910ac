# SPDX-License-Identifier: Apache-2.0
"""``docs/checks.md``, written from the table of rules: ``python -m tools.checks_page > docs/checks.md``.

What each rule says of its examples is what it really says: every example is run.
"""

import re

from nemo2.preflight.checks.rule import Rule
from nemo2.preflight.checks.table import RULES, TOPICS
from support.rule_cases import Example, problems_of
from support.rule_examples import EXAMPLES
from tools.wrapped import wrapped

_WHERE_SET = re.compile(r" \((?:set at )?[^()\s]+:\d+\)")
"""Lines of files, which messages name, move."""

_NOT_IN_FORCE = "This page is written with the newest versions, which don't need this rule: it finds nothing."

_HEAD = """\
# Checks before a run

<!-- Written by `python -m tools.checks_page > docs/checks.md`; a test compares. -->

`nemo2 check` finds the mistakes in a recipe before a run starts, and reports how to fix them:

```console
$ nemo2 check llama3_8b strategy.tensor_model_parallel_size=4 --nodes 2
$ nemo2 check llama31_405b --gpus H100x1152
$ nemo2 check llama_tiny --here  # also checks this machine's files and packages
$ nemo2 check llama3_8b --json   # exit code 2: a rule is broken; 1: no fit
```

Every launch runs the same checks before it creates a process group or touches a GPU. The report lists all broken rules
at once. Each message names the field, its value, the arithmetic and the fix. If another layout would solve the
problem, the report ends with the nearest valid layouts for the same GPUs.

A run that a script starts (`llm.pretrain(...)` with objects, or a built recipe) applies the same rules to its parts, before it
creates a process group. Rules about files and packages of this machine are left out there, because the run opens these
files and packages itself.

In Python, `nemo2.preflight.checks.check_recipe(recipe)` raises one error with all messages.
`nemo2.preflight.checks.find_problems(recipe)` returns the messages as a list.

The rules follow the installed Megatron-Core. Most rules report early what Megatron-Core would reject later, on every
rank. Some rules reject settings that Megatron-Core accepts and then trains wrongly. The "Otherwise" sentence of each
rule says what would happen without the rule.

The rules reject no valid layout. Tests run the examples below, which the rules must reject, and for each
the nearest valid recipe, which all rules must accept and Megatron-Core must build.

There are {count} rules."""


def page() -> str:
    """The page as Markdown."""
    lines = [_HEAD.format(count=len(RULES))]
    for topic in TOPICS:
        lines += ["", f"## {topic.title}"]
        for rule in topic.rules:
            lines += ["", *_entry(rule)]
    return "\n".join(lines) + "\n"


def _entry(rule: Rule) -> list[str]:
    lines = [f"### {rule.name}", "", f"{rule.says} **Otherwise:** {rule.otherwise}"]
    for example in EXAMPLES:
        if example.rule == rule.name:
            lines += _example(example)
    return lines


def _example(example: Example) -> list[str]:
    messages = [problem.message for problem in problems_of(example.broken) if problem.rule == example.rule]
    python = example.broken.in_python
    prompt = ">>>" if python else "$"
    return [
        "",
        "```pycon" if python else "```console",
        *(row for line in example.broken.lines() for row in wrapped(line, f"{prompt} ")),
        "```",
        "",
        *([f"> {_WHERE_SET.sub('', message)}" for message in messages] or [_NOT_IN_FORCE]),
        "",
        f"Valid: `{'`, `'.join(example.mended.lines())}`",
    ]


if __name__ == "__main__":
    print(page(), end="")
