# Every target makes what it needs: `make demo` and `make test` work on a fresh clone.
PYTHON ?= python3
VENV ?= .venv
PIP_INSTALL = $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# One thread per device, parallel over devices: threads that share two cores only wait for each other.
export OMP_NUM_THREADS = 1

.PHONY: help install dev docs demo demo-flower test test-slow test-browser test-network test-flower test-flower-oldest test-flower-newest vendor check format bench bench-smoke bench-truncation reproduce clean

QUICK = --quick

help: ## Show what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(PIP_INSTALL) -e '.[dev]'
	@touch $@

install: $(VENV)/.run ## Make the virtual environment and install fedpmt
dev: $(VENV)/.dev ## The same with the tools for development

demo: $(VENV)/.run ## Compare FedPMT, FedAvg and FedDrop on five unequal levels; writes demo/report.html
	@rm -rf demo
	@$(VENV)/bin/fedpmt compare fedpmt fedavg feddrop --rounds 100 --eval-every 2 --out demo/iid
	@echo
	@$(VENV)/bin/fedpmt compare fedpmt fedavg feddrop --rounds 100 --eval-every 2 --partition classes:2 --out demo/classes-2
	@$(VENV)/bin/fedpmt report demo/iid demo/classes-2 --out demo/report.html
	@echo "open demo/report.html in a browser"

$(VENV)/.flower: $(VENV)/.run
	$(PIP_INSTALL) -e '.[flower]'
	@touch $@

demo-flower: $(VENV)/.flower ## The same method on Flower: a SuperLink and five SuperNodes of different speeds, here
	@rm -rf demo-flower
	$(VENV)/bin/fedpmt deploy --samples 800 --lr 0.1 --rounds 6 --out demo-flower

$(VENV)/.reproduction: $(VENV)/.run
	$(PIP_INSTALL) -e '.[reproduction]'
	@touch $@

$(VENV)/.docs: $(VENV)/.run
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@

docs: $(VENV)/.docs ## Build the documentation in site/; fails on a warning or a dead link
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict --quiet
	@echo "open site/index.html in a browser"

test: $(VENV)/.dev ## Run the tests
	$(VENV)/bin/python -m pytest -q -n 2

test-slow: $(VENV)/.dev ## Run the tests that take minutes
	$(VENV)/bin/python -m pytest -q -m slow

test-browser: $(VENV)/.dev ## Open the pages in headless Chromium (Debian: chromium, chromium-driver; npm for axe-core)
	$(VENV)/bin/python -m pytest -q -m browser

test-network: $(VENV)/.dev ## Fetch the real data sets and load them
	$(VENV)/bin/python -m pytest -q -m network

test-flower: $(VENV)/.dev ## Run on Flower: Ray, and SuperLink and SuperNodes as real processes
	$(VENV)/bin/python -m pytest -q -m flower

OLDEST_FLOWER = 1.41.0
NEWEST_FLOWER = 1.42.0

# An environment of its own for one version of Flower. What this version asks for in other versions than
# constraints.txt has is left open. An index may lack one of its requirements (1.42.0 asks for
# certifi >= 2026.10.19): it is then installed on the requirements of the version before, and pip check says so.
$(VENV)-flower-%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	grep -vE '^(flwr|uv|certifi)==' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt -e '.[dev]' 'flwr[simulation]==$*' \
	|| { $(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt -e '.[dev]' \
	     && $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'flwr==$*'; }
	-$(@D)/bin/python -m pip check
	@touch $@

test-flower-oldest: $(VENV)-flower-$(OLDEST_FLOWER)/.ready ## All Flower tests with the oldest supported version, in an environment of its own
	$(VENV)-flower-$(OLDEST_FLOWER)/bin/python -m pytest -q -m 'not slow' tests/flower

test-flower-newest: $(VENV)-flower-$(NEWEST_FLOWER)/.ready ## The same with the newest supported version
	$(VENV)-flower-$(NEWEST_FLOWER)/bin/python -m pytest -q -m 'not slow' tests/flower

vendor: $(VENV)/.dev ## Fetch the scripts that come from npm again and check them
	$(VENV)/bin/python tests/vendor.py

check: $(VENV)/.dev ## Lint, format, types and import directions
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.dev ## Put the code in form
	$(VENV)/bin/ruff check --fix --quiet .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.dev ## Measure everything, ours and its peers, and write the pages (needs the data: fedpmt data get mnist, cifar10)
	$(VENV)/bin/python -m benchmarks all

bench-smoke: $(VENV)/.dev ## The same in seconds, ours and a plain loop only
	$(VENV)/bin/python -m benchmarks smoke

bench-truncation: $(VENV)/.run ## Measure training time and peak memory of each depth
	$(VENV)/bin/fedpmt profile --task fcnn-mnist --prefix recompute
	$(VENV)/bin/fedpmt profile --task cnn-mnist --prefix recompute
	$(VENV)/bin/fedpmt profile --task cnn-cifar10 --prefix recompute
	$(VENV)/bin/fedpmt profile --task cnn-cifar10 --prefix cache

reproduce: $(VENV)/.reproduction ## Make the paper's tables and figures, small and on embedded data, in results/ (all of them: make reproduce QUICK=)
	$(VENV)/bin/python -m reproduction all $(QUICK) --out results

clean: ## Remove the environment and the demo
	rm -rf $(VENV) $(VENV)-flower-* demo demo-flower site
