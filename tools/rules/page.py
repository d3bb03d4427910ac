# SPDX-License-Identifier: Apache-2.0
"""``docs/checks.md``, written from the table of rules: ``python -m tools.rules.page > docs/checks.md``.

What each rule says of its example is what it really says: every example is run.
"""

import re

from nemo2.checks.rule import Rule
from nemo2.checks.table import RULES, TOPICS
from tools.rules.examples import problems_of

_WHERE_SET = re.compile(r" \([^()\s]+:\d+\)")
"""Lines of files, which messages name, move."""

_HEAD = """\
# What is checked before a run

<!-- Written by `python -m tools.rules.page > docs/checks.md`; a test compares. -->

Every launch looks at the whole recipe first, before a process group exists or a GPU is touched, and tells everything that is
wrong at once: the field, its value, the arithmetic, what would do, and the nearest legal layouts for the same GPUs. Ask
beforehand with

```console
$ nemo2 check llama3_8b strategy.tensor_model_parallel_size=4 --nodes 2
$ nemo2 check llama31_405b --gpus H100x1152
$ nemo2 check llama_tiny --here          # also the files, packages and variables of this machine
$ nemo2 check llama3_8b --json           # for scripts; the exit code is 2 where a rule is broken
```

or in Python: `nemo2.checks.check_recipe(recipe)` raises, `nemo2.checks.find_problems(recipe)` lists.

The rules follow the installed Megatron-Core. What it refuses is refused earlier here, and in words; what it lets pass and then
trains wrongly is refused too, and each such rule says so. A layout that is legal is never refused: behind each rule stand the
example below, which must be refused, and its nearest legal neighbour, which must pass and which Megatron-Core must build.

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
    told = [problem.message for problem in problems_of(rule.broken) if problem.rule == rule.name]
    python = bool(rule.broken.assigned or rule.broken.corpus)
    prompt = ">>>" if python else "$"
    return [
        f"### {rule.name}",
        "",
        f"{rule.says} **Otherwise:** {rule.otherwise}",
        "",
        "```pycon" if python else "```console",
        *(f"{prompt} {line}" for line in rule.broken.lines()),
        "```",
        "",
        *(f"> {_WHERE_SET.sub('', message)}" for message in told),
        "",
        f"Legal: `{'`, `'.join(rule.mended.lines())}`",
    ]


if __name__ == "__main__":
    print(page(), end="")
