# SPDX-License-Identifier: Apache-2.0
"""Random sizes and switches of every family against transformers: ``python -m tests.long.random_models SECONDS [SEED] [FAMILY]``.

Starts from the rows of `support.hf_models` and draws other values for fields of config.json. transformers makes the
model and its files. Each case ends as one of

    same      imported, our logits are transformers'; exported again, the files are the same bit by bit
    refused   the configuration is refused by field and value, as a ConfigError
    no model  transformers itself can't build or run it

Any other outcome is printed with its seed, which reproduces it.
"""

import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.hf_models import ROWS, Row

TOLERANCE = 1e-5
_ROPE = (
    {"rope_type": "default", "rope_theta": 10000.0},
    {"rope_type": "default", "rope_theta": 1000000.0},
    {"rope_type": "default", "rope_theta": 25000.5},
    {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 16, "mscale": 1.0,
     "mscale_all_dim": 1.0, "beta_fast": 16, "beta_slow": 2},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "attention_factor": 1.3, "truncate": False},
    {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 32},
    {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "factor": 2.0},
    {"rope_type": "longrope", "rope_theta": 10000.0, "attention_factor": 1.1, "partial_rotary_factor": 0.5},
    {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 24},
)  # fmt: skip


def drawn(row: Row, rng: random.Random) -> dict[str, Any]:
    """Fields of the row, some of them changed."""
    fields = dict(row.fields)
    gpt2 = "n_embd" in fields
    heads = rng.choice((2, 4, 6))
    names = {"heads": "n_head", "hidden": "n_embd", "inner": "n_inner", "layers": "n_layer"}
    names = names if gpt2 else {"heads": "num_attention_heads", "hidden": "hidden_size", "inner": "intermediate_size",
                                "layers": "num_hidden_layers"}  # fmt: skip
    possible: dict[str, Any] = {
        "vocab_size": lambda: rng.choice((64, 97, 128, 131)),
        names["hidden"]: lambda: heads * rng.choice((8, 16, 32)),
        names["inner"]: lambda: rng.choice((32, 72, 160, None if gpt2 else 40)),
        "tie_word_embeddings": lambda: rng.random() < 0.5,
        "rms_norm_eps": lambda: rng.choice((1e-6, 1e-5, 1e-3)),
        "norm_epsilon": lambda: rng.choice((1e-6, 1e-5)),
        "norm_eps": lambda: rng.choice((1e-6, 1e-5, 1e-3)),
        "layer_norm_epsilon": lambda: rng.choice((1e-6, 1e-5, 1e-3)),
        "attention_bias": lambda: rng.random() < 0.5,
        "mlp_bias": lambda: rng.random() < 0.5,
        "use_bias": lambda: rng.random() < 0.5,
        "hidden_act": lambda: rng.choice(("silu", "gelu", "gelu_pytorch_tanh", "relu2")),
        "activation_function": lambda: rng.choice(("gelu", "gelu_new", "gelu_pytorch_tanh", "relu")),
        "head_dim": lambda: rng.choice((8, 16, 32)),
        "sliding_window": lambda: rng.choice((None, 1, 5, 17, 4096)),
        "use_sliding_window": lambda: rng.random() < 0.5,
        "max_window_layers": lambda: rng.choice((0, 1, 3)),
        "rope_parameters": lambda: dict(rng.choice(_ROPE)),
        "query_pre_attn_scalar": lambda: rng.choice((8, 24, 256)),
        "attn_logit_softcapping": lambda: rng.choice((None, 2.0, 50.0)),
        "final_logit_softcapping": lambda: rng.choice((None, 2.0, 30.0)),
        "num_experts_per_tok": lambda: rng.choice((1, 2, 3)),
        "norm_topk_prob": lambda: rng.random() < 0.5,
        "decoder_sparse_step": lambda: rng.choice((1, 2)),
        "mlp_only_layers": lambda: rng.choice(([], [0], [1, 3])),
        "first_k_dense_replace": lambda: rng.choice((0, 1, 2)),
        "n_shared_experts": lambda: rng.choice((1, 2, None)),
        "routed_scaling_factor": lambda: rng.choice((1.0, 2.5, 16.0)),
        "q_lora_rank": lambda: rng.choice((None, 12, 24)),
        "n_group": lambda: rng.choice((1, 2, 4)),
        "topk_group": lambda: rng.choice((1, 2)),
        "topk_method": lambda: rng.choice(("greedy", "group_limited_greedy")),
        "v_head_dim": lambda: rng.choice((8, 16, 24)),
        "qk_rope_head_dim": lambda: rng.choice((8, 16)),
        "moe_intermediate_size": lambda: rng.choice((16, 40)),
        "no_rope_layer_interval": lambda: rng.choice((2, 3, 4)),
        "interleave_moe_layer_step": lambda: rng.choice((1, 2)),
        "attention_chunk_size": lambda: rng.choice((8, 16, 64)),
        "use_qk_norm": lambda: rng.random() < 0.5,
        "attn_temperature_tuning": lambda: rng.random() < 0.5,
        "floor_scale": lambda: rng.choice((4, 8192)),
        "swiglu_limit": lambda: rng.choice((1.0, 7.0)),
        "multi_query": lambda: rng.random() < 0.5,
        "scale_attn_weights": lambda: rng.random() < 0.8,
        "use_conv_bias": lambda: rng.random() < 0.8,
        "conv_kernel": lambda: rng.choice((4, 4, 3)),
        "n_groups": lambda: rng.choice((1, 2, 4)),
        "ssm_state_size": lambda: rng.choice((8, 16)),
        "state_size": lambda: rng.choice((8, 16)),
        "mlp_hidden_act": lambda: rng.choice(("relu2", "gelu", "silu")),
        "scale_attn_by_inverse_layer_idx": lambda: rng.random() < 0.3,
        "max_position_embeddings": lambda: rng.choice((24, 64, 200)),
        "original_max_position_embeddings": lambda: rng.choice((16, 64)),
        "n_routed_experts": lambda: rng.choice((4, 8, 16)),
        "layers_block_type": lambda: [
            rng.choice(("linear_attention", "moe", "full_attention", "mlp")) for _ in range(rng.choice((2, 3, 6)))
        ],
        "layer_types": lambda: [rng.choice(("full_attention", "sliding_attention")) for _ in range(fields[names["layers"]])],
    }  # fmt: skip
    known = _known(row.config)
    changes = [name for name in possible if name in known and (name in fields or rng.random() < 0.7)]
    for name in rng.sample(changes, k=min(len(changes), rng.choice((1, 2, 3, 5)))):
        fields[name] = possible[name]()
        if name == names["hidden"] and names["heads"] in fields:
            fields[names["heads"]] = heads
            if "num_key_value_heads" in fields:
                latent = "kv_lora_rank" in fields
                fields["num_key_value_heads"] = (
                    heads if latent else rng.choice([n for n in (1, 2, 3, heads) if heads % n == 0])
                )
    if (fields.get("rope_parameters") or {}).get("rope_type") == "longrope" and not gpt2:
        rope = fields["rope_parameters"] = dict(fields["rope_parameters"])
        width = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        channels = int(width * rope.get("partial_rotary_factor", 1.0)) // 2
        rope["short_factor"] = [round(rng.uniform(1.0, 1.3), 3) for _ in range(channels)]
        rope["long_factor"] = [round(rng.uniform(1.0, 30.0), 3) for _ in range(channels)]
    return fields


def _known(config: str) -> set[str]:
    import transformers

    return set(getattr(transformers, config)().to_dict()) | {"rope_parameters", "head_dim"}


def tried(row: Row, folder: Path) -> str:
    """The outcome of a case. An error that isn't a refusal is raised."""
    from safetensors.torch import load_file

    from nemo2.base.errors import ConfigError
    from nemo2.hugging_face.exporting import export_weights
    from nemo2.hugging_face.released import described
    from nemo2.models.conversion.families import conversion_of
    from support import hf_parity as parity
    from support.released_models import import_release

    try:
        model = parity.make(row, folder)
        expected = parity.logits_of(model)
        assert bool(expected.isfinite().all())
    except Exception as error:
        return f"no model: {type(error).__name__}"
    released = parity.Released(folder)
    try:
        described(released.conversion, released.json)
    except ConfigError as error:
        return f"refused: {str(error)[:100]}"
    config = released.config()
    checkpoint = import_release(folder, folder / "imported", config=config)
    whole = released.chunk(config, checkpoint)
    if (apart := parity.apart(parity.our_logits(whole), expected)) > TOLERANCE:
        raise AssertionError(f"logits differ by {apart:.1e} of the largest")
    if conversion_of(config) is released.conversion:
        back = load_file(export_weights(checkpoint, folder / "back") / "model.safetensors")
        # A bias that only our side has goes out as zeros.
        back = {n: one for n, one in back.items() if n in released.file or not n.endswith(".bias") or one.any()}
        different = [n for n in {*back, *released.file} if n not in back or n not in released.file
                     or not (back[n] == released.file[n]).all()]  # fmt: skip
        if different:
            raise AssertionError(f"not the same after an export: {sorted(different)[:4]}")
        _loads(folder / "back", expected, row)
    return "same"


def _loads(folder: Path, expected: Any, row: Row) -> None:
    from transformers import AutoModelForCausalLM

    from support import hf_parity as parity

    if not row.readable:
        return
    auto: Any = AutoModelForCausalLM
    model, loading = auto.from_pretrained(folder, output_loading_info=True)
    if told := {name: what for name, what in loading.items() if what}:
        raise AssertionError(f"transformers on the export: {told}")
    if (apart := parity.apart(parity.logits_of(parity.plain(model)), expected)) > TOLERANCE:
        raise AssertionError(f"transformers' logits of the export differ by {apart:.1e} of the largest")


def main(seconds: float, first: int, only: str) -> None:
    import torch

    from support import hf_parity as parity
    from support import small_runs

    warnings.filterwarnings("ignore")
    small_runs.quiet()
    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parity.start()
    # What a stand-in's files are made to look like has the stand-in's own sizes.
    named = [row for row in ROWS if only.lower() in row.name.lower()]
    rows = [replace(row, released=None) for row in named if row.readable]
    ends: Counter[str] = Counter()
    begun, seed = time.monotonic(), first
    while time.monotonic() - begun < seconds:
        rng = random.Random(seed)
        row = rows[seed % len(rows)]
        fields = drawn(row, rng)
        changed = {name: value for name, value in fields.items() if row.fields.get(name, ...) != value}
        folder = Path(tempfile.mkdtemp())
        try:
            end = tried(replace(row, fields=fields), folder)
        except Exception as error:
            end = "FAILED"
            print(
                f"seed {seed}, {row.name}: {json.dumps(changed)}\n  {type(error).__name__}: {' '.join(str(error).split())[:400]}"
            )
            if os.environ.get("TRACEBACK"):
                traceback.print_exc()
        finally:
            shutil.rmtree(folder)
        ends[end.split(":")[0]] += 1
        if end.startswith("refused") and os.environ.get("REFUSED"):
            print(f"seed {seed}, {row.name}: {json.dumps(changed)}\n  {end}")
        seed += 1
    print(f"{seed - first} cases from seed {first}: {dict(ends)}")


if __name__ == "__main__":
    _given = [*sys.argv[1:], *("60", "0", "")[len(sys.argv) - 1 :]]
    main(float(_given[0]), int(_given[1]), _given[2])
