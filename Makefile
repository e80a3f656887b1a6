# Two commands do it all on a fresh machine with Python 3.10 or newer: `make demo` and `make test`.
PYTHON ?= python3
# Installed before what depends on it, so that nothing pulls another build.
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ZOO := .venv-zoo
DOCS := .venv-docs
DATA ?=
ARGS ?=
IGNORE ?=
FAULTS ?= 20

.PHONY: faults help install demo unit test more test-all parity matrix versions wheel crash check audit lint format types mutants fuzz convergence bench gpu gpu-bench scale startup layouts zoo docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(STAMP)  ## make the environment

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(STAMP)

demo: $(STAMP)  ## train on two processes and on one, compare (DATA=file-or-folder)
	$(BIN)/python examples/demo.py $(if $(DATA),--data "$(DATA)") $(ARGS)

unit: $(STAMP)  ## what one runs while editing: the tests that start no processes, in under a minute
	$(BIN)/python -m pytest --numprocesses 2 --dist loadgroup tests/unit $(ARGS)

test: $(STAMP)  ## the core of the tests, two at a time: every capability once, every refusal (ten minutes)
	$(BIN)/python -m compileall -q lightning_seqpar tests examples benchmarks  # for the many processes that the tests start
	$(BIN)/python -m pytest -m "not matrix and not more" --numprocesses 2 --dist loadgroup $(ARGS)

more: $(STAMP)  ## what the core leaves out: every topology, model and option (half an hour)
	$(BIN)/python -m pytest -m "more and not matrix" --numprocesses 2 --dist loadgroup $(ARGS)

test-all: test more  ## the whole suite

parity: $(STAMP)  ## every Hugging Face family at every topology, against one process
	$(BIN)/python -m pytest $(addprefix tests/end_to_end/test_,families.py hf_uses.py zoo.py adapters.py estimates.py meta_models.py fsdp.py precision.py recompute.py compile.py formula.py trainer_habits.py sync_batchnorm.py crash.py context.py parity.py products.py random.py saving_memory.py styles.py tile_mlp.py vocabulary.py) tests/distributed/test_column_groups.py tests/distributed/test_context_attention.py tests/distributed/test_seq_part.py tests/ways_in -m "matrix or not matrix" --numprocesses 2 --dist loadgroup --parity-table docs/parity.md $(ARGS)

matrix: $(STAMP)  ## every case that the suite leaves out
	$(BIN)/python -m pytest -m matrix --numprocesses 2 --dist loadgroup $(ARGS)

versions:  ## a slice of the suite beside the oldest and the newest releases that are taken (ten minutes each, and 10 GB)
	$(PYTHON) tests/versions.py $(ARGS)

wheel: $(STAMP)  ## build wheel and sdist; train an example by the wheel in an empty environment, and import the sdist in it
	rm -rf dist .venv-wheel
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install --quiet "$(TORCH)"
	.venv-wheel/bin/python -m pip install --quiet dist/*.whl
	.venv-wheel/bin/python examples/train.py --config conf/demo.yaml trainer.max_steps=20
	.venv-wheel/bin/python -m pip install --quiet --no-deps --force-reinstall dist/*.tar.gz
	cd dist && ../.venv-wheel/bin/python -c "import lightning_seqpar as it; print(it.__file__, it.__version__)"

lint: $(STAMP)  ## formatter and linter
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)  ## strict types
	$(BIN)/mypy

format: $(STAMP)  ## format and fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint types audit test-all  ## everything that must be green

audit: $(STAMP)  ## known vulnerabilities of what is installed, as far as a database can be reached (IGNORE="ID ...": but those)
	$(BIN)/python tests/audit.py $(addprefix --ignore ,$(IGNORE))

mutants: $(STAMP)  ## break the source on purpose; show which test sees it
	$(BIN)/python tests/mutants.py $(ARGS)

fuzz: $(STAMP)  ## 60,000 random configurations, files and plans: taken, or refused by a sentence that helps
	SEQPAR_FUZZ=20000 $(BIN)/python -m pytest --numprocesses 2 --dist load --timeout 0 tests/unit/test_fuzz.py $(ARGS)

faults: $(STAMP)  ## fail on purpose at random moments, FAULTS=20 of each kind, under both launchers; see how the run ends (an hour and more)
	FAULTS=$(FAULTS) $(BIN)/python -m pytest tests/ways_in/test_launch.py -m matrix -k random_moment $(ARGS)

crash: $(STAMP)  ## kill ranks while they write checkpoints; look at what is left
	CRASH=1 $(BIN)/python -m pytest tests/end_to_end/test_crash.py -m "matrix or not matrix" --timeout 0 $(ARGS)

convergence: $(STAMP)  ## 300 steps of the demo model in every form, drawn over each other
	$(BIN)/python benchmarks/convergence.py $(ARGS)

bench: $(STAMP)  ## time, memory and traffic beside DTensor, DDP and one process (an hour)
	$(BIN)/python benchmarks/bench.py $(ARGS)

gpu: $(STAMP)  ## on one GPU or more: parity with one process, where the host waits, and late collectives
	$(BIN)/python tests/gpu.py $(ARGS)

gpu-bench: $(STAMP)  ## a step of one rank of tp 8 on one GPU, beside DTensor's (an hour or two; on a CPU small, counts alone)
	$(BIN)/python benchmarks/gpu_bench.py $(ARGS)

scale: $(STAMP)  ## what one rank of 512 does before it trains Llama-3-8B and -70B
	$(BIN)/python benchmarks/scale.py $(ARGS)

layouts: $(STAMP)  ## predicted memory and order of layouts beside runs of two ranks (fifteen minutes)
	$(BIN)/python benchmarks/layouts.py $(ARGS)

startup: $(STAMP)  ## time and memory until the first step, with the self-check and without
	$(BIN)/python benchmarks/startup.py $(ARGS)

$(ZOO)/.installed: pyproject.toml
	$(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install --quiet --upgrade pip
	$(ZOO)/bin/python -m pip install --quiet "$(TORCH)"
	PYTHONWARNINGS=ignore $(ZOO)/bin/python -m pip install --quiet "$(TORCH)" --editable ".[zoo]"
# It asks for an older release of a library than the others do; what the zoo uses of it runs with the newer one.
	$(ZOO)/bin/python -m pip install --quiet --no-deps litgpt
# Built for CUDA: where torch has none, an import would fail at them. No model of the zoo calls them.
	rm -f $(ZOO)/lib/python*/site-packages/torchaudio/lib/*.so
	touch $@

zoo: $(ZOO)/.installed  ## models of many packages as they are shipped, against one process (half an hour)
	$(ZOO)/bin/python benchmarks/zoo.py --jobs 2 $(ARGS)

$(DOCS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet "pip>=25.1"
	$(DOCS)/bin/python -m pip install --quiet --group docs
	touch $@

docs: $(DOCS)/.installed  ## the documentation as a site, build/site/index.html (ARGS="serve" or none; an environment of its own)
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs $(or $(ARGS),build --strict)

clean:  ## remove the environment and what runs left
	rm -rf $(VENV) $(ZOO) .venv-* build dist runs .pytest_cache .mypy_cache .ruff_cache *.egg-info
