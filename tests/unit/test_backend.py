from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from pictures import encode, noise
from PIL import Image

from headrace.pipeline import fake, values
from headrace.pipeline.backend import BACKENDS, Backend, make
from headrace.pipeline.paint import paint
from headrace.pipeline.photometric import ColorJitter, GaussianBlur, RandomEqualize, RandomErasing
from headrace.pipeline.probe import BadPicture, Picture, probe
from headrace.pipeline.spec import Decode
from headrace.pipeline.transforms import Pad, Params, RandomHorizontalFlip, RandomResizedCrop, Resize, plan

Pixels = NDArray[np.uint8]
HEIGHT, WIDTH = 24, 32

#: How a good file becomes one that the backend finds bad; of every backend that needs no GPU.
SPOIL: dict[str, Callable[[bytes], bytes]] = {
    "pillow": lambda data: data[:-50],
    "dali-cpu": lambda data: data[:-50],
    "fake": lambda data: data + fake.REJECT,
}


@pytest.fixture(params=sorted(SPOIL))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def backend(name: str) -> Iterator[Backend]:
    made = make(name)
    yield made
    made.close()


def jpegs(count: int) -> list[bytes]:
    return [encode(noise(60, 80, seed), "JPEG") for seed in range(count)]


def opened(files: Sequence[bytes]) -> list[Picture]:
    return [probe(data, Decode()) for data in files]


def params(pictures: Sequence[Picture], first: int = 0, p: float = 0.5) -> Params:
    sizes = np.array([(picture.height, picture.width) for picture in pictures]).T
    return plan([RandomResizedCrop((HEIGHT, WIDTH)), RandomHorizontalFlip(p)], 0, 0, first, sizes[0], sizes[1])


def slots(count: int) -> NDArray[np.uint8]:
    return np.full((count, HEIGHT, WIDTH, 3), 77, np.uint8)


def render(backend: Backend, files: Sequence[bytes], first: int = 0, p: float = 0.5) -> Pixels:
    pictures, out = opened(files), slots(len(files))
    assert backend.render(pictures, params(pictures, first, p), list(out), lambda i: None) == [None] * len(files)
    return out


def test_every_picture_is_written_where_it_belongs_and_nothing_else(backend: Backend) -> None:
    pictures, out = opened(jpegs(3)), slots(5)
    assert backend.render(pictures, params(pictures), list(out[1:4]), lambda i: None) == [None] * 3
    assert (out[0] == 77).all() and (out[4] == 77).all()
    assert len({picture.tobytes() for picture in out[1:4]}) == 3


def test_pictures_are_begun_before_they_are_written_and_written_before_the_next_are_begun(backend: Backend) -> None:
    pictures, out = opened(jpegs(3)), slots(3)
    begun: list[int] = []

    def begin(now: Sequence[int]) -> None:
        written = {i for i, picture in enumerate(out) if (picture != 77).any()}
        assert written == set(begun)
        begun.extend(now)

    backend.render(pictures, params(pictures), list(out), begin)
    assert begun == [0, 1, 2]


def test_a_bad_picture_is_black_with_a_verdict_and_the_others_are_as_without_it(name: str, backend: Backend) -> None:
    files = jpegs(3)
    good = render(backend, files)
    pictures, out = opened([files[0], SPOIL[name](files[1]), files[2]]), slots(3)
    verdicts = backend.render(pictures, params(pictures), list(out), lambda i: None)
    assert verdicts[0] is None and verdicts[2] is None
    assert isinstance(verdicts[1], BadPicture) and verdicts[1].stage == "decode" and verdicts[1].reason
    assert not out[1].any()
    np.testing.assert_array_equal(out[0], good[0])
    np.testing.assert_array_equal(out[2], good[2])


def test_a_picture_depends_on_its_file_and_its_row_alone(name: str, backend: Backend) -> None:
    files = jpegs(4)
    together = render(backend, files, first=8)
    for i in range(4):
        np.testing.assert_array_equal(render(make(name), files[i : i + 1], first=8 + i)[0], together[i])
    assert (render(backend, files[:1], first=9)[0] != together[0]).any()
    assert (render(backend, files[1:2], first=8)[0] != together[0]).any()
    assert (render(backend, files[:1], p=0.0)[0] != render(backend, files[:1], p=1.0)[0]).any()


def test_the_row_of_a_slot_may_be_a_view(backend: Backend) -> None:
    files = jpegs(1)
    wide = np.zeros((HEIGHT, 2 * WIDTH, 3), np.uint8)
    pictures = opened(files)
    backend.render(pictures, params(pictures), [wide[:, WIDTH:]], lambda i: None)
    np.testing.assert_array_equal(wide[:, WIDTH:], render(backend, files)[0])
    assert not wide[:, :WIDTH].any()


def test_no_pictures_are_no_verdicts(backend: Backend) -> None:
    some = opened(jpegs(1))
    none = params(some).take(np.array([], np.int64))
    some[0].take().close()
    assert backend.render([], none, [], lambda i: None) == []


def test_the_render_id_says_which_backend_and_never_changes(name: str, backend: Backend) -> None:
    assert backend.render_id.startswith(f"{name}/") and backend.render_id == make(name).render_id


def test_a_backend_may_be_closed_twice(backend: Backend) -> None:
    backend.close()
    backend.close()


def test_a_configuration_may_name_every_backend() -> None:
    assert {*values.BACKENDS, "fake"} == {*BACKENDS, "auto"}


@pytest.mark.parametrize("unknown", ["gpu", "auto"])
def test_an_unknown_backend_is_refused_with_those_there_are(unknown: str) -> None:
    with pytest.raises(ValueError, match=f"backend: '{unknown}' is not one of pillow, dali-cpu, dali-gpu, fake"):
        make(unknown)


def test_colours_are_changed_last_by_the_steps_of_each_picture(name: str, backend: Backend) -> None:
    files = jpegs(3)
    pictures, plain, out = opened(files), render(backend, files), slots(3)
    colours = [ColorJitter(0.4, 0.4, 0.4, 0.1), GaussianBlur(3), RandomErasing(0.5), RandomEqualize()]
    sizes = np.full(3, 60), np.full(3, 80)
    chain = [RandomResizedCrop((HEIGHT, WIDTH)), RandomHorizontalFlip(0.5), *colours]
    wanted = plan(chain, 0, 0, 0, *sizes)
    assert backend.render(pictures, wanted, list(out), lambda i: None) == [None] * 3
    for i, (before, after) in enumerate(zip(plain, out, strict=True)):
        assert (before != after).any()
        if name != "fake":
            np.testing.assert_array_equal(after, paint(Image.fromarray(before), wanted.colour, i))


@pytest.mark.parametrize("name", ["pillow", "dali-cpu"])
def test_colours_change_what_is_put_around_a_picture_too(backend: Backend) -> None:
    wanted = plan([Resize((20, 28)), Pad(2, 100), ColorJitter((0.5, 0.5))], 0, 0, 0, *np.array([[60], [80]]))
    out = slots(1)
    assert backend.render(opened(jpegs(1)), wanted, list(out), lambda i: None) == [None]
    frame = np.ones((HEIGHT, WIDTH), np.bool_)
    frame[2:-2, 2:-2] = False
    assert (out[0][frame] == 50).all() and (out[0][~frame] < 128).all()


def test_fake_parity_with_pillow_in_all_but_the_pixels() -> None:
    files = jpegs(2)
    ours, theirs = render(make("fake"), files), render(make("pillow"), files)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype


def test_fake_purity_of_its_pixels() -> None:
    files = jpegs(2)
    np.testing.assert_array_equal(render(make("fake"), files), render(make("fake"), files))


def test_fake_bad_input_is_what_says_so_of_itself() -> None:
    pictures = opened([jpegs(1)[0] + fake.REJECT])
    [verdict] = make("fake").render(pictures, params(pictures), list(slots(1)), lambda i: None)
    assert isinstance(verdict, BadPicture)
