# make demo    the same prompt through the float loader, Load DiT and INT8 Patch Model; pictures in demo_output/
# make test    all tests
# make style   ruff
# make env     only build the environment
#
# DEMO and TEST take further arguments:  make demo DEMO="--prompt rocket"   make test TEST="tests/kernels -x"
# WORKERS are the processes that share the test files, each with one thread of torch; 0 runs them in one process.

SHELL := /bin/bash
ENV := source .ci/env &&
# Never "python -m pytest": it puts the pack's root on sys.path, where "nodes" and "kernels" shadow the host's.
PYTEST := "$$PYTHON" -c "import sys; sys.path = [p for p in sys.path if p]; import pytest; sys.exit(pytest.main())"

WORKERS ?= 2
# an interpreter that the caller brings may lack pytest-xdist
SHARE = $$([ $(WORKERS) -gt 0 ] && "$$PYTHON" -c "import xdist" 2>/dev/null && echo "-n $(WORKERS) --dist loadfile")

.PHONY: demo test style env

demo:
	@$(ENV) "$$PYTHON" tests/demo/run.py $(DEMO)

test:
	@$(ENV) export NATIVE_INT8_TRITONS=$$(bash .ci/tritons) NATIVE_INT8_REAL_DATA=$$(bash .ci/real_data) \
		NATIVE_INT8_CHROMIUM=$$(bash .ci/chromium) NATIVE_INT8_COMFY_CLI=$$(bash .ci/comfy_cli) \
		OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} && $(PYTEST) -ra $(SHARE) $(TEST)

style:
	@$(ENV) "$$PYTHON" -m ruff check . && "$$PYTHON" -m ruff format --check .

env:
	@$(ENV) echo "PYTHON=$$PYTHON COMFYUI_PATH=$$COMFYUI_PATH"
