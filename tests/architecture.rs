//! Rules for the source: the imports between modules, the places of `unsafe`, the sizes of
//! functions, files and structs, and the language of text.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use imports::Imports;

#[path = "architecture/imports.rs"]
mod imports;
#[path = "architecture/source.rs"]
mod source;

/// Each module, and the modules that it may use.
const ARROWS: &[(&str, &[&str])] = &[
    ("ffi", &["engine", "scheduler", "model", "memory", "observability", "output", "text"]),
    ("engine", &["scheduler", "generation", "executor", "output", "memory", "observability", "text", "kv", "model", "backend"]),
    ("scheduler", &["kv"]),
    ("executor", &["model", "kv", "backend"]),
    ("memory", &["model", "kv", "backend"]),
    ("generation", &["text"]),
    ("observability", &["memory"]),
    ("model", &["backend"]),
    ("output", &[]),
    ("kv", &[]),
    ("text", &[]),
    ("backend", &[]),
    ("communicator", &[]),
    ("error", &[]),
    ("sys", &[]),
    ("types", &[]),
];
/// Modules that every module may use. The options of an engine refer to its budget and to its
/// communicator.
const LEAVES: &[&str] = &["communicator", "error", "sys", "types", "memory::budget"];
const UNSAFE_MODULES: &[&str] = &["ffi", "backend", "sys"];
const MAX_FUNCTION_LINES: usize = 60;
const MAX_FILE_LINES: usize = 600;
const MAX_FIELDS: usize = 15;

/// Exceptions of a rule: a name, and the reason. An exception that is not needed is an error.
type Exceptions = &'static [(&'static str, &'static str)];

/// Modules below which cycles of imports are allowed.
const CYCLES: Exceptions = &[];
/// Files with more lines.
const LONG_FILES: Exceptions = &[];
/// Structs with more fields.
const WIDE_STRUCTS: Exceptions = &[
    ("EngineOptions", "the options of the C ABI"),
    ("Header", "the header of an exported sequence"),
    ("Output", "an output of the C ABI"),
    ("SamplingParams", "the parameters of the C ABI"),
    ("Stats", "the statistics of the C ABI"),
    ("pllm_engine_options", "a struct of the C ABI"),
    ("pllm_model_info", "a struct of the C ABI"),
    ("pllm_output", "a struct of the C ABI"),
    ("pllm_request", "a struct of the C ABI"),
    ("pllm_sampling", "a struct of the C ABI"),
    ("pllm_stats", "a struct of the C ABI"),
];

/// The files outside of the folders of the journal that use it, each with what it uses.
const USERS_OF_THE_JOURNAL: Exceptions = &[
    ("engine/delivery.rs", "the digests of outputs"),
    ("engine/late_masks_test.rs", "journals with late masks"),
    ("engine/mod.rs", "the decorators of a new engine"),
    ("engine/request.rs", "the record of a request, copied before it is consumed"),
    ("engine/step_inputs.rs", "the digests at the end of a step"),
    ("engine/stored_names_test.rs", "the stored names"),
];

/// Phrases of the project's former dialect. docs/glossary.md has the terms to use.
const FORMER_PHRASES: &[&str] = &[
    "be told",
    "computed again",
    "give way",
    "gives way",
    "goes on",
    "has to give",
    "is told",
    "lets go",
    "nobody",
    "said again",
    "say again",
    "say the same",
    "says again",
    "says so",
    "says the same",
    "somebody",
    "told of",
    "what became of",
    "what becomes of",
    "what came of",
    "what comes of",
    "whoever",
];
/// Files and folders that are checked for them.
const PLAIN_TEXT: &[&str] = &[
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "Cargo.toml",
    "Makefile",
    "README.md",
    "RELEASING.md",
    "SECURITY.md",
    "benches",
    "bindings",
    "build.rs",
    "cbindgen.toml",
    "connectors",
    "docs",
    "examples",
    "include",
    "kernels",
    "scripts",
    "src",
    "tests/allocations",
    "tests/connectors",
    "tests/consumer",
    "tests/cuda",
    "tests/data",
    "tests/engine",
    "tests/ffi",
    "tests/fuzz",
    "tests/model",
    "tests/mpi",
    "tests/process",
    "tests/ptx",
    "tests/replay",
    "tests/scheduler",
    "tests/scripts",
    "tests/servers",
    "tests/soak",
    "tests/support",
    "tests/tool",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// All files with one of the extensions in a folder, or the file itself. Installed packages are
/// skipped.
fn files(path: &Path, extensions: &[&str], found: &mut Vec<PathBuf>) {
    if !path.is_dir() {
        return found.extend(path.extension().is_some_and(|e| extensions.iter().any(|known| e == *known)).then(|| path.to_path_buf()));
    }
    for entry in std::fs::read_dir(path).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != "node_modules" {
            files(&entry.path(), extensions, found);
        }
    }
}

/// Module, file and text of each source file.
fn modules() -> Vec<(String, PathBuf, String)> {
    let src = root().join("src");
    let mut found = Vec::new();
    files(&src, &["rs"], &mut found);
    found.retain(|file| !file.ends_with("lib.rs"));
    let read = |file: PathBuf| {
        let first = file.strip_prefix(&src).unwrap().iter().next().unwrap().to_str().unwrap();
        (first.trim_end_matches(".rs").to_string(), file.clone(), std::fs::read_to_string(&file).unwrap())
    };
    found.into_iter().map(read).collect()
}

/// Path within src/ and text of each source file.
fn texts() -> Vec<(String, String)> {
    let src = root().join("src");
    let name = |file: &Path| file.strip_prefix(&src).unwrap().to_str().unwrap().to_string();
    modules().into_iter().map(|(_, file, text)| (name(&file), text)).collect()
}

/// Returns the violations without an exception, and the exceptions without a violation. A violation
/// consists of the name that its exception would have, and a description.
fn problems(violations: &[(String, String)], exceptions: Exceptions) -> Vec<String> {
    let has_exception = |name: &str| exceptions.iter().any(|(known, _)| *known == name);
    let mut problems: Vec<String> = violations.iter().filter(|(name, _)| !has_exception(name)).map(|(_, text)| text.clone()).collect();
    let unneeded = exceptions.iter().filter(|(known, _)| violations.iter().all(|(name, _)| name != known));
    problems.extend(unneeded.map(|(name, reason)| format!("the exception {name} ({reason}) is no longer needed; delete it")));
    problems
}

fn assert_only_exceptions(violations: &[(String, String)], exceptions: Exceptions) {
    let problems = problems(violations, exceptions);
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn violations_need_exceptions_and_exceptions_need_violations() {
    let violations = ["a", "b"].map(|name| (name.to_string(), format!("{name} is wrong")));
    assert!(problems(&violations, &[("a", ""), ("b", "")]).is_empty());
    assert_eq!(problems(&violations, &[("a", "")]), ["b is wrong"]);
    assert_eq!(problems(&violations[..1], &[("a", ""), ("b", "old")]), ["the exception b (old) is no longer needed; delete it"]);
}

#[test]
fn files_import_each_other_in_no_cycle() {
    let src = root().join("src");
    let module = |file: &Path| {
        let path = file.strip_prefix(&src).unwrap().with_extension("");
        let path = if path.ends_with("mod") { path.parent().unwrap().to_path_buf() } else { path };
        path.to_str().unwrap().replace('/', "::")
    };
    let texts: BTreeMap<String, String> = modules().into_iter().map(|(_, file, text)| (module(&file), text)).collect();
    let cycles = Imports::find(&texts).cycles();
    let violations: Vec<_> =
        cycles.iter().map(|cycle| (imports::common_parent(cycle), format!("a cycle of imports: {}", cycle.join(", ")))).collect();
    assert_only_exceptions(&violations, CYCLES);
}

/// The core reads from outside only through `Inputs` and `Executor`, and a journal decorates these.
#[test]
fn the_core_knows_no_journal() {
    let outside = texts().into_iter().filter(|(file, text)| !file.contains("/journal/") && text.contains("journal::"));
    let uses: Vec<_> = outside.map(|(file, _)| (file.clone(), format!("{file} uses the journal"))).collect();
    assert_only_exceptions(&uses, USERS_OF_THE_JOURNAL);
}

fn long_files(files: &[(String, String)]) -> Vec<(String, String)> {
    let long = files.iter().map(|(file, text)| (file, text.lines().count())).filter(|(_, lines)| *lines > MAX_FILE_LINES);
    long.map(|(file, lines)| (file.clone(), format!("{file}: {lines} lines, at most {MAX_FILE_LINES}"))).collect()
}

#[test]
fn files_have_at_most_600_lines() {
    assert_only_exceptions(&long_files(&texts()), LONG_FILES);
    let invented = [600, 601].map(|lines| (format!("{lines}.rs"), "\n".repeat(lines)));
    assert_eq!(long_files(&invented), [("601.rs".to_string(), "601.rs: 601 lines, at most 600".to_string())]);
}

fn wide_structs(files: &[(String, String)]) -> Vec<(String, String)> {
    let structs = files.iter().flat_map(|(file, text)| source::structs(text).into_iter().map(move |(name, fields)| (file, name, fields)));
    let wide = structs.filter(|(.., fields)| *fields > MAX_FIELDS);
    wide.map(|(file, name, fields)| (name.to_string(), format!("{file}: {name} has {fields} fields, at most {MAX_FIELDS}"))).collect()
}

#[test]
fn structs_have_at_most_15_fields() {
    assert_only_exceptions(&wide_structs(&texts()), WIDE_STRUCTS);
    let with_fields = |name: &str, fields| format!("struct {name} {{\n{}}}\n", "    field: u8,\n".repeat(fields));
    let invented = [("a.rs".to_string(), with_fields("A", 15) + &with_fields("B", 16))];
    assert_eq!(wide_structs(&invented), [("B".to_string(), "a.rs: B has 16 fields, at most 15".to_string())]);
}

#[test]
fn imports_only_point_down() {
    for (module, file, text) in modules() {
        let (_, below) = ARROWS.iter().find(|(name, _)| *name == module).unwrap_or_else(|| panic!("{module} has no place in ARROWS"));
        for part in text.split("crate::").skip(1) {
            let used: String = part.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            let is_leaf = LEAVES.iter().any(|leaf| part.strip_prefix(leaf).is_some_and(|rest| !rest.starts_with(char::is_alphanumeric)));
            let allowed = used == module || below.contains(&used.as_str()) || is_leaf;
            assert!(allowed, "{} uses {used}, which {module} may not", file.display());
        }
    }
}

/// The compiler denies unsafe code to the whole crate. Only these modules may allow it.
#[test]
fn unsafe_code_stays_in_its_modules() {
    for (module, file, text) in modules() {
        let allowed = text.contains("allow(unsafe_code") || text.contains("allow(\n    unsafe_code");
        assert!(!allowed || UNSAFE_MODULES.contains(&module.as_str()), "{} allows unsafe code in {module}", file.display());
    }
    let lib = std::fs::read_to_string(root().join("src/lib.rs")).unwrap();
    assert!(lib.contains("#![deny(unsafe_code)]"));
}

fn begins_a_function(code: &str) -> bool {
    let before = code.split("fn ").next().unwrap_or(code);
    let qualifiers = ["pub", "pub(super)", "pub(crate)", "const", "unsafe", "extern", "\"C\""];
    code.contains("fn ") && before.split_whitespace().all(|word| qualifiers.contains(&word))
}

#[test]
fn functions_have_at_most_60_lines() {
    let mut seen = 0;
    for (_, file, text) in modules() {
        let lines: Vec<&str> = text.lines().collect();
        for (start, line) in lines.iter().enumerate().filter(|(_, line)| begins_a_function(line.trim_start())) {
            // rustfmt closes a body at the indentation of its signature. A declaration ends in a
            // semicolon, a short body in a brace.
            let indent = &line[..line.len() - line.trim_start().len()];
            let ends = |line: &&str| {
                line.strip_prefix(indent).is_some_and(|rest| {
                    rest.starts_with('}') || rest.ends_with(';') && !rest.starts_with(' ') || rest.ends_with("}") && rest.starts_with("fn")
                })
            };
            let length =
                lines[start..].iter().position(ends).unwrap_or_else(|| panic!("{}:{}: no end found", file.display(), start + 1)) + 1;
            assert!(length <= MAX_FUNCTION_LINES, "{}:{}: {length} lines", file.display(), start + 1);
            seen += 1;
        }
    }
    assert!(seen > 300, "only {seen} functions were recognized");
}

#[test]
fn text_has_no_phrase_of_the_former_dialect() {
    let mut found = Vec::new();
    let extensions = ["rs", "h", "hpp", "c", "cpp", "go", "py", "sh", "js", "ts", "java", "md", "in", "cu", "cuh"];
    for path in PLAIN_TEXT.iter().map(|path| root().join(path)) {
        if path.is_file() { found.push(path) } else { files(&path, &extensions, &mut found) }
    }
    assert!(found.len() > 120, "only {} files were found", found.len());
    let mut uses = Vec::new();
    for file in &found {
        let text = std::fs::read_to_string(file).unwrap();
        for (line, text) in text.lines().enumerate() {
            // Names of tests are sentences, too.
            let words = text.to_lowercase().replace('_', " ").split_whitespace().collect::<Vec<_>>().join(" ");
            let phrases = FORMER_PHRASES.iter().filter(|phrase| words.contains(*phrase));
            uses.extend(phrases.map(|phrase| format!("{}:{}: {phrase:?}", file.display(), line + 1)));
        }
    }
    assert!(uses.is_empty(), "see docs/glossary.md for the terms to use:\n{}", uses.join("\n"));
}
