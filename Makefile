# `make demo` shows what memgraph does; `make test` is what every change must pass.

PYTHON ?= python3
WORKERS ?= 2
BENCHMARKS = demo models limit overhead planning oss oss_far
READY = .venv/ready
LIBRARIES = .venv/libraries
CUDA_READY = .venv-cuda/ready
CUDA_TORCH = torch==2.14.1
CUDA_WANTS = pytest pytest-timeout hypothesis expecttest psutil scipy pillow transformers timm torchvision diffusers torch_geometric

WITHIN ?= 720

.PHONY: demo test long slow check docs bench gpu gpu-smoke gpu-kernels gpu-tests gpu-zoo gpu-figures fake-cuda versions other-python clean
.NOTPARALLEL: # a benchmark wants the machine for itself

demo: bench-demo

# WORKERS files are run at a time; 0 is one process for all.  Threads that wait do so asleep, for others want the core.
test: $(READY)
	OMP_WAIT_POLICY=PASSIVE .venv/bin/python -m pytest -n $(WORKERS) --dist loadfile

# Those with the mark "long", and with libraries that train beside memgraph; no further one begins
# after WITHIN_LONG seconds.
WITHIN_LONG ?= 3600

long: $(LIBRARIES)
	OMP_WAIT_POLICY=PASSIVE .venv/bin/python -m pytest -n $(WORKERS) -m long --within $(WITHIN_LONG)

slow: $(READY)
	.venv/bin/python -m pytest -m slow
	.venv/bin/python -m pytest --hypothesis-profile=thorough tests/passes

# The core tests on every torch that memgraph is said to work with, each in an environment of its own.
versions:
	$(PYTHON) -m benchmarks.versions $(VERSIONS)

# As many of them as there is time for, on the newest torch and another Python.
other-python:
	$(PYTHON) -m benchmarks.versions newest --python other --optional --within $(WITHIN)

check: $(READY)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	@echo "$$(find memgraph passes -name '*.py' | xargs cat | wc -l) lines in memgraph/ and passes/"
	@.venv/bin/pyright --version >/dev/null || \
		{ echo "pyright is a Node program that is fetched once: it wants node on PATH and the npm registry"; exit 1; }
	.venv/bin/pyright

# The site of the pages, in build/site; a warning is an error.
docs: $(LIBRARIES)
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

bench: $(BENCHMARKS:%=bench-%)

bench-%: $(READY)
	.venv/bin/python -m benchmarks.$*

# Use PYTHON as it is, for the torch that was built for this machine's GPU, and no network.  Each stage ends within nine
# minutes, whatever hangs, and goes on where it stopped when it is called again (benchmarks/stages.py).  What has failed
# runs again with AGAIN=--failed, and all of it with AGAIN=--again.  `make gpu` ends with the worst: "Error 1" if something
# has failed, else "Error 75" if something is left to another call.
GPU_STAGES = smoke kernels tests zoo figures
WITHIN_GPU ?= 540
AGAIN ?=

gpu:
	worst=0; for stage in $(GPU_STAGES); do \
		$(PYTHON) -m benchmarks.stages $$stage --within $(WITHIN_GPU) $(AGAIN); status=$$?; \
		case $$status in \
			0) ;; \
			75) test $$worst -ne 0 || worst=75 ;; \
			129|130|143) exit $$status ;; \
			*) worst=$$status ;; \
		esac; done; exit $$worst

$(GPU_STAGES:%=gpu-%): gpu-%:
	$(PYTHON) -m benchmarks.stages $* --within $(WITHIN_GPU) $(AGAIN)

# What CUDA would do, on a machine without a device: torch's CUDA build sees one that is described.  The host computes the
# ops of its tests; then come what the allocator holds for large steps, and what the zoo dispatches.  It takes 6 GB of
# disk and an hour on two cores.  Nothing runs on a GPU, so there is no figure of one in it.
fake-cuda: $(CUDA_READY)
	nice .venv-cuda/bin/python -m benchmarks.fake_cuda.described_device h200 \
		-m pytest -p no:cacheprovider -m fake_cuda tests/benchmarks
	nice .venv-cuda/bin/python -m benchmarks.fake_cuda.described_device h200 -m benchmarks.fake_cuda.host_kernels \
		pytest -p no:cacheprovider -m 'gpu and not kernels' tests/gpu
	nice .venv-cuda/bin/python -m benchmarks.fake_cuda.held_memory
	nice .venv-cuda/bin/python -m benchmarks.fake_cuda

# torch and triton are those of the CUDA build, whatever constraints.txt says.
$(CUDA_READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-cuda
	nice .venv-cuda/bin/pip install --quiet '$(CUDA_TORCH)'
	grep -v '^\(torch\|triton\|setuptools\|networkx\)==' constraints.txt > .venv-cuda/constraints.txt
	.venv-cuda/bin/pip freeze | grep '^\(torch\|triton\)==' >> .venv-cuda/constraints.txt
	nice .venv-cuda/bin/pip install --quiet -c .venv-cuda/constraints.txt -e . $(CUDA_WANTS)
	touch $@

$(LIBRARIES): $(READY)
	.venv/bin/pip install --quiet -c constraints.txt -e '.[libraries,docs]'
	touch $@

# The versions in constraints.txt are those the tests were run with; without them pip takes the newest of everything.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install --quiet -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf .venv .venv-versions .venv-cuda build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
