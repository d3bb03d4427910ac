# SPDX-License-Identifier: Apache-2.0
"""The rooms of nemo2: what lives in each and what it may import. ``make fmt`` writes the table into docs/architecture.md.

An import counts wherever it stands: at the top of a file, inside a function, under ``TYPE_CHECKING``, in a stub. A name that
comes through a front door (``from nemo2 import Trainer``) counts as an import of the module that it lives in.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms, written by `make fmt` from tools/rooms.py -->", "<!-- end of the rooms -->"


@dataclass(frozen=True)
class Room:
    """A file or folder of the package, and the rooms above it in `ROOMS` that it may import. None: all of them."""

    name: str
    holds: str
    leans_on: tuple[str, ...] | None = None


FLOOR = ("errors", "files", "names", "columns", "lazy", "deferred", "noise", "place", "ranks")
"""Rooms that every room may import."""

ROOMS = (
    Room(
        "errors",
        "`ConfigError`, `DataError`, `CheckpointError`, `RuntimeFault`: every error that a user sees, in one paragraph",
        (),
    ),
    Room(
        "files",
        "safe access to files in directories that others may have filled: regular files only, inside the directory, "
        "of limited size; never writes through links",
        (),
    ),
    Room(
        "names",
        "suggestions for misspelled names; safe run names",
        (),
    ),
    Room(
        "columns",
        "text tables, laid out by `rich`: full width in a file or a pipe, wrapped on a narrow terminal",
        (),
    ),
    Room(
        "lazy",
        "packages that import their public names on first use",
        (),
    ),
    Room(
        "deferred",
        "delays imports of other libraries that few runs need until their first use",
        (),
    ),
    Room(
        "noise",
        "filters warnings of other libraries that a user can't act on",
        (),
    ),
    Room(
        "place",
        "rank, world size and node of this process: the only reader of launchers' environment variables",
        (),
    ),
    Room(
        "ranks",
        "what ranks tell each other: every exchange of Python objects, and whether all of them succeeded",
        ("errors",),
    ),
    Room(
        "gpus",
        "GPUs by name: memory as torch reports it, compute capability, data-sheet rates, links",
        (),
    ),
    Room(
        "config",
        "the recipe tree: `Config`, `Partial`, aliases, captured live objects, overrides, JSON, printing. `policy.py`"
        " decides what a JSON recipe may call, `codegen.py` writes a tree as Python, `edits.py` lists the edits "
        "between two trees",
        (),
    ),
    Room(
        "backend",
        "`cpu.py`, `cuda.py`: device, process-group backend, memory figures, workarounds for gloo",
        (),
    ),
    Room(
        "parallel",
        "`layout.py` (tp pp vp cp ep etp dp), `groups.py`, `megatron_parallel.py` (model chunks and the step), "
        "`transform.py` (changes to a chunk before it is wrapped), `sharded_state.py` (how a chunk is stored), "
        "`cuda_graphs.py` (capturing the step), `loss.py`",
        ("backend", "config"),
    ),
    Room(
        "pictures",
        "SVG and HTML without libraries: `svg.py`, `page.py`, line charts, bars, scatter plots. `ranks.py` draws "
        "which rank holds what, `schedule.py` draws a pipeline's timeline",
        ("config", "parallel"),
    ),
    Room(
        "trace",
        "what ran when: `recorder.py` (every collective of a process), `chrome.py` (torch profiler traces), "
        "`events.py` (overlapped fractions), `report.py`",
        ("pictures",),
    ),
    Room(
        "precision",
        "one object that sets the dtypes of model, optimizer and gradient buffers together",
        ("backend", "config", "parallel"),
    ),
    Room(
        "overlap",
        "which communication overlaps computation: `settings.py` holds the requests, `facts.py` collects the facts, "
        "`rules.py` decides, `apply.py` writes the decisions into the configs. `tp_overlap_cfg.py` and `presets.py` "
        "describe Transformer Engine's userbuffers",
        ("gpus", "backend", "config", "parallel"),
    ),
    Room(
        "optim",
        "`megatron.py` (optimizer module), `lr_scheduler.py`",
        ("backend", "config", "parallel", "precision"),
    ),
    Room(
        "data",
        "tokenizers, text → `.bin/.idx`, data modules, `MegatronDataSampler`; `finetuning/` (samples with loss masks,"
        " chats, packing)",
        ("config", "backend", "parallel"),
    ),
    Room(
        "models",
        "`layers/` (plain PyTorch versions of Transformer Engine's layers), `gpt.py`, one file per family. "
        "`walker.py` reads a config into a `shape.py` of `parts.py`; parameters, FLOPs and the planner's inputs are "
        "sums over the parts. `conversion/` has one table per family that maps our tensors to Hugging Face's",
        ("backend", "config", "parallel", "precision", "overlap", "optim", "data"),
    ),
    Room(
        "peft",
        "parameter-efficient fine-tuning: `base.py` (a method is a transform), `lora.py`, `dora.py`, "
        "`canonical_lora.py`, `canonical_dora.py`, `placement.py` (how an adapter is sharded over the ranks of its "
        "layer), `adapter.py`, `targets.py` (which layers), `merge.py`",
        ("config", "backend", "parallel"),
    ),
    Room(
        "checkpoint",
        "checkpoint IO: `writing.py`, `background.py` with `writer_process.py` (asynchronous saves), `reading.py` "
        "(loads tensors while their files are hashed); the directory's lock, `context/`, `ModelCheckpoint`, "
        "`AutoResume`; `forms/` of a model and its optimizer; readers of other programs' files (`untrusted`, "
        "`identify`, `nemo_context`, `nemo_tree`)",
        ("backend", "config", "parallel", "precision", "optim", "data", "models"),
    ),
    Room(
        "hugging_face",
        "files of released models: `safetensors_files.py`; `importing.py` and `exporting.py` convert to and from "
        "checkpoints without building a model, in `streams.py` of bounded memory; `restore.py` fills a model; "
        "`stored.py` and `released.py` return any rows of any tensor of a checkpoint or a release; `adapters.py`, "
        "`tokenizers.py`; `checkpoint.py` opens weights of any format; `api.py` has the functions that users call",
        ("config", "parallel", "data", "models", "peft", "checkpoint"),
    ),
    Room(
        "run_dir",
        "`NeMoLogger`, `metrics.jsonl`, progress, environment, report; stopping on signals, hangs and time limits "
        "(`max_time.py`)",
        ("backend", "config", "parallel", "pictures", "checkpoint"),
    ),
    Room(
        "settle",
        "the settings of a recipe on a machine, with the origin of each setting and the refusals: `machine.py`, "
        "`world.py` (nodes times devices), `parts.py` (builds the settings), `settling.py` (`settle`, which every "
        "room above reads and a strategy applies), `agreement.py` (one value in several configs)",
        ("gpus", "config", "backend", "parallel", "precision", "overlap"),
    ),
    Room(
        "strategies",
        "what all strategies share: `world.py`, `stepping.py`, `checkpoints.py`, `megatron_config.py`; `set_up.py` "
        "sets up a model without a loop; `fsdp2.py` and `fsdp.py` build on `torch_sharded.py`",
    ),
    Room(
        "strategy",
        "`MegatronStrategy`: maps Lightning's hooks to the rooms below",
    ),
    Room(
        "fabric",
        "`Fabric`, `FabricMegatronStrategy`: a user's own loop on the same strategy",
    ),
    Room(
        "trainer",
        "`Trainer`: NeMo's arguments, one strategy and one precision",
    ),
    Room(
        "checks",
        "finds mistakes in a recipe before it runs: `rules/` by topic, `table.py` lists them, `facts.py` holds the "
        "values that they read and the refusals of `settle`, `megatron.py` explains "
        "Megatron-Core's, `nearest.py` finds valid layouts",
    ),
    Room(
        "doctor",
        "reports what is installed, missing or broken, and what this machine can run",
        ("gpus", "backend", "precision"),
    ),
    Room(
        "evaluation",
        "evaluates a trained model: `perplexity.py` (bits per byte of texts), `harness.py` (lm-eval's tasks), "
        "`task_files.py` (which files of a task directory are data), `answers.py` (saves answers so that an "
        "interrupted evaluation resumes), `figures.py` (results by name)",
        ("config", "models", "checkpoint", "run_dir"),
    ),
    Room(
        "llm",
        "the public package `nemo2.llm` with the entry points `pretrain`, `validate`, `generate`; `connecting.py` "
        "connects the parts of a run; `serving.py` starts a server of `engines.py` on a checkpoint, in a format of "
        "`exported.py`; `distillation.py`, `pruning.py`, `quantization.py`",
    ),
    Room(
        "rehearse",
        "one rank of a job of any size, run on meta tensors with a process group that sends nothing; counts bytes, "
        "messages and arithmetic; `shrink.py` shrinks recipes",
    ),
    Room(
        "explain",
        "`fields.py` lists the origin of each setting and what a run changes",
    ),
    Room(
        "planner",
        "predicts a job's time, memory and cost: `job.py` holds the question (beside the model's shape), "
        "`layer_time.py`, `step_time.py` and `memory.py` the formulas, `constants.py` their efficiencies; `recipe.py`"
        " reads a recipe, `fit.py` tells whether it fits its GPUs, "
        "`search.py` finds layouts, `goodput.py` counts interruptions; `bench/planner` calibrates",
    ),
    Room(
        "launch",
        "executors and cluster profiles (`clusters.py`, `shape.py`), exit codes, reports of a rank's failure; "
        "`slurm/`: a job's script, its attempts and their outcomes; `kubeflow/`: a run's manifest and what its pods "
        "run; `experiment.py`: all other executors, through nemo-run",
    ),
    Room(
        "callbacks",
        "one Lightning callback per file, from the directory `callbacks/`",
    ),
    Room(
        "plugins",
        "plugins that edit a recipe and its executor together before a launch, under NeMo 2.0's names",
    ),
    Room(
        "recipes",
        "one small module per recipe and the code that recipes share, from the directory `recipes/`",
    ),
    Room(
        "cli",
        "the commands, and nemo-run's CLI (`nemo_run.py`); finds recipes by name and imports them on first use",
    ),
)

FRONT_DOORS = ("nemo2", "nemo2.llm")
"""Packages whose stubs name what users import, from any room."""

BACK = {
    (
        "nemo2.config.tree",
        "nemo2.config.show",
    ): "a config is registered with its YAML form, which is written by what shows it",
}
"""Imports inside functions that close a circle, and why each stays."""


@cache
def modules() -> dict[str, Path]:
    """The files of the package, by module name; the links to the two other folders aside."""
    found = {}
    for folder in ("nemo2", "callbacks", "recipes"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            if not any(parent.is_symlink() for parent in file.parents):
                parts = [
                    part for part in file.relative_to(ROOT).with_suffix("").parts if part not in ("nemo2", "__init__")
                ]
                found[".".join(("nemo2", *parts))] = file
    return found


@dataclass(frozen=True)
class Import:
    importer: str
    module: str
    line: int
    types_only: bool


@cache
def imports() -> tuple[Import, ...]:
    """Every import of one module of ours by another."""
    files = modules()
    return tuple(one for module, file in files.items() for one in _imports(module, file) if one.module != module)


def room_of(module: str) -> str:
    """The room of a module; "" of the package itself."""
    return (module.split(".") + [""])[1]


def strays() -> list[str]:
    """Imports that the table doesn't allow, and modules without a room."""
    names = [room.name for room in ROOMS]
    allowed = {
        room.name: {room.name, *FLOOR, *(names[:place] if room.leans_on is None else room.leans_on)}
        for place, room in enumerate(ROOMS)
    }
    told = [f"{module} has no room" for module in modules() if room_of(module) not in ("", *names, "__main__")]
    for one in imports():
        target = room_of(one.module)
        if one.importer not in (*FRONT_DOORS, "nemo2.__main__") and target not in allowed.get(
            room_of(one.importer), ()
        ) | {""}:
            told.append(f"{one.importer}:{one.line} imports {one.module}")
    return told


def circles() -> list[list[str]]:
    """Modules that import each other in a circle, at the top of files or inside functions; `BACK` and types aside."""
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for one in imports():
        if not one.types_only and (one.importer, one.module) not in BACK and one.importer not in FRONT_DOORS:
            graph[one.importer].add(one.module)
    return [sorted(circle) for circle in _circles(graph)]


def table() -> str:
    """`ROOMS` as Markdown."""
    files = {path.name for path in (ROOT / "nemo2").glob("*.py")}
    lines = ["| room | what lives there | may import |", "|---|---|---|"]
    for room in ROOMS:
        name = f"{room.name}.py" if f"{room.name}.py" in files else f"{room.name}/"
        leans = "all rows above" if room.leans_on is None else ", ".join(room.leans_on) or "–"
        lines.append(f"| `{name}` | {room.holds} | {leans} |")
    return "\n".join(lines)


def page() -> str:
    """docs/architecture.md with the table as it is now."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def _imports(module: str, file: Path) -> Iterator[Import]:
    tree = ast.parse(file.read_text())
    types = {id(node) for block in ast.walk(tree) if _is_for_types(block) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = {alias.name for alias in node.names if alias.name in homes_of_names()}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = {home for alias in node.names if (home := _home(node.module, alias.name))}
        else:
            continue
        yield from (Import(module, name, node.lineno, id(node) in types) for name in found)
    stub = file.with_suffix(".pyi")
    if stub.exists():
        yield from (Import(module, home, 0, False) for home in homes_of_names()[module].values())


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@cache
def homes_of_names() -> Mapping[str, dict[str, str]]:
    """The modules that the names of each module's stub come from; {} of a module without a stub."""
    homes: dict[str, dict[str, str]] = {module: {} for module in modules()}
    for module, file in modules().items():
        stub = file.with_suffix(".pyi")
        for node in ast.parse(stub.read_text()).body if stub.exists() else ():
            if isinstance(node, ast.ImportFrom) and node.module:
                # A stub without a module, as `nemo2.recipes._typed`, tells the types of names that the package itself has.
                only_types = node.module.startswith("nemo2.") and node.module not in homes
                home = module if only_types else node.module
                homes[module].update({alias.name: home for alias in node.names})
    return homes


def _home(module: str, name: str) -> str | None:
    """The module of ours that ``from module import name`` reaches, through front doors; None of another's."""
    homes = homes_of_names()
    if module not in homes:
        return None
    if f"{module}.{name}" in homes:
        return f"{module}.{name}"
    through = homes[module].get(name)
    if through is None and module in FRONT_DOORS:
        through = next((home for home in set(homes[module].values()) if name in homes.get(home, ())), None)
    return _home(through, name) if through and through != module else module


def _circles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Groups of nodes that can all reach each other."""
    reach = {node: _reached(graph, node) for node in graph}
    return [
        set(group)
        for group in sorted({tuple(sorted(other for other in reach[node] if node in reach[other])) for node in graph})
        if len(group) > 1
    ]


def _reached(graph: Mapping[str, Iterable[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        for node in graph[todo.pop()]:
            if node not in seen:
                seen.add(node)
                todo.append(node)
    return seen


if __name__ == "__main__":
    PAGE.write_text(page())
