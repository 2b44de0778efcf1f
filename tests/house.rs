//! The rules of the house, read off its own source: who imports whom, where `unsafe` may stand, how long a function gets.

use std::path::{Path, PathBuf};

/// Each room, and the rooms it may use.
const ARROWS: &[(&str, &[&str])] = &[
    ("ffi", &["engine", "sched", "model"]),
    ("engine", &["sched", "decode", "text", "model", "backend", "kv"]),
    ("sched", &["kv"]),
    ("model", &["backend"]),
    ("kv", &[]),
    ("decode", &[]),
    ("text", &[]),
    ("backend", &[]),
    ("arena", &[]),
    ("batch", &[]),
    ("error", &[]),
    ("options", &[]),
    ("sys", &[]),
];
const LEAVES: &[&str] = &["arena", "error", "options", "batch", "sys"];
const UNSAFE_ROOMS: &[&str] = &["ffi", "backend", "sys"];
const LONGEST_FUNCTION: usize = 60;

fn sources(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => sources(&path, found),
            false => found.extend(path.extension().is_some_and(|e| e == "rs").then_some(path)),
        }
    }
}

/// (room, file, its text)
fn rooms() -> Vec<(String, PathBuf, String)> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&src, &mut files);
    files.retain(|file| !file.ends_with("lib.rs"));
    let read = |file: PathBuf| {
        let first = file.strip_prefix(&src).unwrap().iter().next().unwrap().to_str().unwrap();
        (first.trim_end_matches(".rs").to_string(), file.clone(), std::fs::read_to_string(&file).unwrap())
    };
    files.into_iter().map(read).collect()
}

#[test]
fn arrows_only_point_down() {
    for (room, file, text) in rooms() {
        let (_, below) = ARROWS.iter().find(|(name, _)| *name == room).unwrap_or_else(|| panic!("{room} has no place in the house"));
        for part in text.split("crate::").skip(1) {
            let used: String = part.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            let allowed = used == room || below.contains(&used.as_str()) || LEAVES.contains(&used.as_str());
            assert!(allowed, "{} uses {used}, which {room} may not", file.display());
        }
    }
}

/// The compiler denies unsafe code to the whole crate; only these rooms may lift that.
#[test]
fn unsafe_code_stays_in_its_rooms() {
    for (room, file, text) in rooms() {
        let lifted = text.contains("allow(unsafe_code") || text.contains("allow(\n    unsafe_code");
        assert!(!lifted || UNSAFE_ROOMS.contains(&room.as_str()), "{} lets unsafe code into {room}", file.display());
    }
    let map = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    assert!(map.contains("#![deny(unsafe_code)]"));
}

fn begins_a_function(code: &str) -> bool {
    let before = code.split("fn ").next().unwrap_or(code);
    let qualifiers = ["pub", "pub(super)", "pub(crate)", "const", "unsafe", "extern", "\"C\""];
    code.contains("fn ") && before.split_whitespace().all(|word| qualifiers.contains(&word))
}

#[test]
fn functions_fit_on_a_screen() {
    let mut seen = 0;
    for (_, file, text) in rooms() {
        let lines: Vec<&str> = text.lines().collect();
        for (start, line) in lines.iter().enumerate().filter(|(_, line)| begins_a_function(line.trim_start())) {
            // rustfmt closes a body at the indentation of its signature; a declaration ends in a semicolon, a short body in a brace.
            let indent = &line[..line.len() - line.trim_start().len()];
            let ends = |line: &&str| {
                line.strip_prefix(indent).is_some_and(|rest| {
                    rest.starts_with('}') || rest.ends_with(';') && !rest.starts_with(' ') || rest.ends_with("}") && rest.starts_with("fn")
                })
            };
            let length =
                lines[start..].iter().position(ends).unwrap_or_else(|| panic!("{}:{}: no end found", file.display(), start + 1)) + 1;
            assert!(length <= LONGEST_FUNCTION, "{}:{}: {length} lines", file.display(), start + 1);
            seen += 1;
        }
    }
    assert!(seen > 300, "only {seen} functions were recognized");
}
