# Every target does its own set-up in .venv and is quick when nothing changed.
UV_VERSION := 0.13.9
BIN := .venv/bin
PYTHON ?=
export PYTHON
# A run starts up to five processes that import the same large packages.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo sums test lint base lock clean
demo: base ## pre-train the tiny base, then watch it learn under STAPO
	$(BIN)/stapo train tiny_stapo

sums: .venv/ready ## the second recipe: evaluate a base on procedural sums, train it, evaluate again
	$(BIN)/python tools/make_tiny_base.py --problems sums --out runs/sums_base
	$(BIN)/stapo eval runs/sums_base --recipe tiny_sums
	$(BIN)/stapo train tiny_sums
	$(BIN)/stapo eval runs/tiny_sums/model --recipe tiny_sums

test: lint ## lint, types and every unmarked, distributed and vllm test
	$(BIN)/pytest

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

base: .venv/ready ## the demo's tiny Qwen3 base, its tokenizer and its problems
	$(BIN)/python tools/make_tiny_base.py

lock: .venv/ready ## resolve the version table of setup.py again
	$(BIN)/uv pip compile setup.py --extra cpu --extra dev --python $(BIN)/python \
		--python-platform x86_64-manylinux_2_28 --no-annotate --no-header \
		--output-file tools/requirements-cpu.txt
	$(BIN)/uv pip compile setup.py --extra gpu --python $(BIN)/python \
		--python-platform x86_64-manylinux_2_39 --no-annotate --no-header \
		--output-file tools/requirements-gpu.txt

clean: ## remove the environment; runs stay
	rm -rf .venv

.venv/ready: setup.py pyproject.toml tools/requirements-cpu.txt tools/find_python.sh
	python=$$(tools/find_python.sh) && { [ -x $(BIN)/python ] || "$$python" -m venv .venv; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps -r tools/requirements-cpu.txt
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .
	touch $@
