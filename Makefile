# make demo, make test: all that a newcomer needs. Both set the machine up first.

CARGO ?= $(shell command -v cargo || echo $(HOME)/.cargo/bin/cargo)
CC ?= cc
CXX ?= c++
WARNINGS := -Wall -Wextra -Wpedantic -Werror
LIBDIR := target/release
LIB := $(LIBDIR)/libpagedllm.so
BUILD := build

.PHONY: demo test setup lib header lint test-rust test-c test-examples bench clean

demo: setup $(BUILD)/hello
	$(BUILD)/hello examples/model

test: setup lint test-rust test-c test-examples
	@echo "make test: everything passed"

setup:
	@scripts/setup.sh

lib:
	$(CARGO) build --release --locked

$(BUILD)/%: lib
	@mkdir -p $(BUILD)

$(BUILD)/hello: examples/c/hello.c include/pagedllm.h
	$(CC) -std=c11 -O2 $(WARNINGS) -Iinclude $< -o $@ -L$(LIBDIR) -lpagedllm -Wl,-rpath,$(CURDIR)/$(LIBDIR)

$(BUILD)/abi_test: tests/c/abi_test.c include/pagedllm.h
	$(CC) -std=c11 -O1 -g -pthread $(WARNINGS) -Iinclude $< -o $@ -L$(LIBDIR) -lpagedllm -Wl,-rpath,$(CURDIR)/$(LIBDIR)

# Writes include/pagedllm.h from src/ffi; a test fails when it is stale.
header:
	PLLM_WRITE_HEADER=1 $(CARGO) test --locked --test header

lint:
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets -- -D warnings

test-rust:
	$(CARGO) test --locked

test-c: $(BUILD)/abi_test
	$(CC) -std=c99 $(WARNINGS) -Iinclude -fsyntax-only tests/c/header_alone.c
	$(CC) -std=c11 $(WARNINGS) -Iinclude -fsyntax-only tests/c/header_alone.c
	$(CXX) -std=c++17 $(WARNINGS) -Iinclude -fsyntax-only -x c++ tests/c/header_alone.c
	$(BUILD)/abi_test examples/model tests/goldens/llama

# The examples answer alike, and as they did when their output was committed.
test-examples: $(BUILD)/hello
	$(BUILD)/hello examples/model | diff - examples/hello.expected
	python3 examples/python/hello.py $(LIB) examples/model | diff - examples/hello.expected

# On an otherwise idle machine: benches/README.md.
bench:
	$(CARGO) bench --locked --bench cpu

clean:
	rm -rf $(BUILD)
	$(CARGO) clean
