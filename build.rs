//! Compiles the kernels of CUDA devices, where there is nvcc; and names the library as programs remember it: the number changes when the ABI
//! breaks, never before 1.0 without notice.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Machine code for Ampere, Ada and Hopper, and what drivers compile for whatever comes later.
const TARGETS: [&str; 5] = [
    "arch=compute_80,code=sm_80",
    "arch=compute_86,code=sm_86",
    "arch=compute_89,code=sm_89",
    "arch=compute_90a,code=sm_90a",
    "arch=compute_80,code=compute_80",
];

/// For tests, which are built often: drivers compile it when it is loaded.
const TARGETS_OF_TESTS: [&str; 1] = ["arch=compute_80,code=compute_80"];

/// Where `make cuda-toolkit` puts it; that touches this file, since cargo does not look for what was not there.
const OWN_TOOLKIT: &str = "target/cuda-toolkit/bin/nvcc";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    compile_kernels();
    if env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libpagedllm.so.0");
        // Rust's thread-local keys are not given back when a library is unloaded: dlclose leaves this one where it is.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
        // What other crates offer to C is not ours to show.
        println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
        // benches/polling stands in for the library, so it goes by its name.
        println!("cargo:rustc-link-arg-examples=-Wl,-soname,libpagedllm.so.0");
    }
}

/// Set, it makes a kernel that keeps in memory what should be in registers an error. Other compilers than ours may need to.
const DENY_SPILLS: &str = "PAGEDLLM_DENY_SPILLS";

/// Without nvcc the file is empty, and whoever asks for a CUDA device is told so.
fn compile_kernels() {
    println!("cargo:rerun-if-changed=kernels");
    ["NVCC", "CUDA_HOME", DENY_SPILLS].iter().for_each(|variable| println!("cargo:rerun-if-env-changed={variable}"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("kernels.fatbin");
    let Some(nvcc) = nvcc() else { return std::fs::write(out, []).expect("OUT_DIR can be written") };
    let mut command = Command::new(&nvcc);
    command.args(["-fatbin", "-std=c++17", "-O3", "--threads", "0", "-Xfatbin", "-compress-all", "kernels/all.cu", "-o"]).arg(&out);
    if env::var_os(DENY_SPILLS).is_some() {
        command.args(["-Xptxas", "-warn-spills", "-Xptxas", "-Werror"]);
    }
    let targets = if env::var("PROFILE").as_deref() == Ok("release") { &TARGETS[..] } else { &TARGETS_OF_TESTS };
    command.args(targets.iter().flat_map(|target| ["-gencode", target]));
    match command.status() {
        Ok(status) if status.success() => {}
        result => panic!("{} did not compile kernels/all.cu: {result:?}. Without CUDA: NVCC= cargo build", nvcc.display()),
    }
}

/// $NVCC, where it is empty none; otherwise that of $CUDA_HOME, that on the path, or our own.
fn nvcc() -> Option<PathBuf> {
    if let Some(named) = env::var_os("NVCC").map(PathBuf::from) {
        assert!(named.as_os_str().is_empty() || named.is_file(), "$NVCC is {}, which is no file", named.display());
        return named.is_file().then_some(named);
    }
    let home = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).map(|dir| dir.join("nvcc"));
    let own = [PathBuf::from(OWN_TOOLKIT)];
    home.into_iter().chain(on_path).chain(own).find(|nvcc| nvcc.is_file())
}
