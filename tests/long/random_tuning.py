# SPDX-License-Identifier: Apache-2.0
"""Random fine-tunings of released models, in layouts of some ranks: ``python -m tests.long.random_tuning SECONDS [SEED]``.

transformers makes a tiny release of `support.hf_models`. A PEFT method, or training in full, with random targets and data
fine-tunes it by ``llm.finetune``: one process, and two layouts, on the same samples. Losses, gradient norms and
counted tokens of three steps and each parameter's gradient of the first step are compared. One process then resumes each
layout's second checkpoint, and peft and transformers load what is exported of the last. Each ends as one of

    same     within the bounds of the parity table (`tests.long.parity.verdict`), and of the same logits
    refused  by nemo2's rules or by the part in question

Whatever differs or fails is printed with its seed, which reproduces it, and the exit code is 1.
"""

import functools
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""

from nemo2.models.peft import PEFT
from support import ranks
from support.hf_models import ROWS, Row
from tests.long import random_switches
from tests.long.parity import verdict
from tests.long.random_switches import LAYOUTS

STEPS, LENGTH, VOCABULARY, ALIGN = 3, 64, 320, 4
LOGITS = 1e-5
_ROWS = [row for row in ROWS if row.readable and row.released is None]
_EVERYWHERE = ["linear_proj", "linear_fc2", "*.layers.0.*linear_proj", "*.layers.1-2.*.linear_fc2", "*.linear_proj", "router",
               "output_layer", "linear_kv_down_proj", "linear_kv_up_proj", "linear_q_proj", "linear_q_up_proj", "in_proj",
               "out_proj", "*shared_experts.linear_fc2", "*.experts.linear_fc2", "*.layers.{0,3}.*"]  # fmt: skip
_FUSED = ["linear_qkv", "linear_fc1", "*.layers.3.*.linear_fc?", "*.layers.0-1.*.linear_qkv", "*.experts.linear_fc1",
          "*"]  # fmt: skip
_PARTS = ["linear_q", "linear_k", "linear_v", "linear_fc1_up", "linear_fc1_gate", "*.layers.0-1.*.linear_q",
          "*.linear_fc1_up"]  # fmt: skip
_EXCLUDED = [None, None, None, ["*.layers.0.*"], ["linear_proj"], ["*.layers.{1,3}.*"], ["output_layer"], ["*.mlp.*"]]
_SAVED = [None, None, None, None, ["word_embeddings"], ["output_layer"], ["*layernorm"], ["*.layers.0.*layernorm"], ["router"],
          ["*.layers.2-3.mlp"]]  # fmt: skip


def drawn(seed: int) -> tuple[str, dict[str, Any], list[str]]:
    """A release, its fine-tuning as plain data, and layouts. The same seed gives the same case."""
    dice = random.Random(seed)
    kind = dice.choice(("LoRA", "LoRA", "DoRA", "CanonicalLoRA", "CanonicalDoRA", "full", "norms"))
    names = [*_EVERYWHERE, *(_PARTS if kind.startswith("Canonical") else _FUSED) * 2]
    method = {
        "target_modules": dice.choice((None, None, [], dice.sample(names, 1), dice.sample(names, 2), dice.sample(names, 4))),
        "exclude_modules": dice.choice(_EXCLUDED),
        "modules_to_save": dice.choice(_SAVED),
        "dim": dice.choice((1, 3, 4, 8)),
        "alpha": dice.choice((4, 8, 16)),
        "dropout_position": dice.choice(("pre", "post")),
        "lora_A_init_method": dice.choice(("xavier", "uniform", "kaiming", "normal")),
        "lora_B_init_method": dice.choice(("zero", "normal", "xavier")),
    }  # fmt: skip
    samples = dice.choice(("records", "conversations", "pairs", "packed chats", "packed pairs"))
    settings: dict[str, Any] = {"pad_to_max_length": dice.random() < 0.3}
    if "pairs" in samples:
        settings |= {name: dice.random() < 0.6 for name in ("answer_only_loss", "add_bos", "add_eos")}
    else:
        settings |= {"turns": dice.choice(("all", "last"))}
    case = {
        "row": dice.choice(_ROWS).name,
        "kind": kind,
        "method": {} if kind in ("full", "norms") else method,
        "samples": samples,
        "settings": settings,
        "micro": 1 if "packed" in samples else dice.choice((1, 2)),
        "global": dice.choice((4, 8)),
        "config": dice.choice(({}, {}, {"calculate_per_token_loss": False}, {"recompute_granularity": "full",
                               "recompute_method": "uniform", "recompute_num_layers": 1})),
        "freezer": dice.choice((None,) * 5 + ({"decoder.layers.1": [1, 1]}, {"decoder.layers.0.mlp": [1, -1]})),
    }  # fmt: skip
    layouts = [*LAYOUTS]
    dice.shuffle(layouts)
    return case["row"], case, layouts


class Norms(PEFT):
    """A method of the user's own, which trains norms alone."""

    def transform(self, module: Any, name: str | None = None, prefix: str | None = None) -> Any:
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_("norm" in f"{prefix}.{name}")
        return module


def prepare(case: dict[str, Any], root: str) -> None:
    """The release and the samples."""
    from support import hf_parity
    from support.small_chats import make_tokenizer, questions, say, write_lines

    row: Row = next(row for row in ROWS if row.name == case["row"])
    folder = Path(root)
    hf_parity.make(replace(row, fields={**row.fields, "vocab_size": VOCABULARY}), folder / "released")
    make_tokenizer(folder / "released", vocab_size=VOCABULARY)
    turns = [
        [
            ("user", "?" * (1 + i % 7)),
            ("assistant", "!" * (1 + i % 5) + f"{i}"),
            ("user", "so"),
            ("assistant", f"{i * i}"),
        ]
        for i in range(48)
    ]
    chats = [say(*turns_of[: 2 + 2 * (i % 2)]) for i, turns_of in enumerate(turns)]
    write_lines(folder / "chats.jsonl", chats)
    write_lines(folder / "conversations" / "training.jsonl", chats)
    write_lines(folder / "pairs" / "training.jsonl", questions(48))


def tune(case: dict[str, Any], root: str, name: str, resume: str | None = None) -> dict[str, Any]:
    """Train in a layout by its name. Returns what this rank has of losses, gradient norms and tokens, and errors of
    gradients; or who refused."""
    import torch

    import nemo2
    from nemo2 import llm
    from nemo2.base.errors import ConfigError
    from nemo2.config.provenance import adjust
    from nemo2.data.finetuning.base import SampleDataModule
    from nemo2.mcore.precision import MegatronMixedPrecision
    from support import small_runs, tiny_releases, tuned_runs
    from tests.long.parity.measure import Recorder

    small_runs.quiet()
    small_runs.release()
    torch._dynamo.config.disable = True
    # Packs hold the same samples in every layout.
    SampleDataModule._align = ALIGN  # pyright: ignore[reportAttributeAccessIssue]
    if whole := name == "one process":
        prepare(case, root)
    torch.manual_seed(1234)
    layout = dict(LAYOUTS.get(name, {}))
    kind = layout.pop("kind", "MegatronStrategy")
    layout.pop("world", None)
    layout |= {} if kind != "MegatronStrategy" else {"ckpt_async_save": False}

    class Watch(Recorder):
        tokens: tuple[int, ...] = ()

        def on_megatron_step_end(self, step: Any) -> None:
            if step.pipeline.weight is not None:
                self.tokens += (int(step.pipeline.weight),)

    first: Callable[[Any], dict[str, Any]] = functools.partial(
        random_switches.save_gradients if whole else random_switches.gradient_errors, folder=Path(root)
    )
    watch = Watch(first if resume is None else lambda trainer: {"errors": {}}, None)
    try:
        model = tiny_releases.model_of(f"{root}/released", rate=1e-3)
        adjust(model.config, "moe_aux_loss_coeff", 0.0, why="micro-batches hold other samples in other layouts")
        for field, value in case["config"].items():
            setattr(model.config, field, value)
        model.optim.config.use_distributed_optimizer = name in LAYOUTS and kind == "MegatronStrategy"
        freezer = [nemo2.callbacks.LayerFreezer(case["freezer"])] if case["freezer"] else []
        trainer = nemo2.Trainer(
            devices=torch.distributed.get_world_size(),
            max_steps=STEPS,
            strategy=getattr(nemo2, kind)(**layout),
            plugins=MegatronMixedPrecision("32"),
            callbacks=[watch, *freezer],
            limit_val_batches=0,
            log_every_n_steps=1,
            enable_progress_bar=False,
        )
        methods: dict[str, Any] = {"full": lambda: None, "norms": Norms}
        method = methods.get(case["kind"]) or getattr(llm.peft, case["kind"])
        tuned_runs.finetune(
            f"{root}/{name}",
            path=f"hf://{root}/released",
            folder=root,
            peft=method(**case["method"]),
            samples=case["samples"],
            trainer=trainer,
            model=model,
            checkpoint=resume,
            micro_batch_size=case["micro"],
            global_batch_size=case["global"],
            dataset_kwargs=case["settings"],
        )
    except ConfigError as error:
        return {"refused": f"{error.rule or ''} {' '.join(str(error).split())[:300]}"}
    return {"losses": watch.losses, "grad_norms": watch.grad_norms, "tokens": [*watch.tokens]} | watch.first


def after(case: dict[str, Any], root: str, name: str) -> dict[str, Any]:
    """The third step of a layout, resumed by one process from the second checkpoint, and how far the logits of what is exported
    of the third are from nemo2's."""
    import peft
    import transformers

    from nemo2 import llm
    from nemo2.base.errors import ConfigError
    from support import hf_parity, small_runs
    from support.peft_models import logits_of, logits_of_checkpoint

    small_runs.quiet()
    transformers.logging.set_verbosity_error()
    auto: Any = transformers.AutoModelForCausalLM
    [second], [last] = [[*Path(root, name).rglob(f"step={step}")] for step in (2, STEPS)]
    resumed = tune(case, root, f"{name} resumed", str(second))
    ours = logits_of_checkpoint(last)

    def adapter() -> Any:
        folder = llm.export_ckpt(last, "hf-peft", f"{root}/{name} as peft")
        return peft.PeftModel.from_pretrained(auto.from_pretrained(f"{root}/released"), str(folder))

    def merged() -> Any:
        source = last if case["kind"] in ("full", "norms") else llm.peft.merge_lora(last, f"{root}/{name} merged")
        return auto.from_pretrained(llm.export_ckpt(source, "hf", f"{root}/{name} as hf"))

    apart: dict[str, Any] = {}
    for form in (merged,) if case["kind"] in ("full", "norms") else (adapter, merged):
        small_runs.release()
        try:
            apart[form.__name__] = hf_parity.apart(logits_of(hf_parity.plain(form())), ours)
        except ConfigError as error:
            apart[form.__name__] = " ".join(str(error).split())[:300]
    return resumed | {"apart": apart}


def results_of(seed: int) -> Iterator[tuple[str, str, Any]]:
    """Of each layout its name, its end, and why; no more than two of them run."""
    _, case, layouts = drawn(seed)
    with tempfile.TemporaryDirectory() as root:

        def attempt(name: str, world: int, function: Any = tune) -> Any:
            try:
                answers = ranks.run(function, world, case, root, name, timeout=240.0, quiet=True)
            except ranks.RankFailed as error:
                return random_switches.shown(error)
            return answers[0] | {"tokens": max((one.get("tokens", []) for one in answers), key=len)}

        reference = attempt("one process", 1)
        if isinstance(reference, str) or "refused" in reference:
            yield "one process", *_not_trained(reference)
            return
        ran: list[str] = []
        for name in layouts:
            report = attempt(name, random_switches.world_of(LAYOUTS[name]))
            if isinstance(report, str) or "refused" in report:
                yield name, *_not_trained(report)
                if not isinstance(report, str):
                    continue
            else:
                difference = verdict.differences(report, reference) | {"tokens": report["tokens"]}
                same = not verdict.broken(difference, verdict.BOUNDS) and report["tokens"] == reference["tokens"]
                yield name, "same" if same else "DIFFERS", difference
                yield from _after(f"after {name}", attempt(name, 1, after), reference)
            ran.append(name)
            if len(ran) == 2:
                break


def _not_trained(report: Any) -> tuple[str, Any]:
    return ("FAILED", report) if isinstance(report, str) else ("refused", report["refused"])


def _after(name: str, report: Any, reference: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    if isinstance(report, str) or "refused" in report:
        yield name, *_not_trained(report)
        return
    last = {key: verdict.largest(report[key][-1:], reference[key][-1:]) for key in ("losses", "grad_norms")}
    same = len(report["losses"]) == 1 and all(apart <= 1e-4 for apart in last.values())
    yield f"{name}, resumed", "same" if same else "DIFFERS", last
    for form, apart in report["apart"].items():
        end = "refused" if isinstance(apart, str) else "same" if apart <= LOGITS else "DIFFERS"
        yield f"{name}, {form}", end, apart


if __name__ == "__main__":
    from tests.long import random_tuning  # ranks know its functions by this name

    sys.exit(random_switches.main(random_tuning, *sys.argv[1:]))
