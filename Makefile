# What a developer does here, one word each. `make` alone lists them.
# From a bare Debian 12, 13 or Ubuntu 24.04 with python3 and make, `make test` and `make demo` fetch what they need.
# VGPU_PYTHON=/path/to/python uses an environment made elsewhere (a machine without a network) in place of .venv.

SHELL := /bin/sh
.DEFAULT_GOAL := help
ifdef VGPU_PYTHON
PY := $(VGPU_PYTHON)
ENVIRONMENT :=
else
PY := .venv/bin/python
ENVIRONMENT := .venv/ready
endif

PACKAGES := vgpu_errors image_format gpu_state oci_hook runtime_shim podman_integration containerd_integration docker_integration vgpu_cli
TOOLS := vgpu_preload packaging tools docs
DESTDIR ?= /
INSTALL_PYTHON ?= /usr/bin/python3
INSTALL_VERSION = $(shell $(INSTALL_PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
FUZZ_SECONDS ?= 60
ROOT := $(shell [ "$$(id -u)" = 0 ] && echo yes)

.PHONY: help dev lock lint test test-fast test-root test-gpu gpu-test gpu-demo demo fuzz bench docs measurements install uninstall package carry clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

dev: ## install missing system packages (as root) and make .venv
	@sh packaging/dev.sh

.venv/ready: requirements-dev.lock packaging/dev.sh
	@sh packaging/dev.sh

lock: $(ENVIRONMENT) ## write requirements.lock and requirements-dev.lock from .venv
	$(PY) packaging/lock.py

lint: $(ENVIRONMENT) ## style, format, types and layers
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy $(foreach package,$(PACKAGES) $(TOOLS),-p $(package))
	$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'

ifdef T
test: $(ENVIRONMENT) ## lint, then every test that needs no GPU; T=name: only these, up to the first failure
	$(PY) -m pytest -x -k '$(T)' -m 'not gpu'
else
test: lint
	@$(if $(ROOT),,echo "test: not root, so the tests in test hosts are left out")
	$(PY) -m tools.run_tests $(if $(ROOT),,--without-hosts)
endif

test-fast: $(ENVIRONMENT) ## tests without test hosts
	$(PY) -m pytest -m 'not gpu and not engines' $(if $(T),-x -k '$(T)')

test-root: $(ENVIRONMENT) ## tests in test hosts (root): real podman, runc, crun, containerd, CRIU
	$(PY) -m pytest -m engines $(if $(T),-x -k '$(T)')

test-gpu: $(ENVIRONMENT) ## tests on this machine's NVIDIA GPU
	$(PY) -m pytest -m gpu $(if $(T),-x -k '$(T)')

gpu-test: test-gpu

demo: $(ENVIRONMENT) ## a GPU container moves between two nodes, on the software GPU (root)
	$(PY) -m tests.demo

gpu-demo: $(ENVIRONMENT) ## PyTorch on this machine's NVIDIA GPU: export, import, leave-running, a tampered archive (root)
	$(PY) -m tests.gpu.podman_run

fuzz: $(ENVIRONMENT) ## fuzz every parser, FUZZ_SECONDS in all (default 60)
	VGPU_FUZZ_SECONDS=$(FUZZ_SECONDS) $(PY) -m pytest tests/fuzz

bench: $(ENVIRONMENT) ## run the benchmarks that need no GPU
	set -e; for name in shim_passthrough verify_speed pack_speed; do $(PY) -m bench.$$name; done

docs: $(ENVIRONMENT) ## write the generated parts of the documentation
	$(PY) -m docs

measurements: $(ENVIRONMENT) ## draw tables and plots from docs/measurements/*.json
	$(PY) -m tools.measurements

build/vendor/install-%: requirements.lock packaging/vendor.py | $(ENVIRONMENT)
	rm -rf $@
	$(PY) packaging/vendor.py --python-version $* $@

install: $(ENVIRONMENT) ## install below DESTDIR for INSTALL_PYTHON (root)
	$(MAKE) --no-print-directory build/vendor/install-$(INSTALL_VERSION)
	$(PY) packaging/install.py --destdir $(DESTDIR) --python $(INSTALL_PYTHON) --vendor build/vendor/install-$(INSTALL_VERSION)

uninstall: ## remove what install put below DESTDIR (root)
	python3 packaging/install.py --destdir $(DESTDIR) --uninstall

package: $(ENVIRONMENT) ## make build/vgpu-snapshot-<version>-py<version>.tar.gz, to be unpacked at /
	rm -rf build/package
	$(MAKE) --no-print-directory install DESTDIR=build/package
	$(PY) packaging/package.py build/package $(INSTALL_VERSION)

carry: $(ENVIRONMENT) ## fill build/gpu-carry with what hosts need on a GPU machine without a network
	$(PY) -m tests.hosts carry trixie build/gpu-carry

clean: ## remove builds and caches, not the roots of the test hosts
	rm -rf build/package build/vendor build/images build/preload .pytest_cache .mypy_cache .ruff_cache
