# Everything runs in .venv, which the first target that needs it makes. `make` alone lists the targets.

BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo check test bench bench-log bench-engine bench-shipping bench-restore bench-spark chaos format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/dev ## show it at work: a database that comes back from a real S3 server
	@$(BIN)/python -m lowwater.demo

check: .venv/dev ## formatting, lint, types, import contracts and the fast tests
	@echo "check: formatting"
	@$(BIN)/ruff format --quiet --diff .
	@echo "check: lint"
	@$(BIN)/ruff check --quiet .
	@echo "check: types"
	@$(BIN)/mypy
	@echo "check: import contracts"
	@$(BIN)/lint-imports --no-logo
	@echo "check: fast tests"
	@$(BIN)/pytest -q -n 2 -m "not slow and not docker"
	@echo "check passed: formatting, lint, strict types, import contracts and the fast tests all hold."

test: .venv/dev ## all tests, then those that need Docker
	@echo "test: all tests, the slow ones too"
	@$(BIN)/pytest -q -n 2
	@if $(BIN)/python -c 'import sys; from lowwater.engine.fast import IS_COMPILED; sys.exit(not IS_COMPILED)'; then \
		echo "test: the engine's fast tests once more, without what is compiled"; \
		PURE_PYTHON=1 $(BIN)/pytest -q -n 2 -m "not slow and not docker" tests/engine || exit 1; \
	else \
		echo "test: NOTHING IS COMPILED HERE, so compiled loops were not tested: install a C compiler and Python's headers, then 'make clean'"; \
	fi
	@if $(BIN)/pytest -q -m docker --collect-only >/dev/null; then \
		echo "test: tests that need Docker"; $(BIN)/pytest -q -m docker || exit 1; \
		echo "test passed: all tests hold, and those that need Docker were passed or skipped as said above."; \
	else \
		echo "test passed: all tests hold. There are no tests yet that need Docker, so none were run."; \
	fi

bench: bench-log bench-engine bench-shipping bench-restore bench-spark ## measure everything against its peers

bench-log: .venv/bench ## measure the log against its peers, in one run
	@$(BIN)/python bench/log.py --picture build/bench/log.png

bench-engine: .venv/bench ## measure the engine against its peers with 256 and with 64 MiB, and its recovery
	@$(BIN)/python bench/engine.py --picture build/bench/engine.png
	@$(BIN)/python bench/engine.py --memory 64 --json build/bench/engine-64.json --picture build/bench/engine-64.png
	@$(BIN)/python bench/recovery.py --picture build/bench/recovery.png

bench-shipping: .venv/bench ## measure shipping to an S3 server, writers beside it, and reading back
	@$(BIN)/python bench/shipping.py --picture build/bench/shipping.png

bench-restore: .venv/bench ## measure how long a restore takes until the first read, and until all of it is here
	@$(BIN)/python bench/restore.py

bench-spark: .venv/bench ## measure Spark over an archive against Parquet of the same rows
	@$(BIN)/python bench/spark.py --picture build/bench/spark.png

chaos: .venv/dev ## the tests that draw their cases, with as many as have to hold once: more than an hour
	@MODEL_STEPS=1000000 TIERED_STEPS=160000 LIVES=300 LIVES_TRACED=300 SPARK_ARCHIVES=30 STREAM_KILLS=20 \
		$(BIN)/pytest -q -n 2 --timeout 7200 tests/engine/test_engine_model.py tests/tiering/test_tiered_model.py \
		tests/chaos tests/spark/test_frames.py tests/spark/test_building.py tests/spark/test_stream_kill.py
	@echo "chaos passed: models, lives, Spark's replays and its killed streams hold, with long runs of each."

format: .venv/dev ## write the formatting, and what lint can correct
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format .

clean: ## remove .venv and all that was built or cached
	@rm -rf .venv build dist engine/*.so src/*.egg-info .hypothesis .*_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

LOOPS := $(wildcard engine/_fast*.[ch])

.venv/dev: pyproject.toml setup.py $(LOOPS) tests/spark/connect.txt
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		for python in python3.11 python3.12 python3.13 python3; do \
			if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
				if $$python -c 'import ensurepip, venv' 2>/dev/null; then break; fi; \
				bare=$$python; \
			fi; \
			python=; \
		done; \
		if [ -z "$$python" ] && [ -n "$$bare" ]; then \
			echo "error: $$bare has no venv module. On Debian or Ubuntu: apt-get install python3-venv" >&2; exit 1; \
		elif [ -z "$$python" ]; then \
			echo "error: no Python 3.11 or newer was found. On Debian or Ubuntu: apt-get install python3 python3-venv" >&2; exit 1; \
		fi; \
		echo ".venv: making it with $$($$python --version)"; \
		$$python -m venv --clear .venv; \
	}
	@echo ".venv: installing lowwater and what its tests need (the first time takes a minute)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --target .venv/connect -r tests/spark/connect.txt
	@$(BIN)/python -c 'from lowwater.engine.fast import IS_COMPILED as yes; print(".venv: ready,", "with its loops compiled" if yes else "without a C compiler: writes are slower")'
	@touch $@

.venv/bench: .venv/dev
	@echo ".venv: installing what the benchmark compares with"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]'
	@touch $@
