# Everything here works from a fresh clone: each target makes the environments it needs, and finds them made the next time.

PYTHON := .venv/bin/python
DEVICE ?= auto
TESTS ?= tests
LOCK := .venv/bin/uv pip compile --quiet --no-header --no-annotate --no-emit-index-url --no-emit-find-links --extra test
.DEFAULT_GOAL := help

.PHONY: help setup demo serve test test-fast test-harbor test-full test-matrix bench docs lock

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | expand -t 12

setup:  ## make .venv (server) and .client-venv (tinker SDK and cookbook)
	./install_verl.sh --device $(DEVICE)
	client_examples/setup.sh

demo: setup  ## train a small model with a cookbook recipe and draw the curve; under ten minutes on two cores
	$(PYTHON) client_examples/demo.py

serve: setup  ## start the server with the preset that suits this machine
	$(PYTHON) -m verl_tinker.start

test: setup  ## all tests but the long forms
	$(PYTHON) -m pytest $(TESTS)

test-fast: setup  ## the tests that start no engine; seconds
	$(PYTHON) -m pytest $(TESTS) -m "not engine and not recipes and not full and not matrix and not containers"

test-harbor: setup  ## the whole chain of harbor_env in containers; installs a Docker engine where none is (Debian, as root)
	$(PYTHON) -m pytest tests/containers -m containers

test-full: setup  ## all tests, the long forms too, but the matrix of SDK versions and the chain in containers
	$(PYTHON) -m pytest $(TESTS) -m "not matrix and not containers"

test-matrix: setup  ## every SDK version from 0.19 on, each in its own environment, with each flag on and off
	$(PYTHON) -m pytest tests/matrix -m "matrix or not matrix"

bench: setup  ## measure anew what docs/performance.md and docs/numerics.md show; most of an hour on an idle machine
	set -e; for table in performance load prefix runs_and_versions request_path numerics; do $(PYTHON) bench/$$table.py; done

docs: setup  ## the documentation as a site, in build/site
	$(PYTHON) -m mkdocs build

lock: setup  ## pin requirements/*.txt anew from pyproject.toml
	$(LOCK) --python-version 3.11 --extra cpu --overrides requirements/overrides-cpu.txt \
		$(foreach folder,$(PIP_FIND_LINKS),--find-links $(folder)) $(if $(PIP_FIND_LINKS),,--torch-backend cpu) \
		pyproject.toml -o requirements/cpu.txt
	$(LOCK) --python-version 3.12 --extra cuda --overrides requirements/overrides-cuda.txt \
		--python-platform x86_64-manylinux_2_31 pyproject.toml -o requirements/cuda.txt
	printf 'tinker==%s\ntorch==2.13.0+cpu\n' $$(tail -n 1 tests/matrix/versions.txt) | $(subst --extra test,,$(LOCK)) \
		--python-version 3.11 --no-emit-package tinker $(foreach folder,$(PIP_FIND_LINKS),--find-links $(folder)) \
		$(if $(PIP_FIND_LINKS),,--torch-backend cpu) - -o tests/matrix/requirements.txt
