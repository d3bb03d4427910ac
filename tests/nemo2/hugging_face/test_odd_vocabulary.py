# SPDX-License-Identifier: Apache-2.0
"""A release whose vocabulary the tensor-parallel ranks don't divide."""

from pathlib import Path
from typing import Any

import pytest

from support import odd_folders, released_models, small_runs

ROWS = 331


def losses(source: str, described: str, saved: str | None, **strategy: Any) -> list[float]:
    """The losses of two steps from the weights in ``source``, with the model of the checkpoint ``described``."""
    import fiddle as fdl
    from megatron.core.optimizer import OptimizerConfig

    from nemo2.checkpoint.auto_resume import RestoreConfig
    from nemo2.checkpoint.context import load_context
    from nemo2.mcore.optim.megatron import MegatronOptimizerModule

    config = load_context(Path(described), "model", build=False)
    config.config.seq_length = small_runs.SEQ
    model = fdl.build(config)
    MegatronOptimizerModule(OptimizerConfig(optimizer="sgd", lr=1e-2, clip_grad=0.0)).connect(model)

    def save(trainer: Any) -> None:
        if saved is not None:
            trainer.save_checkpoint(saved, weights_only=True)

    restore = RestoreConfig(path=source, load_artifacts=False)
    return small_runs.fit(model, max_steps=2, restore_config=restore, inspect=save, **strategy)["losses"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from support.released_models import import_release

    folder = tmp_path_factory.mktemp("odd vocabulary")
    released_models.write("llama", folder / "release", vocab_size=ROWS)
    import_release(folder / "release", folder / "imported")
    return folder


@pytest.mark.parametrize("kind", ["imported", pytest.param("release", marks=pytest.mark.nightly)])
def test_rows_are_padded_for_the_tensor_parallel_ranks(run_on_ranks: Any, folder: Path, kind: str) -> None:
    """The loss is that of one process; what is saved is read by one process and exported with the release's rows."""
    from nemo2.hugging_face.exporting import export_weights

    imported, saved = str(folder / "imported"), str(folder / f"saved from {kind}")
    source = imported if kind == "imported" else f"hf://{folder / 'release'}"
    split = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    (alone,) = run_on_ranks(losses, 1, source, imported, None)
    for rank in run_on_ranks(losses, 2, source, imported, saved, **split):
        assert rank == pytest.approx(alone, rel=1e-5)
    exported = export_weights(saved, folder / f"exported from {kind}")
    assert released_models.tensors(exported)["model.embed_tokens.weight"].shape[0] == ROWS
    (again,) = run_on_ranks(losses, 1, saved, imported, None)
    (from_export,) = run_on_ranks(losses, 1, f"hf://{exported}", imported, None)
    assert again == pytest.approx(from_export, rel=1e-6)


def written(places: list[str], **strategy: Any) -> list[list[int]]:
    """The tokens that the model of each place writes, in one layout."""
    from nemo2 import llm

    small_runs.quiet()
    found = []
    for place in places:
        small_runs.release()
        trainer = small_runs.build_trainer(max_steps=1, **strategy)
        [one] = llm.generate(place, trainer=trainer, prompts=["hello"], max_new_tokens=6, temperature=0.0)
        found.append(one.token_ids)
    return found


def test_ranks_that_do_not_divide_the_vocabulary_write_what_one_process_writes(
    run_on_ranks: Any, tmp_path: Path
) -> None:
    from nemo2.hugging_face.api import import_ckpt

    places: list[str] = []
    for rows in (331, 32001):
        release = tmp_path / str(rows)
        odd_folders.write(release, vocab_size=rows)
        imported = import_ckpt(source=str(release), output_path=tmp_path / f"imported {rows}")
        places += [str(release), str(imported)]
    alone = run_on_ranks(written, 1, places)
    assert alone[0][::2] == alone[0][1::2], "a release and its import are one model"
    assert run_on_ranks(written, 2, places, tensor_model_parallel_size=2) == alone * 2
