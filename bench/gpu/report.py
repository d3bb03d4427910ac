# SPDX-License-Identifier: Apache-2.0
"""Turns into figures, and figures into a page."""

import statistics
from typing import Any

from bench.gpu.cases import GRAPHS, Case, recipe_of

NAMES = {"ours": "nemo2", "bare": "bare Megatron-Core", "hf": "HF Trainer"}
COLUMNS = {
    "ours / bare": "at least 0.98",
    "ours / HF": "at least 1.3 for the Llamas",
    "of the product's peak": "at least 0.70 for llama3_8b at 8,192 tokens in bf16",
    "fp8 / bf16": "at least 1.35",
    "graphs / none": "no figure",
}
"""The ratios of a case, and what is asked of each."""


def figures(case: Case, turns: list[dict[str, Any]], peaks: dict[str, float], *, device: str = "") -> dict[str, Any]:
    """Summary of a case's turns: medians per arm, ratios per repeat and their median, the prediction for ``device``."""
    flops = {kind: step_flops(case, causal=kind == "causal") for kind in ("causal", "full")}
    sheet = data_sheet_flops(case, device)
    arms = {}
    for arm in dict.fromkeys(turn["arm"] for turn in turns):
        own = [turn for turn in turns if turn["arm"] == arm]
        good = [turn for turn in own if "failed" not in turn]
        failed = [turn["failed"] for turn in own if "failed" in turn]
        arms[arm] = {"failed": failed[0]} if not good else summary(case, good, flops)
        if good and sheet:
            arms[arm]["mfu"] = {kind: arms[arm][f"tflops_{kind}"] * 1e12 / sheet for kind in flops}
    if "tokens_per_second" in arms.get("ours", {}):
        arms["ours"]["predicted_tokens_per_second"] = predicted(case, device)
    ceiling = peaks.get("fp8" if case.precision.startswith("fp8") else "bf16")
    row: dict[str, Any] = {"case": case.name, "layers": case.layers, "toy": case.toy, "arms": arms}
    row["ratios"] = {"ours / bare": ratio(turns, "bare"), "ours / HF": ratio(turns, "hf")}
    if ceiling and "tflops_causal" in arms.get("ours", {}):
        row["ratios"]["of the product's peak"] = arms["ours"]["tflops_causal"] * 1e12 / ceiling
    return row


def chip_of(device: str) -> str | None:
    """The GPU of `nemo2.base.gpus` that torch calls ``device``; None for another."""
    from nemo2.base.gpus import NAMES as CHIPS

    words = device.upper().replace("-", " ").split()
    return next((name for name in CHIPS if name in words), None)


def data_sheet_flops(case: Case, device: str) -> float | None:
    """FLOP/s of the device's matrix units by its data sheet, dense, in the precision of the case: what MFU is a share of
    (PaLM, arXiv:2204.02311, appendix B). None where it isn't known."""
    from nemo2.base.gpus import gpu

    chip = chip_of(device)
    return None if chip is None else gpu(chip).flops.get("fp8" if case.precision.startswith("fp8") else "bf16")


def predicted(case: Case, device: str) -> float | None:
    """Tokens per second by `nemo2 plan`'s model of time; None on a device that it doesn't know."""
    from nemo2.base.gpus import gpu
    from nemo2.preflight.planner.recipe import read_recipe
    from nemo2.preflight.planner.step_time import predict

    chip = chip_of(device)
    if chip is None:
        return None
    subject = read_recipe(recipe_of(case), gpu(chip))
    return predict(subject.shape, subject.job).tokens_per_second_per_gpu


def step_flops(case: Case, *, causal: bool) -> float:
    """Model FLOPs of one optimizer step (`nemo2.models.flops`)."""
    import fiddle as fdl

    from nemo2.models.flops import model_flops_per_step

    config: Any = fdl.build(recipe_of(case).model.config)
    return model_flops_per_step(config, case.seq, case.microbatches, causal=causal)


def summary(case: Case, turns: list[dict[str, Any]], flops: dict[str, float]) -> dict[str, Any]:
    """The summary of one arm: the median over its turns of the mean step time."""
    steps = [statistics.mean(turn["seconds"]) for turn in turns]
    seconds = statistics.median(steps)
    return {
        "step_seconds": seconds,
        "spread": [min(steps), max(steps)],
        "tokens_per_second": case.tokens_per_step / seconds,
        "tflops_causal": flops["causal"] / seconds / 1e12,
        "tflops_full": flops["full"] / seconds / 1e12,
        "peak_gib": max(turn["peak_bytes"] for turn in turns) / 2**30,
        "first_and_last_loss": [turns[0]["losses"][0], turns[0]["losses"][-1]],
    }


def ratio(turns: list[dict[str, Any]], other: str) -> float | None:
    """Tokens per second of ours over another's, the median over repeats in which both ran."""
    means = {(turn["arm"], turn["repeat"]): statistics.mean(turn["seconds"]) for turn in turns if "failed" not in turn}
    pairs = [
        seconds / means[("ours", repeat)]
        for (arm, repeat), seconds in means.items()
        if arm == other and ("ours", repeat) in means
    ]
    return statistics.median(pairs) if pairs else None


def gains(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """nemo2's tokens per second relative to another of its cases, by column: fp8 relative to bf16, with CUDA graphs
    relative to without."""
    speed = {row["case"]: row["arms"].get("ours", {}).get("tokens_per_second") for row in rows}
    found: dict[str, dict[str, float]] = {"fp8 / bf16": {}, "graphs / none": {}}
    for name, value in speed.items():
        base, _, precision = name.rpartition("/")
        column, other = ("fp8 / bf16", f"{base}/bf16") if precision.startswith("fp8") else ("graphs / none", name)
        if GRAPHS in name:
            column, other = "graphs / none", name.partition(GRAPHS)[0]
        if other != name and value and speed.get(other):
            found[column][name] = value / speed[other]
    return found


def is_pretend(device: str) -> bool:
    """Whether the device is one of support/pretend_gpu, whose times and rates say nothing."""
    return "pretend" in device


def ran(result: dict[str, Any]) -> str:
    """The page of a pretend GPU: what ran to its end."""
    lines = ["A pretend GPU: this says that the scripts run, and nothing about a GPU.", ""]
    lines += ["| case | arm | first and last loss |", "|---|---|---|"]
    for row in result["rows"]:
        for arm, values in row["arms"].items():
            losses = ", ".join(f"{loss:.4f}" for loss in values.get("first_and_last_loss", ()))
            lines.append(f"| {row['case']} | {NAMES[arm]} | {values.get('failed') or losses} |")
    return "\n".join([*lines, "", *(f"Not measured: {reason}." for reason in result["left_out"])]).rstrip() + "\n"


def page(result: dict[str, Any]) -> str:
    """The whole result as Markdown."""
    if is_pretend(result["device"]):
        return ran(result)
    lines = [f"# {result['device']}, {result['date']}", ""]
    lines += [", ".join(f"{name} {version}" for name, version in result["versions"].items()) + ".", ""]
    if result.get("clocks"):
        lines += ["; ".join(f"{name} {value}" for name, value in result["clocks"].items()) + ".", ""]
    if result["toy"]:
        lines += ["Toy sizes: this says that the scripts run, and nothing about speed.", ""]
    peaks = ", ".join(f"{kind} {rate / 1e12:,.0f}" for kind, rate in result["peaks"].items())
    lines += [f"Measured matrix products (TFLOP/s): {peaks}.", ""]
    lines += [
        "| case | layers | arm | ms a step | tokens/s | predicted | TFLOP/s causal / full | MFU causal / full | peak GiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        for arm, values in row["arms"].items():
            start = f"| {row['case']} | {row['layers'] or 'all'} | {NAMES[arm]} |"
            if "failed" in values:
                lines.append(f"{start} {values['failed']} | | | | | |")
                continue
            guess, mfu = values.get("predicted_tokens_per_second"), values.get("mfu")
            lines.append(
                f"{start} {values['step_seconds'] * 1e3:,.1f} | {values['tokens_per_second']:,.0f} | "
                f"{'–' if guess is None else format(guess, ',.0f')} | "
                f"{values['tflops_causal']:,.1f} / {values['tflops_full']:,.1f} | "
                f"{'–' if mfu is None else format(mfu['causal'], '.1%') + ' / ' + format(mfu['full'], '.1%')} | "
                f"{values['peak_gib']:.1f} |"
            )
    lines += ["", "| case | " + " | ".join(COLUMNS) + " |", "|---" * (1 + len(COLUMNS)) + "|"]
    own = gains(result["rows"])
    for row in result["rows"]:
        ratios = row["ratios"] | {column: values.get(row["case"]) for column, values in own.items()}
        cells = ["–" if ratios.get(column) is None else f"{ratios[column]:.3f}" for column in COLUMNS]
        lines.append(f"| {row['case']} | " + " | ".join(cells) + " |")
    lines += ["", "Asked for: " + "; ".join(f"{column} {words}" for column, words in COLUMNS.items()) + ".", ""]
    lines += [f"Not measured: {reason}." for reason in result["left_out"]]
    return "\n".join(lines).rstrip() + "\n"
