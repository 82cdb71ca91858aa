"""What is said of a GPU that is there: by NVML, by CUDA, by trials, and by whoever chooses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from headrace.device import Cuda
from headrace.pipeline import gpus, trial
from headrace.pipeline.machine import choose
from headrace.pipeline.spec import Workers

pytestmark = pytest.mark.gpu


def test_the_driver_tells_of_each_gpu_what_is_asked() -> None:
    there = gpus.look()
    assert (there.trouble, [gpu.trouble for gpu in there.found]) == ("", [""] * len(there.found))
    assert there.driver and there.cuda >= (12, 0)
    for gpu in there.found:
        assert gpu.name != "unknown" and gpu.uuid.startswith(("GPU-", "MIG-"))
        assert 0 < gpu.free <= gpu.total


def test_cuda_counts_gpus_as_nvml_does_and_locks_memory_for_each() -> None:
    found = gpus.look().found
    assert [tried.trouble for tried in trial.run(trial.PAGE_LOCKING, found)] == [""] * len(found)


@pytest.mark.parametrize("load", [0.0, 0.5, 1.0])
def test_a_gpu_that_is_named_is_tried_and_chosen_though_this_process_uses_it(load: float) -> None:
    (number,) = (gpu.number for gpu in gpus.look().found[:1])
    chosen = choose(Workers(backend="dali-gpu", devices=[number], hw_decoder_load=load))
    assert chosen.devices == (number,)
    assert chosen.render_id.startswith("dali-gpu/")
    assert ("hw_decoder_load-0.5" in chosen.render_id, "jpeg-engine" in chosen.render_id) == (load == 0.5, load == 1)


def test_a_gpu_that_somebody_uses_is_left_alone_unless_it_is_named() -> None:
    busy = {gpu.number for gpu in gpus.look().found if gpu.busy}
    assert not busy & set(choose(Workers()).devices)


def test_a_gpu_that_is_hidden_is_not_found() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    program = "import json; from headrace.pipeline import gpus; print(json.dumps(gpus.look().trouble))"
    done = subprocess.run([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, check=True)
    assert 'CUDA_VISIBLE_DEVICES="-1"' in json.loads(done.stdout)


def test_torch_and_nvml_agree_where_a_gpu_is_so_that_a_loader_finds_its_worker() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} has no GPU")
    found = gpus.look().found
    assert [Cuda(index).bus for index in range(len(found))] == [gpu.bus for gpu in found]
    assert "" not in [gpu.bus for gpu in found]
