//! include/pagedllm.h matches src/ffi. `make header` generates it.

use std::path::Path;

use super::description::{FILES, source};

#[test]
fn the_committed_header_matches_the_source() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).unwrap();
    // Only src/ffi is read, because constants of other modules are not part of the C API. The order
    // suits a first reading.
    let order = FILES.map(|name| source(root, name));
    let mut sources = std::fs::read_dir(root.join("src/ffi")).unwrap().map(|entry| entry.unwrap().path());
    // mod.rs only includes the other files. If cbindgen read it, too, every item would appear
    // twice.
    assert!(sources.all(|file| order.contains(&file) || file.ends_with("mod.rs")), "a file of src/ffi has no place in the header");
    let builder = order.into_iter().fold(cbindgen::Builder::new().with_config(config), |builder, source| builder.with_src(source));
    let mut generated = Vec::new();
    builder.generate().unwrap().write(&mut generated);
    let text = String::from_utf8_lossy(&generated);
    assert_eq!(text.matches("void pllm_engine_free(").count(), 1, "each prototype appears once");
    let path = root.join("include/pagedllm.h");
    if std::env::var_os("PLLM_WRITE_HEADER").is_some() {
        std::fs::write(&path, &generated).unwrap();
    }
    let committed = std::fs::read(&path).unwrap_or_default();
    assert!(committed == generated, "include/pagedllm.h is stale: run `make header` and commit it");
}
