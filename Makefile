# make train: watch the built-in model learn to plan trips.  make test: everything that is checked.
# Both set up .venv by themselves; PYTHON picks the interpreter it is made from.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
# processes of one thread each: models this small are slower on more threads
WORKERS ?= 2
# which tests; empty: the learning runs of minutes too
SELECT ?= -m "not slow"
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -q -n $(WORKERS) --dist worksteal

.PHONY: train test test-slow test-kernels lint venv venv-dev tiny clean

train: venv
	$(PY) train_grpo.py

test: venv-dev
	$(PYTEST) $(SELECT)
	$(MAKE) test-kernels

# the Triton kernels, run by Triton's interpreter on a machine without a GPU
test-kernels: venv-dev
	TRITON_INTERPRET=1 $(PYTEST) tests/test_linear_logp.py tests/test_clip_loss.py tests/test_decode.py \
		tests/test_sampler_shared.py tests/test_train_interpreted.py

# learning runs of more than three minutes each
test-slow: venv-dev
	$(PYTEST) -m slow

lint: venv-dev
	$(PY) -m ruff check .

# makes assets/tiny again from nothing (about half an hour on two cores)
tiny: venv
	$(PY) assets/make_tiny.py --out assets/tiny

venv: $(VENV)/.requirements
venv-dev: $(VENV)/.requirements-dev

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.requirements: requirements.txt | $(VENV)/bin/python
	$(PY) -m pip install -q -r requirements.txt
	touch $@

$(VENV)/.requirements-dev: requirements-dev.txt $(VENV)/.requirements
	$(PY) -m pip install -q -r requirements-dev.txt
	touch $@

clean:
	rm -rf $(VENV) .cache .pytest_cache .ruff_cache
