//! Compiles the CUDA kernels if nvcc is available, and sets the soname of the shared library. The
//! number in the soname changes with every ABI break, and before 1.0 never without notice.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

/// One compilation of the kernels to PTX, and its uses in release builds.
struct Family {
    /// Virtual architecture.
    compute: &'static str,
    /// The PTX version that is declared: the lowest one that has the architectures. nvcc declares its
    /// own version, which older drivers and other versions of ptxas reject. ptxas checks that no
    /// instruction needs a later one.
    ptx_version: &'static str,
    /// Architectures for which ptxas makes machine code. Code for 8.9 also runs on later GPUs of the
    /// same major number. Code for 9.0a runs on 9.0 only.
    machine: &'static [&'static str],
}

/// Machine code for Ampere, Ada, Hopper and Blackwell. Hopper has instructions of its own.
const FAMILIES: [Family; 3] = [
    Family { compute: "80", ptx_version: "8.0", machine: &["80", "86", "89"] },
    Family { compute: "90a", ptx_version: "8.0", machine: &["90a"] },
    Family { compute: "100", ptx_version: "8.7", machine: &BLACKWELL },
];

/// The family whose PTX is in the library too. Drivers compile it for later architectures. Other
/// builds than releases have nothing else, because they are made often.
const FALLBACK: &str = "80";

/// Path of the nvcc that `make cuda-toolkit` installs. That target also touches this file, because
/// cargo does not rerun the script when a missing file appears.
const OWN_TOOLKIT: &str = "target/cuda-toolkit/bin/nvcc";

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let release = env::var("PROFILE").as_deref() == Ok("release");
    compile_kernels(release);
    println!("cargo:rustc-check-cfg=cfg(wide_tiles)");
    if release || host_has_avx512() {
        println!("cargo:rustc-cfg=wide_tiles");
    }
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

/// Returns whether this machine runs AVX-512. Other machines compile the wide tiles of AVX-512 for
/// releases only: they are most of the code of the CPU kernels, and no test of theirs runs it.
fn host_has_avx512() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("avx512f");
    #[cfg(not(target_arch = "x86_64"))]
    return false;
}

/// Environment variable with the architectures that get machine code in a release, such as "90a" or
/// "80,89". Without it, all do. Other builds have no machine code.
const ARCHS: &str = "PAGEDLLM_CUDA_ARCHS";

/// Environment variable that turns register spills in kernels into errors. It is optional because
/// other versions of nvcc may spill where the version of CI does not.
const DENY_SPILLS: &str = "PAGEDLLM_DENY_SPILLS";

/// Options that make PTX. tests/ptx/run.py has the same.
const PTX_OPTIONS: [&str; 3] = ["-ptx", "-std=c++17", "-O3"];

/// Environment variable with a folder that keeps PTX for other builds and for tests/ptx. Compiling the
/// kernels to PTX takes more than a minute.
const PTX_CACHE: &str = "PAGEDLLM_PTX_CACHE";

const BLACKWELL: [&str; 2] = ["100", "120"];

/// Bytes that a thread may spill on Blackwell. Nine kernels spill 4 to 36 bytes there with ptxas 12.9.
/// With more registers for each thread, a multiprocessor would have one block less, which costs more.
const MAX_SPILL_ON_BLACKWELL: u32 = 48;

/// Compiles kernels/all.cu to images, which `$OUT_DIR/kernels.rs` lists. Without nvcc the list is
/// empty, and opening a CUDA device fails with an error.
fn compile_kernels(release: bool) {
    println!("cargo:rerun-if-changed=kernels");
    ["NVCC", "CUDA_HOME", ARCHS, DENY_SPILLS].iter().for_each(|variable| println!("cargo:rerun-if-env-changed={variable}"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let (mut images, mut min_driver) = (Vec::new(), 12);
    if let Some(nvcc) = nvcc() {
        let toolkit = Toolkit { ptxas: ptxas(&nvcc), nvcc, archs: archs(release), release, out: out.clone() };
        let families = FAMILIES.iter().filter(|family| family.compute == FALLBACK || toolkit.machine(family).next().is_some());
        let made = thread::scope(|scope| {
            let threads: Vec<_> = families.map(|family| scope.spawn(|| toolkit.compile(family))).collect();
            threads.into_iter().map(|thread| thread.join().expect("the kernels are compiled")).collect::<Vec<_>>()
        });
        images.extend(made.into_iter().flatten());
        if !toolkit.archs.is_empty() && toolkit.major_version() > min_driver {
            min_driver = toolkit.major_version();
            println!(
                "cargo:warning=the library needs a driver for CUDA {min_driver}, because {} made its machine code; \
                 `make cuda-toolkit` installs a ptxas whose code needs CUDA 12",
                toolkit.ptxas.display()
            );
        }
    }
    let list = format!(
        "/// The version of the oldest driver that loads the kernels.\n\
         pub const MIN_DRIVER: std::ffi::c_int = {min_driver}_000;\n\
         static IMAGES: &[Image] = &[\n{}];\n",
        images.concat()
    );
    std::fs::write(out.join("kernels.rs"), list).expect("OUT_DIR can be written");
}

/// The compiler, and what it makes.
struct Toolkit {
    nvcc: PathBuf,
    ptxas: PathBuf,
    /// Architectures that get machine code.
    archs: Vec<&'static str>,
    release: bool,
    out: PathBuf,
}

impl Toolkit {
    /// Compiles the kernels for a family. Returns the entries of its images in the list.
    fn compile(&self, family: &Family) -> Vec<String> {
        let Family { compute, ptx_version, .. } = family;
        let ptx = self.out.join(format!("compute_{compute}.ptx"));
        let text = self.compile_to_ptx(compute);
        let declares = |line: &str| if line.starts_with(".version ") { format!(".version {ptx_version}\n") } else { format!("{line}\n") };
        std::fs::write(&ptx, text.lines().map(declares).collect::<String>()).expect("OUT_DIR can be written");
        let assembled = thread::scope(|scope| {
            let threads: Vec<_> = self.machine(family).map(|arch| scope.spawn(|| self.assemble(&ptx, arch))).collect();
            threads.into_iter().map(|thread| thread.join().expect("the PTX is assembled")).collect::<Vec<_>>()
        });
        let mut images: Vec<_> = assembled.iter().zip(self.machine(family)).map(|(path, arch)| self.image(path, "Machine", arch)).collect();
        if *compute == FALLBACK {
            images.push(self.image(&ptx, "Ptx", compute));
        }
        images
    }

    /// Compiles the kernels to PTX, unless the cache has it.
    fn compile_to_ptx(&self, compute: &str) -> String {
        let file = |folder| Path::new(&folder).join(format!("compute_{compute}-all.cu-{:016x}.ptx", self.digest()));
        let cached = env::var_os(PTX_CACHE).map(file);
        if let Some(text) = cached.as_ref().and_then(|path| std::fs::read_to_string(path).ok()) {
            return text;
        }
        let path = self.out.join(format!("nvcc_{compute}.ptx"));
        let target = format!("-arch=compute_{compute}");
        run(Command::new(&self.nvcc).args(PTX_OPTIONS).args([&target, "kernels/all.cu", "-o"]).arg(&path));
        if let Some(cached) = cached {
            // Another build may read the cache at the same time.
            let unfinished = cached.with_extension(std::process::id().to_string());
            std::fs::create_dir_all(cached.parent().expect("a file has a folder")).expect("the cache can be written");
            std::fs::copy(&path, &unfinished).expect("the cache can be written");
            std::fs::rename(&unfinished, &cached).expect("the cache can be written");
        }
        std::fs::read_to_string(&path).expect("nvcc writes PTX")
    }

    /// Returns the FNV-1a hash of the compiler's version and options and of the kernels. tests/ptx/run.py has
    /// the same.
    fn digest(&self) -> u64 {
        let version = Command::new(&self.nvcc).arg("--version").output().map(|output| output.stdout);
        let mut bytes = version.unwrap_or_default();
        PTX_OPTIONS.iter().for_each(|option| bytes.extend(option.bytes()));
        for flags in ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS"].map(env::var_os).into_iter().flatten() {
            bytes.extend(flags.as_encoded_bytes());
        }
        let folder = std::fs::read_dir("kernels").expect("the kernels are here");
        let mut files: Vec<_> = folder.map(|file| file.expect("as above").path()).collect();
        files.sort();
        for file in files {
            bytes.extend(file.file_name().expect("it has a name").as_encoded_bytes());
            bytes.extend(std::fs::read(&file).expect("a kernel can be read"));
        }
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
    }

    /// Returns the architectures of a family that get machine code.
    fn machine(&self, family: &Family) -> impl Iterator<Item = &'static str> {
        family.machine.iter().copied().filter(|arch| self.archs.contains(arch))
    }

    /// Makes machine code.
    fn assemble(&self, ptx: &Path, arch: &str) -> PathBuf {
        let path = self.out.join(format!("sm_{arch}.cubin"));
        let mut command = Command::new(&self.ptxas);
        command.args(["-O3", &format!("-arch=sm_{arch}")]).arg(ptx).arg("-o").arg(&path);
        let output = command.arg("-warn-spills").output();
        let Ok(output) = output else { panic!("{command:?}: {output:?}") };
        let messages = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{command:?}: {messages}. {REMEDY}");
        if env::var_os(DENY_SPILLS).is_some() {
            let spill = messages.lines().find(|line| line.contains("spill") && !may_spill(line, arch));
            assert!(spill.is_none(), "sm_{arch}: {}; change the kernel or its launch bounds", spill.unwrap_or_default());
        }
        path
    }

    /// Compresses an image. Returns its entry in the list.
    fn image(&self, path: &Path, kind: &str, arch: &str) -> String {
        let bytes = std::fs::read(path).expect("the image was just written");
        let compressed = path.with_extension("deflated");
        let level = if self.release { 9 } else { 1 };
        std::fs::write(&compressed, miniz_oxide::deflate::compress_to_vec(&bytes, level)).expect("OUT_DIR can be written");
        let digits = arch.trim_end_matches('a');
        let (major, minor) = digits.split_at(digits.len() - 1);
        format!(
            "    Image {{ kind: Kind::{kind}, major: {major}, minor: {minor}, only_this: {}, bytes: {}, compressed: include_bytes!({compressed:?}) }},\n",
            digits != arch,
            bytes.len()
        )
    }

    /// Returns the major version of CUDA whose drivers load the machine code.
    fn major_version(&self) -> u32 {
        let output = Command::new(&self.ptxas).arg("--version").output();
        let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        let release = text.split_once("release ").and_then(|(_, version)| version.split('.').next());
        let major = release.and_then(|major| major.parse().ok());
        major.unwrap_or_else(|| panic!("{} --version reports no version: {text}", self.ptxas.display()))
    }
}

/// Returns the architectures that get machine code.
fn archs(release: bool) -> Vec<&'static str> {
    let known: Vec<&str> = FAMILIES.iter().flat_map(|family| family.machine).copied().collect();
    let list = if release { env::var(ARCHS).unwrap_or_else(|_| known.join(",")) } else { String::new() };
    let find = |name: &str| known.iter().copied().find(|&arch| arch == name);
    let names = list.split(',').map(str::trim).filter(|name| !name.is_empty());
    names.map(|name| find(name).unwrap_or_else(|| panic!("${ARCHS} has {name:?}; known architectures are {known:?}"))).collect()
}

/// Returns whether a message of ptxas is about spills that are accepted: it has the bytes of stores and
/// of loads.
fn may_spill(message: &str, arch: &str) -> bool {
    let words: Vec<&str> = message.split_whitespace().collect();
    let bytes = words.windows(2).filter(|pair| pair[1] == "bytes").map(|pair| pair[0].parse().unwrap_or(u32::MAX));
    BLACKWELL.contains(&arch) && bytes.max().is_some_and(|bytes| bytes <= MAX_SPILL_ON_BLACKWELL)
}

fn run(command: &mut Command) {
    match command.status() {
        Ok(status) if status.success() => {}
        result => panic!("{command:?} failed: {result:?}. {REMEDY}"),
    }
}

/// The remedy if the compiler fails.
const REMEDY: &str = "The kernels need CUDA 12.8 or later: run `make cuda-toolkit` and build with \
                      NVCC=target/cuda-toolkit/bin/nvcc, or without CUDA with NVCC= (empty)";

/// Returns the ptxas to use: that of CUDA 12 which `make cuda-toolkit` installs, then the one beside
/// nvcc, then the one on the path. That of CUDA 12 is not beside nvcc, because nvcc runs the one
/// beside it on PTX of its own version.
fn ptxas(nvcc: &Path) -> PathBuf {
    let beside = |nvcc: PathBuf| nvcc.with_file_name("ptxas");
    let of_cuda_12 = nvcc.ancestors().nth(2).map(|toolkit| toolkit.join("cuda12/bin/ptxas"));
    let places = [of_cuda_12, Some(beside(nvcc.to_path_buf())), nvcc.canonicalize().ok().map(beside)];
    places.into_iter().flatten().find(|ptxas| ptxas.is_file()).unwrap_or_else(|| PathBuf::from("ptxas"))
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
