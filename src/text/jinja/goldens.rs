//! Compares renderings with those of Jinja2: stored ones, and new random ones if Python has Jinja2.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value as Json;

use super::{STACK_BYTES, parse, render, strftime};
use crate::sys::threads;

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/templates")
}

fn stored() -> Json {
    serde_json::from_slice(&std::fs::read(goldens().join("templates.json")).unwrap()).unwrap()
}

/// Renders each case, and fails with all that differ.
fn compare(variables: &Json, cases: &[Json]) {
    let variables = variables.as_object().unwrap();
    let mut wrong = Vec::new();
    for case in cases {
        let template = case["template"].as_str().unwrap();
        let variables = variables.iter().map(|(name, value)| (name.as_str(), value));
        let rendered = parse(template).and_then(|tree| render(&tree, variables)).map_err(|e| e.to_string());
        if rendered.as_ref().ok().map(String::as_str) != case["rendered"].as_str() {
            wrong.push(format!("{template:?}\n  Jinja2 {}\n  here   {rendered:?}", case.get("rendered").unwrap_or(&case["error"])));
        }
    }
    assert!(wrong.is_empty(), "{} of {} differ:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

pub fn on_deep_stack(body: impl FnOnce() + Send) {
    threads::with_stack(STACK_BYTES, body).unwrap().unwrap_or_else(|panic| panic!("{panic}"));
}

#[test]
fn stored_templates_render_as_in_jinja2() {
    let stored = stored();
    let cases = stored["cases"].as_array().unwrap();
    assert!(cases.len() > 700);
    on_deep_stack(|| compare(&stored["variables"], cases));
}

#[test]
fn random_templates_render_as_in_jinja2() {
    let script = goldens().join("make_templates.py");
    let seed = std::env::var("PAGEDLLM_TEMPLATE_SEED").unwrap_or_else(|_| "2".to_string());
    let output = Command::new("python3")
        .args([script.to_str().unwrap(), "--random", "2000", &seed])
        .env("PYTHONPATH", Path::new(env!("CARGO_MANIFEST_DIR")).join("build/references"))
        .output();
    let Some(output) = output.ok().filter(|output| output.status.success()) else {
        return eprintln!("skipped: python3 with jinja2 is needed to make random templates");
    };
    let text = String::from_utf8(output.stdout).unwrap();
    let cases: Vec<Json> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(cases.len(), 2000);
    on_deep_stack(|| compare(&stored()["variables"], &cases));
}

#[test]
fn dates_are_written_as_by_python() {
    let stored = stored();
    let mut wrong = Vec::new();
    for case in stored["dates"].as_array().unwrap() {
        let (format, seconds, micros) = (case[0].as_str().unwrap(), case[1].as_u64().unwrap(), case[2].as_u64().unwrap());
        let written = strftime::strftime(format, Duration::new(seconds, micros as u32 * 1000)).unwrap();
        if written != case[3] {
            wrong.push(format!("{format:?} at {seconds}: {written:?} instead of {}", case[3]));
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}
