# SPDX-License-Identifier: Apache-2.0
"""Released weights into a checkpoint and into a model of any layout, and out of it again: transformers is the authority."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support import released_models
from support.nightly import each_case, requested
from support.resharding import Cut, whole_tensors

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*moe_ffn_hidden_size is not set.*:UserWarning"),
    # Torch says on every call that it was told to work without ranks.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]
CUTS = {
    "llama": [
        Cut(2, "tp2 sp"),
        Cut(2, "pp2 vp2"),
        Cut(2, "fsdp2"),
        Cut(2, "pp2"),
        Cut(2, "do"),
        Cut(2, "fsdp1"),
        Cut(2, "mfsdp"),
    ],
    "mixtral": [Cut(2, "ep2"), Cut(2, "tp2 etp1 ep2 sp"), Cut(2, "tp2 etp2 sp"), Cut(2, "pp2")],
}
"""Read from the release; Megatron-Core itself reads the imported checkpoint in the first two, and exporting reads all."""
CASES = [(kind, str(cut)) for kind, cuts in CUTS.items() for cut in cuts]
BEGUN = [("checkpoint", kind, str(cut)) for kind, cuts in CUTS.items() for cut in cuts[:2]]
BEGUN += [("release", kind, cut) for kind, cut in CASES]
DAILY = [(kind, str(cut)) for kind, count in (("llama", 3), ("mixtral", 2)) for cut in CUTS[kind][:count]]


class Begun:
    """Runs in all layouts, from the imported checkpoint or from the release itself, of each kind once."""

    def __init__(
        self, run_on_ranks: Any, tmp_path_factory: pytest.TempPathFactory, cases: list[tuple[str, str]]
    ) -> None:
        self.run_on_ranks, self.factory, self.cases = run_on_ranks, tmp_path_factory, cases
        self.made: dict[str, dict[str, Any]] = {}

    def of(self, kind: str) -> dict[str, Any]:
        if kind not in self.made:
            from support.released_models import import_release

            folder = self.factory.mktemp(kind)
            cuts = [cut for cut in CUTS[kind] if (kind, str(cut)) in self.cases]
            first = [cut for cut in CUTS[kind][:2] if cut in cuts]
            model = released_models.write(kind, folder / "released", shard_size="40KB")
            imported = import_release(folder / "released", folder / "imported")
            runs = {
                name: self.run_on_ranks(released_models.run_all, 2, kind, path, some, str(folder / name), timeout=400)[
                    0
                ]
                for name, path, some in (
                    ("checkpoint", str(imported), first),
                    ("release", f"hf://{folder / 'released'}", cuts),
                )
                if some
            }
            self.made[kind] = {"folder": folder, "loss": released_models.first_loss(model), "runs": runs}
        return self.made[kind]


@pytest.fixture(scope="module")
def begun(request: pytest.FixtureRequest, run_on_ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Begun:
    return Begun(run_on_ranks, tmp_path_factory, requested(request, "kind", "cut"))


@pytest.mark.quick
@pytest.mark.parametrize(("source", "kind", "cut"), each_case(BEGUN, [one for one in BEGUN if one[1:] in DAILY]))
def test_training_begins_with_the_released_weights_in_any_layout(
    begun: Begun, source: str, kind: str, cut: str
) -> None:
    """The first step's loss is transformers'; the second's, after an update of the optimizer's own copies, is the same in
    all layouts and from both sources."""
    made = begun.of(kind)
    first, second = made["runs"][source][cut]
    assert first == pytest.approx(made["loss"], rel=2e-6)
    others = [losses[1] for run in made["runs"].values() for losses in run.values()]
    assert second == pytest.approx(sum(others) / len(others), rel=1e-5)
    assert abs(second - first) > 1e-3


@pytest.mark.parametrize(("kind", "cut"), each_case(CASES, DAILY))
def test_a_checkpoint_of_any_layout_is_exported_bit_for_bit(begun: Begun, kind: str, cut: str, tmp_path: Path) -> None:
    from nemo2.hugging_face.exporting import export_weights

    folder = begun.of(kind)["folder"]
    exported = export_weights(folder / "release" / cut.replace(" ", "_"), tmp_path / "out", shard_bytes=60_000)
    same(released_models.tensors(folder / "released"), released_models.tensors(exported))


@pytest.mark.parametrize("kind", CUTS)
def test_transformers_loads_what_is_exported_and_computes_the_same_and_so_does_what_is_imported_again(
    begun: Begun, kind: str, tmp_path: Path
) -> None:
    import transformers

    from nemo2.hugging_face.exporting import export_weights
    from support.released_models import import_release

    made = begun.of(kind)
    imported = made["folder"] / "imported"
    exported = export_weights(imported, tmp_path / "out", shard_bytes=60_000)
    assert (exported / "model.safetensors.index.json").is_file()
    model, said = transformers.AutoModelForCausalLM.from_pretrained(
        exported, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(said.values()), said
    assert released_models.first_loss(model.eval()) == made["loss"]
    same(whole_tensors(imported), whole_tensors(import_release(exported, tmp_path / "again")))


def test_inspect_finds_an_imported_checkpoint_whole(begun: Begun) -> None:
    from nemo2.hugging_face.identify import identify

    folder = begun.of("mixtral")["folder"]
    found = identify(folder / "imported", verify=True)
    assert (found.kind, found.problems, found.weights_only) == ("nemo2", [], True)
    assert found.parameters == sum(value.numel() for value in released_models.tensors(folder / "released").values())


def test_16_bits_stay_as_they_are_and_a_dtype_may_be_asked_for(tmp_path: Path) -> None:
    from nemo2.hugging_face.exporting import export_weights
    from support.released_models import import_release

    released_models.write("llama", tmp_path / "released", dtype=torch.bfloat16)
    imported = import_release(tmp_path / "released", tmp_path / "imported")
    theirs = released_models.tensors(tmp_path / "released")
    same(theirs, released_models.tensors(export_weights(imported, tmp_path / "out")))
    wide = export_weights(imported, tmp_path / "wide", dtype=torch.float32)
    same({name: value.float() for name, value in theirs.items()}, released_models.tensors(wide))
    narrow = import_release(wide, tmp_path / "narrow", dtype=torch.bfloat16)
    same(theirs, released_models.tensors(export_weights(narrow, tmp_path / "narrow_out")))


def test_tied_embeddings_are_in_the_files_once(tmp_path: Path) -> None:
    from nemo2.hugging_face.exporting import export_weights
    from support.released_models import import_release

    released_models.write("llama", tmp_path / "released", tie_word_embeddings=True)
    exported = export_weights(import_release(tmp_path / "released", tmp_path / "imported"), tmp_path / "out")
    found = released_models.tensors(exported)
    assert "lm_head.weight" not in found
    same(released_models.tensors(tmp_path / "released"), found)


def test_rows_of_padding_are_added_on_import_and_cut_off_on_export(tmp_path: Path) -> None:
    from nemo2.checkpoint.foreign_files import read_object
    from nemo2.hugging_face.exporting import export_weights
    from nemo2.models.conversion.families import conversion_for
    from support.released_models import import_release

    released_models.write("llama", tmp_path / "released", vocab_size=61)
    released = read_object(tmp_path / "released", "config.json")
    config = conversion_for(released).config(released)
    config.vocab_size = 64
    imported = import_release(tmp_path / "released", tmp_path / "imported", config=config)
    embedding = whole_tensors(imported)["module.embedding.word_embeddings.weight"]
    assert embedding.shape[0] == 64 and not embedding[61:].any() and embedding[60].any()
    exported = export_weights(imported, tmp_path / "out", vocab_size=61)
    same(released_models.tensors(tmp_path / "released"), released_models.tensors(exported))


def same(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
    assert theirs.keys() == ours.keys()
    different = [
        name for name, value in theirs.items() if value.dtype != ours[name].dtype or not value.equal(ours[name])
    ]
    assert not different
