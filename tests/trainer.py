"""A trainer that writes down what it gets: `python trainer.py SOURCE RECORD [options]`.

SOURCE is an address, several with commas in between, or a YAML file. One JSON line per batch goes to RECORD, with a
digest of each picture and the state after the batch. A record that exists is gone on with: from the
last whole line's state. SIGTERM ends it after the batch that it is at.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

from headrace import Batch, Loader, tcp

#: Bytes of the last line, and of half a one behind it, at most.
_LONGEST_LINE = 1 << 22


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source")
    parser.add_argument("record", type=Path)
    parser.add_argument("--stream", default=None)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--last-batch", default=None)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--prefetch", type=int, default=2)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of pretended training per batch")
    parser.add_argument("--steps", type=int, default=None, help="end after so many batches of this run")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--on-bad-sample", default=None)
    parser.add_argument("--secret-key", default=None, help="for tcp, and --server-key the server's")
    parser.add_argument("--server-key", default=None)
    parser.add_argument("--silence", type=int, default=None, help="milliseconds after which a daemon over tcp is gone")
    args = parser.parse_args()
    ends: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ends.append(number))
    if args.silence is not None:
        tcp.HEARTBEAT, tcp.CONTROL_SILENCE, tcp.DATA_SILENCE = args.silence // 6, args.silence, 2 * args.silence
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    last = cut_to_whole_lines(args.record)
    with (
        Loader(
            args.source.split(",") if "," in args.source else args.source,
            stream=args.stream,
            batch_size=args.batch_size,
            rank=args.rank,
            world_size=args.world_size,
            last_batch=args.last_batch,
            on_bad_sample=args.on_bad_sample,
            prefetch=args.prefetch,
            output="numpy",
            dtype="uint8",
            layout="NHWC",
            transport=args.transport,
            curve={"secret_key": args.secret_key, "server": args.server_key} if args.secret_key else None,
        ) as loader,
        args.record.open("ab") as record,
    ):
        if last:
            loader.load_state_dict(json.loads(last)["state"])
        taken = 0
        while loader.state_dict()["epoch"] < args.epochs:
            for batch in loader:
                record.write(json.dumps(described(batch, loader.state_dict())).encode() + b"\n")
                record.flush()
                taken += 1
                if taken == args.steps or ends:
                    return
                time.sleep(args.pause)


def described(batch: Batch, state: dict[str, Any]) -> dict[str, Any]:
    images, labels = batch
    return {
        "epoch": batch.epoch,
        "step": batch.step,
        "indices": batch.indices.tolist(),
        "labels": labels if isinstance(labels, list) else labels.tolist(),
        "valid": batch.valid.tolist(),
        "pictures": [hashlib.sha256(image).hexdigest()[:16] for image in images],
        "rejects": [[reject.index, reject.position, reject.stage] for reject in batch.rejects],
        "state": state,
    }


def cut_to_whole_lines(record: Path) -> bytes:
    """The last whole line; what was written of another one is cut off. A kill at any moment leaves the others."""
    with record.open("a+b") as file:
        start = max(0, file.seek(0, os.SEEK_END) - _LONGEST_LINE)
        file.seek(start)
        tail = file.read()
        end = tail.rfind(b"\n") + 1
        file.truncate(start + end)
    return tail[:end].rstrip(b"\n").rpartition(b"\n")[2]


def whole_lines(record: Path) -> list[bytes]:
    """A line that a kill cut short is none."""
    if not record.exists():
        return []
    return [line for line in record.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


if __name__ == "__main__":
    main()
