# Every target sets up what it needs; see README.md.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CSRC := $(wildcard csrc/*.cc csrc/*.h csrc/test/*.cc csrc/test/*.h)
MATCHING := $(addprefix csrc/,engine.cc executor.cc inbox.cc message.cc pool.cc shared.cc)

.PHONY: help demo test test-tpu stress faults ops lint types docs pages wheel format sanitize clean

help:
	@echo "make demo    train a GPT on two ranks of two devices (ARGS='--schedule ZBVZeroBubble')"
	@echo "make test    run the tests (ARGS='-m pure' for the fast ones)"
	@echo "make test-tpu  compile for TPUs, which need not be there (ARGS='-k fit'; LIBTPU=0.0.52)"
	@echo "make ops     compare all of torch's operators, write docs/operators.md"
	@echo "make lint    check format and style      make types   check types"
	@echo "make docs    build build/docs/index.html    make pages   write what their code prints"
	@echo "make wheel   build a wheel into build/wheel, install it afresh without a compiler, and use it"
	@echo "make sanitize  run C++ code with threads under sanitizers"
	@echo "make stress  run in loops what must not die (ARGS='--cases eval')"
	@echo "make faults  end ranks in all ways, and see what the others hear"
	@echo "make format  format the code             make clean   remove what was built"

demo: $(STAMP)
	@echo "Starting two ranks of two devices; loading torch and torch_xla takes some seconds"
	@OMP_NUM_THREADS=1 PJRT_DEVICE=CPU CPU_NUM_DEVICES=2 $(BIN)/torchrun --standalone --nproc-per-node 2 examples/train_gpt.py $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile --max-worker-restart 0 $(ARGS)

# The compiler alone, outside of the environment: its licence is its own.
LIBTPU ?= 0.0.21
TPU_FOLDER := build/libtpu-$(LIBTPU)
# It writes the kernel of attention; the version that torch_xla 2.9 asks for.
JAX_FOLDER := build/jax-0.7.1

test-tpu: $(STAMP) $(TPU_FOLDER)/libtpu/libtpu.so $(JAX_FOLDER)/jax
	PYTHONPATH=$(JAX_FOLDER) TPU_LIBRARY_PATH=$(TPU_FOLDER)/libtpu/libtpu.so $(BIN)/python -m pytest test/accelerators test/fitting test/cli/test_fit_command.py $(ARGS)

$(TPU_FOLDER)/libtpu/libtpu.so:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(TPU_FOLDER) libtpu==$(LIBTPU)

$(JAX_FOLDER)/jax:
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(JAX_FOLDER) jax==0.7.1 jaxlib==0.7.1 ml_dtypes opt_einsum scipy

stress: $(STAMP)
	$(BIN)/python benchmarks/stress.py $(ARGS)

faults: $(STAMP)
	$(BIN)/python benchmarks/faults.py $(ARGS)

# All of torch's operator samples; `make test` runs some of them.
ops: $(STAMP)
	PYTHONPATH=test $(BIN)/python test/ops/table.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CSRC)

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini benchmarks/*.py examples/*.py

docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q docs build/docs

# With the compiled library inside, so that installing it needs no compiler.
wheel: $(STAMP)
	rm -rf build/wheel build/lib* build/bdist*
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -c constraints.txt -w build/wheel .
	$(BIN)/python .ci/fresh_install.py build/wheel/*.whl

# After a change of what the code of the pages prints, or of what the pictures show.
pages: $(STAMP)
	$(BIN)/python test/pages.py
	$(BIN)/python docs/pictures/draw.py

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $(CSRC)

# The matching of messages, large and shared blocks, under the thread and the address sanitizer.
SANITIZED := $(foreach test,engine_test blocks_test shared_test,build/$(test).thread build/$(test).address)
sanitize: $(SANITIZED)
	$(foreach test,$(SANITIZED),$(test) &&) true

SANITIZE = $(CXX) -std=c++17 -g -O1 -Wall -Wextra -fsanitize=$* -fno-omit-frame-pointer -o $@ $(filter %.cc,$^) -lpthread

build/engine_test.%: csrc/test/engine_test.cc csrc/test/expect.h $(MATCHING) $(wildcard csrc/*.h)
	@mkdir -p build
	$(SANITIZE)

build/blocks_test.%: csrc/test/blocks_test.cc csrc/test/expect.h csrc/blocks.cc csrc/blocks.h
	@mkdir -p build
	$(SANITIZE)

build/shared_test.%: csrc/test/shared_test.cc csrc/test/expect.h csrc/shared.cc csrc/shared.h
	@mkdir -p build
	$(SANITIZE)

clean:
	rm -rf build torch_xla_pp/*.so *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard csrc/*)
	@test -x $(BIN)/python || { \
	  "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	    { echo "Python 3.11 is needed, got: $$("$(PYTHON)" --version). Run make PYTHON=/path/to/python3.11"; exit 1; }; \
	  echo "Making $(VENV) with $(PYTHON)"; "$(PYTHON)" -m venv $(VENV); }
	@echo "Installing torch_xla_pp into $(VENV); torch is about 7 GB the first time, which takes minutes"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)
