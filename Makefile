# Two commands do everything on a fresh machine: `make demo` and `make test`.
# The environment is kept in .venv, and downloads that all clones share are kept in $KVSTRATA_CACHE or ~/.cache/kvstrata.
# Nothing else on the machine is changed.

SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# Tests start many Python processes; without bytecode each of them would compile all its modules.
unexport PYTHONDONTWRITEBYTECODE

VENV_PYTHON := .venv/bin/python
JOBS ?= $(shell nproc)
# More than cores, since tests of processes wait. A worker gets a file at a time, so fixtures of a module are
# made once.
WORKERS ?= $(shell echo $$((2 * $(JOBS))))
PYTEST ?= $(VENV_PYTHON) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Builds and checks of wheels need no environment of this clone.
WHEEL_PYTHON = $(or $(wildcard $(VENV_PYTHON)),python3)
# make test ARGS="-k name" hands ARGS to pytest; with "-n0" one test runs at a time, in pytest's own process.
ARGS ?=
LINTED := src tests docs benchmarks examples ext/make setup.py
CLANG_FORMATTED = $(shell git ls-files --cached --others --exclude-standard 'ext/*.h' 'ext/*.cpp' 'ext/*.cu' 'tests/*.cpp' 'benchmarks/*.cpp')

# In CI the CUDA code must compile if nvcc is installed.
ifeq ($(CI),true)
ifneq ($(shell command -v nvcc),)
export KVSTRATA_CUDA ?= require
endif
export KVSTRATA_WERROR ?= 1
endif

.PHONY: help setup setup-packages setup-built demo test test-all test-fast test-sglang test-native test-vllm-env test-versions families lint format sanitize docs bench bench-isa bench-paired cuda gpu gpu-pack soak chaos power-loss wheel wheel-check lock clean

##@ First steps
# Shows these lines of this file: `##@ heading`, `target: …  ## what it does`, and below a target `#+ its variables`.
help:  ## show this list
	@awk -F ' *## ' '/^##@/ {sub(/^##@ /, ""); printf "\n%s\n", $$0} \
	    /^[a-z-]+:.*## / {name = $$1; sub(/:.*/, "", name); printf "  make %-16s %s\n", name, $$2} \
	    /^#\+ / {printf "%24s%s\n", "", substr($$0, 4)}' Makefile

# PYTHON=... names another interpreter; without it the one that made .venv is kept. A name on PATH may be a shim that
# only prints an error: run it to be sure.
setup:  ## make or update .venv and the compiled modules
#+ PYTHON=python3.12: with this interpreter (3.11 to 3.13)
setup-packages:  ## install only the Python packages of .venv
setup-built:  ## make .venv, and compile the modules only if there are none
setup-packages: SETUP_ONLY := --only packages
setup-built: SETUP_ONLY := --only built
setup setup-packages setup-built:
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
	    kept=$$(.venv/bin/python -c 'import sys; print(sys._base_executable)' 2>/dev/null); \
	    for name in $${kept:+"$$kept"} python3.11 python3.12 python3.13 python3; do \
	        if "$$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
	        then python="$$name"; break; fi; \
	    done; \
	fi; \
	if [ -z "$$python" ]; then \
	    echo "no Python 3.11, 3.12 or 3.13 was found; on Debian or Ubuntu:" \
	         "sudo apt-get update && sudo apt-get install -y python3 python3-dev python3-venv g++"; exit 2; \
	fi; \
	"$$python" tests/tools/setup_env.py $(SETUP_ONLY)

# vLLM is fetched and its model made while the modules are compiled; the demo itself says why it has none.
demo: DEMO_VLLM := $(VENV_PYTHON) tests/harness/vllm_env.py --model $(or $(MODEL),160m) >/dev/null
demo: setup-packages  ## show the main use end to end, with real vLLM where its download is small
#+ VLLM=1: always with vLLM
#+ MODEL=gemma3, gpt-oss, mistral, llama4 or qwen3-next: a small model of that family
#+ CLUSTER=1: a controller and two instances that read from each other; KEEP=1 leaves it open
#+ GATEWAY=1: a gateway in front of two engines; after a kill, a conversation continues at the other engine
#+ FLEET=1: simulated engines, two servers, a gateway, a controller and kills, in half a minute
#+ PD=1: an engine that prefills long prompts for another engine is killed
	@$(if $(VLLM),export VLLM=$(VLLM);) [ "$$VLLM" = 0 ] || [ -n "$(FLEET)" ] || $(DEMO_VLLM) & $(MAKE) setup; done=$$?; \
	    wait; [ $$done = 0 ] || exit $$done; \
	    $(if $(VLLM),VLLM=$(VLLM)) $(VENV_PYTHON) -m tests.tools.demo $(ARGS)

##@ Before a commit
# The environment of vLLM is fetched while the C++ tests are compiled. Tests of silence run last, one at a time.
test: MARKED := not long and
test: setup  ## run the gate of each change (twenty minutes), with real vLLM where it is installed or small
#+ ARGS="-k name": for pytest; ARGS="-n0 -k name": one test at a time, in pytest's own process
#+ WORKERS=3, JOBS=2: test processes, compilers
test-all: export ALL_TESTS := 1
test-all: export PYTEST_TIMEOUT := 3600
test-all: setup  ## run every test, including the long and the rare ones, with fresh seeds
test test-all:
	@$(MAKE) test-vllm-env & $(MAKE) test-native; native=$$?; wait $$! && exit $$native
	@$(PYTEST) --junitxml build/tests.xml -m "$(MARKED) not silence" $(ARGS); beside=$$?; \
	    $(PYTEST) -n0 --junitxml build/tests-alone.xml -m "$(MARKED) silence" $(ARGS); alone=$$?; \
	    case "$$beside $$alone" in "0 5" | "5 0") exit 0 ;; esac; exit $$((beside ? beside : alone))  # 5: no test

test-fast: setup test-native  ## run the tests that need no process, vLLM or GPU (a minute)
	@$(PYTEST) -n $(JOBS) -m "fast and not long and not silence" \
	    $(addprefix tests/,conformance fuzz model property unit) $(ARGS)

families: setup test-vllm-env  ## serve a small model of each family with real vLLM, and compare tokens and hits
#+ MODEL=gemma3: only this one; ARGS="--lengths 5 --seed 7"
	@$(VENV_PYTHON) -m tests.tools.families $(MODEL) $(ARGS)

test-sglang: setup test-vllm-env  ## fetch SGLang's wheel (50 MB), and run our storage under its code
	@$(VENV_PYTHON) -c "from tests.tools import fetch_wheels as f; f.ensure(f.SGLANG)"
	@$(VENV_PYTHON) -m pytest -n0 tests/sglang $(ARGS)

test-versions: setup test-vllm-env  ## serve with each supported version of vLLM, and share records between them
#+ VERSIONS="0.30.0 0.32.0": only these; ARGS="--lengths 5 --seed 7"
	@$(VENV_PYTHON) -m tests.tools.families --versions $(VERSIONS) $(ARGS)

test-native:  ## run the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer
#+ make -C ext/core check SANITIZER=address TEST=pool/slab_test: one program
	@$(MAKE) -C ext/core -j$(JOBS) check SANITIZER=address

# Without the environment its tests are skipped with the reason; with CI=true they are required.
test-vllm-env: setup  ## fetch the environment of vLLM that the tests use
	@$(VENV_PYTHON) tests/harness/vllm_env.py --ensure >/dev/null || [ "$(CI)" != true ]

lint: setup-packages  ## check with ruff, mypy and clang-format; changes nothing
	@$(VENV_PYTHON) -m ruff check --output-format concise $(wildcard $(LINTED))
	@$(VENV_PYTHON) -m ruff format --check $(wildcard $(LINTED))
	@$(VENV_PYTHON) ext/make/stubs.py && $(VENV_PYTHON) -m mypy src
	@files=($(CLANG_FORMATTED)); [ $${#files[@]} = 0 ] || \
	    .venv/bin/clang-format --dry-run -Werror "$${files[@]}"

format: setup-packages  ## format Python and C++, and apply ruff's fixes
	@$(VENV_PYTHON) -m ruff format $(wildcard $(LINTED))
	@$(VENV_PYTHON) -m ruff check --fix $(wildcard $(LINTED))
	@files=($(CLANG_FORMATTED)); [ $${#files[@]} = 0 ] || .venv/bin/clang-format -i "$${files[@]}"

sanitize: test-native  ## run the C++ tests under ASan + UBSan, then under ThreadSanitizer
	@$(MAKE) -C ext/core -j$(JOBS) check SANITIZER=thread

docs: setup-built  ## write the pages that are generated from the code
	@$(VENV_PYTHON) -m docs.generate

##@ Measurements
bench: setup  ## run every benchmark, after a question; figures go to build/bench.json
#+ BENCH="ping copy_path": only these
#+ ARGS=--report: print the existing figures; ARGS=--small: only check that the benchmarks work
	@$(VENV_PYTHON) -m benchmarks.run $(BENCH) $(ARGS)

bench-isa: setup  ## compare the benchmarks that depend on vector instructions, with and without AVX-512, in turns
#+ BENCH="lookup_rpc host_cost" ARGS="--rounds 3"
	@$(VENV_PYTHON) -m tests.tools.paired --simd avx2 $(ARGS) $(or $(BENCH),lookup_rpc registry start_ready host_cost mooncake)

bench-paired: setup  ## compare the benchmarks of this checkout and of another commit, in turns
#+ WITH=commit BENCH="ping lookup_rpc" ARGS="--rounds 5"
	@$(VENV_PYTHON) -m tests.tools.paired --commit $(or $(WITH),$(error make bench-paired needs WITH=commit)) \
	    $(ARGS) $(or $(BENCH),$(error make bench-paired needs BENCH="name ..."))

cuda: setup  ## compile the CUDA kernels; an error where nvcc is missing
	@KVSTRATA_CUDA=require $(VENV_PYTHON) setup.py --quiet build_ext --inplace

# Runs where nothing can be fetched, with the Python that has CuPy, so it makes no .venv.
gpu:  ## run the tests marked gpu, then every GPU benchmark, on a machine with a GPU and no network
#+ STAGE=1..3: one stage; results in $OUT, else build/gpu
	@$(or $(PYTHON),python3) tests/tools/gpu_run.py $(STAGE) $(ARGS)

gpu-pack: setup-packages  ## fetch the wheels that `make gpu` needs there into build/gpu-pack
#+ GPU_PYTHON=3.12: for that Python
	@rm -rf build/gpu-pack
	@$(VENV_PYTHON) -m pip download --quiet --no-deps --only-binary=:all: --dest build/gpu-pack \
	    --require-hashes --requirement requirements/gpu-pack.lock \
	    --python-version $(or $(GPU_PYTHON),3.12) --implementation cp --platform manylinux2014_x86_64 \
	    $(patsubst %,--platform manylinux_2_%_x86_64,34 31 28 27 24 17 12 5)
	@echo "Bring build/gpu-pack into the clone on the machine with the GPU, then there: make gpu"

##@ Long random tests (MINUTES=10, SEED=)
soak: setup  ## run a server with clients that come and go; fails on a wrong byte or a leak
	@$(VENV_PYTHON) -m tests.tools.soak --minutes $(or $(MINUTES),10) $(SEED:%=--seed %) $(ARGS)

chaos: setup  ## kill, stop and cut off three controllers and three servers; fails on a wrong byte or answer
	@$(VENV_PYTHON) -m tests.tools.chaos --minutes $(or $(MINUTES),10) $(SEED:%=--seed %) $(ARGS)

power-loss:  ## simulate power cuts at each step of a disk tier; fails on a lost or wrong record
	@$(MAKE) -C ext/core --no-print-directory power-loss MINUTES=$(or $(MINUTES),10) \
	    SEED=$(or $(SEED),$(shell date +%s))

##@ Packages
wheel:  ## build an sdist, and a manylinux wheel for each Python 3.11 to 3.13 found, in dist/
#+ PYTHONS="python3.12 ...": for these only
	@$(WHEEL_PYTHON) -m tests.tools.wheels make $(PYTHONS)

wheel-check:  ## store and load with a server from each wheel in dist/, with no program on PATH
	@$(WHEEL_PYTHON) -m tests.tools.wheels check $(PYTHONS)

# Any Python runs this: its tools have an environment of their own in the cache folder.
lock:  ## pin the packages of tests and image, with hashes, in requirements/*.lock
#+ ARGS=--upgrade: the newest versions; otherwise versions that still fit are kept
lock:
	@$(WHEEL_PYTHON) tests/tools/supply.py $(ARGS)

clean:  ## remove everything that was built here except the cache folder
	@rm -rf .venv build dist src/*.egg-info
	@find src -name '*.so' -delete -o -name '*.pyi' -delete
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
