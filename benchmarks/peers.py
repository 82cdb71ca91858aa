"""What Headrace is compared with: each peer as its users write it, the same photos in and the same batches out.

A peer is what a trainer iterates, without end, and where it has one the server beside it. Everything is imported only
by who needs it: TensorFlow and torch do not meet in one process.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import common
import numpy as np

Batches = Iterator[tuple[Any, Any]]


@dataclass(frozen=True)
class Setting:
    """
    Attributes:
        folder: class folders of JPEGs.
        workers: processes or threads of this trainer, or of its server.
        trainers: how many there are.
        address: of the server, where there is one.
        number: of this trainer.
        prepared: where files lie that were made before.
    """

    folder: Path
    batch_size: int
    workers: int
    trainers: int = 1
    address: str = ""
    number: int = 0
    prepared: Path | None = None


@dataclass(frozen=True)
class Peer:
    """
    Attributes:
        batches: what a trainer iterates: pictures of float32, NCHW or NHWC, and labels, all batches of one size.
        serve: for a server: what it does once it has said its address, as long as it lives.
        said: how the table explains it.
    """

    batches: Callable[[Setting], Batches]
    said: str
    serve: Callable[[Setting], tuple[str, Callable[[], object]]] | None = None


# -- torch ----------------------------------------------------------------------------------------------------------


def pictures(folder: Path, *, levels: bool = False, size: int = common.SIZE) -> Any:
    """torchvision's data set of a folder; as uint8 `levels` or as normalised float32."""
    common.torchvision_operators()
    datasets, t = import_module("torchvision.datasets"), import_module("torchvision.transforms")
    chain = [t.RandomResizedCrop(size), t.RandomHorizontalFlip()]
    chain += [t.PILToTensor()] if levels else [t.ToTensor(), t.Normalize(common.MEAN, common.STD)]
    return datasets.ImageFolder(folder, t.Compose(chain))


def _loader(setting: Setting, *, levels: bool = False) -> Any:
    return import_module("torch.utils.data").DataLoader(
        pictures(setting.folder, levels=levels),
        batch_size=setting.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=setting.workers,
        persistent_workers=True,
    )


def data_loader(setting: Setting) -> Batches:
    return forever(_loader(setting))


def forever(epochs: Iterable[Any]) -> Iterator[Any]:
    while True:
        yield from epochs


# -- DALI -----------------------------------------------------------------------------------------------------------


def bare_dali(setting: Setting) -> Batches:
    """What DALI's users write: it decodes the random window alone, resizes, mirrors and normalises in one."""
    os.environ.setdefault("DALI_DISABLE_NVML", "1")
    dali, fn, types = (import_module(f"nvidia.dali{name}") for name in ("", ".fn", ".types"))
    plugin = import_module("nvidia.dali.plugin.pytorch")

    @dali.pipeline_def(batch_size=setting.batch_size, num_threads=setting.workers, device_id=None, seed=0)
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(file_root=str(setting.folder), random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(encoded, device="cpu", random_area=(0.08, 1.0))
        images = fn.resize(images, size=[common.SIZE, common.SIZE], antialias=True)
        return fn.crop_mirror_normalize(
            images,
            mirror=fn.random.coin_flip(),
            mean=[255 * value for value in common.MEAN],
            std=[255 * value for value in common.STD],
            dtype=types.FLOAT,
            output_layout="CHW",
        ), labels

    made = plugin.DALIGenericIterator(
        pipeline(),
        ["images", "labels"],
        reader_name="reader",
        last_batch_policy=plugin.LastBatchPolicy.DROP,
        auto_reset=True,
    )
    for [batch] in forever(made):
        yield batch["images"], batch["labels"]


# -- tf.data --------------------------------------------------------------------------------------------------------


def _tensorflow() -> Any:
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    return import_module("tensorflow")


def _dataset(setting: Setting, *, antialias: bool = True) -> Any:
    tf = _tensorflow()
    files = sorted(setting.folder.glob("*/*"))
    names = sorted({file.parent.name for file in files})
    labels = [names.index(file.parent.name) for file in files]
    mean, std = (tf.constant([255 * value for value in values]) for values in (common.MEAN, common.STD))

    def decode(file: Any, label: Any) -> tuple[Any, Any]:
        data = tf.io.read_file(file)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(data),
            tf.zeros([1, 0, 4]),
            area_range=(0.08, 1.0),
            aspect_ratio_range=(3 / 4, 4 / 3),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.concat([begin[:2], size[:2]], 0)
        image = tf.io.decode_and_crop_jpeg(data, window, channels=3, dct_method="INTEGER_ACCURATE")
        image = tf.image.resize(image, [common.SIZE, common.SIZE], antialias=antialias)
        return (tf.image.random_flip_left_right(image) - mean) / std, label

    listed = tf.data.Dataset.from_tensor_slices(([str(file) for file in files], labels))
    shuffled = listed.shuffle(len(files)).repeat()
    decoded = shuffled.map(decode, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
    return decoded.batch(setting.batch_size, drop_remainder=True)


def _arrays(dataset: Any) -> Batches:
    for images, labels in dataset.prefetch(_tensorflow().data.AUTOTUNE):
        yield images.numpy(), labels.numpy()


def tf_data(setting: Setting) -> Batches:
    return _arrays(_dataset(setting))


def tf_data_aliased(setting: Setting) -> Batches:
    return _arrays(_dataset(setting, antialias=False))


def tf_service(setting: Setting) -> Batches:
    service = _tensorflow().data.experimental.service
    shared = {}
    if setting.trainers > 1:  # all of them get what is in its window, as one job
        shared = {"cross_trainer_cache": service.CrossTrainerCache(trainer_id=str(setting.number)), "job_name": "all"}
    return _arrays(
        _dataset(setting).apply(
            service.distribute(service.ShardingPolicy.OFF, setting.address, compression=None, **shared)
        )
    )


def serve_tf(setting: Setting) -> tuple[str, Callable[[], object]]:
    service = _tensorflow().data.experimental.service
    dispatcher = service.DispatchServer(service.DispatcherConfig(port=0))
    worker = service.WorkerServer(service.WorkerConfig(dispatcher_address=dispatcher.target.partition("://")[2]))

    def work() -> None:
        worker.join()
        dispatcher.join()

    return dispatcher.target, work


# -- TensorSocket ---------------------------------------------------------------------------------------------------

#: Batches that it joins to one: as few as it works with, instead of 8. On the CPU each slice of them is sent with the
#: whole, so that 8 batches of 64 in float32 make a message of 5 GB for two trainers, which no machine here bears.
_JOINED = 2


def serve_tensorsocket(setting: Setting) -> tuple[str, Callable[[], object]]:
    ports = _free_ports(4)
    loader = _loader(setting, levels=True)
    producer = import_module("tensorsocket").TensorProducer(
        loader,
        port=ports[0],
        ack_port=ports[1],
        heart_ports=(ports[2], ports[3]),
        rubber_band_pct=max(0.02, 8 / len(loader)),
        producer_batch_size=_JOINED,
    )

    def produce() -> None:
        while True:
            for _ in producer:
                pass

    return ",".join(map(str, ports)), produce


def tensorsocket(setting: Setting) -> Batches:
    torch = import_module("torch")
    data, ack, beat, pulse = map(int, setting.address.split(","))
    consumer = import_module("tensorsocket").TensorConsumer(
        port=data, ack_port=ack, heart_ports=(beat, pulse), batch_size=setting.batch_size
    )
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (common.MEAN, common.STD))
    for images, labels in forever(consumer):
        yield images.to(torch.float32).div_(255).sub_(mean).div_(std), labels


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("", 0))
        return [int(one.getsockname()[1]) for one in taken]


# -- FFCV -----------------------------------------------------------------------------------------------------------


def write_beton(folder: Path, file: Path, *, raw: bool) -> None:
    """FFCV's own file of the photos: JPEG of quality 90 again, at most 512 pixels; or levels, at most 256."""
    common.torchvision_operators()
    fields, writer = import_module("ffcv.fields"), import_module("ffcv.writer")
    how: dict[str, Any] = {"write_mode": "raw", "max_resolution": 256}
    if not raw:
        how = {"write_mode": "jpg", "max_resolution": 512, "jpeg_quality": 90}
    made = writer.DatasetWriter(
        str(file), {"image": fields.RGBImageField(**how), "label": fields.IntField()}, num_workers=1
    )
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bar
        made.from_indexed_dataset(import_module("torchvision.datasets").ImageFolder(folder))


def ffcv_jpeg(setting: Setting) -> Batches:
    return _ffcv(setting, "jpeg.beton")


def ffcv_raw(setting: Setting) -> Batches:
    return _ffcv(setting, "raw.beton")


def _ffcv(setting: Setting, file: str) -> Batches:
    loader, decoders, transforms = (
        import_module(f"ffcv.{name}") for name in ("loader", "fields.decoders", "transforms")
    )
    assert setting.prepared is not None
    mean, std = (255 * np.array(values) for values in (common.MEAN, common.STD))
    made = loader.Loader(
        str(setting.prepared / file),
        batch_size=setting.batch_size,
        num_workers=setting.workers,
        order=loader.OrderOption.RANDOM,
        drop_last=True,
        os_cache=True,
        pipelines={
            "image": [
                decoders.RandomResizedCropRGBImageDecoder((common.SIZE, common.SIZE)),
                transforms.RandomHorizontalFlip(),
                transforms.NormalizeImage(mean, std, np.float32),
                transforms.ToTensor(),
                transforms.ToTorchImage(),
            ],
            "label": [decoders.IntDecoder(), transforms.ToTensor(), transforms.Squeeze()],
        },
    )
    return forever(made)


PEERS: Mapping[str, Peer] = {
    "DataLoader": Peer(
        data_loader,
        "torch's, over torchvision's ImageFolder, RandomResizedCrop, RandomHorizontalFlip, ToTensor and Normalize "
        "(Pillow), its workers persistent",
    ),
    "bare DALI": Peer(
        bare_dali,
        "a pipeline in the trainer's own process: file reader, decoding of the random window alone, resize, mirror "
        "and normalise in one; it cuts before it resizes, reads files unchecked and ends at the first bad one",
    ),
    "tf.data": Peer(
        tf_data,
        "in the trainer's own process: decode_and_crop_jpeg, antialiased resize, flip and normalise in one parallel "
        "map, tuned by itself, in any order; it cuts before it resizes",
    ),
    "tf.data, aliased": Peer(tf_data_aliased, "the same without antialiasing, so other pictures than the others'"),
    "tf.data service": Peer(
        tf_service,
        "the same by one dispatcher and one worker in a process of theirs, uncompressed; several trainers share it "
        "by its cross-trainer cache, out of which a slow one skips what it missed",
        serve_tf,
    ),
    "TensorSocket": Peer(
        tensorsocket,
        "its producer over the same DataLoader, of uint8, which the trainers cast and normalise; rubber_band_pct 8 / "
        "number of batches, two batches joined to one. Without a GPU it sends pictures by pickle, each slice with the "
        "whole, which float32 and its usual 8 batches make far slower",
        serve_tensorsocket,
    ),
    "FFCV, JPEG": Peer(
        ffcv_jpeg,
        "its loader with as many threads, on a file of its own made before: JPEG of quality 90, at most 512 pixels; "
        "resized by OpenCV's area filter",
    ),
    "FFCV, raw": Peer(ffcv_raw, "the same on levels, at most 256 pixels: nothing is decoded"),
}
