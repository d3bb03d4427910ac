# SPDX-License-Identifier: Apache-2.0
"""A recipe's way to a run's folder: edited, settled on a machine, launched, trained."""

from nemo2 import recipes
from nemo2.mcore.settle import Machine, settle
from nemo2.report.pictures.svg import Canvas, text_width
from nemo2.training.run_dir import RunFolder
from tools.explained.kit import (
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    LEFT,
    PLAIN,
    SMALL,
    TOP,
    WIDTH,
    box,
    note,
    sheet,
    signed,
)

NAME, GPUS = "llama3_8b", 8


def journey() -> Canvas:
    """The four stations, and what is known at each of them."""
    from nemo2.launch import launch
    from nemo2.llm import pretrain
    from nemo2.training.run_dir.directory import CHECKPOINTS
    from nemo2.training.run_dir.records import METRICS_FILE, RECIPE_FILE, REPORT_FILE

    recipe = recipes.get(NAME).pretrain_recipe()
    settled = settle(recipe, Machine.named(f"H100x{GPUS}"))
    assert settled.world is not None and not settled.refusals
    size = settled.world.size
    canvas = sheet("From a recipe to a run")
    stations = (
        ("recipe", FORWARD, ", ".join(recipe.__arguments__), "edit a field, or give path=value"),
        (
            "settle",
            COMMUNICATION,
            f"on {GPUS} H100: {settled.layout.describe(size)}",
            "check, rehearse, plan and show read it",
        ),
        ("launch", BACKWARD, f"{size} ranks: this machine, Slurm, Kubernetes", "each rank settles, builds and trains"),
        ("run folder", PLAIN, f"{METRICS_FILE}, {CHECKPOINTS}/", f"{RECIPE_FILE}, {REPORT_FILE}"),
    )
    y, high, wide = TOP + 2, 46.0, 82.0
    for number, (name, fill, *lines) in enumerate(stations):
        box(canvas, LEFT, y, wide, high, name, fill)
        for line, words in enumerate(lines):
            assert LEFT + wide + 12 + text_width(words, SMALL) <= WIDTH, words
            canvas.text(LEFT + wide + 12, y + 19 + 16 * line, words, "soft" if line else "ink", size=SMALL)
        if number + 1 < len(stations):
            canvas.arrow(LEFT + wide / 2, y + high + 1, LEFT + wide / 2, y + high + 21, "accent")
        y += high + 22
    y = note(canvas, y + 2, f"{NAME}; the same folder resumes the run, and its recipe starts another")
    return signed(canvas, y - 14, settle, launch, pretrain, RunFolder)
