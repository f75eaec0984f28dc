# Each target sets up .venv by itself; extras are installed only for the targets that need them.
#
#   make demo        a trainer and two evaluators share weights; one evaluator is killed on the way
#   make test        the fast tests              make test-full   all of them
#   make test-alone    each file of tests in a process of its own; part of test-full
#   make test-torchrl  the tests with torchrl, in an environment of its own; part of test-full
#   make test-frameworks  those with Lightning, Accelerate, transformers' Trainer and torchtitan, likewise
#   make test-vllm    those with vLLM's classes, likewise
#   make check       ruff, basedpyright, docs     make bench       the benchmarks, with their goals
#   make format      ruff format                 make bench-long  ten minutes of overwrites: does anything grow?
#   make docs        the documentation as a site, in build/site
#   make dist        wheel and sdist              make try-dist   the wheel, in an environment that never saw this folder
#   make address REPOSITORY=https://github.com/NAME/memstore   the address, wherever it is missing (docs/releasing.md)
#   make release-check VERSION=0.2.0   what is missing for that release
#   make clean       removes the environments and caches
#
# PYTHON=python3.12 chooses the interpreter, WORKERS=3 how many processes test. On x86-64, torch from PyPI brings CUDA
# (gigabytes); for the CPU build:
#   export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu

TORCH := 2.13.0
VENV  := .venv
WORKERS ?= 4  # on 2 cores: many tests wait for processes of their own
RUN   := $(VENV)/bin/python
WITH_TORCHRL := .venv-torchrl
WITH_FRAMEWORKS := .venv-frameworks
WITH_VLLM := .venv-vllm

SUPPORTED := import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.10 python3.14; do \
	"$$p" -c '$(SUPPORTED)' 2>/dev/null && { echo "$$p"; break; }; done)

# Thousands of processes import memstore: each would compile it anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-full test-alone test-malloc test-torchrl test-frameworks test-vllm check lint types docs bench bench-long format clean dist try-dist address release-check
.DELETE_ON_ERROR:

demo: $(VENV)/.has-demo
	$(RUN) -m examples.follow_policy

test: $(VENV)/.has-test
	$(RUN) -m pytest -q -n $(WORKERS) --dist worksteal

# The extras are those without which a test is skipped: it draws plots, builds the site, and has the archives checked.
test-full: $(VENV)/.has-test $(VENV)/.has-demo $(VENV)/.has-docs $(VENV)/.has-release $(VENV)/.has-check
	HYPOTHESIS_PROFILE=full $(RUN) -m pytest -q -n $(WORKERS) --dist worksteal -m "full or not full"
	@$(MAKE) --no-print-directory test-alone
	@$(MAKE) --no-print-directory test-malloc
	@if $(MAKE) --no-print-directory $(WITH_TORCHRL)/.has-torchrl; then $(MAKE) --no-print-directory test-torchrl; else \
		echo "memstore: skipped make test-torchrl: torchrl could not be installed, see above" >&2; fi
	@if $(MAKE) --no-print-directory $(WITH_FRAMEWORKS)/.has-frameworks; then $(MAKE) --no-print-directory test-frameworks; else \
		echo "memstore: skipped make test-frameworks: they could not be installed, see above" >&2; fi
	@if $(MAKE) --no-print-directory $(WITH_VLLM)/.has-vllm; then $(MAKE) --no-print-directory test-vllm; else \
		echo "memstore: skipped make test-vllm: vllm could not be installed, see above" >&2; fi

# In a run of all files a test may rely on what another file has imported, warmed or left.
test-alone: $(VENV)/.has-test
	$(RUN) -m tests.alone -n $(WORKERS)

# Damaged and hostile files must lead to no write outside of a value's memory. glibc finds one in the heap, by its checks.
MALLOC_CHECKS := $(firstword $(wildcard /lib/*/libc_malloc_debug.so.0 /lib64/libc_malloc_debug.so.0))
test-malloc: $(VENV)/.has-test
	@if [ -n "$(MALLOC_CHECKS)" ]; then \
		LD_PRELOAD=$(MALLOC_CHECKS) MALLOC_CHECK_=3 MALLOC_PERTURB_=165 $(RUN) -X faulthandler -m pytest -q \
			tests/structure tests/contents tests/damage; else \
		echo "memstore: skipped make test-malloc: this C library has no libc_malloc_debug.so.0" >&2; fi

# torchrl 0.14 wants tensordict 0.14, and memstore's own tests are run with 0.15.
test-torchrl: $(WITH_TORCHRL)/.has-torchrl
	HYPOTHESIS_PROFILE=full $(WITH_TORCHRL)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m "full or not full" \
		tests/integrations/torchrl tests/datasets \
		"tests/documents/test_snippets.py::test_a_page_runs_as_a_newcomer_copies_it[docs/torchrl.md]"

$(WITH_TORCHRL)/.has-torchrl: pyproject.toml Makefile
	@$(MAKE) --no-print-directory VENV=$(WITH_TORCHRL) $(WITH_TORCHRL)/.ready
	@echo "memstore: installing torchrl, torch $(TORCH) and memstore[test] into $(WITH_TORCHRL), once" >&2
	@$(WITH_TORCHRL)/bin/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH)"
	@$(WITH_TORCHRL)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[test]" \
		"torch==$(TORCH)" "torchrl>=0.14.1,<0.15"
	@touch $@

# They bring 30 packages, of which memstore needs none. torchtitan's own requirements have 40 more (wandb, datasets, ...):
# its checkpoints need these few.
test-frameworks: $(WITH_FRAMEWORKS)/.has-frameworks
	HYPOTHESIS_PROFILE=full $(WITH_FRAMEWORKS)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m "full or not full" \
		tests/integrations/frameworks tests/formats/test_export_hf.py \
		$(addprefix "tests/documents/test_snippets.py::test_a_page_runs_as_a_newcomer_copies_it[docs/,\
			$(addsuffix .md]",transformers lightning accelerate torchtitan))

$(WITH_FRAMEWORKS)/.has-frameworks: pyproject.toml Makefile
	@$(MAKE) --no-print-directory VENV=$(WITH_FRAMEWORKS) $(WITH_FRAMEWORKS)/.ready
	@echo "memstore: installing lightning, accelerate and torchtitan into $(WITH_FRAMEWORKS), once" >&2
	@$(WITH_FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH)"
	@$(WITH_FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[test]" \
		"torch==$(TORCH)" "lightning>=2.6,<2.7" "accelerate>=1.15,<2" "transformers>=5.24,<6" \
		torchdata tyro einops torch_checkpointing "spmd_types==0.2.3"
	@$(WITH_FRAMEWORKS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "torchtitan==0.3.0"
	@touch $@

# vLLM's own packages want a GPU's torch. Its registries, workers, layers, routes and clients run on a CPU with those
# below; it needs Python 3.11 or later.
VLLM := 0.33.0
VLLM_NEEDS := aiohttp cachetools cbor2 einops fastapi llguidance openai openai_harmony partial_json_parser pillow ray \
	prometheus_client psutil py-cpuinfo pybase64 regex requests sentencepiece transformers uvicorn uvloop

test-vllm: $(WITH_VLLM)/.has-vllm
	HYPOTHESIS_PROFILE=full $(WITH_VLLM)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m "full or not full" \
		tests/integrations/vllm

$(WITH_VLLM)/.has-vllm: pyproject.toml Makefile
	@$(MAKE) --no-print-directory VENV=$(WITH_VLLM) $(WITH_VLLM)/.ready
	@echo "memstore: installing vllm $(VLLM), torch $(TORCH) and memstore[test] into $(WITH_VLLM), once" >&2
	@$(WITH_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check "torch==$(TORCH)"
	@$(WITH_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[test]" \
		"torch==$(TORCH)" $(VLLM_NEEDS)
	@$(WITH_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "vllm==$(VLLM)" \
		xgrammar apache-tvm-ffi
	@touch $@

# In parts, for the hooks of .pre-commit-config.yaml: what is added here is added there.
check: lint types docs

lint: $(VENV)/.has-check
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.has-check
	$(RUN) -m basedpyright

docs: $(VENV)/.has-docs
	$(RUN) -m sphinx -W --keep-going -E -j 2 -q -c docs/site docs build/site
	$(RUN) docs/site/links.py build/site

bench: $(VENV)/.has-bench
	$(RUN) -m tests.benchmarks $(BENCH)

bench-long: $(VENV)/.has-bench
	$(RUN) -m tests.benchmarks long --minutes 10 $(BENCH)

format: $(VENV)/.has-check
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

dist: $(VENV)/.has-release
	rm -rf dist
	$(RUN) -m build --no-isolation
	$(RUN) -m twine check --strict dist/*

# The wheel, with all that it needs, in an environment that has never seen this folder.
try-dist: dist
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && "$(PYTHON)" -m venv "$$fresh" && cd "$$fresh" && \
	bin/python -m pip install --quiet --disable-pip-version-check "$$(ls "$(CURDIR)"/dist/*.whl)[cli]" "torch==$(TORCH)" && \
	bin/python -m pip check && bin/python "$(CURDIR)/examples/put_get.py" && bin/memstore bench

# Puts the repository's address in the place of the placeholder, in all files that have it.
address:
	@case "$(REPOSITORY)" in https://*/*/*) ;; *) echo "memstore: say REPOSITORY=https://github.com/NAME/memstore" >&2; exit 1;; esac
	git grep -lF https://github.com/OWNER/memstore -- . ':!Makefile' ':!tests' | xargs sed -i 's#https://github.com/OWNER/memstore#$(REPOSITORY)#g'

release-check: $(VENV)/.has-release
	@$(RUN) -m tests.packaging.ready "$(VERSION)"

clean:
	rm -rf $(VENV) $(WITH_TORCHRL) $(WITH_FRAMEWORKS) $(WITH_VLLM) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp an extra; older than pyproject.toml, it is stale. A second run of pip finds everything there and takes a second.
$(VENV)/.has-%: pyproject.toml Makefile | $(VENV)/.ready
	@echo "memstore: installing torch $(TORCH) and memstore[$*] into $(VENV), once" >&2
	@$(RUN) -m pip install --quiet --disable-pip-version-check "torch==$(TORCH)"
	@$(RUN) -m pip install --quiet --disable-pip-version-check --editable ".[$*]" "torch==$(TORCH)"
	@touch $@

# A .venv that works is kept, whoever made it. Debian's python3 without python3-venv has no ensurepip: take its pip.
$(VENV)/.ready:
	@if ! $(RUN) -m pip --version >/dev/null 2>&1; then \
		if [ -z "$(PYTHON)" ]; then echo "memstore: no Python 3.10 to 3.14 found; say make PYTHON=..." >&2; exit 1; fi; \
		"$(PYTHON)" -c '$(SUPPORTED)' || { echo "memstore: $(PYTHON) is not Python 3.10 to 3.14" >&2; exit 1; }; \
		echo "memstore: making $(VENV) with $$("$(PYTHON)" --version)" >&2; \
		"$(PYTHON)" -m venv --clear $(VENV) >/dev/null 2>&1 || { \
			"$(PYTHON)" -m venv --clear --without-pip $(VENV) && \
			"$(PYTHON)" -m pip --python $(RUN) install --quiet --disable-pip-version-check pip; }; \
	fi
	@touch $@
