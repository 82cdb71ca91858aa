"""Trains with Accelerate, saves its state in the middle of an epoch, and goes on from it.

`python with_accelerate.py ADDRESS FOLDER`. Prints JSON: what followed the saving, and what followed the loading.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from accelerate import Accelerator

from headrace import Loader


class Run:
    """A model, an optimiser and a Loader, as Accelerate prepares them."""

    def __init__(self, address: str) -> None:
        self.accelerator = Accelerator(cpu=True)
        loader = Loader(address, stream="train", batch_size=10)
        model = torch.nn.Linear(3 * 8 * 8, 2)
        model, optimiser, self.loader = self.accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), 0.01), loader
        )
        assert self.loader is loader, "it takes a Loader as it is"
        self.accelerator.register_for_checkpointing(loader)
        self.model, self.optimiser = model, optimiser

    def step(self, batch: Any) -> list[Any]:
        images, labels = batch
        self.accelerator.backward(torch.nn.functional.cross_entropy(self.model(images.flatten(1)), labels % 2))
        self.optimiser.step()
        self.optimiser.zero_grad()
        return [batch.epoch, batch.step, batch.indices.tolist()]

    def rest(self, batches: Any) -> list[list[Any]]:
        """Of this epoch, and the next one."""
        return [self.step(batch)[::2] for epoch in (batches, self.loader) for batch in epoch]


def main() -> None:
    address, folder = sys.argv[1:]
    run = Run(address)
    batches = iter(run.loader)
    for _ in range(3):
        run.step(next(batches))
    run.accelerator.save_state(folder)
    followed = run.rest(batches)
    run.loader.close()
    again = Run(address)
    again.accelerator.load_state(folder)
    resumed = again.rest(again.loader)
    again.loader.close()
    sys.stdout.write(json.dumps({"followed": followed, "resumed": resumed}))


if __name__ == "__main__":
    main()
