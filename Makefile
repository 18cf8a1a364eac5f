# make run: one minute of training on this machine, with the preset that `egg.py train` takes here. make prepare,
# make test, make bench, make install, make clean. Everything is installed into .venv here; ARGS adds to the command,
# PYTHON names another interpreter:
#   make prepare TEXT="book1.txt book2.txt" ARGS="--out books"
#   make run ARGS="--minutes 10 -D N_LAYERS=2"        make test PYTHON=python3.12

SHELL := /bin/sh
PYTHON ?=
VENV := .venv
EGG := $(VENV)/bin/python egg.py
ARGS ?=

# CUDA major version of the driver, 0 where there is no NVIDIA GPU; asked only by the rules that need it
CUDA = $$($(VENV)/bin/python -c 'from engine import hardware; major, gpus = hardware.driver(); \
	print((12 if major < 13 else 13) if gpus else 0)')

# whether ARGS says how long, and where
LIMIT = $(filter --minutes% --steps%,$(ARGS))
PLACE = $(filter --save-dir%,$(ARGS))

.PHONY: run install prepare test bench clean

run: $(VENV)/ready
	@to=ckpt-$$(date +%Y%m%d-%H%M%S); \
	echo "make run: trains $(if $(LIMIT),with $(ARGS),for a minute), the first time after about 20 s of compiling"; \
	set -x; \
	exec $(EGG) train $(if $(LIMIT),,--minutes 1) $(if $(PLACE),,--save-dir $$to) $(ARGS)

install: $(VENV)/ready

prepare: $(VENV)/ready
	@$$(cat $(VENV)/pip) install -q -r requirements/prepare.txt
	@$(EGG) prepare $(TEXT) $(ARGS)

test: $(VENV)/ready-test
	$(VENV)/bin/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal $(ARGS)

bench: $(VENV)/ready
	$(EGG) bench $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis __pycache__ */__pycache__

$(VENV)/ready: requirements/core.txt requirements/cuda12.txt requirements/cuda13.txt $(VENV)/pip
	@cuda=$(CUDA); if [ "$$cuda" = 0 ]; then list=requirements/core.txt; else list=requirements/cuda$$cuda.txt; fi; \
	echo "installing $$list into $(VENV) (once, about a minute) ..."; $$(cat $(VENV)/pip) install -q -r $$list
	@touch $@

$(VENV)/ready-test: requirements/test.txt $(VENV)/ready
	@cuda=$(CUDA); if [ "$$cuda" = 0 ]; then cuda=13; fi; \
	echo "installing requirements/test.txt into $(VENV) ..."; \
	$$(cat $(VENV)/pip) install -q -r requirements/test.txt -r requirements/cuda$$cuda.txt
	@touch $@

# named, but not that of $(VENV): made anew
WHICH := -c 'import sys; print(sys.version, sys.base_prefix)'
ifneq ($(PYTHON),)
ifneq ($(shell $(PYTHON) $(WHICH) 2>&1),$(shell $(VENV)/bin/python $(WHICH) 2>/dev/null))
.PHONY: $(VENV)/pip
endif
endif

# The environment, and in $(VENV)/pip the command that installs into it. Debian keeps the part of venv that brings pip
# in a package of its own; where that is missing, the pip of the system does as well.
$(VENV)/pip:
	@for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11); do \
	  "$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && break; \
	  python=; done; \
	if [ -z "$$python" ]; then \
	  echo "egg: needs Python 3.11 to 3.14, and $(or $(PYTHON),python3) is not: install one," \
	    "or name it with make PYTHON=..." >&2; exit 1; fi; \
	echo "making $(VENV) with $$($$python --version) ..."; \
	if "$$python" -m ensurepip --version >/dev/null 2>&1; then \
	  "$$python" -m venv --clear $(VENV) && pip="$(VENV)/bin/python -m pip"; \
	elif "$$python" -c 'import pip, venv' 2>/dev/null; then \
	  "$$python" -m venv --clear --without-pip $(VENV) && pip="$$python -m pip --python $(VENV)/bin/python"; \
	else \
	  version=$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  echo "egg: $$python has neither ensurepip nor pip: apt install python$$version-venv (as root)," \
	    "then run make again" >&2; exit 1; \
	fi && echo "$$pip" --disable-pip-version-check > $@
