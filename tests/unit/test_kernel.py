"""The finishing pass of a device: NumPy, plain torch and Triton give the same bits."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import headrace.kernel
from headrace.finish import Finisher
from headrace.kernel import choose, fused, plain
from headrace.output import DType, Layout, Output

torch = pytest.importorskip("torch")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
DTYPES: tuple[DType, ...] = ("uint8", "float16", "bfloat16", "float32")
LAYOUTS: tuple[Layout, ...] = ("NCHW", "NHWC", "channels_last")
FORMS = [*product(DTYPES, LAYOUTS)]
#: The second one is of several blocks of Triton's; the third has every level in every channel.
SIZES = [(3, 5), (20, 31), (16, 16)]
ROWS = [None, [4, 0, 3]]


def output(dtype: DType, layout: Layout) -> Output:
    return Output(dtype, layout) if dtype == "uint8" else Output(dtype, layout, MEAN, STD)


def pictures(height: int, width: int) -> NDArray[np.uint8]:
    made = np.random.default_rng(5).integers(0, 256, (5, height, width, 3), np.uint8)
    if height * width == 256:
        made[...] = np.arange(256, dtype=np.uint8).reshape(height, width, 1)
    return made


def by_numpy(form: Output, levels: NDArray[np.uint8]) -> bytes:
    finisher = Finisher(form, *levels.shape[1:3])
    memory = np.empty(len(levels) * finisher.row_bytes, np.uint8)
    finisher.finish(levels, finisher.rows(memory, len(levels)))
    return memory.tobytes()


def by(finish: Any, form: Output, levels: NDArray[np.uint8], rows: list[int] | None) -> bytes:
    count, height, width = len(levels) if rows is None else len(rows), *levels.shape[1:3]
    shape = (count, 3, height, width) if form.layout == "NCHW" else (count, height, width, 3)
    out = torch.full(shape, 77, dtype=getattr(torch, form.dtype))
    finish(torch.from_numpy(levels), None if rows is None else torch.tensor(rows), out)
    return bytes(out.view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize(("dtype", "layout"), FORMS)
def test_plain_torch_gives_numpys_bits_in_one_piece_and_in_blocks(
    dtype: DType, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = output(dtype, layout)
    finish = plain(form, torch.device("cpu"))
    for size, rows in product(SIZES, ROWS):
        levels = pictures(*size)
        wanted = by_numpy(form, levels if rows is None else levels[rows])
        assert by(finish, form, levels, rows) == wanted
        monkeypatch.setattr(headrace.kernel, "_BLOCK", 2 * levels[0].size)
        assert by(finish, form, levels, rows) == wanted


# In a process of its own: whether Triton interprets is settled when a kernel is defined.
_COMPARE = """
import torch
from test_kernel import FORMS, by, by_numpy, output, pictures
from headrace.kernel import _agree, fused, plain
for dtype, layout in FORMS:
    form = output(dtype, layout)
    finish = fused(form)
    for size, rows in (((16, 16), None), ((20, 31), [4, 0, 3])):
        levels = pictures(*size)
        wanted = by_numpy(form, levels if rows is None else levels[rows])
        assert by(finish, form, levels, rows) == wanted, (dtype, layout, size, rows)
assert _agree(finish, plain(form, torch.device("cpu")), form, 9, 4, torch.device("cpu"))
print("same")
"""

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no triton")


@needs_triton
def test_tritons_kernel_gives_numpys_bits_where_it_is_interpreted() -> None:
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([os.path.dirname(__file__), *sys.path]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", _COMPARE], env=environment, capture_output=True, text=True, check=False, timeout=100
    )
    assert done.stdout == "same\n", done.stderr


def compiled(kind: str, pointer: str, *, planes: bool, fusion: bool = False) -> str:
    """The kernel's code for a GPU, which needs none to be made."""
    import triton
    from triton.backends.compiler import GPUTarget

    from headrace.fused import _finish

    arguments = {"levels": "*u8", "rows": "*i64", "out": pointer, "pixels": "i32"}
    arguments |= dict.fromkeys(("a0", "a1", "a2", "b0", "b1", "b2"), "fp32")
    settled = {"GATHER": True, "PLANES": planes, "KIND": kind, "BLOCK": 512}
    source = triton.compiler.ASTSource(
        _finish,
        arguments | dict.fromkeys(settled, "constexpr"),
        constexprs={(len(arguments) + place,): value for place, value in enumerate(settled.values())},
        attrs={(place,): [["tt.divisibility", 16]] for place in range(4)},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": fusion})
    assert made.asm["cubin"]
    return str(made.asm["ptx"])


@needs_triton
@pytest.mark.parametrize("planes", [True, False])
@pytest.mark.parametrize(
    ("kind", "pointer"), [("uint8", "*u8"), ("float16", "*fp16"), ("bfloat16", "*u16"), ("float32", "*fp32")]
)
def test_tritons_kernel_compiles_for_a_gpu_and_fuses_nothing(kind: str, pointer: str, planes: bool) -> None:
    code = compiled(kind, pointer, planes=planes)
    assert "fma." not in code and ("mul." in code and "add." in code)
    # A thread's numbers go out together, of each channel where planes are written.
    assert code.count("st.global.") == (3 if planes else 1)


@needs_triton
def test_it_would_be_fused_where_that_is_not_forbidden() -> None:
    assert "fma." in compiled("float32", "*fp32", planes=True, fusion=True)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, form: Output, kernel: Any) -> tuple[str, Any]:
    """What is chosen where tensors are on a GPU; here they are on the CPU."""

    class Gpu:
        type = "cuda"

    cpu = torch.device("cpu")
    real_plain, real_agree = plain, headrace.kernel._agree
    monkeypatch.setattr(headrace.kernel, "fused", kernel)
    monkeypatch.setattr(headrace.kernel, "_current", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(headrace.kernel, "plain", lambda output, device: real_plain(output, cpu))
    monkeypatch.setattr(headrace.kernel, "_agree", lambda *args: real_agree(*args[:-1], cpu))
    return choose(form, 9, 4, Gpu())


@pytest.mark.parametrize(("dtype", "layout"), FORMS)
def test_a_kernel_that_gives_the_same_is_taken_and_one_that_does_not_is_left_alone(
    dtype: DType, layout: Layout, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    form = output(dtype, layout)
    same = plain(form, torch.device("cpu"))
    assert on_a_gpu(monkeypatch, form, lambda output: same) == ("triton", same)

    def other(levels: Any, rows: Any, out: Any) -> None:
        same(levels, rows, out)
        if rows is not None:
            out.view(-1)[-1] += 1  # only here

    with monkeypatch.context() as context:
        assert on_a_gpu(context, form, lambda output: other)[0] == "torch"
    assert "its numbers differ from plain torch's): plain torch finishes the batches" in caplog.text


def test_where_triton_does_not_work_plain_torch_finishes_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(output: Output) -> Any:
        raise RuntimeError("Failed to find C compiler\nplease install one")

    assert on_a_gpu(monkeypatch, Output(), broken)[0] == "torch"
    assert "RuntimeError: Failed to find C compiler): plain torch" in caplog.text


def test_on_the_cpu_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(output: Output) -> Any:
        raise AssertionError

    monkeypatch.setattr(headrace.kernel, "fused", fail)
    assert choose(Output(), 4, 4, torch.device("cpu"))[0] == "torch"


def test_triton_is_asked_for_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "headrace.fused", raising=False)
    with pytest.raises(ImportError):
        fused(Output())
