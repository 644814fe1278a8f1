# make run      everything: install, model, needle test, every notebook, pages under site/
# make lab      the notebooks in JupyterLab
# make test     the whole test suite, notebooks included
# make browser  every widget and page in Chromium
PYTHON ?= python3
PY := .venv/bin/python
STARTED := $(shell date +%s)

# JupyterLab refuses root, who is the usual user inside a container.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

# ipykernel's debugger warns about frozen modules; nothing here debugs.
export PYDEVD_DISABLE_FILE_VALIDATION = 1

.PHONY: run lab test browser refresh clean

run: .venv/.installed
	@echo "== the model"
	@$(PY) -c "from pageskip_lib import load_model; load_model()"
	@echo "== the needle test"
	@mkdir -p site
	@$(PY) -m pageskip_lib.quality needle --json site/needle.json
	@echo "== the notebooks"
	@$(PY) tools/notebooks.py site --needle site/needle.json --started $(STARTED)

lab: .venv/.installed
	@.venv/bin/jupyter lab $(AS_ROOT) notebooks/00_start_here.ipynb

test: .venv/.installed
	@$(PY) -m pytest

# With the machine's own Chromium or Chrome, else with playwright's.
browser: .venv/.installed
	@$(PY) -m pip install -qq --disable-pip-version-check playwright==1.55.0
	@command -v chromium || command -v google-chrome || $(PY) -m playwright install chromium
	@$(PY) -m pytest -m browser tests/test_browser.py

refresh: .venv/.installed
	@$(PY) tools/notebooks.py refresh
	@$(PY) tools/readme_figure.py

clean:
	rm -rf .venv site build *.egg-info .pytest_cache .hypothesis data/models

.venv/.installed: requirements.txt pyproject.toml
	@echo "== installing into .venv (minutes, once)"
	@test -x $(PY) || $(PYTHON) -m venv .venv
	@$(PY) -m pip install -qq --disable-pip-version-check -r requirements.txt
	@touch $@
