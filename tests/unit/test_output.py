"""The form of a batch."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.output import Output

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def test_the_defaults_are_float32_from_0_to_1() -> None:
    assert Output() == Output("float32", "NCHW", (0, 0, 0), (1, 1, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float64"}, "dtype: 'float64' is not one of uint8, float16, bfloat16, float32"),
        ({"dtype": None}, "dtype: None is not one of"),
        ({"layout": "CHW"}, "layout: 'CHW' is not one of NCHW, NHWC, channels_last"),
        ({"mean": (0, 0)}, "mean: .* is not three finite numbers"),
        ({"mean": 0.5}, "mean: 0.5 is not three finite numbers"),
        ({"mean": "123"}, "mean: '123' is not three finite numbers"),
        ({"mean": ("a", 0, 0)}, "mean: .* is not three finite numbers"),
        ({"mean": (10**400, 0, 0)}, "mean: .* is not three finite numbers"),
        ({"std": (1, 1, math.nan)}, "std: .* is not three finite numbers"),
        ({"std": (1, 1, math.inf)}, "std: .* is not three finite numbers"),
        ({"std": (1, 0, 1)}, "std: .* must be positive"),
        ({"std": (1, -1, 1)}, "std: .* must be positive"),
        ({"std": (1, 1, 1e-42)}, "float32 overflows"),
        ({"dtype": "float16", "mean": (123, 117, 104), "std": (1, 1e-3, 1)}, "float16 overflows"),
        ({"mean": (1e30, 0, 0), "std": (1e-30, 1, 1)}, "float32 overflows"),
        ({"dtype": "uint8", "mean": (0.5, 0.5, 0.5)}, "uint8 hands out the rendered levels"),
        ({"dtype": "uint8", "std": (0.5, 0.5, 0.5)}, "uint8 hands out the rendered levels"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Output(**arguments)


def test_lists_and_integers_are_taken_as_tuples_of_floats() -> None:
    output = Output(mean=[0, 1, 2], std=[1, 2, 3])  # type: ignore[arg-type]
    assert output == Output(mean=(0.0, 1.0, 2.0), std=(1.0, 2.0, 3.0))
    assert hash(output) == hash(Output(mean=(0, 1, 2), std=(1, 2, 3)))


def test_replaced_changes_only_what_is_given() -> None:
    base = Output("float16", "NHWC", **IMAGENET)
    assert base.replaced() == base
    assert base.replaced(dtype=None, layout=None, mean=None, std=None) == base
    assert base.replaced(dtype="bfloat16") == Output("bfloat16", "NHWC", **IMAGENET)
    assert base.replaced(std=(1, 1, 1)) == Output("float16", "NHWC", mean=IMAGENET["mean"])


def test_uint8_drops_the_streams_mean_and_std_but_not_the_callers() -> None:
    base = Output("float32", "NHWC", **IMAGENET)
    assert base.replaced(dtype="uint8") == Output("uint8", "NHWC")
    with pytest.raises(ValueError, match="uint8"):
        base.replaced(dtype="uint8", mean=(0.5, 0.5, 0.5))
    with pytest.raises(ValueError, match="uint8"):
        Output("uint8").replaced(mean=(0.5, 0.5, 0.5))


numbers = st.tuples(*[st.floats(0.01, 10)] * 3)


@given(st.builds(Output, st.sampled_from(["float16", "bfloat16", "float32"]), mean=numbers, std=numbers))
def test_an_output_survives_the_wire_bit_for_bit(output: Output) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=Output) == output
