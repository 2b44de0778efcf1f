//! The imports between modules, and the cycles among them. A module has the name of its path, such
//! as `text::jinja::value`.

use std::collections::{BTreeMap, BTreeSet};

use super::source;

/// The modules that each module imports. A module and its descendants belong together, so imports
/// between them are left out.
pub struct Imports(BTreeMap<String, BTreeSet<String>>);

impl Imports {
    /// Finds the imports between modules, given each module's text. Test modules are left out.
    pub fn find(texts: &BTreeMap<String, String>) -> Imports {
        let tests: Vec<String> = texts
            .iter()
            .flat_map(|(module, text)| source::test_modules(text).into_iter().map(move |name| format!("{module}::{name}")))
            .collect();
        let is_test = |module: &str| tests.iter().any(|test| is_within(module, test));
        let modules: BTreeSet<&str> = texts.keys().map(String::as_str).filter(|module| !is_test(module)).collect();
        let of_module = |module: &str| {
            let found = paths(&source::code(&texts[module])).into_iter().filter_map(|path| resolve(module, &path, &modules));
            found.filter(|used| !is_within(used, module) && !is_within(module, used)).collect()
        };
        Imports(modules.iter().map(|module| (module.to_string(), of_module(module))).collect())
    }

    /// Returns the groups of modules that import each other, directly or through others.
    pub fn cycles(&self) -> BTreeSet<Vec<String>> {
        let reached: BTreeMap<&str, BTreeSet<&str>> = self.0.keys().map(|module| (module.as_str(), self.reached_from(module))).collect();
        let in_cycle = reached.iter().filter(|(module, reached)| reached.contains(*module));
        in_cycle
            .map(|(module, found)| found.iter().filter(|other| reached[*other].contains(module)).map(|m| m.to_string()).collect())
            .collect()
    }

    fn reached_from(&self, module: &str) -> BTreeSet<&str> {
        let mut reached = BTreeSet::new();
        let mut open: Vec<&String> = self.0[module].iter().collect();
        while let Some(next) = open.pop() {
            if reached.insert(next.as_str()) {
                open.extend(&self.0[next]);
            }
        }
        reached
    }
}

/// Returns the innermost module that has all these modules below it.
pub fn common_parent(modules: &[String]) -> String {
    let mut parent = modules[0].rsplit_once("::").map_or("", |(parent, _)| parent);
    while !modules.iter().all(|module| is_within(module, parent)) {
        parent = parent.rsplit_once("::").map_or("", |(parent, _)| parent);
    }
    parent.to_string()
}

fn is_within(module: &str, ancestor: &str) -> bool {
    ancestor.is_empty() || module.strip_prefix(ancestor).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// Returns the paths of all `use` declarations, and the qualified paths in the code.
fn paths(code: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut statement = String::new();
    for line in code.lines().map(str::trim) {
        if !statement.is_empty() || source::without_visibility(line).starts_with("use ") {
            statement.push_str(line);
            if line.ends_with(';') {
                let (_, tree) = statement.split_once("use ").unwrap_or_default();
                expand("", tree.trim_end_matches(';'), &mut found);
                statement.clear();
            }
        }
    }
    found.extend(code.split(|c: char| !source::is_word(c) && c != ':').filter(|path| path.contains("::")).map(str::to_string));
    found
}

/// Adds the paths of a `use` tree.
fn expand(prefix: &str, tree: &str, found: &mut Vec<String>) {
    let Some((path, items)) = tree.split_once('{') else { return found.push(format!("{prefix}{}", tree.trim())) };
    let (mut depth, mut item) = (0, String::new());
    for c in items.trim_end().strip_suffix('}').unwrap_or(items).chars() {
        depth += i32::from(c == '{') - i32::from(c == '}');
        if c == ',' && depth == 0 {
            expand(&format!("{prefix}{}", path.trim()), &std::mem::take(&mut item), found);
        } else {
            item.push(c);
        }
    }
    if !item.trim().is_empty() {
        expand(&format!("{prefix}{}", path.trim()), &item, found);
    }
}

/// Returns the module that a path of `module` leads to. Paths into other crates lead to none.
fn resolve(module: &str, path: &str, modules: &BTreeSet<&str>) -> Option<String> {
    let mut at: Vec<&str> = module.split("::").collect();
    let mut rest = path.split("::").map(|name| name.split_whitespace().next().unwrap_or_default()).peekable();
    match rest.next()? {
        "crate" => at.clear(),
        "self" => {}
        "super" => {
            at.pop();
            while rest.next_if_eq(&"super").is_some() {
                at.pop();
            }
        }
        _ => return None,
    }
    at.extend(rest);
    (1..=at.len()).rev().map(|len| at[..len].join("::")).find(|name| modules.contains(name.as_str()))
}

#[cfg(test)]
fn imports(texts: &[(&str, &str)]) -> Imports {
    Imports::find(&texts.iter().map(|(module, text)| (module.to_string(), text.to_string())).collect())
}

#[test]
fn use_trees_and_qualified_paths_are_resolved() {
    let user = "use super::{\n    b::{C, d as e},\n    f,\n};\npub use std::g;\n\nfn h() -> crate::i::J {\n    self::k::l()\n}\n";
    let others = ["a::b", "a::b::d", "a::f", "g", "i", "a::user::k"].map(|module| (module, ""));
    let found = imports(&[&[("a::user", user)], &others[..]].concat());
    assert_eq!(found.0["a::user"].iter().collect::<Vec<_>>(), ["a::b", "a::b::d", "a::f", "i"], "descendants are left out");
}

#[test]
fn a_cycle_is_found_whatever_its_length() {
    let found = imports(&[
        ("a::b", "use crate::c;"),
        ("c", "use crate::a::d::E;"),
        ("a::d", "fn f() {\n    super::b::g()\n}"),
        ("h", "use crate::c;"),
    ]);
    assert_eq!(found.cycles(), [["a::b", "a::d", "c"].map(String::from).to_vec()].into());
}

#[test]
fn tests_and_descendants_make_no_cycle() {
    let found = imports(&[
        ("a", "use crate::b;\n#[cfg(test)]\nmod tests;"),
        ("b", "#[cfg(test)]\nmod tests {\n    use crate::a;\n}\nmod c;\nuse c::D;"),
        ("b::c", "use super::E;"),
        ("a::tests", "use crate::b;"),
    ]);
    assert!(found.cycles().is_empty());
}

#[test]
fn cycles_are_named_by_their_common_parent() {
    let parent = |modules: &[&str]| common_parent(&modules.iter().map(|module| module.to_string()).collect::<Vec<_>>());
    assert_eq!(parent(&["a::b::c", "a::b::d"]), "a::b");
    assert_eq!(parent(&["a::b::c", "a::d"]), "a");
    assert_eq!(parent(&["a", "b"]), "");
}
