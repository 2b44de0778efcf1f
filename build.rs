//! Compiles the CUDA kernels if nvcc is available, and sets the soname of the shared library. The
//! number in the soname changes with every ABI break, and before 1.0 never without notice.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// nvcc targets of release builds: machine code for Ampere, Ada and Hopper, and PTX that drivers
/// compile for later architectures.
const TARGETS: [&str; 5] = [
    "arch=compute_80,code=sm_80",
    "arch=compute_86,code=sm_86",
    "arch=compute_89,code=sm_89",
    "arch=compute_90a,code=sm_90a",
    "arch=compute_80,code=compute_80",
];

/// nvcc target of other builds, which are made often: PTX that the driver compiles at load time.
const TARGETS_OF_TESTS: [&str; 1] = ["arch=compute_80,code=compute_80"];

/// Path of the nvcc that `make cuda-toolkit` installs. That target also touches this file, because
/// cargo does not rerun the script when a missing file appears.
const OWN_TOOLKIT: &str = "target/cuda-toolkit/bin/nvcc";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    compile_kernels();
    if env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libpagedllm.so.1");
        // `nodelete` makes dlclose keep the library mapped: Rust does not release thread-local keys
        // when a library is unloaded.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
        // Symbols that dependencies export to C are not part of this library's ABI.
        println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
        // benches/polling replaces the library at run time and therefore needs its soname.
        println!("cargo:rustc-link-arg-examples=-Wl,-soname,libpagedllm.so.1");
    }
}

/// Environment variable that turns register spills in kernels into errors. It is optional because
/// other versions of nvcc may spill where the version of CI does not.
const DENY_SPILLS: &str = "PAGEDLLM_DENY_SPILLS";

/// Compiles kernels/all.cu to `$OUT_DIR/kernels.fatbin`. Without nvcc the file is empty, and
/// opening a CUDA device fails with an error.
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

/// Returns the nvcc to use: `$NVCC`, then `$CUDA_HOME/bin/nvcc`, then nvcc on the path, then
/// `OWN_TOOLKIT`. If `$NVCC` is set to the empty string, the result is None.
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
