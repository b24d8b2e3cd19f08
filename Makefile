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

# What only computes shares the cores; what keeps to a clock goes alone, so that nothing of ours is in its way.
COMPUTES := tests/agent tests/media tests/models tests/runtime tests/scheduling tests/sip

test: $(STAMPS)/dev $(STAMPS)/system check
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile $(COMPUTES)
	$(BIN)/pytest $(COMPUTES:%=--ignore=%)

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

# qwen-tts pins an older transformers, so it comes without its dependencies: only its codec class is compared with ours; and of
# pipecat-ai only the weights of Smart Turn are used.
$(STAMPS)/dev: $(STAMPS)/venv pyproject.toml constraints.txt
	@echo "Installing breeze_rtc and its checks (a few minutes the first time)"
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[listen,dev]'
	$(BIN)/pip install --quiet --no-deps qwen-tts==0.1.1 pipecat-ai==1.14.0
	@touch $@

# What the tests call, listen, relay and record with; a test says so when it skips itself for want of one.
SYSTEM := chromium firefox-esr espeak-ng coturn baresip-core pulseaudio pulseaudio-utils pocketsphinx-testdata sip-tester
COMMANDS := chromium firefox-esr espeak-ng turnserver baresip pulseaudio parec sipp
HAVE_ALL := for c in $(COMMANDS); do command -v $$c >/dev/null || exit 1; done

$(STAMPS)/system: $(STAMPS)/venv
	@if ($(HAVE_ALL)); then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing for the tests: $(SYSTEM)"; \
	  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SYSTEM) >/dev/null; \
	else echo "Tests that need one of these and miss it will be skipped. On Debian: sudo apt-get install $(SYSTEM)"; fi
	@($(HAVE_ALL)) && touch $@ || true
