"""A rank that trains in step with others: `torchrun with_torchrun.py ADDRESS FOLDER`, on the CPU.

Each rank writes JSON to FOLDER/RANK.json: its batches, and its state after each step.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from headrace import Loader


def main() -> None:
    address, folder = sys.argv[1:]
    # A rank with a step more than the others would wait for them.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.manual_seed(0)
    model = torch.nn.Linear(3 * 8 * 8, 2)
    record = []
    with Loader(address, stream="train", batch_size=5) as loader:  # rank and world size: torch.distributed says
        for _ in range(2):
            for batch in loader:
                images, labels = batch
                torch.nn.functional.cross_entropy(model(images.flatten(1)), labels % 2).backward()
                for weights in model.parameters():  # by hand: what torch has for it takes seconds to import
                    assert weights.grad is not None
                    dist.all_reduce(weights.grad)
                    weights.data -= 0.01 * weights.grad
                    weights.grad = None
                record.append([batch.epoch, batch.indices.tolist(), batch.valid.tolist(), loader.state_dict()])
        lengths = torch.tensor([len(loader), len(record)])
        shared = lengths.clone()
        dist.all_reduce(shared)
        assert (shared == lengths * dist.get_world_size()).all()
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(record))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
