# Two commands, each of which does all the set-up it needs on a fresh machine (Python 3.11 or newer and a C++17 compiler):
#   make demo    train a small transformer on the CPU through the stock deepspeed launcher
#   make test    linters and all tests that need no GPU
# `make ci` is what continuous integration runs.
# On a machine whose pip knows the public index only, PIP_FLAGS saves gigabytes of CUDA packages:
#   make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_FLAGS ?=
PYTEST_FLAGS ?=
# Files of tests that run at the same time; 1 for the order and the output of a plain pytest.
TEST_WORKERS ?= 2
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
CLIENTS := $(CURDIR)/.venv-clients
VENV_WHEELS := $(CURDIR)/.venv-wheels
OPERATORS := CPUAdam FusedAdam ShareMemComm
NATIVE_SOURCES := $(shell find csrc -name '*.[ch]pp' 2>/dev/null)

# A file at a time: its tests share engines and the results of processes. In the order of their names: sorted by their
# number of tests, as xdist would, the few long tests would come last, one worker waiting for the other.
WORKERS := $(if $(filter 1,$(TEST_WORKERS)),,-n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder)

# DeepSpeed looks for ninja on the PATH.
ACTIVATE := PATH="$(BIN):$$PATH"
# Kept with the environment: the default cache in the home directory does not tell one torch version from another.
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export DS_ACCELERATOR := cpu
# Tests start fresh processes: what these import is compiled once.
unexport PYTHONDONTWRITEBYTECODE

# Two recipes at a time: compilers, linters and pip use a core each. What a command prints comes as a whole at its end.
TOGETHER = $(MAKE) --no-print-directory --jobs=2 --output-sync=line

.PHONY: demo test test-clients test-clients-quick test-trl-quick test-older-quick clients-quick ci lint sanitize native \
	wheels test-wheels test-install install clean

demo: install
	$(ACTIVATE) $(BIN)/deepspeed --log_level warning --num_gpus 1 examples/finetune.py \
		--deepspeed_config configs/slide_cpu.json --model tiny --batch 8 --seq 128 --steps 100 --log runs/demo.jsonl

test:
	@$(TOGETHER) install lint
	$(QUICK_TESTS)

# Also the wheel in an empty environment, and two clients in theirs, which pip fills beside the compilers.
ci:
	@$(TOGETHER) install clients-quick lint test-install
	$(QUICK_TESTS)
	@$(TOGETHER) test-clients-quick

QUICK_TESTS = $(ACTIVATE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not gpu and not clients" \
	$(WORKERS) $(PYTEST_FLAGS)

# Programs that people fine-tune with, each in an environment of its own packages on top of the one above.
test-clients: install $(foreach client,trl sentence-transformers llamafactory axolotl lightning swift older-transformers bitsandbytes,$(CLIENTS)/$(client)/.installed)
	$(CLIENT_TEST) $(BIN)/python $(CLIENT_FLAGS) tests/clients/test_accelerate.py
	$(CLIENT_TEST) $(CLIENTS)/trl/bin/python $(CLIENT_FLAGS) tests/clients/test_trl.py tests/clients/test_peft.py
	$(CLIENT_TEST) $(CLIENTS)/sentence-transformers/bin/python $(CLIENT_FLAGS) tests/clients/test_sentence_transformers.py
	$(CLIENT_TEST) $(CLIENTS)/llamafactory/bin/python $(CLIENT_FLAGS) tests/clients/test_llamafactory.py
	$(CLIENT_TEST) $(CLIENTS)/axolotl/bin/python $(CLIENT_FLAGS) tests/clients/test_axolotl.py
	$(CLIENT_TEST) $(CLIENTS)/lightning/bin/python $(CLIENT_FLAGS) tests/clients/test_lightning.py
	$(CLIENT_TEST) $(CLIENTS)/swift/bin/python $(CLIENT_FLAGS) tests/clients/test_swift.py
	$(CLIENT_TEST) $(CLIENTS)/bitsandbytes/bin/python $(CLIENT_FLAGS) $(PACKED)
	$(OLDER_TEST) $(OLDER:%=tests/end_to_end/%.py)

# What of it continuous integration has time for: a loss in chunks, generation, parameters of two data types, and inputs of
# blocks that are moved under an older transformers.
test-clients-quick: test-trl-quick test-older-quick

test-trl-quick: install $(CLIENTS)/trl/.installed
	$(CLIENT_TEST) $(CLIENTS)/trl/bin/python $(CLIENT_FLAGS) $(QUICK:%='tests/clients/%')

test-older-quick: install $(CLIENTS)/older-transformers/.installed
	$(OLDER_TEST) tests/end_to_end/activations/test_moved_inputs.py -k "changes_no_bit and clipping or one_block_ahead"

clients-quick: $(foreach client,trl older-transformers,$(CLIENTS)/$(client)/.installed)

QUICK := $(foreach case,sft grpo,test_trl.py::test_losses_and_weights_are_stocks[$(case)]) \
	test_peft.py::test_losses_and_norms_are_stocks[lora]
# Those of DS-Slide's own tests that need bitsandbytes.
PACKED := $(addprefix tests/end_to_end/,models/test_packed.py models/test_packed_adapters.py ranks/test_packed_ranks.py \
	memory/test_planning.py) tests/benchmarks/test_bases.py
# Those of DS-Slide's own tests in which transformers says how a layer is called and recomputed.
OLDER := $(addprefix activations/test_,activations moved_inputs mixed_blocks inputs_on_ssd unasked_recomputation saved_tensors) \
	$(addprefix steps/test_,own_boundaries two_passes) $(addprefix models/test_,families features generation hf_trainer) \
	compile/test_compiled_training
OLDER_TEST = $(CLIENT_TEST) $(CLIENTS)/older-transformers/bin/python -m pytest -m "not slow and not gpu" $(PYTEST_FLAGS)
CLIENT_TEST = $(ACTIVATE) OMP_NUM_THREADS=1
CLIENT_FLAGS = -m pytest -m clients $(PYTEST_FLAGS)

# `addsitedir`, so that the .pth files there count, the editable installation's among them. The lists are complete: what a
# client declares beside them would bring another torch, or is not imported. PyPI's torchaudio is built for CUDA alone and
# does not load beside another torch; without that library it has what is written in Python.
$(CLIENTS)/%/.installed: tests/clients/requirements-%.txt | $(VENV)/.requirements
	$(BIN)/python -m venv $(CLIENTS)/$*
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(CLIENTS)/$*/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/layer.pth"
	$(CLIENTS)/$*/bin/python -m pip install --quiet --no-deps $(PIP_FLAGS) -r $<
	rm -rf $(CLIENTS)/$*/lib/python3*/site-packages/torchaudio/lib
	@touch $@

lint: $(VENV)/.requirements
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)

# The C++ alone, hammered from several threads under ThreadSanitizer and AddressSanitizer.
sanitize:
	bash csrc/tests/run_sanitizers.sh

# The library in place, for the python that is active (needs setuptools there).
native:
	$(PYTHON) setup.py build_ext --inplace

# The wheels of a release for both architectures, checked, with their sums, in dist/: no Docker, no compiler of the machine.
wheels: $(VENV_WHEELS)/.installed
	$(VENV_WHEELS)/bin/python release/build_wheels.py

$(VENV_WHEELS)/.installed: requirements/wheels.txt
	$(PYTHON) -m venv $(VENV_WHEELS)
	$(VENV_WHEELS)/bin/python -m pip install --quiet -r requirements/wheels.txt
	@touch $@

# The wheel as a user installs it: in empty environments without a compiler, one for each Python of the machine.
test-wheels: install
	$(BIN)/python release/check_install.py $(WHEEL_FLAGS)

# The same in less than a minute, with a wheel of the library that `make install` has compiled.
test-install: install
	$(BIN)/python release/check_install.py --in-place --quick

install: $(OPERATORS:%=$(VENV)/.operator-%) $(VENV)/.installed

$(VENV)/.requirements: requirements/torch.txt requirements/test.txt requirements/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the pinned versions need Python 3.11 or newer, not " \
		+ sys.version.split()[0] + ": name another one with make PYTHON=python3.11")'
	@echo "Installing the pinned packages into $(VENV): a few minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -r requirements/torch.txt
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -r requirements/test.txt
	@touch $@

# DeepSpeed would compile these at their first use, a minute each in the middle of a run or a test with a time limit.
# A compilation that was killed leaves its lock behind, and the next one would wait for it for ever.
$(OPERATORS:%=$(VENV)/.operator-%): $(VENV)/.operator-%: $(VENV)/.requirements
	@echo "Compiling DeepSpeed's CPU operator $*, once."
	@$(ACTIVATE) $(BIN)/python -c 'import pathlib; from deepspeed.accelerator import get_accelerator as get; \
		builder = get().create_op_builder("$*Builder"); \
		pathlib.Path("$(TORCH_EXTENSIONS_DIR)", builder.name, "lock").unlink(missing_ok=True); builder.load(verbose=False)'
	@touch $@

# Editable, so that a change of Python needs no new installation; a change of C++ or of the metadata makes one.
$(VENV)/.installed: $(VENV)/.requirements setup.py pyproject.toml $(NATIVE_SOURCES)
	$(ACTIVATE) $(BIN)/python -m pip install --quiet --no-build-isolation --no-deps -e .
	@touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) $(VENV_WHEELS) build dist runs *.egg-info ds_slide/_native*.so ds_slide/_native/*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
