//! Scripts of C API calls, played on each instruction path of this machine. Tokens, texts, the bits
//! of log probabilities and the results of calls equal the recorded ones.
//!
//! A script is a JSON file in this directory: "about" states its purpose, and "calls" lists the
//! calls of player.rs in order. Its records are in recorded/, by instruction path. After an
//! intended change of results, run `PLLM_RECORD_SCRIPTS=1 cargo test --test scripts`. It replaces
//! the records of the paths that this machine supports.

mod device;
mod player;
mod record;
mod structs;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use pagedllm::backend::cpu::CpuBackend;
use pagedllm::ffi::*;
use pagedllm::types::options::Isa;
use player::{CALLS, InstructionPath, Player};
use serde_json::{Value as Json, json};
use support::TempDir;

const PATHS: [InstructionPath; 6] = [
    InstructionPath { name: "portable", c: PLLM_ISA_PORTABLE, isa: Isa::Portable },
    InstructionPath { name: "avx2", c: PLLM_ISA_AVX2, isa: Isa::Avx2 },
    InstructionPath { name: "avx_vnni", c: PLLM_ISA_AVX_VNNI, isa: Isa::AvxVnni },
    InstructionPath { name: "avx512", c: PLLM_ISA_AVX512, isa: Isa::Avx512 },
    InstructionPath { name: "avx512_vnni", c: PLLM_ISA_AVX512_VNNI, isa: Isa::Avx512Vnni },
    InstructionPath { name: "avx512_bf16", c: PLLM_ISA_AVX512_BF16, isa: Isa::Avx512Bf16 },
];

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts")
}

/// Returns the name and the content of each script.
fn scripts() -> Vec<(String, Json)> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(directory()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    let read = |file: PathBuf| {
        let json = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        (file.file_stem().unwrap().to_str().unwrap().to_string(), json)
    };
    files.into_iter().map(read).collect()
}

fn paths_of_this_machine() -> Vec<InstructionPath> {
    let (supported, unsupported): (Vec<_>, Vec<_>) = PATHS.into_iter().partition(|path| CpuBackend::new(1, Some(path.isa)).is_ok());
    for path in unsupported {
        println!("skipped: {}: this machine does not support it", path.name);
    }
    supported
}

fn record_file(script: &str) -> PathBuf {
    directory().join(format!("recorded/{script}.json"))
}

/// Returns the records of a script: a list of {"paths": names, "record": record}, because many
/// paths have the same record.
fn recorded(script: &str) -> Vec<Json> {
    let bytes = std::fs::read(record_file(script)).unwrap_or_else(|_| b"[]".to_vec());
    serde_json::from_slice(&bytes).unwrap()
}

fn recorded_on<'a>(records: &'a [Json], path: &str) -> &'a Json {
    let found = records.iter().find(|record| record["paths"].as_array().unwrap().iter().any(|name| name == path));
    found.map_or(&Json::Null, |record| &record["record"])
}

/// Replaces the records of some paths.
fn write_records(script: &str, new: &[(&str, Json)]) {
    let mut records: Vec<Json> = Vec::new();
    let old = recorded(script);
    for InstructionPath { name, .. } in PATHS {
        let played = new.iter().find(|(path, _)| *path == name).map(|(_, record)| record);
        let record = played.unwrap_or_else(|| recorded_on(&old, name));
        if record.is_null() {
            continue;
        }
        match records.iter_mut().find(|other| other["record"] == *record) {
            Some(same) => same["paths"].as_array_mut().unwrap().push(name.into()),
            None => records.push(json!({"paths": [name], "record": record})),
        }
    }
    let mut text = serde_json::to_string_pretty(&records).unwrap();
    text = compact_lists(&text);
    std::fs::create_dir_all(directory().join("recorded")).unwrap();
    std::fs::write(record_file(script), text + "\n").unwrap();
}

/// Puts each list of numbers on one line.
fn compact_lists(text: &str) -> String {
    let mut out = String::new();
    let mut in_list = false;
    for line in text.lines() {
        let trimmed = line.trim();
        let is_number = trimmed.trim_end_matches(',').parse::<u64>().is_ok();
        let ends_list = in_list && trimmed.starts_with(']');
        match in_list && (is_number || ends_list) {
            true => out += &trimmed.replace(',', if ends_list { "," } else { ", " }),
            false => {
                out += if out.is_empty() { "" } else { "\n" };
                out += line;
            }
        }
        in_list = trimmed.ends_with('[') || in_list && is_number;
    }
    out
}

/// Returns the first difference of two records.
fn difference(place: &str, expected: &Json, found: &Json) -> Option<String> {
    match (expected, found) {
        (Json::Object(a), Json::Object(b)) => {
            let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
            names.into_iter().find_map(|name| difference(&format!("{place}.{name}"), &expected[name], &found[name]))
        }
        _ => (expected != found).then(|| format!("{place}: recorded {expected}\nfound {found}")),
    }
}

#[test]
fn scripts_give_the_recorded_results() {
    let record = std::env::var_os("PLLM_RECORD_SCRIPTS").is_some();
    let paths = paths_of_this_machine();
    let mut failures = Vec::new();
    for (name, script) in scripts() {
        let mut played = Vec::new();
        for &path in &paths {
            let dir = TempDir::new();
            played.push((path.name, Player::play(&script, path, &dir.0)));
        }
        if record {
            write_records(&name, &played);
            continue;
        }
        let records = recorded(&name);
        for (path, found) in &played {
            failures.extend(difference(&format!("{name} on {path}"), recorded_on(&records, path), found));
        }
    }
    assert!(failures.is_empty(), "{} differ:\n{}", failures.len(), failures.join("\n"));
}

/// Each call is used by a script, and each script states its purpose.
#[test]
fn scripts_use_every_call_and_state_their_purpose() {
    let scripts = scripts();
    assert!(scripts.len() >= 30, "only {} scripts", scripts.len());
    let mut used = BTreeSet::new();
    for (name, script) in &scripts {
        assert!(script["about"].is_string(), "{name} does not state its purpose");
        let calls = script["calls"].as_array().unwrap();
        used.extend(CALLS.iter().map(|(call, _)| *call).filter(|call| calls.iter().any(|members| members.get(*call).is_some())));
    }
    let unused: Vec<&str> = CALLS.iter().map(|(call, _)| *call).filter(|call| !used.contains(call)).collect();
    assert!(unused.is_empty(), "no script uses the calls {unused:?}");
}
