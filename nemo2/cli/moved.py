# SPDX-License-Identifier: Apache-2.0
"""What earlier versions, or a user by habit, call otherwise."""

from nemo2.base.errors import ConfigError

MOVED = {
    "explain": "nemo2 show RECIPE --explain FIELD",
    "diff": "nemo2 show RECIPE --diff OTHER",
    "freeze": "nemo2 show RECIPE --python, or --output FILE.py",
    "show-layout": "nemo2 show RECIPE --layout",
    "inspect": "nemo2 show CHECKPOINT, or nemo2 show RUN --checkpoint",
    "prepare-data": "nemo2 data prepare",
    "preview-data": "nemo2 data preview",
    "validate": "nemo2 evaluate CHECKPOINT --recipe RECIPE",
    "chat": "nemo2 generate CHECKPOINT --chat",
    "merge": "nemo2 export CHECKPOINT --merge, with --to checkpoint for a checkpoint of nemo2",
    "report": "nemo2 runs report RUN",
    "trace": "nemo2 runs trace RUN",
    "jobs": "nemo2 runs list --submitted, and nemo2 runs status, tail, report or cancel",
    "completion": "nemo2 --show-completion SHELL",
    "show --graph": "--output FILE",
    "show --recipe-json": "--output FILE.json",
    "distill --write": "--output FILE.json",
    "diff --all": "nemo2 show RECIPE --diff OTHER --defaults",
    "diff --code": "nemo2 show RECIPE --diff OTHER --python",
    "validate --checkpoint": "nemo2 evaluate CHECKPOINT --recipe RECIPE",
    **dict.fromkeys(("pretrain --json", "finetune --json", "distill --json"), "nemo2 runs status RUN --json"),
    "serve --json": "nemo2 serve CHECKPOINT --print, which prints the server's command",
}
"""Commands and options that don't exist, each with what takes its place."""


def refuse_moved(words: str) -> None:
    """Raise ConfigError if ``words``, a command or a command and its option, are in `MOVED`."""
    if words in MOVED:
        raise ConfigError(f"nemo2 {words} doesn't exist: use {MOVED[words]}.")
