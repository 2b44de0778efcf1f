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
    ("batch", &[]),
    ("error", &[]),
    ("options", &[]),
    ("sys", &[]),
];
const LEAVES: &[&str] = &["error", "options", "batch", "sys"];
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

#[test]
fn unsafe_code_stays_in_its_rooms() {
    for (room, file, text) in rooms() {
        for (i, line) in text.lines().enumerate().filter(|(_, line)| line.contains("unsafe {") || line.contains("unsafe impl")) {
            assert!(UNSAFE_ROOMS.contains(&room.as_str()), "{}:{}: unsafe code in {room}: {line}", file.display(), i + 1);
        }
    }
}

#[test]
fn functions_fit_on_a_screen() {
    for (_, file, text) in rooms() {
        let lines: Vec<&str> = text.lines().collect();
        for (start, line) in lines.iter().enumerate() {
            let code = line.trim_start();
            let is_function =
                ["fn ", "pub fn ", "unsafe fn ", "pub unsafe fn ", "pub(super) fn "].iter().any(|begin| code.starts_with(begin));
            if !is_function || code.ends_with(';') {
                continue;
            }
            let closing = format!("{}}}", &line[..line.len() - code.len()]);
            let length = lines[start..].iter().position(|line| *line == closing).unwrap_or(0) + 1;
            assert!(length <= LONGEST_FUNCTION, "{}:{}: {length} lines", file.display(), start + 1);
        }
    }
}
