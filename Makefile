# Everything runs in .venv, which the first target that needs it makes. `make` alone lists the targets.

BIN := .venv/bin

# Every test runs in one of two targets: `test`, which has the fast ones of `check` too, and `test-long`.
FAST := not slow and not long and not docker
SLOW := slow and not long and not docker
LONG := long or docker

PYTEST := $(BIN)/pytest -q
# A fast test mostly waits for the disk: twice as many of them at once as CI has cores. Others start a JVM, or take
# all of a core.
MANY := -n 4
FEW := -n 2 --dist loadgroup

# Tests start hundreds of interpreters: what they import is compiled once, whatever the shell says of it.
unexport PYTHONDONTWRITEBYTECODE
# Sources and documents are in UTF-8, whatever the machine's language is.
export PYTHONUTF8 := 1

.DEFAULT_GOAL := help
.PHONY: help demo check test test-long bench bench-log bench-engine bench-shipping bench-restore bench-spark chaos format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/demo ## show it at work: a database that comes back from a real S3 server (a minute and a half)
	@$(BIN)/python -m lowwater.demo

check: .venv/dev ## formatting, lint, types, import contracts and the fast tests (4 minutes)
	@echo "check: formatting"
	@$(BIN)/ruff format --quiet --diff .
	@echo "check: lint"
	@$(BIN)/ruff check --quiet .
	@echo "check: types"
	@$(BIN)/mypy
	@echo "check: import contracts"
	@$(BIN)/lint-imports --no-logo
	@echo "check: the fast tests of each part"
	@$(PYTEST) $(MANY) -m "$(FAST)"
	@echo "check passed: formatting, lint, strict types, import contracts and the fast tests all hold."

test: .venv/dev ## every part of it, with Spark and an S3 server, and without Docker, Java or a compiler (8 minutes)
	@echo "test: log, engine, crashes, archive, restore, scrub, Spark, the command line and documents"
	@$(PYTEST) $(MANY) -m "$(FAST)"
	@echo "test: what takes longer, with the S3 server and Spark"
	@$(PYTEST) $(FEW) -m "$(SLOW)"
	@echo "test passed: every part does what the documents say, through crashes, a real S3 server and Spark."

test-long: .venv/dev ## the rest: kills, lost power, long models, memory, crashes in full, Spark Connect, the engine not compiled (20 minutes)
	@echo "test-long: kills, long models, memory and crashes in full, one line a test; then Docker, where it runs"
	@$(PYTEST) $(FEW) -vv -m "$(LONG)"
	@if $(BIN)/python -c 'import sys; from lowwater.engine.format.fast import IS_COMPILED; sys.exit(not IS_COMPILED)'; then \
		echo "test-long: the engine's fast tests once more, without what is compiled"; \
		PURE_PYTHON=1 $(PYTEST) $(MANY) -m "$(FAST)" tests/engine || exit 1; \
		echo "test-long passed: kills, long models, memory and crashes in full hold, and the engine without its loops."; \
	else \
		echo "test-long passed: kills, long models, memory and crashes in full hold."; \
		echo "NOT TESTED: compiled loops. Install a C compiler and Python's headers, then 'make clean'."; \
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

chaos: .venv/dev .venv/s3s ## the tests that draw their cases, with as many as have to hold once: hours
	@MODEL_STEPS=1000000 TIERED_STEPS=160000 KILLS=200 LIVES=300 LIVES_TRACED=300 PAGE_FLIPS=1000 SPARK_ARCHIVES=30 \
		STREAM_KILLS=20 SENDER_ROUNDS=200 STORE_FAULTS=3 POWER_LOSSES=60 FILE_FLIPS=1000 OBJECT_DAMAGES=400 \
		LIST_LIES=200 \
		$(BIN)/pytest -q -n 2 --timeout 7200 tests/engine/test_engine_model.py tests/engine/test_engine_kill.py \
		tests/tiering/test_tiered_model.py tests/tiering/test_senders.py tests/tiering/test_faulty_network.py \
		tests/tiering/test_other_servers.py tests/engine/test_page_flips.py tests/chaos tests/spark/test_frames.py \
		tests/spark/test_building.py tests/spark/test_stream_kill.py tests/recovery/test_file_damage.py \
		tests/recovery/test_object_damage.py tests/recovery/test_lying_lists.py
	@echo "chaos passed: models, lives, senders, other stores and their networks, power losses, flipped bits in pages, damage to files and objects, lists that lie, Spark's replays and its killed streams hold, with long runs of each."

format: .venv/dev ## write the formatting, and what lint can correct
	@$(BIN)/ruff check --quiet --fix . ; $(BIN)/ruff format .

clean: ## remove .venv and all that was built or cached
	@rm -rf .venv build dist engine/format/*.so src/*.egg-info .hypothesis .*_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

LOOPS := $(wildcard engine/format/_fast*.[ch])

.venv/demo: pyproject.toml setup.py $(LOOPS) .ci/install.py
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
		python=$$(.ci/python) || exit 1; \
		echo ".venv: making it with $$($$python --version)"; \
		$$python -m venv --clear .venv; \
	}
	@$(BIN)/python .ci/install.py demo
	@touch $@

.venv/dev: .venv/demo tests/spark/connect.txt
	@$(BIN)/python .ci/install.py dev
	@touch $@

.venv/bench: .venv/dev
	@$(BIN)/python .ci/install.py bench
	@touch $@

# Another S3 server, which no index of Python has. Later versions need a newer Rust than most machines have.
.venv/s3s: .venv/dev
	@if command -v cargo >/dev/null; then \
		echo ".venv: building s3s-fs with Rust, which takes minutes"; \
		cargo install --quiet --locked --root .venv --features binary s3s-fs@0.14.1 && touch $@; \
	else \
		echo "NOT TESTED: there is no cargo here, which builds s3s-fs"; \
	fi
