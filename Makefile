# make demo and make test do all the set-up themselves: a virtual environment in .venv, pinned packages, then the work.
PYTHON ?= python3
# e.g. PIP_ARGS="--extra-index-url <an index with CPU builds of torch>"
PIP_ARGS ?=
# make mutants: how many more; or which once more, e.g. AGAIN=survived
N ?= 20
AGAIN ?=
# make gpu: which of doctor, tests, parity, stages, resume, plan, generate, bench-head, bench-sft, bench-pretrain,
# bench-images, bench-texts; DEVICE=cpu rehearses; AT_ONCE=4: cases that are not timed run four at once; CASES='0.5B':
# those of such names
PART ?=
DEVICE ?= cuda
AT_ONCE ?= 1
# make test: how many processes share the tests
JOBS ?= 2
# make test-versions: which combinations, e.g. ONLY=3.12-lowest, and which tests, e.g. SELECT="tests/models tests/data"
ONLY ?=
SELECT ?=
VENV := .venv
BIN := $(VENV)/bin
# each process of several would compile all sources anew
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.PHONY: help demo test test-long test-all test-versions parity chaos fuzz mutants gpu gpu-report lint bench clean

help:
	@echo "make demo      install, train the digits recipe at four precisions and on eight engines, and compare"
	@echo "make test      install and run the tests but the long and slow ones, in ten minutes on two cores; JOBS=4: on four"
	@echo "make test-long the long ones, in about ten minutes more"
	@echo "make both in one go, which is quicker than one after the other"
	@echo "make test-all  all tests, one after another, and property tests with all their examples; much longer"
	@echo "make test-versions  the tests on Python 3.11 to 3.13 with the lowest and the newest packages; needs uv, 30 GB, hours"
	@echo "make parity    every engine against plain PyTorch, all cases; writes docs/background/parity.md"
	@echo "make chaos     runs of nine kinds killed a hundred times and disturbed otherwise; MINUTES=60: for an hour"
	@echo "make fuzz      1,400 almost right command lines of every verb; writes bench/results/fuzz.md"
	@echo "make mutants   N=20 more small changes to src that tests should notice (seconds to minutes each); AGAIN=survived repeats"
	@echo "make gpu       on a machine with a GPU, with the packages of PYTHON=: tests, parity, resume, benches; PART=parity: one"
	@echo "make gpu-report  what make gpu found, as bench/results/gpu-<name>.md"
	@echo "make lint      ruff and mypy"
	@echo "make bench     the benchmarks of bench/ (tens of minutes; wants a quiet machine)"
	@echo "make clean     remove .venv, runs and caches"

demo: $(VENV)/.installed
	$(BIN)/drivetrain compare recipes/digits.yaml precision=fp32,bf16,bf16-mixed,fp16-mixed --output runs/demo --fresh
	$(BIN)/drivetrain compare recipes/digits.yaml engine=single,dp,ddp,fsdp,zero1,zero2,zero3,accelerate-ddp processes=2 --output runs/demo-engines --fresh
	$(BIN)/drivetrain compare recipes/digits.yaml engine=fsdp,zero3 precision=bf16-mixed processes=2 --output runs/demo-mixed --fresh

# a file's tests stay together, as they share what they set up, and files come as tests/conftest.py orders them: xdist
# would begin with those of most tests; threads of one process would only disturb the other
PARALLEL := OMP_NUM_THREADS=1 DRIVETRAIN_TEST_FEW_EXAMPLES=1 $(BIN)/python -m pytest -n $(JOBS) --dist loadfile \
	--no-loadscope-reorder --durations=60 --durations-min=4
test: $(VENV)/.installed-dev
	$(PARALLEL) -m "not slow and not long"

test-long: $(VENV)/.installed-dev
	$(PARALLEL) -m "long and not slow"

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m pytest

test-versions:
	$(PYTHON) -m bench.versions $(if $(ONLY),--only $(ONLY)) $(if $(SELECT),--select $(SELECT))

parity: $(VENV)/.installed-dev
	PARITY_TABLE=docs/background/parity.md CROSSING_TABLE=docs/reference/checkpoints.md $(BIN)/python -m pytest tests/parity

chaos: $(VENV)/.installed-dev
	$(BIN)/python -m bench.chaos $(if $(MINUTES),--minutes $(MINUTES))

fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m bench.fuzz

mutants: $(VENV)/.installed-dev
	$(BIN)/python -m bench.mutants $(if $(AGAIN),--again $(AGAIN),--number $(N))

# these install nothing
gpu:
	PYTHONPATH="src:.:$$PYTHONPATH" $(PYTHON) -m bench.gpu $(PART) --device $(DEVICE) --jobs $(AT_ONCE) $(if $(CASES),--cases '$(value CASES)') $(if $(AGAIN),--again)

gpu-report:
	PYTHONPATH="src:.:$$PYTHONPATH" $(PYTHON) -m bench.gpu report --device $(DEVICE)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev
	$(BIN)/python bench/loop_overhead.py
	$(BIN)/python bench/trainer.py
	$(BIN)/python bench/comparing.py
	$(BIN)/python bench/engines.py
	$(BIN)/python bench/mesh.py
	$(BIN)/python bench/checkpoint.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "drivetrain needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Try make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv"; exit 1; }

$(VENV)/.installed: $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) --editable ".[deepspeed,accelerate]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache .mypy_cache .hypothesis
