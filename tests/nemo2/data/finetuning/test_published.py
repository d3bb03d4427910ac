# SPDX-License-Identifier: Apache-2.0
"""Squad, Dolly and Alpaca: brought once, written whole, found again."""

import json

import pytest

from nemo2.base.errors import DataError
from nemo2.data.finetuning import open as opening
from nemo2.data.finetuning.published import AlpacaDataModule, DollyDataModule, SquadDataModule
from nemo2.data.tokenizer import ByteTokenizer

SQUAD = [{"context": f"Paris {i}", "question": "Which?", "answers": {"text": ["Paris", "the city"]}} for i in range(40)]
DOLLY = [
    {"instruction": f"Name {i}", "context": "some" if i % 2 else "", "response": "yes", "category": "qa"}
    for i in range(40)
]
ALPACA = [{"prompt": f"### Instruction:\nAdd {i}\n### Output:\nx", "output": "x"} for i in range(40)]
SETS = {
    SquadDataModule: {"train": SQUAD, "validation": SQUAD[:5]},
    DollyDataModule: {"train": DOLLY},
    AlpacaDataModule: {"train": ALPACA},
}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Names and options of what was asked of the hub."""
    asked = []

    def load(name, **options):
        asked.append((name, options))
        (tmp_path / "set" / "raw").mkdir(parents=True, exist_ok=True)
        return next(held for kind, held in SETS.items() if kind.hub == name)

    monkeypatch.setattr(opening, "load", load)
    return asked


def make(kind, tmp_path, **settings):
    return kind(dataset_root=tmp_path / "set", tokenizer=ByteTokenizer(), seq_length=128, num_workers=0, **settings)


def lines(data, name):
    return [json.loads(line) for line in (data.root / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "kind, sizes", [(SquadDataModule, (38, 2, 5)), (DollyDataModule, (32, 6, 2)), (AlpacaDataModule, (32, 6, 2))]
)
def test_a_set_is_brought_once_and_cut_into_splits(hub, tmp_path, kind, sizes):
    data = make(kind, tmp_path)
    data.prepare_data()
    data.setup("fit")
    assert tuple(len(lines(data, name)) for name in ("training", "validation", "test")) == sizes
    assert len(data.train_dataloader().dataset) == sizes[0] and not (data.root / "raw").exists()
    make(kind, tmp_path).prepare_data()
    assert len(hub) == 1
    make(kind, tmp_path, force_redownload=True, delete_raw=False).prepare_data()
    assert hub[1][1]["download_mode"] == "force_redownload" and (data.root / "raw").exists()


def test_a_download_that_is_interrupted_mixes_no_two_orders(hub, tmp_path, monkeypatch):
    data = make(AlpacaDataModule, tmp_path)
    data.fetch()
    before = {path: path.read_text() for path in data.root.glob("*.jsonl")}
    again, left = make(AlpacaDataModule, tmp_path, force_redownload=True, seed=2), iter(range(len(ALPACA) - 1))
    record = again.record
    monkeypatch.setattr(again, "record", lambda held: record(held) if next(left, None) is not None else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        again.fetch()
    assert {path: path.read_text() for path in data.root.iterdir() if path.is_file()} == before


def test_the_texts(hub, tmp_path):
    data = make(SquadDataModule, tmp_path / "a")
    data.fetch()
    assert lines(data, "test")[0] == {
        "input": "Context: Paris 0 Question: Which? Answer:",
        "output": "Paris",
        "original_answers": ["Paris", "the city"],
    }
    data = make(DollyDataModule, tmp_path / "b")
    data.fetch()
    inputs = {record["input"] for record in lines(data, "training")}
    assert any(text.startswith("some\n\nName") for text in inputs) and any(text.endswith("\n\nsome") for text in inputs)
    data = make(AlpacaDataModule, tmp_path / "c")
    data.fetch()
    assert all(record["input"].endswith("\n") and "Output" not in record["input"] for record in lines(data, "training"))


def test_the_folder_has_a_place_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("NEMO_DATASETS_CACHE", str(tmp_path))
    assert SquadDataModule().root == tmp_path / "squad" and DollyDataModule().root == tmp_path / "dolly"


def test_without_the_hub_the_message_says_what_to_do(monkeypatch, tmp_path):
    class Package:
        @staticmethod
        def load_dataset(*args, **kwargs):
            raise ConnectionError("no network")

    monkeypatch.setattr(opening, "datasets_package", lambda what: Package)
    data = make(DollyDataModule, tmp_path)
    data.prepare_data()
    with pytest.raises(
        DataError,
        match="'databricks/databricks-dolly-15k' cannot be loaded.*copy the files to this machine and name their folder",
    ):
        data.setup("fit")


def test_the_standard_library_needs_no_hub(tmp_path):
    from nemo2.data.finetuning.docstrings import StdlibDocstringDataModule, documented_functions

    found = list(documented_functions(max_bytes=400_000))
    assert len(found) > 50 and len({record["input"] for record in found}) == len(found)
    assert all(record["input"].startswith("def ") and record["input"].endswith("):") for record in found)
    data = StdlibDocstringDataModule(dataset_root=tmp_path, seq_length=64, tokenizer=ByteTokenizer())
    data.download = lambda: {"train": found}
    data.fetch()
    written = [record for name in ("training", "validation", "test") for record in lines(data, name)]
    assert sorted(record["input"] for record in written) == sorted(record["input"] for record in found)
