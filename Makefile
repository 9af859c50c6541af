# Everything runs in .venv, which .ci/bootstrap.py makes and keeps up to date. A newer Python: make run PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin

# The demo: two questions to a 135M model, each with lines of a file of this repository. What
# keeps so small a model on the point: few lines, no tools to call, short replies. Others: make run TASK='...'
MODEL ?= smollm2
TASK ?= In one sentence, what is a chapbook? @README.md:3-4
NEXT ?= Who is it for? @README.md:8-9
RUN_FLAGS ?= --tool-choice none --temperature 0 --max-reply-tokens 80 --set sampling.repeat_penalty=1.08 \
	--set turn.continuations=0

.PHONY: help run test test-slow lint bench clean

help:
	@echo "make run     set up, then ask SmolLM2 two questions about README.md"
	@echo "make test    set up, then run the tests"
	@echo "make test-slow   the tests that take long: a real model, many processes, many more examples"
	@echo "make lint    set up, then ruff, mypy and import-linter"
	@echo "make bench   set up, then measure speed against bare llama.cpp, the prefix cache, the gate, and the kernels"
	@echo "make clean   remove what tools left behind; .venv and the compiled llama.cpp stay"

run:
	@$(PYTHON) .ci/bootstrap.py llama
	printf '%s\n' '$(TASK)' '$(NEXT)' | $(BIN)/chapbook chat --model '$(MODEL)' $(RUN_FLAGS)

test:
	@$(PYTHON) .ci/bootstrap.py llama test
	$(BIN)/pytest -n auto -m 'not slow'

test-slow:
	@$(PYTHON) .ci/bootstrap.py llama test
	$(BIN)/pytest -n auto -m slow

lint:
	@$(PYTHON) .ci/bootstrap.py lint test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --strict .ci/bootstrap.py
	$(BIN)/lint-imports

bench:
	@$(PYTHON) .ci/bootstrap.py llama bench
	$(BIN)/chapbook bench speed
	$(BIN)/chapbook bench cache
	$(BIN)/chapbook bench gate
	$(BIN)/pytest bench/

clean:
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .benchmarks
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
