# make demo, make test: all that a newcomer needs. Both set the machine up first.

WARNINGS := -Wall -Wextra -Wpedantic -Werror
LIBDIR := target/release
LIB := $(LIBDIR)/libpagedllm.so
BUILD := build
LINK := -L$(LIBDIR) -lpagedllm -Wl,-rpath,$(CURDIR)/$(LIBDIR)
# Where rustup, should setup have to run it, puts cargo.
export PATH := $(HOME)/.cargo/bin:$(PATH)

.PHONY: demo test setup lib header lint test-rust test-c test-examples bench clean

demo: setup $(BUILD)/hello
	$(BUILD)/hello examples/model

test: setup lint test-rust test-c test-examples
	@echo "make test: everything passed"

setup:
	@scripts/setup.sh

lib:
	cargo build --release --locked

$(BUILD)/hello: examples/c/hello.c include/pagedllm.h | lib
	@mkdir -p $(BUILD)
	$(CC) -std=c11 -O2 $(WARNINGS) -Iinclude $< -o $@ $(LINK)

$(BUILD)/abi_test: tests/c/abi_test.c include/pagedllm.h | lib
	@mkdir -p $(BUILD)
	$(CC) -std=c11 -O1 -g -pthread $(WARNINGS) -Iinclude $< -o $@ $(LINK)

# Writes include/pagedllm.h from src/ffi; a test fails when it is stale.
header:
	PLLM_WRITE_HEADER=1 cargo test --locked --test header

lint:
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings

test-rust:
	cargo test --locked

test-c: $(BUILD)/abi_test
	$(CC) -std=c99 $(WARNINGS) -Iinclude -fsyntax-only tests/c/header_alone.c
	$(CC) -std=c11 $(WARNINGS) -Iinclude -fsyntax-only tests/c/header_alone.c
	$(CXX) -std=c++17 $(WARNINGS) -Iinclude -fsyntax-only -x c++ tests/c/header_alone.c
	$(BUILD)/abi_test examples/model tests/goldens/llama
	@# An intrinsic that is a function of its own is one that slipped out of its kernel: docs/design.md.
	@if nm -C $(LIB) | grep -E 'core_arch::x86::(avx512|avx2|fma|f16c)'; then echo "intrinsics are called, not inlined" >&2; exit 1; fi
	@# Only the ABI leaves the library.
	@if nm -D --defined-only $(LIB) | grep -v ' pllm_'; then echo "symbols leave the library that are not pllm_*" >&2; exit 1; fi

# The examples answer alike, and as they did when their output was committed.
test-examples: $(BUILD)/hello
	$(BUILD)/hello examples/model | diff - examples/hello.expected
	python3 examples/python/hello.py $(LIB) examples/model | diff - examples/hello.expected

# On an otherwise idle machine: benches/README.md.
bench:
	cargo bench --locked --bench cpu

clean:
	rm -rf $(BUILD)
	cargo clean
