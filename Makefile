# Each target sets up what it needs in .venv; on a fresh machine nothing else has to be done before.
# Another interpreter: make PYTHON=python3.12 test

PYTHON ?= python3
# The warning says not to remove build/, which the targets here lay again when it is gone.
PIP := PYTHONWARNINGS='ignore:Editable installation' .venv/bin/pip
# Links to the sources, one a file: type checker and import linter cannot see through the default editable install.
EDITABLE := --no-build-isolation --config-settings editable_mode=strict --editable
SOURCES := $(sort $(wildcard $(addsuffix /*.py,client pipeline workers server)))

.PHONY: demo test test-gpu check soak bench clean env-demo env-dev
.NOTPARALLEL:
.DELETE_ON_ERROR:

# Hundreds of processes start in a run of the tests: none has to compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

demo: env-demo
	.venv/bin/headrace demo

# Tests wait for processes more than they compute: one process more than cores, a module's tests in one of them.
# In the order of their folders, so that the small modules come last and all processes end at about the same time.
test: env-dev
	.venv/bin/pytest --numprocesses 3 --dist loadscope --no-loadscope-reorder

# On a machine with an NVIDIA GPU; elsewhere each of them says why it is skipped. What it prints last are the figures of
# benchmarks/gpu_train.py, of a machine that does nothing else.
test-gpu: env-dev
	.venv/bin/pytest -m gpu tests/gpu

check: env-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports

soak: env-dev
	.venv/bin/pytest -m soak -o faulthandler_timeout=0
	.venv/bin/python benchmarks/epochs.py

# On a machine that does nothing else, for the better part of an hour. Its page is benchmarks/RESULTS.md; a section alone:
# make bench BENCH='--only large'. With TensorSocket and FFCV: make bench PEERS=all
PEERS ?= usual
bench: build/peers/$(PEERS).stamp
	@status=0; build/peers/bin/python benchmarks/compare.py --peers $(PEERS) $(BENCH) || status=1; \
		$(if $(BENCH),,build/peers/bin/python benchmarks/corrupt.py || status=1;) exit $$status

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage*

# -- the virtual environment -----------------------------------------------------------------------------------

# A source file that came or went needs its link; nothing is resolved or downloaded for that.
env-demo env-dev: env-%: .venv/%.stamp
	@echo "$(SOURCES)" | cmp -s - build/linked 2>/dev/null || { $(PIP) install --quiet --no-deps $(EDITABLE) . && echo "$(SOURCES)" >build/linked; }

.venv/demo.stamp: .venv/pip.stamp pyproject.toml
	@echo "Installing Headrace with what the demo needs (a few minutes the first time)"
	$(PIP) install --quiet --constraint constraints.txt $(EDITABLE) '.[demo]'
	@echo "$(SOURCES)" >build/linked
	@touch $@

.venv/dev.stamp: .venv/pip.stamp pyproject.toml
	@echo "Installing Headrace with its development tools (a few minutes the first time)"
	$(PIP) install --quiet --constraint constraints.txt $(EDITABLE) '.[dev]'
	@echo "$(SOURCES)" >build/linked
	@touch .venv/demo.stamp $@

.venv/pip.stamp: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Headrace needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet --constraint constraints.txt pip setuptools
	@touch $@

# -- what `make bench` compares with, in an environment of its own -----------------------------------------------

PEERS_PIP = PYTHONWARNINGS='ignore:Editable installation' build/peers/bin/pip install --quiet --constraint benchmarks/peers.txt

build/peers/usual.stamp: benchmarks/peers.txt pyproject.toml
	@echo "Installing what Headrace is compared with (8 GB, some minutes the first time)"
	$(PYTHON) -m venv build/peers
	$(PEERS_PIP) pip setuptools wheel
	$(PEERS_PIP) --no-build-isolation --editable '.[dali,demo]' torch torchvision tensorflow-cpu
	@touch $@

build/peers/all.stamp: build/peers/usual.stamp
	@pkg-config --exists opencv4 libturbojpeg || { \
		echo "FFCV is compiled here, with libraries that are missing: apt-get install libopencv-dev libturbojpeg0-dev pkg-config" >&2; exit 1; }
	$(PEERS_PIP) tensorsocket fastargs numba opencv-python-headless pytorch-pfn-extras tqdm
	$(PEERS_PIP) --no-build-isolation --no-deps ffcv
	@touch $@
