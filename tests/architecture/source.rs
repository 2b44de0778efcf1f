//! Reads source text as far as the rules need it. The text is formatted by rustfmt, so indentation
//! shows where an item ends.

/// Returns the code without comments and without items under `#[cfg(test)]`.
pub fn code(text: &str) -> String {
    let mut kept = String::new();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.trim() == "#[cfg(test)]" {
            let indent = indent(line);
            lines.find(|line| ends_item(line, indent));
        } else {
            kept.push_str(line.split("//").next().unwrap_or(line));
            kept.push('\n');
        }
    }
    kept
}

/// Returns the names of the modules that are declared under `#[cfg(test)]` and have their own file.
pub fn test_modules(text: &str) -> Vec<&str> {
    let declarations = text.split("#[cfg(test)]").skip(1);
    declarations
        .filter_map(|rest| without_visibility(rest.trim_start()).strip_prefix("mod ")?.split_once(';'))
        .map(|(name, _)| name)
        .collect()
}

/// Returns each struct with named fields, and their number.
pub fn structs(text: &str) -> Vec<(&str, usize)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let Some(rest) = without_visibility(line.trim_start()).strip_prefix("struct ").filter(|rest| rest.ends_with('{')) else { continue };
        let body = lines[start + 1..].iter().take_while(|next| next.trim().is_empty() || indent(next) > indent(line));
        let fields = body.filter(|next| indent(next) == indent(line) + 4 && is_field(next.trim_start()));
        found.push((rest.split(|c: char| !is_word(c)).next().unwrap_or(rest), fields.count()));
    }
    found
}

pub fn without_visibility(code: &str) -> &str {
    let Some(rest) = code.strip_prefix("pub") else { return code };
    let rest = if rest.starts_with('(') { rest.split_once(')').map_or(rest, |(_, rest)| rest) } else { rest };
    rest.strip_prefix(' ').unwrap_or(code)
}

/// Returns true for a character of an identifier.
pub fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

fn is_field(code: &str) -> bool {
    let rest = without_visibility(code);
    let name = rest.len() - rest.trim_start_matches(is_word).len();
    name > 0 && rest[name..].starts_with(": ")
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Returns true for the last line of an item that begins at this indentation.
fn ends_item(line: &str, item: usize) -> bool {
    indent(line) == item && line.ends_with(['}', ';', ','])
}

#[test]
fn code_has_no_comments_and_no_tests() {
    let text =
        "use a; // crate::b\n\n/// super::c\n#[cfg(test)]\nmod tests {\n    use d;\n}\n#[cfg(test)]\nuse e::{\n    f,\n};\nfn g() {}\n";
    assert_eq!(code(text), "use a; \n\n\nfn g() {}\n");
}

#[test]
fn test_modules_are_those_under_cfg_test() {
    assert_eq!(test_modules("mod a;\n#[cfg(test)]\nmod b;\n#[cfg(test)]\npub(crate) mod c;\n#[cfg(test)]\nmod d {}\n"), ["b", "c"]);
}

#[test]
fn fields_of_a_struct_are_counted() {
    let text = "/// A.\npub struct A<'a> {\n    /// B.\n    pub b: &'a [u8],\n    #[serde(skip)]\n    pub(super) c: Map<\n        d::E,\n    >,\n}\n\nstruct F(u8);\n";
    assert_eq!(structs(text), [("A", 2)]);
}
