"""What `next` hands out: a batch, and the pictures that were bad."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.errors import StateError


@dataclass(frozen=True, slots=True)
class Reject:
    """A picture whose content is bad.

    Attributes:
        index: its line of the listing, as `headrace ls` prints it.
        position: where it stands in the epoch.
        path: the file, root included, in the escaped form of `headrace ls`.
        stage: `read`, `probe`, `decode` or `worker`.
        reason: a sentence.
    """

    index: int
    position: int
    path: str
    stage: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} (index {self.index}, position {self.position}): {self.stage}: {self.reason}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Batch(Sequence[Any]):
    """A sequence of just two, `images, labels`, that knows where its rows come from. n is its number of rows.

    Attributes:
        images: a tensor, or a NumPy array, of the Loader's dtype and layout: (n, 3, H, W), or (n, H, W, 3) for NHWC. On
            the Loader's device it may be used by whatever is submitted to the stream that was current in `next`.
        labels: int64 or float32, (n,) or (n, k), of the same kind as `images`; texts are a list of str. Where rows are
            mixed it is float32 (n, classes).
        indices: NumPy int64 (n,): the line of the listing that each row shows; of the rejected one in a masked row.
        valid: NumPy bool (n,): False in a padded, masked or replaced row, which is not to be counted.
        epoch, step: which batch this is; steps count from where the Loader took up the epoch.
        rejects: the bad pictures among the positions of this batch, in order.
        extra: the listing's further columns by name, a list of n values each.
    """

    images: Any
    labels: Any
    indices: NDArray[np.int64]
    valid: NDArray[np.bool_]
    epoch: int
    step: int
    rejects: tuple[Reject, ...] = ()
    extra: Mapping[str, list[Any]] = field(default_factory=dict)
    #: For the Loader: the event after which what is on a device has arrived.
    arrival: Any = None

    def __len__(self) -> int:
        return 2

    def __getitem__(self, key: Any) -> Any:
        return (self.images, self.labels)[key]

    def __repr__(self) -> str:
        return (
            f"Batch(epoch={self.epoch}, step={self.step}, images={tuple(self.images.shape)} {self.images.dtype}, "
            f"valid={int(self.valid.sum())}, rejects={len(self.rejects)})"
        )

    def to(self, device: Any, *, non_blocking: bool = False) -> Batch:
        """This batch with images and labels on a torch device; the rest, and labels that are texts, stay on the host.

        Raises:
            StateError: the batch is made of NumPy arrays.
        """
        if isinstance(self.images, np.ndarray):
            raise StateError("a batch of NumPy arrays has no device: make the Loader with output='torch'")
        return replace(
            self,
            images=self.images.to(device, non_blocking=non_blocking),
            labels=self.labels if isinstance(self.labels, list) else self.labels.to(device, non_blocking=non_blocking),
        )
