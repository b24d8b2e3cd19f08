# Two commands are all: `make demo` opens the page, `make test` runs every check.  Both set up what they need, once.
# The first that really runs (a version manager may leave names that do not) and is new enough.
NEW_ENOUGH := -c 'import sys; sys.exit(sys.version_info < (3, 11))'
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do $$p $(NEW_ENOUGH) 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.installed
HOST ?= 127.0.0.1
PORT ?= 8000

.PHONY: demo test check clean

demo: $(STAMPS)/demo
	$(BIN)/breeze-rtc demo --host $(HOST) --port $(PORT)

test: $(STAMPS)/dev $(STAMPS)/system check
	$(BIN)/pytest

check: $(STAMPS)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist

# The interpreter must be 3.11 or newer and able to make virtual environments; say so in words otherwise.
$(STAMPS)/venv:
	@$(or $(PYTHON),false) $(NEW_ENOUGH) || \
	  { echo "breeze_rtc needs Python 3.11 or newer, and found none. Try: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "Python cannot make a virtual environment here. On Debian: apt-get install python3-venv"; exit 1; }
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/demo: $(STAMPS)/venv pyproject.toml constraints.txt
	@echo "Installing breeze_rtc with speech recognition (a few minutes the first time)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[listen]'
	@touch $@

# qwen-tts pins an older transformers, so it comes without its dependencies: only its codec class is compared with ours.
$(STAMPS)/dev: $(STAMPS)/venv pyproject.toml constraints.txt
	@echo "Installing breeze_rtc and its checks (a few minutes the first time)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[listen,dev]'
	$(BIN)/pip install --quiet --no-deps qwen-tts==0.1.1
	@touch $@

$(STAMPS)/system: $(STAMPS)/venv
	@if command -v chromium >/dev/null && command -v espeak-ng >/dev/null && command -v turnserver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing Chromium, espeak-ng and coturn, which the tests call, listen and relay with"; \
	  apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium espeak-ng coturn >/dev/null; \
	else echo "Tests that need Chromium, espeak-ng or coturn will be skipped. On Debian: sudo apt-get install chromium espeak-ng coturn"; fi
	@command -v chromium >/dev/null && command -v espeak-ng >/dev/null && command -v turnserver >/dev/null && touch $@ || true
