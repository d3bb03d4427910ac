# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` work in a bare clone: what they need is installed into .venv first, once.
# Another interpreter, in an environment beside it: make test PYTHON=python3.12. Another place: make test VENV=/path/to/venv.

PYTHON ?= python3
VENV ?= $(if $(filter-out python3,$(PYTHON)),.venv-$(notdir $(PYTHON)),.venv)
READY := $(VENV)/.ready
BIN := $(VENV)/bin

# The tests start hundreds of processes. Without byte code each would compile what it imports of torch, for 15 s.
unexport PYTHONDONTWRITEBYTECODE

# The tests of a room: its folder, or the files of its name.
OF_ROOM = $(if $(ROOM),$(wildcard tests/$(ROOM) tests/nemo2/$(ROOM) tests/test_$(ROOM).py tests/nemo2/test_$(ROOM)*.py))

.PHONY: help setup fmt check test quick newest docs-site notebooks test-gpu gpu-day pretend-gpu nightly test-evaluate test-serve test-quantize test-resiliency test-engines test-trackers docs figures screenshots checks-page demo demo-finetune drill cluster parity parity-quick reshard rehearse sweep calibrate clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 14

setup: $(READY) ## install what the others need into .venv

$(READY): pyproject.toml constraints.txt tools/setup.sh tools/constraints.py
	@bash tools/setup.sh "$(PYTHON)" "$(VENV)"

demo: $(READY) ## train a small Llama on this machine, interrupt it, resume it, let it write
	@$(BIN)/python tools/demo.py

demo-finetune: $(READY) ## fine-tune it by LoRA, merge it, export it, and ask it in transformers
	@$(BIN)/python tools/demo_finetune.py

test: $(READY) ## run the tests; ROOM=config only those of a room
	@echo "==> tests"
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -p support.unsteady $(or $(strip $(OF_ROOM)),$(if $(ROOM),$(error no tests of a room $(ROOM))))

quick: $(READY) ## units, and one run on ranks for each room
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -p support.unsteady -p support.quick

newest: ## what releases newer than constraints.txt break: the tests in an environment without it
	@rm -rf .venv-newest
	@CONSTRAINTS= bash tools/setup.sh "$(PYTHON)" .venv-newest
	@.venv-newest/bin/python tools/constraints.py --compare .venv-newest
	@$(MAKE) test VENV=.venv-newest

test-gpu: $(READY) ## run the tests that need a GPU; they fail where there is none
	@$(BIN)/python -m pytest -q -m gpu tests/gpu

gpu-day: $(READY) ## all that a first day with a GPU should tell, in ten minutes: bench/results/DATE-day-DEVICE.md
	@$(BIN)/python -m bench.gpu.day

# Headers and libraries land in .pretend_gpu; support/pretend_gpu/README.md.
pretend-gpu: $(READY) ## the CUDA path on GPUs that aren't there: build them, compare them with torch, train on them (five minutes)
	@$(BIN)/python -m support.pretend_gpu.build
	@$(BIN)/python -m support.pretend_gpu --gpus 4 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "pretend_gpu or gpu" tests/pretend_gpu tests/gpu
	@$(BIN)/python -m support.pretend_gpu --gpus 2 $(BIN)/python -m tests.long.parity --again --folder .pretend_gpu/parity --rows \
		'llama: DP 2' 'llama: TP 2 + SP' 'llama: PP 2 x VP 2' 'LoRA: TP 2' 'mixtral: EP 2, all-to-all' 'deepseek: FSDP2' --quick

nightly: pretend-gpu ## that, every layout and every recipe on them, and the cases that `test` leaves out (hours)
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m nightly
	@$(BIN)/python -m tests.long.random_values --cases 500
	@$(BIN)/python -m tests.long.random_models 600
	@$(BIN)/python -m tests.long.random_switches 1800
	@$(BIN)/python -m tests.long.random_tuning 1800
	@$(BIN)/python -m tests.long.random_resumes 1800
	@$(BIN)/python -m support.pretend_gpu --gpus 8 $(BIN)/python -m tests.long.parity --folder .pretend_gpu/parity
	@$(BIN)/python -m support.pretend_gpu --gpus 4 $(BIN)/python -m tests.long.recipes_on_pretend_gpus --again \
		--results .pretend_gpu/recipes.json --write bench/results/pretend-gpu.md

test-evaluate: $(READY) ## run the tests that need lm-eval; installs it
	@$(BIN)/python -m pip install -q -e '.[evaluate]'
	@$(BIN)/python -m pytest -q -m evaluate tests/lm_eval

test-serve: $(READY) ## run the tests that start a server; installs transformers' extra
	@$(BIN)/python -m pip install -q -e '.[serve]'
	@$(BIN)/python -m pytest -q -m serve tests/serving

test-quantize: $(READY) ## run the tests that need NVIDIA's ModelOpt; installs it
	@$(BIN)/python -m pip install -q -e '.[quantize]'
	@$(BIN)/python -m pytest -q -m quantize tests/quantized

test-resiliency: $(READY) ## run the tests of nvidia-resiliency-ext's launcher; installs it
	@$(BIN)/python -m pip install -q -e '.[resiliency]'
	@$(BIN)/python -m pytest -q -m resiliency tests/nemo2/test_plugins.py

# SkyPilot pins packages that others of this environment need newer: a folder of its own.
test-engines: $(READY) ## run the tests of Kubernetes and SkyPilot; brings their clients
	@[ -d .engines/kubernetes ] || $(BIN)/python -m pip install -q --target .engines kubernetes 'kubeflow-trainer-api>=2.3' 'skypilot>=0.12.3'
	@PYTHONPATH="$(CURDIR)/.engines:$(CURDIR)" $(BIN)/python -m pytest -q -m engines tests/engines

# MLflow and Comet bring servers and pins of their own: a folder apart.
test-trackers: $(READY) ## run the tests of W&B, MLflow and Comet, offline; brings their clients
	@[ -d .trackers/wandb ] || $(BIN)/python -m pip install -q --target .trackers wandb mlflow comet_ml
	@PYTHONPATH="$(CURDIR)/.trackers:$(CURDIR)" $(BIN)/python -m pytest -q -m trackers tests/trackers

check: $(READY) ## formatting, lint, types, which room imports which
	@echo "==> ruff format"
	@$(BIN)/ruff format --check .
	@echo "==> ruff check"
	@$(BIN)/ruff check .
	@echo "==> lint-imports"
	@$(BIN)/lint-imports --no-cache
	@echo "==> pyright"
	@$(BIN)/pyright --pythonpath $(BIN)/python

fmt: $(READY) ## format, fix what ruff can fix, and write what is written from the code
	@$(BIN)/python -m tools.recipe_stub
	@$(BIN)/python -m tools.hugging_face
	@$(BIN)/python -m tools.te_calls
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

drill: $(READY) ## kill, fill, flip and interrupt runs, and see that the same command goes on (half an hour)
	@$(BIN)/python -m tests.long.drill

cluster: $(READY) ## a real Slurm of two nodes on this machine: runs that are killed in every way come back (root, Debian)
	@$(BIN)/python -m tests.long.cluster

reshard: $(READY) ## load checkpoints in other layouts than they were saved in: 53 pairs
	@$(BIN)/python -m tests.long.reshard

docs: $(READY) ## run every example of the README, the docs and a notebook
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile -m examples tests/docs

checks-page: $(READY) ## run the examples of the rules, and write what they say to docs/checks.md (half a minute)
	@$(BIN)/python -m tools.checks_page > .checks.md && mv .checks.md docs/checks.md

notebooks: $(READY) ## run all notebooks, and keep what they put out (some minutes)
	@PYTHONPATH="$(CURDIR)" $(BIN)/python -m tools.notebooks

docs-site: $(READY) ## build the documentation site into site/ and test its pages, names and links; installs MkDocs
	@$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt -e '.[site]'
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH="$(CURDIR)" $(BIN)/python -m mkdocs build --strict --quiet
	@$(BIN)/python -m pytest -q -m site tests/docs
	@echo "site/index.html; with its search: $(BIN)/python -m http.server --directory site"

screenshots: $(READY) ## take every picture and page in Chromium, wide, narrow, light and dark, and say what can't be read
	@PYTHONPATH="$(CURDIR)" $(BIN)/python -m tools.screenshots screenshots

figures: $(READY) ## draw the figures of the documentation anew, from what Megatron-Core, torch and nemo2 say
	@$(BIN)/python -m tools.figures

parity: $(READY) ## train every layout against one process (docs/parity.md); a call that was interrupted resumes
	@$(BIN)/python -m tests.long.parity

parity-quick: $(READY) ## the few of these layouts that the tests run too
	@$(BIN)/python -m tests.long.parity --quick

rehearse: $(READY) ## check and rehearse every recipe, of fine-tuning too, at its declared scale, in six minutes of two cores (docs/rehearse.md)
	@$(BIN)/python tools/rehearse_recipes.py

sweep: $(READY) ## thousands of random layouts: the rules against Megatron-Core
	@$(BIN)/python -m tests.long.random_layouts

calibrate: $(READY) ## fit the planner to published speeds and write its errors (docs/plan-calibration.md; ten minutes)
	@$(BIN)/python -m bench.planner --calibrate

clean: ## remove the environment and everything that was built; runs stay
	rm -rf .venv* build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
