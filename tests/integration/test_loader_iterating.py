"""The Loader as an iterable: epochs, state, ranks, policies, all against a scripted daemon."""

from __future__ import annotations

import copy
import gc
import json
import logging
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted import Do, ScriptedDaemon, index_of, level, wait_until

from headrace import Loader
from headrace.batch import Batch
from headrace.errors import ConfigError, SampleError, StateError, TooManyRejects
from headrace.output import Output

SAMPLES = 40

Serve = Callable[..., ScriptedDaemon]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    daemons: list[ScriptedDaemon] = []

    def make(**script: Any) -> ScriptedDaemon:
        daemons.append(ScriptedDaemon(tmp_path / f"{len(daemons)}.sock", **script))
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.close()


def open_loader(daemon: ScriptedDaemon, **arguments: Any) -> Loader:
    usual: dict[str, Any] = {"batch_size": 8, "output": "numpy", "dtype": "uint8", "timeout": 20}
    return Loader(daemon.address, **(usual | arguments))


def check(batch: Batch, positions: list[int], epoch: int = 0, samples: int = SAMPLES) -> None:
    """The valid rows show just these positions."""
    assert batch.epoch == epoch
    assert batch.indices[batch.valid].tolist() == [index_of(p, samples) for p in positions]
    assert batch.labels[batch.valid].tolist() == [index_of(p, samples) // 10 for p in positions]
    levels = np.array([level(epoch, p) for p in positions], np.uint8)
    assert (batch.images[batch.valid] == levels[:, None, None, None]).all()


def test_an_epoch_delivers_every_position_once_in_order(serve: Serve) -> None:
    daemon = serve()
    with open_loader(daemon) as loader:
        assert (len(loader), loader.num_samples, loader.classes, loader.stream) == (5, 40, ["cat", "dog"], "train")
        for epoch in range(3):
            for step, batch in enumerate(loader):
                assert batch.step == step
                check(batch, list(range(8 * step, 8 * step + 8)), epoch)
            assert step == 4
    assert daemon.asked[:30] == [(epoch, chunk) for epoch in range(3) for chunk in range(10)]


def test_the_next_epoch_is_fetched_before_the_last_batches_are_taken(serve: Serve) -> None:
    daemon = serve()
    with open_loader(daemon, prefetch=3) as loader:
        batches = iter(loader)
        next(batches)
        wait_until(lambda: len(daemon.asked) == 10)  # batches 1 to 4: three that are ready, and one in the making
        next(batches)
        wait_until(lambda: len(daemon.asked) == 12)
        assert daemon.asked[:10] == [(0, chunk) for chunk in range(10)]
        assert daemon.asked[10:] == [(1, 0), (1, 1)]
        for _ in range(3):
            next(batches)
        assert loader.state_dict()["epoch"] == 1 and set(loader.stats()["epochs"]) == {0}
        loader.set_epoch(1)
        for step, batch in enumerate(loader):
            check(batch, list(range(8 * step, 8 * step + 8)), 1)
        assert daemon.asked.count((1, 0)) == 1


def test_what_was_fetched_ahead_is_dropped_when_the_trainer_goes_elsewhere(serve: Serve) -> None:
    daemon = serve()
    with open_loader(daemon) as loader:
        assert len(list(loader)) == 5
        wait_until(lambda: (1, 0) in daemon.asked)
        loader.set_epoch(7)
        for step, batch in enumerate(loader):
            check(batch, list(range(8 * step, 8 * step + 8)), 7)
        assert loader.stats()["epochs"].keys() == {0, 7}


def test_images_and_labels_unpack(serve: Serve) -> None:
    with open_loader(serve()) as loader:
        for images, labels in loader:
            assert images.shape == (8, 3, 2, 3)
            assert labels.shape == (8,)


def test_every_lease_is_released(serve: Serve) -> None:
    daemon = serve(slots=1, window=9)
    with open_loader(daemon, batch_size=17) as loader:
        for _ in range(3):
            assert sum(len(b.indices) for b in loader) == SAMPLES
    daemon.wait_released()


def test_iter_begins_nothing(serve: Serve) -> None:
    daemon = serve()
    with open_loader(daemon) as loader:
        for _ in range(3):
            iter(loader)
        assert daemon.gets == []
        unused = iter(loader)
        check(next(iter(loader)), list(range(8)))
        del unused


def test_break_ends_the_epoch_and_takes_back_what_was_asked_for(serve: Serve) -> None:
    daemon = serve(behave=lambda get: Do.NOTHING if get.epoch == 0 and get.chunk > 2 else Do.ANSWER)
    with open_loader(daemon) as loader:
        for batch in loader:
            check(batch, list(range(8)))
            wait_until(lambda: (0, 3) in daemon.asked)
            break
        batches = list(loader)
        assert [b.epoch for b in batches] == [1] * 5
        check(batches[0], list(range(8)), epoch=1)
    assert daemon.cancelled


def test_late_chunks_of_a_broken_epoch_are_released_and_never_handed_out(serve: Serve) -> None:
    daemon = serve(slots=2, window=9)
    with open_loader(daemon, prefetch=4) as loader:
        for epoch in range(6):
            for batch in loader:
                check(batch, list(range(8)), epoch)
                break
        assert [b.epoch for b in loader] == [6] * 5
    daemon.wait_released()


def test_two_live_iterators_are_an_error(serve: Serve) -> None:
    with open_loader(serve()) as loader:
        first, second = iter(loader), iter(loader)
        next(first)
        with pytest.raises(StateError, match="two iterators"):
            next(second)
        check(next(first), list(range(8, 16)))
        del first
        gc.collect()
        check(next(second), list(range(8)), epoch=1)


def test_an_iterator_that_is_through_stays_so_and_does_not_count_as_live(serve: Serve) -> None:
    with open_loader(serve()) as loader:
        first = iter(loader)
        assert len(list(first)) == 5
        assert list(first) == []
        exact = iter(loader)
        for _ in range(len(loader)):
            next(exact)  # StopIteration is never seen
        assert [b.epoch for b in loader] == [2] * 5


def test_the_state_after_the_last_batch_is_the_next_epochs_before_stopiteration(serve: Serve) -> None:
    with open_loader(serve()) as loader:
        batches = iter(loader)
        for step in range(5):
            assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (0, 8 * step)
            assert loader.remaining == 5 - step
            next(batches)
        assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)


def test_a_state_is_plain_data_and_goes_on_with_the_very_next_batch(serve: Serve) -> None:
    daemon = serve()
    with open_loader(daemon) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = json.loads(json.dumps(loader.state_dict()))
        assert pickle.loads(pickle.dumps(state)) == state
    with open_loader(daemon) as loader:
        loader.load_state_dict(state)
        loader.set_epoch(0)  # the loaded epoch: the position stays
        assert loader.remaining == 2
        first, second = loader
        check(first, list(range(24, 32)))
        check(second, list(range(32, 40)))
        assert [b.epoch for b in loader] == [1] * 5


def test_a_state_saved_after_break_goes_on_where_it_broke(serve: Serve) -> None:
    with open_loader(serve()) as loader:
        for batch in loader:
            if batch.step == 1:
                break
        state = loader.state_dict()
        loader.load_state_dict(state)
        check(next(iter(loader)), list(range(16, 24)))


def test_a_state_of_one_rank_goes_on_with_several(serve: Serve) -> None:
    daemon = serve()
    with open_loader(daemon, batch_size=4) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        state = loader.state_dict()
    seen: list[int] = []
    for rank in range(3):
        with open_loader(daemon, batch_size=5, rank=rank, world_size=3) as loader:
            loader.load_state_dict(state)
            assert loader.remaining == 2
            assert len(loader) == 3
            seen += [i for b in loader for i in b.indices[b.valid].tolist()]
    assert sorted(seen) == sorted(index_of(p, SAMPLES) for p in range(16, 40))


def test_set_epoch_with_another_epoch_begins_it(serve: Serve) -> None:
    with open_loader(serve()) as loader:
        loader.load_state_dict(loader.state_dict() | {"position": 16})
        loader.set_epoch(3)
        check(next(iter(loader)), list(range(8)), epoch=3)


def test_set_epoch_each_time_is_the_same_as_not_at_all(serve: Serve) -> None:
    with open_loader(serve()) as loader:
        for epoch in range(3):
            loader.set_epoch(epoch)
            assert [b.epoch for b in loader] == [epoch] * 5
        for epoch in range(3, 6):
            loader.set_epoch(epoch)
            for batch in loader:
                check(batch, list(range(8)), epoch)
                break


def test_lightnings_way_to_set_the_epoch_is_the_same(serve: Serve) -> None:
    with open_loader(serve()) as loader:
        sampler = loader.batch_sampler
        assert sampler.batch_size == 8
        loader.load_state_dict(loader.state_dict() | {"position": 16})
        sampler.sampler.set_epoch(0)  # as after a checkpoint in the middle
        check(next(iter(loader)), list(range(16, 24)))
        sampler.sampler.set_epoch(3)  # as after one at an epoch's end
        check(next(iter(loader)), list(range(8)), epoch=3)


def test_set_epoch_after_break_gives_that_epoch_from_its_beginning(serve: Serve) -> None:
    with open_loader(serve()) as loader:
        for _ in loader:
            break
        loader.set_epoch(0)
        check(next(iter(loader)), list(range(8)))


def test_set_epoch_and_load_state_dict_end_an_iteration_that_is_under_way(serve: Serve) -> None:
    with open_loader(serve()) as loader:
        batches = iter(loader)
        next(batches)
        loader.set_epoch(0)
        check(next(batches), list(range(8, 16)))
        loader.set_epoch(5)
        with pytest.raises(StateError, match="ended by set_epoch, load_state_dict or another one"):
            next(batches)
        check(next(iter(loader)), list(range(8)), epoch=5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"order": "other", "samples": 99}, "99 samples"),
        ({"order": "other", "data": "other"}, "files or labels"),
        ({"order": "other", "seed": 7}, "seed is 7"),
        ({"order": "other"}, "shuffle"),
        ({"position": 40}, "position: 40 must be a whole number from 0 on and below 40"),
        ({"position": -1}, "position: -1 must"),
        ({"epoch": 1.5}, "epoch: 1.5 is not a whole number"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(serve: Serve, change: dict[str, Any], named: str) -> None:
    with open_loader(serve()) as loader:
        with pytest.raises(StateError, match=named):
            loader.load_state_dict(loader.state_dict() | change)
        check(next(iter(loader)), list(range(8)))


def test_something_that_is_no_state_is_refused(serve: Serve) -> None:
    with open_loader(serve()) as loader, pytest.raises(StateError, match="'position' is missing"):
        loader.load_state_dict({"epoch": 1})


def test_a_state_with_other_pixels_is_taken_with_a_warning(serve: Serve) -> None:
    with open_loader(serve()) as loader:
        with pytest.warns(UserWarning, match="saved with other pictures"):
            loader.load_state_dict(loader.state_dict() | {"position": 8, "pixels": "other"})
        check(next(iter(loader)), list(range(8, 16)))


def test_the_ranks_see_each_position_once_and_pad_with_flagged_copies(serve: Serve) -> None:
    daemon = serve(samples=26)
    seen: list[int] = []
    for rank in range(4):
        with open_loader(daemon, batch_size=6, rank=rank, world_size=4) as loader:
            batches = list(loader)
            assert [len(b.indices) for b in batches] == [6, 6]
            seen += [i for b in batches for i in b.indices[b.valid].tolist()]
            counts = loader.stats()["epochs"][0]
            assert counts["delivered"] + counts["extra"] == 12
    assert sorted(seen) == list(range(26))


def test_the_rank_is_looked_up_when_it_is_first_needed(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    with open_loader(serve()) as loader:
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "5")
        assert len(loader) == 1
        monkeypatch.setenv("RANK", "2")
        check(next(iter(loader)), list(range(8, 16)))


def test_last_batch_defaults_to_partial_for_one_rank_and_pad_for_several(serve: Serve) -> None:
    daemon = serve(samples=10)
    with open_loader(daemon) as loader:
        assert [len(b.indices) for b in loader] == [8, 2]
    with open_loader(daemon, rank=0, world_size=2, batch_size=4) as loader:
        assert [len(b.indices) for b in loader] == [4, 4]


def test_drop_that_leaves_no_step_is_an_error_when_it_is_first_needed(serve: Serve) -> None:
    with open_loader(serve(), batch_size=21, rank=0, world_size=2, last_batch="drop") as loader:
        with pytest.raises(ConfigError, match="40 samples"):
            len(loader)
        with pytest.raises(ConfigError, match="40 samples"):
            next(iter(loader))


def test_stats_account_for_every_position(serve: Serve) -> None:
    with open_loader(serve(samples=42, bad={3, 11}), last_batch="drop") as loader:
        list(loader)
        stats = loader.stats()
    assert stats["transport"] == "shm"
    epoch = stats["epochs"][0]
    assert (epoch["delivered"], epoch["rejected"], epoch["dropped"], epoch["extra"]) == (38, 2, 2, 0)
    assert epoch["images_per_s"] > 0
    assert 0 < epoch["wait_share"] <= 1


def test_skipped_pictures_are_named_once_in_the_log_with_what_would_keep_the_shape(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    with open_loader(serve(bad={3, 11})) as loader, caplog.at_level(logging.WARNING, "headrace"):
        for _ in range(2):
            list(loader)
    assert caplog.text.count("'mask' or 'replace'") == 1
    assert "/data/3.jpg" in caplog.text
    assert "/data/11.jpg" in caplog.text


def test_the_streams_policy_counts_unless_the_caller_says_otherwise(serve: Serve) -> None:
    daemon = serve(bad={3}, on_bad_sample="mask")
    with open_loader(daemon) as loader:
        assert len(next(iter(loader)).indices) == 8
    with open_loader(daemon, on_bad_sample="skip") as loader:
        assert len(next(iter(loader)).indices) == 7


def test_replacements_come_from_the_table_of_draws(serve: Serve) -> None:
    from headrace.draws import uniforms

    with open_loader(serve(bad={3}, seed=9), on_bad_sample="replace") as loader:
        batch = next(iter(loader))
    position = next(p for p in (int(u * SAMPLES) for u in uniforms(9, 0, "replace", 3, 1, 16)[0]) if p != 3)
    assert batch.indices[3] == index_of(position, SAMPLES)
    assert (batch.images[3] == level(0, position)).all()
    assert not batch.valid[3]


def test_raise_leaves_the_position_and_carries_the_reject(serve: Serve) -> None:
    with open_loader(serve(bad={11}), on_bad_sample="raise") as loader:
        batches = iter(loader)
        next(batches)
        for iterator in (batches, batches, None):
            if iterator is None:
                del batches  # a new iterator goes on at the same place
                iterator = iter(loader)
            with pytest.raises(SampleError, match=r"/data/11\.jpg") as caught:
                next(iterator)
            assert caught.value.reject is not None
            assert caught.value.reject.position == 11
            assert loader.state_dict()["position"] == 8


def test_too_many_rejects_end_the_epoch_with_an_error_that_stays(serve: Serve) -> None:
    with open_loader(serve(samples=100, bad=range(20, 40)), max_bad=0.01) as loader:
        seen = 0
        with pytest.raises(TooManyRejects, match="max_bad=0.01"):
            for batch in loader:
                seen += int(batch.valid.sum())
        assert seen == 20
        with pytest.raises(TooManyRejects):
            next(iter(loader))
        loader.set_epoch(1)
        with pytest.raises(TooManyRejects):
            list(loader)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC", "channels_last"])
def test_the_streams_output_counts_unless_the_caller_changes_it(serve: Serve, layout: str) -> None:
    torch = pytest.importorskip("torch")
    daemon = serve(output=Output("float16", "NHWC", (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)))
    with Loader(daemon.address, batch_size=8) as loader:
        images, labels = next(iter(loader))
    assert images.dtype is torch.float16
    assert images.shape == (8, 2, 3, 3)
    assert labels.dtype is torch.int64
    with Loader(daemon.address, batch_size=8, dtype="bfloat16", layout=layout, mean=[0, 0, 0]) as loader:
        changed = next(iter(loader)).images
    assert changed.dtype is torch.bfloat16
    assert float(changed.flatten()[0]) == pytest.approx(level(0, 0) / 255 / 0.25, rel=0.01)
    with Loader(daemon.address, batch_size=8, dtype="uint8") as loader:
        assert int(next(iter(loader)).images[0, 0, 0, 0]) == level(0, 0)


def test_kept_batches_keep_their_pixels_while_memory_is_reused(serve: Serve) -> None:
    daemon = serve(size=(64, 64), samples=80)
    with open_loader(daemon, dtype="float32", batch_size=8) as loader:
        addresses: set[int] = set()
        kept: list[tuple[int, Any]] = []
        for epoch in range(4):
            for batch in loader:
                addresses.add(batch.images.__array_interface__["data"][0])
                if batch.step % 4 == 0:
                    kept.append((level(epoch, 8 * batch.step + 2), batch.images[2, 1]))
        for value, view in kept:
            assert (view == np.float32(value) * np.float32(1 / 255)).all()
    assert len(addresses) < 30


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"device": "meta"}, "device: meta is not available; use None, 'cpu' or 'cuda'"),
        ({"transport": "udp"}, "transport: 'udp' is not one of auto, shm, tcp"),
        ({"transport": "udp"}, "transport: 'udp' is not one of auto, shm"),
        ({"batch_size": 0}, "batch_size: 0 must be"),
        ({"batch_size": 2.5}, "batch_size: 2.5 is not a whole number"),
        ({"prefetch": -1}, "prefetch: -1"),
        ({"last_batch": "wrap"}, "last_batch: 'wrap' is not one of drop, partial, pad"),
        ({"on_bad_sample": "ignore"}, "on_bad_sample: 'ignore' is not one of skip, replace, mask, raise"),
        ({"max_bad": 1.5}, "max_bad: 1.5"),
        ({"max_bad": "1%"}, "max_bad: '1%'"),
        ({"timeout": 0}, "timeout: 0"),
        ({"timeout": "1"}, "timeout: '1'"),
        ({"dtype": "float32", "mean": 0.5}, "mean: 0.5"),
        ({"rank": 1}, "rank is given without world_size"),
        ({"output": "jax"}, "output: 'jax'"),
        ({"rank": "0", "world_size": 2}, "rank: '0' is not a whole number"),
        ({"rank": 0.0, "world_size": 2}, "rank: 0.0 is not a whole number"),
        ({"rank": 0, "world_size": 2.0}, "world_size: 2.0 is not a whole number"),
        ({"dtype": "float64"}, "^dtype: 'float64'"),
        ({"dtype": np.float16}, "^dtype: .*numpy.float16"),
        ({"layout": "CHW"}, "^layout: 'CHW'"),
        ({"dtype": "float32", "std": [1, 0, 1]}, "std"),
        ({"dtype": "float32", "mean": [1, 2]}, "mean"),
        ({"mean": [0, 0, 0]}, "uint8"),
        ({"dtype": "bfloat16"}, "bfloat16 is unknown to NumPy"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_allowed(serve: Serve, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        open_loader(serve(), **arguments)


def test_a_dtype_may_be_torchs(serve: Serve) -> None:
    torch = pytest.importorskip("torch")
    with Loader(serve().address, batch_size=8, dtype=torch.bfloat16) as loader:
        assert next(iter(loader)).images.dtype is torch.bfloat16


@pytest.mark.parametrize("timeout", [1e8, float("inf")])
def test_a_timeout_may_be_as_good_as_none(serve: Serve, timeout: float) -> None:
    with open_loader(serve(indexing=3), timeout=timeout) as loader:
        assert len(list(loader)) == 5


def test_epochs_are_numbered_below_two_to_the_63rd(serve: Serve) -> None:
    with open_loader(serve()) as loader:
        with pytest.raises(ConfigError, match="epoch: 18446744073709551616 must be a whole number"):
            loader.set_epoch(1 << 64)
        with pytest.raises(StateError, match="epoch"):
            loader.load_state_dict(loader.state_dict() | {"epoch": 1 << 63})
        loader.set_epoch((1 << 63) - 1)
        assert len(list(loader)) == 5


def test_numbers_of_numpy_are_numbers(serve: Serve) -> None:
    with open_loader(serve(), batch_size=np.int64(8), prefetch=np.int8(1)) as loader:
        loader.load_state_dict(loader.state_dict() | {"epoch": np.int64(2), "position": np.uint16(8)})
        check(next(iter(loader)), list(range(8, 16)), epoch=2)
        assert json.dumps(loader.state_dict())


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_does_not_go_to_another_process(serve: Serve, how: Callable[[Loader], Any]) -> None:
    with open_loader(serve()) as loader, pytest.raises(TypeError, match="make the Loader in the process that uses it"):
        how(loader)


def test_the_cpu_is_a_device_and_shm_a_transport(serve: Serve) -> None:
    with open_loader(serve(), device="cpu", transport="shm") as loader:
        assert loader.stats()["transport"] == "shm"


def test_a_list_of_one_address_is_that_address_and_none_stands_twice_in_a_list(serve: Serve) -> None:
    daemon = serve()
    with Loader([daemon.address], batch_size=8, output="numpy") as loader:
        assert len(loader) == 5
    with pytest.raises(ConfigError, match="stands twice"):
        Loader([daemon.address, daemon.address], batch_size=8)


def test_notices_of_the_listing_are_logged_at_the_handshake(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "headrace"), open_loader(serve(notices=["2 files left out: .txt"])):
        pass
    assert "2 files left out: .txt" in caplog.text
