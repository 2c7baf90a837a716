# Everything runs in .venv, made at first use. PYTHON: which Python (>= 3.10) to make it with.
PYTHON ?= python3
BIN := .venv/bin
RUN := $(BIN)/fl-lightning
DEMO := runs/demo
PUBLIC ?= .venv-public
# cpu: PyTorch's own wheels without CUDA; else those of the package index. For a .venv that is made now
TORCH ?= default

.DEFAULT_GOAL := help
.PHONY: help demo test test-rest test-all test-studies test-flower test-trackers test-lightning test-oldest public check format docs gallery faults soak gpu-check results papers papers-quick release

help:  ## these lines
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 10

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python >= 3.10 is needed: make PYTHON=/path/to/python3 ..."; exit 1; }
	$(PYTHON) -m venv .venv

# torch and torchvision come together in one pip call: builds of different origin do not fit each other
.venv/installed: .venv/bin/python setup.cfg pyproject.toml
	@if [ -e $@ ]; then :; elif [ "$(TORCH)" = cpu ]; then \
	  echo "Installing into .venv: PyTorch for the CPU alone, and what goes with it."; \
	else \
	  echo "Installing into .venv. On Linux (x86-64) PyTorch comes with CUDA: about 3.2 GB are downloaded and take 5.9 GB"; \
	  echo "of disk. Without a GPU: make demo TORCH=cpu leaves out CUDA's libraries, which are 2.5 GB of the download."; \
	fi
	@test "$(TORCH)" != cpu || \
	  $(BIN)/python -m pip install --disable-pip-version-check torch torchvision --index-url https://download.pytorch.org/whl/cpu
	@$(BIN)/python -m pip install --disable-pip-version-check -e .
	@$(BIN)/python -c 'import torch, torchvision' 2>/dev/null || \
	  { echo "torch and torchvision in .venv come from different builds, which do not fit each other. pip may have taken"; \
	  echo "them from two package indexes. Remove .venv, and run make again with one index (pip config list shows yours),"; \
	  echo "or without TORCH=cpu."; exit 1; }
	@touch $@

.venv/installed-test: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@

.venv/installed-dev: .venv/installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	@touch $@

demo: .venv/installed  ## three methods, five seeds each, on skewed digits: a report and its verdicts (TORCH=cpu: without CUDA)
	@rm -rf $(DEMO)
	@echo "FedAvg, FedInit and SCAFFOLD on scikit-learn's digits, ten clients with few classes each: 15 runs of 20 rounds"
	OMP_NUM_THREADS=1 $(RUN) sweep demo --out $(DEMO)
	$(RUN) report $(DEMO)
	@$(BIN)/python -c "import csv, glob, json; \
	claims = json.load(open('$(DEMO)/report.json'))['claims']; \
	told = '{id}: {mean:+.3f} accuracy, 95 % interval {low:+.3f} to {high:+.3f}: {verdict}'; \
	print(*(told.format(**claim) for claim in claims), sep='\n'); \
	last = [float(list(csv.DictReader(open(f)))[-1]['val/acc']) for f in glob.glob('$(DEMO)/scaffold/*/metrics.csv')]; \
	print(f'SCAFFOLD, accuracy after the last round, the worst of {len(last)} seeds: {min(last):.3f} (at least 0.900)'); \
	raise SystemExit(not min(last) >= 0.9)"
	@echo "Open $(DEMO)/report.html in a browser. Each run's folder has its card.md, metrics.csv, partition.png, checkpoints/"

# one process more than cores (tests/conftest.py), each test on one thread; one that runs out takes over some of another's
SIDE_BY_SIDE := --numprocesses logical --dist worksteal

test: .venv/installed-test  ## the fast tier of the tests, minutes (tests/tiers.py says which)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m "not whole"

test-rest: .venv/installed-test  ## the tests that `make test` leaves out
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE) -m whole

test-studies: .venv/installed-test  ## the studies: their settings, and their results by other calculations
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE) studies/tests

test-all: .venv/installed-test  ## every test of the library, half an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE)

# of an extra that `test` lacks: what it needs in other versions lies here, in front of .venv's packages
BESIDE := .venv-flower/installed .venv-trackers/installed

$(BESIDE): .venv-%/installed: .venv/installed-test
	$(BIN)/python -m venv --clear .venv-$*
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$(.venv-$*/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/beside.pth"
	.venv-$*/bin/python -m pip install --quiet --disable-pip-version-check -e '.[$*]'
	@touch $@

test-flower: .venv-flower/installed  ## apps over sites, by Flower's own processes, in an environment of their own (Python >= 3.11)
	OMP_NUM_THREADS=1 .venv-flower/bin/python -m pytest $(SIDE_BY_SIDE) tests/deploy/test_flower.py

test-trackers: .venv-trackers/installed  ## what MLflow and W&B hold of runs, read back, in an environment of their own
	OMP_NUM_THREADS=1 .venv-trackers/bin/python -m pytest $(SIDE_BY_SIDE) tests/cli/test_trackers.py tests/record/test_description.py -k "mlflow or wandb"

test-lightning: .venv/installed-test  ## the suite with `lightning` in place of `pytorch_lightning`
	FL_LIGHTNING_TESTS=lightning OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(SIDE_BY_SIDE)

# each floor of setup.cfg as a pin: `torch>=2.6` is `torch==2.6`. With Python 3.10 to 3.12, for which these have wheels
.venv-oldest/installed: setup.cfg
	$(PYTHON) -m venv --clear .venv-oldest
	sed -nE 's/^    ([A-Za-z-]+)(\[[a-z]+\])?>=([0-9.]+).*/\1==\3/p' setup.cfg > .venv-oldest/floors.txt
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-oldest/floors.txt -e '.[test]'
	@touch $@

test-oldest: .venv-oldest/installed  ## the suite on the oldest versions that setup.cfg allows (TESTS="tests/storage -x": part of it)
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest $(SIDE_BY_SIDE) $(TESTS)

$(PUBLIC)/installed: setup.cfg pyproject.toml tests/public/requirements.txt
	test -x $(PUBLIC)/bin/python || $(PYTHON) -m venv $(PUBLIC)
	$(PUBLIC)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[test]' -r tests/public/requirements.txt
	@touch $@

# a process for each file, since a process has one Lightning: that of the package
public: $(PUBLIC)/installed  ## learners and data of public packages, in an environment of their own (gigabytes)
	@failed=; for file in tests/public/test_*.py; do \
	  OMP_NUM_THREADS=1 $(PUBLIC)/bin/python -m pytest -q -W ignore $$file || failed="$$failed $$file"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

check: .venv/installed-dev  ## lint, formatting, types, the order of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tests.lint
	$(BIN)/mypy

format: .venv/installed-dev  ## put the code in form
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

results: .venv/installed  ## studies/results.md and results_tables.md from the runs in studies/results/
	$(BIN)/python -m studies.papers page

.venv/installed-docs: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	@touch $@

docs: .venv/installed-docs  ## the site, in build/site: open build/site/index.html, no network needed
	$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs build/site
	@echo "build/site/index.html"

.venv/installed-notebook: .venv/installed-test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[notebook]'
	@touch $@

gallery: .venv/installed-notebook  ## run the examples and the notebook, and keep their pictures for the site (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python docs/site/gallery.py

# data from FL_LIGHTNING_DATA, else fetched; beside the committed results, in runs/papers
papers-quick: .venv/installed  ## three of the papers' small twins again, cut; within twenty minutes on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.papers quick

papers: .venv/installed-test  ## all of them (studies/protocol.md says what takes how long); goes on where it stopped
	OMP_NUM_THREADS=1 $(BIN)/python -m studies.papers all

gpu-check: .venv/installed  ## on a CUDA GPU: compare the engines' results, then time and profile them
	$(BIN)/python -m benchmarks.gpu_check

faults: .venv/installed-test  ## plant faults and mutants; print which check catches each (long; FAULTS=--named: no mutants)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.plant $(FAULTS)

soak: .venv/installed .venv-flower/installed  ## kill runs 200 times, in every phase, and 24 times over sites, and compare what each resumes to, bit by bit
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.soak $(SOAK)
	OMP_NUM_THREADS=1 .venv-flower/bin/python -m benchmarks.soak_sites

comma := ,
VERSION := $(shell sed -n 's/^version = //p' setup.cfg)
TAG := v$(VERSION)
# what builds and checks; the tests of this target give another one
TOOLS := .venv/installed-dev
REFUSED = { echo "release $(TAG): $(1)" >&2; exit 1; }

# the checks stand before the tag, and nothing is sent: what is pushed cannot be taken back
release: $(TOOLS)  ## build dist/ and tag the version of setup.cfg, if nothing is uncommitted and CHANGELOG has it; pushes nothing
	@test -z "$$(git status --porcelain)" || \
	  $(call REFUSED,there are changes that are not committed. Commit them or put them away: git status)
	@grep -qE '^## \[$(subst .,\.,$(VERSION))\] - [0-9]{4}-[0-9]{2}-[0-9]{2}$$' CHANGELOG.md || \
	  $(call REFUSED,CHANGELOG.md has no line '## [$(VERSION)] - YYYY-MM-DD'. Write it below '## [Unreleased]')
	@grep -qFx 'version: $(VERSION)' CITATION.cff && grep -qFx '__version__ = "$(VERSION)"' fl_lightning/__init__.py || \
	  $(call REFUSED,setup.cfg says $(VERSION)$(comma) CITATION.cff or fl_lightning/__init__.py does not)
	@! git rev-parse --quiet --verify refs/tags/$(TAG) > /dev/null || \
	  $(call REFUSED,there is such a tag. Give setup.cfg$(comma) CITATION.cff and fl_lightning/__init__.py another version)
	@rm -rf dist && mkdir -p build && $(BIN)/python -m build > build/log 2>&1 || { tail build/log; exit 1; }
	@$(BIN)/python -m twine check --strict dist/*
	@git tag --annotate $(TAG) --message 'fl-lightning $(VERSION)'
	@echo "$(TAG) is the present commit; nothing was sent. Next, once .ci/run has passed on it:"
	@echo "  git push origin $(TAG)"
	@echo "  $(BIN)/python -m twine upload dist/*"
	@echo "To take it back before it is pushed: git tag --delete $(TAG)"
