"""Trains with Lightning, saves after every step and at the ends of epochs, and goes on from some of these checkpoints.

`python with_lightning.py ADDRESS FOLDER`. Prints JSON: what the whole run was given, and by checkpoint what followed.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

from torchvision_shim import torchvision

torchvision("transforms")  # which Lightning imports where there is one

import pytorch_lightning as lightning  # noqa: E402
import torch  # noqa: E402

from headrace import Loader  # noqa: E402

EPOCHS = 3


class Model(lightning.LightningModule):
    """Notes `[epoch, step, epoch of the batch, its indices]` of each training batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3 * 8 * 8, 2)
        self.trained: list[list[Any]] = []
        self.validated: list[list[int]] = []

    def training_step(self, batch: Any, step: int) -> Any:
        images, labels = batch
        self.trained.append([self.current_epoch, step, batch.epoch, batch.indices.tolist()])
        loss = torch.nn.functional.cross_entropy(self.layer(images.flatten(1)), labels % 2)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, step: int) -> None:
        self.validated.append(batch.indices.tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class Save(lightning.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"step-{trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"epoch-{trainer.current_epoch}.ckpt")


def fit(address: str, checkpoint: Path | None = None, **more: Any) -> Model:
    model = Model()
    with (
        Loader(address, stream="train", batch_size=10) as train,
        Loader(address, stream="val", batch_size=16) as val,
    ):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = lightning.Trainer(accelerator="cpu", max_epochs=EPOCHS, enable_checkpointing=False, **(quiet | more))
        trainer.fit(model, train, val, ckpt_path=checkpoint)
        assert trainer.num_training_batches == len(train)
    return model


def main() -> None:
    warnings.filterwarnings("error", message=".*(resum|Loader|loader).*")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    address, folder = sys.argv[1], Path(sys.argv[2])
    whole = fit(address, callbacks=[Save(folder)], num_sanity_val_steps=0)
    after = {
        name: fit(address, folder / f"{name}.ckpt").trained
        for name in ("step-3", "step-5", "step-12", "epoch-0", "epoch-1")
    }
    sys.stdout.write(json.dumps({"whole": whole.trained, "validated": whole.validated, "after": after}))


if __name__ == "__main__":
    main()
