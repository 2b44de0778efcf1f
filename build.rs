//! The name that programs remember the library by: the number changes when the ABI breaks, never before 1.0 without notice.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libpagedllm.so.0");
        // Rust's thread-local keys are not given back when a library is unloaded: dlclose leaves this one where it is.
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
        // What other crates offer to C is not ours to show.
        println!("cargo:rustc-cdylib-link-arg=-Wl,--exclude-libs,ALL");
        // benches/polling stands in for the library, so it goes by its name.
        println!("cargo:rustc-link-arg-examples=-Wl,-soname,libpagedllm.so.0");
    }
}
