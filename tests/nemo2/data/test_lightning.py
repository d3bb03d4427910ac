# SPDX-License-Identifier: Apache-2.0
"""The data modules inside Lightning's own loop: what is trained on before and after a resume."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.strategies import SingleDeviceStrategy

from nemo2.data.mock import MockDataModule
from nemo2.data.tokenizer import NullTokenizer


class TransformingStrategy(SingleDeviceStrategy):
    """Does with loaders what MegatronStrategy does, on Lightning's simplest strategy."""

    def process_dataloader(self, dataloader):
        return self.lightning_module.trainer.datamodule.data_sampler.transform_dataloader(dataloader)


class Recorder(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained, self.consumed, self.validated = [], [], []

    def training_step(self, batch, batch_idx):
        self.trained.append(batch["tokens"].tolist())
        self.consumed.append(self.trainer.datamodule.data_sampler.consumed_samples)
        return self.layer(batch["tokens"][:1, :1].float()).sum()

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch["tokens"].tolist())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Predictor(Recorder):
    def predict_step(self, batch, batch_idx):
        return batch["tokens"]


QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}


def mock_data(**settings):
    sizes = {"seq_length": 4, "micro_batch_size": 2, "global_batch_size": 8, "num_workers": 0}
    return MockDataModule(**sizes | settings)


def fit(directory, steps, *, ckpt_path=None, data=None, **trainer_arguments):
    settings = {"tokenizer": NullTokenizer(10_000), "num_train_samples": 64, "num_val_samples": 16, **(data or {})}
    model = Recorder()
    trainer = pl.Trainer(
        max_steps=steps,
        strategy=TransformingStrategy(device="cpu"),
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=str(directory),
        **QUIET,
        **trainer_arguments,
    )
    trainer.fit(model, datamodule=mock_data(**settings), ckpt_path=ckpt_path)
    path = directory / f"step{trainer.global_step}.ckpt"
    trainer.save_checkpoint(path)
    return model, path


@pytest.mark.filterwarnings("ignore:.*num_workers.*", "ignore:.*does not have many workers.*", "ignore:.*log_every_n.*")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*", "error:.*dataloader is not resumable.*")
class TestFit:
    # 64 samples are 8 steps of 8; 11 steps go into a second pass. The ramp-up is 4, 4, 4, then 8.
    @pytest.mark.parametrize("rampup", [None, [4, 4, 12]])
    @pytest.mark.parametrize("stop", [3, 8, 9])
    def test_a_resumed_run_sees_what_the_uninterrupted_one_saw(self, tmp_path, stop, rampup):
        data = {"rampup_batch_size": rampup}
        whole, _ = fit(tmp_path, 11, data=data)
        begun, checkpoint = fit(tmp_path, stop, data=data)
        resumed, _ = fit(tmp_path, 11, data=data, ckpt_path=checkpoint)
        assert begun.trained + resumed.trained == whole.trained
        assert begun.consumed + resumed.consumed == whole.consumed
        sizes = [len(step) for step in whole.trained]
        assert whole.consumed == [sum(sizes[:i]) for i in range(11)]

    def test_workers_that_read_ahead_lose_nothing_when_epochs_are_cut_short(self, tmp_path):
        whole, _ = fit(tmp_path, 8)
        cut, _ = fit(tmp_path, 8, data={"num_workers": 1}, limit_train_batches=3)
        assert cut.trained == whole.trained

    @pytest.mark.parametrize("limit", [{"limit_train_batches": 3}, {"limit_train_batches": 0.4}])
    def test_each_epoch_that_is_cut_short_ends_with_its_validation(self, tmp_path, limit):
        model, _ = fit(tmp_path, 12, limit_val_batches=1, **limit)
        assert len(model.validated) == 4

    @pytest.mark.parametrize("batches", [2, 0.35])
    def test_overfitting_repeats_the_first_batches(self, tmp_path, batches):
        whole, _ = fit(tmp_path, 2)
        options = {"overfit_batches": batches, "data": {"num_val_samples": 64}}
        model, _ = fit(tmp_path, 6, **options)
        assert model.trained == whole.trained * 3
        stopped, checkpoint = fit(tmp_path, 3, **options)
        resumed, _ = fit(tmp_path, 6, **options, ckpt_path=checkpoint)
        assert stopped.trained + resumed.trained == model.trained

    def test_validation_runs_the_same_batches_each_time(self, tmp_path):
        model, _ = fit(tmp_path, 4, val_check_interval=2, check_val_every_n_epoch=None, limit_val_batches=2)
        assert model.validated[:2] == model.validated[2:]
        assert [len(batch) for batch in model.validated] == [8] * 4

    def test_prediction_has_whole_batches_and_its_writer_knows_their_samples(self, tmp_path):
        batches = []

        class Writer(BasePredictionWriter):
            def write_on_batch_end(self, trainer, module, prediction, indices, batch, batch_idx, dataloader_idx):
                batches.append((len(batch["tokens"]), indices))

        data = mock_data(num_val_samples=18)
        data.predict_dataloader = data.val_dataloader
        strategy = TransformingStrategy(device="cpu")
        trainer = pl.Trainer(strategy=strategy, callbacks=[Writer("batch")], default_root_dir=str(tmp_path), **QUIET)
        trainer.predict(Predictor(), datamodule=data)
        assert batches == [(8, list(range(8))), (8, list(range(8, 16)))]

    def test_resuming_a_finished_run_does_nothing(self, tmp_path):
        _, checkpoint = fit(tmp_path, 8)
        again, _ = fit(tmp_path, 8, ckpt_path=checkpoint)
        assert again.trained == []
