# `make demo` and `make test` first install what is missing on the machine.

# A program that fails must not hide behind the diff it is piped to.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
# The oldest glibc that the library runs with: stated in docs/abi.md, checked by test-abi.
GLIBC_FLOOR := 2.34
PREFIX ?= /usr/local
WARNINGS := -Wall -Wextra -Wpedantic -Werror
LIBDIR := $(CURDIR)/target/release
LIB := $(LIBDIR)/libpagedllm.so
BUILD := $(CURDIR)/build
MODEL := examples/model
LINK := -L$(LIBDIR) -lpagedllm -Wl,-rpath,$(LIBDIR)
# The command-line tool. It finds the library in ../lib, here and where it is installed.
TOOL := $(BUILD)/tool/bin/pagedllm
TOOL_OBJECTS := $(patsubst examples/pagedllm/%.cpp,$(BUILD)/tool/%.o,$(wildcard examples/pagedllm/*.cpp))
# Duration of the fuzzer in `make test-c`, in seconds.
FUZZ := 60
# Duration of the random programs in `make test-tsan`, in seconds.
TSAN := 120
# Folders into which rustup and scripts/setup.sh install cargo and go.
export PATH := $(HOME)/.cargo/bin:$(HOME)/.local/go/bin:$(PATH)
# A CUDA kernel that spills registers is a build error.
export PAGEDLLM_DENY_SPILLS := 1
# Paths by which the wrappers find the library in this tree.
export CGO_CFLAGS := -O2 -I$(CURDIR)/include
export CGO_LDFLAGS := -L$(LIBDIR) -Wl,-rpath,$(LIBDIR)
export PAGEDLLM_LIBRARY := $(LIB)

# Packages for the registries of languages, made and tested (scripts/wheel.sh, scripts/node-package.sh).
.PHONY: wheel node-package test-packages
.PHONY: demo test stages setup lib tool tool-setup header man manual lint test-rust test-soak soak test-c test-tsan test-abi test-cpp test-go test-python test-java test-node test-examples test-tool \
        test-server-go test-server-cpp test-install test-kernels test-ptx test-connectors test-mpi test-parallel connectors install-connectors cuda-toolkit install dist bench bench-engines bench-fairness bench-kv-store bench-workers bench-long bench-polling bench-quality bench-quick bench-scheduler bench-sequences bench-serving bench-swap fuzz paper paper-quick scale clean

demo: $(TOOL)
	$(TOOL) inspect $(MODEL)
	@echo
	$(TOOL) chat $(MODEL) --show-messages < examples/pagedllm/demo.txt
	@echo
	@echo "To chat yourself: $(TOOL) chat $(MODEL)"

# Runs two stages at a time, because some of them mostly wait. Neighbouring stages build in different
# folders. A stage that fails does not end the others, and its fault is repeated at the end.
test: setup
	@scripts/test.sh

stages: lint test-c test-rust test-cpp test-soak test-kernels test-connectors test-mpi test-parallel test-abi test-go test-server-go test-python test-java test-node test-peers test-gpu-scripts test-scale test-examples test-tool test-install test-packages test-server-cpp paper-quick

setup:
	@scripts/setup.sh test

lib:
	@scripts/setup.sh demo
	cargo build --release --locked
	@ln -sf libpagedllm.so $(LIBDIR)/libpagedllm.so.1
	@rm -f $(LIBDIR)/libpagedllm.so.0

$(BUILD)/%_c: examples/c/%.c include/pagedllm.h | lib
	@mkdir -p $(BUILD)
	$(CC) -std=c11 -O2 $(WARNINGS) -Iinclude $< -o $@ $(LINK)

$(BUILD)/%_cpp: examples/cpp/%.cpp include/pagedllm.h bindings/cpp/pagedllm.hpp | lib
	@mkdir -p $(BUILD)
	$(CXX) -std=c++17 -O2 $(WARNINGS) -Iinclude -Ibindings/cpp $< -o $@ $(LINK) -pthread

tool: $(TOOL)

# After `lib`, because both install packages.
tool-setup: lib
	@scripts/setup.sh tool

$(BUILD)/tool/%.o: examples/pagedllm/%.cpp $(wildcard examples/pagedllm/*.hpp) include/pagedllm.h bindings/cpp/pagedllm.hpp | tool-setup
	@mkdir -p $(BUILD)/tool
	$(CXX) -std=c++17 -O2 $(WARNINGS) -Wshadow -Wconversion -Iinclude -Ibindings/cpp -c $< -o $@

$(TOOL): $(TOOL_OBJECTS) | lib
	@mkdir -p $(dir $@)
	@ln -sfn $(LIBDIR) $(BUILD)/tool/lib
	$(CXX) $^ -o $@ -L$(LIBDIR) -lpagedllm -Wl,-rpath,'$$ORIGIN/../lib' -pthread

$(BUILD)/abi_test: $(wildcard tests/ffi/c/abi_test/*) include/pagedllm.h | lib
	@mkdir -p $(BUILD)
	$(CC) -std=gnu11 -O1 -g -pthread $(WARNINGS) -Iinclude $(filter %.c,$^) -o $@ $(LINK) -lm

$(BUILD)/libuv_test: tests/ffi/c/libuv_test.c include/pagedllm.h | lib
	@mkdir -p $(BUILD)
	$(CC) -std=gnu11 -O1 -g $(WARNINGS) -Iinclude $< -o $@ $(LINK) -luv

# Writes include/pagedllm.h and bindings/abi.json from src/ffi, and from these the manual and parts of
# the wrappers; lint fails when one is stale.
header:
	PLLM_WRITE_HEADER=1 cargo test --locked --lib ffi::
	scripts/manual.py
	scripts/bindings/__main__.py

# Writes the man page of the tool from its help; test-tool fails when the page is stale.
man: $(TOOL)
	scripts/man.py $(TOOL)

# Clippy has a build script of its own, which would compile the CUDA kernels once more.
lint:
	cargo fmt --check
	rustfmt --check --edition 2024 examples/rust/src/main.rs
	NVCC= cargo clippy --locked --all-targets -- -D warnings
	scripts/manual.py --check
	scripts/bindings/__main__.py --check
	scripts/licences.py --check
	benches/scale/scale.py --check

# Before a commit: formatting, clippy, the unit tests, and the generated files: header (a unit test), manual, licences.
check: lint
	cargo test --locked --lib

test-rust:
	cargo test --locked --no-fail-fast

# Random hosts, budgets and faults, for one minute. No memory, thread, descriptor or file may leak.
test-soak:
	PLLM_SOAK_SECONDS=60 cargo test --locked --test soak -- --nocapture

soak:
	PLLM_SOAK_SECONDS=600 cargo test --locked --test soak -- --nocapture

test-c: $(BUILD)/abi_test $(BUILD)/libuv_test $(BUILD)/hello_c
	$(CC) -std=c99 $(WARNINGS) -Iinclude -fsyntax-only tests/ffi/c/header_alone.c
	$(CC) -std=c11 $(WARNINGS) -Iinclude -fsyntax-only tests/ffi/c/header_alone.c
	$(CXX) -std=c++17 $(WARNINGS) -Iinclude -fsyntax-only -x c++ tests/ffi/c/header_alone.c
	$(BUILD)/abi_test $(MODEL) tests/data/llama
	$(BUILD)/libuv_test $(MODEL)
	tests/ffi/c/boundary/run.sh
	tests/ffi/c/fuzz/run.sh $(FUZZ)
	@# No leak, and no read of uninitialized memory.
	valgrind -q --error-exitcode=9 --leak-check=full --show-leak-kinds=definite,indirect --errors-for-leak-kinds=definite,indirect \
		$(BUILD)/hello_c $(MODEL) | diff - examples/hello.expected

# Checks threads over the whole C API with ThreadSanitizer, for some minutes. It needs the nightly toolchain
# and builds everything a second time, so `make test` does not run it.
test-tsan:
	scripts/setup.sh tsan
	tests/ffi/c/tsan.sh $(TSAN)

test-abi: lib
	tests/ffi/abi/check.py
	@# A program built against the first header of this ABI version has the same output.
	@mkdir -p $(BUILD)
	$(CC) -std=c11 -O2 -Itests/ffi/abi/0.3.0 examples/c/hello.c -o $(BUILD)/hello_0.3.0 $(LINK)
	$(BUILD)/hello_0.3.0 $(MODEL) | diff - examples/hello.expected
	tests/ffi/abi/soname.sh $(LIBDIR)
	tests/ffi/abi/symbols.sh $(LIB) $(GLIBC_FLOOR)

# Tests of the replacement for a CUDA device, and a selection of test-ptx, in less than two minutes.
test-kernels:
	tests/cuda/build.sh target/cuda-shim test
	python3 -B tests/ptx/test_interpreter.py
	python3 -B tests/ptx/test_tensor_copies.py
	tests/ptx/run.py quick

# Compiles all kernels to PTX and interprets it, for some minutes.
test-ptx:
	@scripts/setup.sh ptx
	python3 -B tests/ptx/test_interpreter.py
	python3 -B tests/ptx/test_tensor_copies.py
	tests/ptx/run.py all

# Libraries with KV stores (docs/kv-stores.md). They need the header of the library only.
connectors:
	@scripts/setup.sh connectors
	connectors/build.sh $(BUILD)/connectors

# Installs the stores alone, as `make install` does with the rest. Builds nothing: run `make connectors` first.
install-connectors:
	connectors/install.sh $(BUILD)/connectors $(DESTDIR)$(PREFIX)

# Tests the stores against the contract of pllm_kv_store, with faults, with an engine, and in
# examples/disaggregated.
test-connectors: lib
	tests/connectors/run.sh

# Tests the communicator of bindings/mpi with Open MPI and MPICH. It needs no library.
test-mpi:
	tests/mpi/run.sh

# Divides the bundled model among processes, and kills, stops and limits some of them.
test-parallel: lib
	tests/parallel/run.sh $(LIBDIR) $(BUILD)/parallel $(MODEL)

# Installs the CUDA compiler (300 MB). Needs neither a GPU nor root.
cuda-toolkit:
	scripts/cuda-toolkit.sh

# Runs the tests of the C++ wrapper with g++ and clang++: without sanitizers, with AddressSanitizer and
# UBSan, and with ThreadSanitizer.
test-cpp: lib connectors
	bindings/cpp/tests/run.sh

# The fuzzers have a number of runs and no time limit: with a time limit, go test sometimes fails with
# "context deadline exceeded".
test-go: lib connectors
	@test -z "$$(gofmt -l bindings/go examples/go benches/polling/go)" || { gofmt -l bindings/go examples/go benches/polling/go; exit 1; }
	cd bindings/go && go vet ./... && go test -timeout 60m -count=1 ./... && go test -race -timeout 60m -count=1 ./...
	cd bindings/go && GODEBUG=cgocheck=1 go test -timeout 60m -count=1 -tags pagedllm_static ./...
	cd examples/go && go vet ./... && go test -timeout 60m -count=1 ./...
	cd bindings/go && for fuzz in TokenizeRoundTrip:50000 Detokenize:2000 RenderChat:100000 Request:25000 Options:100000; do \
		go test -timeout 60m -run '^$$' -fuzz="Fuzz$${fuzz%:*}\$$" -fuzztime="$${fuzz#*:}x" -parallel=2 . || exit 1; done

# The tests of the Go server, then the official clients of OpenAI and Anthropic and a load against the
# program.
test-server-go: lib
	@test -z "$$(gofmt -l examples/server-go)" || { gofmt -l examples/server-go; exit 1; }
	cd examples/server-go && go vet ./... && go test -timeout 30m -count=1 -race ./...
	tests/servers/go.sh

# The same checks of the C++ server. SANITIZE=address,undefined or SANITIZE=thread builds it with sanitizers.
test-server-cpp: lib
	tests/servers/cpp.sh

test-python: lib connectors
	python3 -m unittest discover -s bindings/python/tests

test-node: lib
	cd bindings/node && npm ci --ignore-scripts --no-audit --no-fund
	node --test bindings/node/tests/*.test.js

test-java: lib
	bindings/java/tests/run.sh $(MODEL)

# The same program prints the committed output, and pagedllm-replay repeats a journal.
test-examples: $(BUILD)/hello_c $(BUILD)/chat_c $(BUILD)/hello_cpp test-node
	$(BUILD)/hello_c $(MODEL) | diff - examples/hello.expected
	$(BUILD)/chat_c $(MODEL) | diff - examples/c/chat.expected
	$(BUILD)/hello_cpp $(MODEL) | diff - examples/hello.expected
	cd examples/go && go run ./hello ../model | diff - ../hello.expected
	python3 examples/python/hello.py $(MODEL) | diff - examples/hello.expected
	python3 examples/python/researcher.py $(MODEL)
	node examples/node/hello.js $(MODEL) | diff - examples/hello.expected
	cargo build --locked --example pagedllm-replay
	python3 tests/replay/check.py target/debug/examples/pagedllm-replay $(MODEL)

# Runs each command of the tool, also with wrong arguments and streams.
test-tool: $(TOOL)
	PAGEDLLM_TOOL=$(TOOL) python3 -B -m unittest discover -s tests/tool

# Runs the fuzzers for an hour and a quarter, before a release. That of GGUF files needs a nightly compiler.
fuzz: lib
	tests/ffi/c/fuzz/run.sh 3600
	scripts/setup.sh tsan
	tests/fuzz/run.sh 900

# Builds and runs programs with the installed tree and with the packages, as users do.
test-install: lib $(TOOL) connectors
	rm -rf $(BUILD)/installed $(BUILD)/dist
	$(MAKE) install PREFIX=$(BUILD)/installed
	tests/consumer/run.sh $(BUILD)/installed $(MODEL) examples/hello.expected
	scripts/dist.sh $(BUILD)/dist
	tests/consumer/packages.sh $(BUILD)/dist $(MODEL) examples/hello.expected

# Installs each package in an empty folder and runs the example with it. After `connectors`, because
# scripts/install.sh installs them.
test-packages: lib connectors
	rm -rf $(BUILD)/packages
	scripts/wheel.sh $(BUILD)/packages
	tests/packages/python.sh $(BUILD)/packages $(MODEL) examples/hello.expected
	scripts/node-package.sh $(BUILD)/packages
	tests/packages/node.sh $(BUILD)/packages $(MODEL) examples/hello.expected
	scripts/install.sh $(BUILD)/packages/tree
	tests/packages/go.sh $(BUILD)/packages/tree $(MODEL) examples/hello.expected
	tests/packages/java.sh $(BUILD)/packages/tree $(MODEL) examples/hello.expected
	tests/packages/rust.sh $(MODEL) examples/hello.expected
	tests/packages/conan.sh $(MODEL) examples/hello.expected
	tests/packages/vcpkg.sh $(MODEL) examples/hello.expected

wheel: lib
	@scripts/setup.sh wheel
	scripts/wheel.sh dist

node-package: lib
	scripts/node-package.sh dist

# Builds nothing, so that root does not compile: run `make lib`, `make tool` and `make connectors`, then
# `sudo make install`.
install:
	@[ -f $(LIB) ] || { echo "$(LIB) is missing: run 'make lib' first" >&2; exit 1; }
	scripts/install.sh $(DESTDIR)$(PREFIX)

dist: lib $(TOOL) connectors
	scripts/dist.sh dist

# Measures the table of benches/README.md. The machine must be idle.
bench:
	cargo bench --locked --bench cpu -- --table

# The next two measure the scheduler's share of a step, and long contexts (benches/README.md).
bench-scheduler:
	cargo bench --locked --bench cpu -- --scheduler

bench-long:
	cargo bench --locked --bench cpu -- --long

# Runs a short form of each CPU benchmark, in seconds. A run with a wrong token count fails.
bench-quick:
	cargo bench --locked --bench cpu -- --quick
	cargo bench --locked --bench cpu -- --quick --table
	cargo bench --locked --bench cpu -- --quick --scheduler
	cargo bench --locked --bench cpu -- --quick --long

# Measures loading of packed weights, and two engines in one process.
bench-engines:
	cargo bench --locked --bench engines

# Measures sharing of KV blocks, and grammars.
bench-sequences:
	cargo bench --locked --bench sequences
	cargo bench --locked --bench constraint

# Measures perplexity by KV format and weight format.
bench-quality:
	cargo bench --locked --bench quality

# Compares swapping with recomputation.
bench-swap:
	cargo bench --locked --bench swap

# Serves a load on a simulated machine, to compare policies and to measure the engine's own time.
bench-serving:
	cargo bench --locked --bench serving

# Repeats the evaluation of the PagedAttention paper: docs/evaluation.md, its plots and numbers.
paper:
	scripts/setup.sh paper
	@mkdir -p docs/evaluation
	cargo bench --locked --bench paper -- --out docs/evaluation/numbers.json
	PYTHONPATH=build/paper benches/paper/report.py docs/evaluation/numbers.json docs

# Runs a short form of the evaluation into target/paper-quick, and checks that the page is that of its
# numbers. The profile is that of the tests: a release with the packages of benchmarks is another build of
# the library, which takes minutes.
paper-quick:
	scripts/setup.sh paper
	@mkdir -p target/paper-quick
	cargo bench --profile dev --locked --bench paper -- --quick --out target/paper-quick/numbers.json
	PYTHONPATH=build/paper benches/paper/report.py target/paper-quick/numbers.json target/paper-quick
	benches/paper/report.py docs/evaluation/numbers.json docs --check

# Writes the tables and the plot of docs/scale.md.
scale:
	scripts/setup.sh paper
	PYTHONPATH=build/paper benches/scale/scale.py

# Measures the longest step while other requests and threads of the host attack the engine.
bench-fairness:
	cargo bench --locked --bench fairness

# Measures time to first token, interference and hit rates with the stores of connectors/.
bench-kv-store: lib
	benches/kv_store/run.sh

# Measures one model in one process and in two.
bench-workers: lib
	benches/parallel/run.sh

bench-polling:
	benches/polling/run.sh

# Compares with OpenVINO, vLLM and llama.cpp. The set-up downloads 7 GB (benches/README.md).
.PHONY: bench-peers test-peers
bench-peers:
	benches/peers/setup.sh
	benches/peers/run.py --picture target/bench-results/peers.svg

# Tests of the comparison's scripts. They run none of the other engines.
test-peers:
	python3 -B -m unittest discover -s benches/peers

# Tests of the scripts of benches/gpu, without a GPU.
.PHONY: test-gpu-scripts
test-gpu-scripts:
	python3 -B -m unittest discover -s benches/gpu

# Tests of the model of docs/scale.md.
.PHONY: test-scale
test-scale:
	python3 -B -m unittest discover -s benches/scale

clean:
	rm -rf $(BUILD) dist
	cargo clean
