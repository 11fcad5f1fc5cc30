# Everything runs in .venv, made on first use from the versions in constraints.txt. Needs only python3 >= 3.11.

PYTHON := $(or $(PYTHON),$(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell \
	$(p) -c 'import sys; print("$(p)" if sys.version_info >= (3, 11) else "")' 2>/dev/null))))
BIN := .venv/bin
# Named beside everything else so that no other torch is ever considered.
TORCH := torch==2.13.0

.PHONY: help demo test slow olmo check format constraints clean

help:
	@echo "make demo         run the demonstration"
	@echo "make test         fast tests and the examples in the docstrings"
	@echo "make slow         the slow tests"
	@echo "make olmo         OLMo-core's trainers, in environments of their own"
	@echo "make check        lint, formatting, types and layering"
	@echo "make format       apply formatting and safe lint fixes"
	@echo "make constraints  resolve dependencies anew into constraints.txt"
	@echo "make clean        remove .venv and caches"

.venv/.stamp: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "attrax needs Python >= 3.11; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt --upgrade setuptools
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[all]" $(TORCH)
	@touch $@

demo: .venv/.stamp
	$(BIN)/attrax demo

test: .venv/.stamp
	$(BIN)/python -m pytest --doctest-modules --pyargs attrax.core attrax.methods attrax.frontends
	$(BIN)/python -m pytest -n 2 -m "not slow" --durations=5

slow: .venv/.stamp
	$(BIN)/python -m pytest -m slow --durations=5

# OLMo-core pins older versions of packages that the other tests use.
olmo:
	for version in 3.0.0 2.6.0; do \
		$(PYTHON) -m venv .venv-olmo-$$version && \
		.venv-olmo-$$version/bin/python -m pip install -q $(TORCH) ai2-olmo-core==$$version h5py opt_einsum jaxtyping \
			xxhash beartype hypothesis pytest && \
		PYTHONPATH=. .venv-olmo-$$version/bin/python -m pytest tests/frontends/test_olmo_core.py || exit 1; \
	done

check: .venv/.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

format: .venv/.stamp
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

constraints:
	rm -rf build/lock && $(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install -q --upgrade setuptools
	build/lock/bin/python -m pip install -q --no-build-isolation ".[all]" $(TORCH)
	{ head -n 1 constraints.txt; build/lock/bin/python -m pip freeze --all --exclude pip --exclude attrax \
		| sed 's/+cpu$$//'; } > build/constraints.txt
	mv build/constraints.txt constraints.txt && rm -rf build

clean:
	rm -rf .venv .venv-olmo-* build .hypothesis .pytest_cache .ruff_cache .import_linter_cache *.egg-info
