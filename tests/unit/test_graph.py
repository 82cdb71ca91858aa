"""The graph for GPUs, as far as a machine without one can tell; what it renders is the business of tests/gpu."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nvidia.dali import backend
from nvidia.dali.pipeline import Pipeline

from headrace.pipeline import dali_colour, graph
from headrace.pipeline.graph import Executor, Form
from headrace.pipeline.transforms import TRANSFORMS, parse, plan

COLOURS = ["color_jitter", "random_grayscale", "gaussian_blur", "random_erasing", "random_solarize"]
COLOURS += ["random_posterize", "random_autocontrast", "random_equalize"]
ARGUMENTS: dict[str, Any] = {
    "color_jitter": {"brightness": 0.2, "contrast": 0.4, "saturation": 0.3, "hue": 0.1},
    "gaussian_blur": {"kernel_size": 9},
    "random_solarize": {"threshold": 128},
    "random_posterize": {"bits": 4},
}


def operators(pipeline: Pipeline) -> set[tuple[str, str]]:
    """(name, device) of all that a graph consists of."""
    found, left = {}, [node.source for node in pipeline._graph_out]
    while left:
        operator = left.pop()
        if id(operator) not in found:
            found[id(operator)] = operator._op.schema.Name(), operator._op.device
            for given in operator.inputs:
                left += [node.source for node in (given if isinstance(given, list) else [given])]
    return {*found.values()}


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("name", [None, *[name for name in COLOURS if name in TRANSFORMS]])
def test_the_graph_of_a_gpu_is_of_operators_that_dali_has_for_one(
    monkeypatch: pytest.MonkeyPatch, name: str | None, part: bool
) -> None:
    monkeypatch.setattr(Pipeline, "build", lambda self: None)  # which would look for the device
    chain = ["random_horizontal_flip", {"random_crop": {"size": 96, "pad_if_needed": True}}]
    chain += [{name: ARGUMENTS.get(name, {})}] if name else []
    params = plan([parse(item) for item in chain], 0, 0, 0, np.array([200]), np.array([300]))
    form = Form(part, True, (96, 96), "bilinear", (1, 2, 3), dali_colour.form(params.colour))
    pipeline = graph.build(form, Executor(device=0, batch=128, threads=4, hw_decoder_load=0.0))
    assert [node.device for node in pipeline._graph_out] == ["gpu"] * (1 if part else 2)
    there = {
        "cpu": {*backend.RegisteredCPUOps()},
        "gpu": {*backend.RegisteredGPUOps()},
        "mixed": {*backend.RegisteredMixedOps()},
    }
    of = operators(pipeline)
    assert ("decoders__ImageSlice" if part else "decoders__Image", "mixed") in of
    assert {device for _, device in of} == {"cpu", "gpu", "mixed"}
    assert [(name, device) for name, device in of if name != "ExternalSource" and name not in there[device]] == []
