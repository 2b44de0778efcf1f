//! Character classes and case of Python, where they differ from those of Rust.

use unicode_general_category::{GeneralCategory, get_general_category};

/// Returns `str.isspace` for one character.
pub fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// Returns true for characters at which `str.splitlines` ends a line.
pub fn is_line_end(c: char) -> bool {
    matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// Returns true if `repr` writes the character without an escape.
pub fn is_printable(c: char) -> bool {
    use GeneralCategory::*;
    let hidden = [Control, Format, Surrogate, PrivateUse, Unassigned, LineSeparator, ParagraphSeparator, SpaceSeparator];
    c == ' ' || !hidden.contains(&get_general_category(c))
}

pub fn is_alpha(c: char) -> bool {
    use GeneralCategory::*;
    [UppercaseLetter, LowercaseLetter, TitlecaseLetter, ModifierLetter, OtherLetter].contains(&get_general_category(c))
}

pub fn is_decimal(c: char) -> bool {
    get_general_category(c) == GeneralCategory::DecimalNumber
}

/// Returns true for digits, including superscripts and circled digits, which are not decimal.
pub fn is_digit(c: char) -> bool {
    const OTHERS: [(char, char); 21] = [
        ('\u{b2}', '\u{b3}'),
        ('\u{b9}', '\u{b9}'),
        ('\u{1369}', '\u{1371}'),
        ('\u{19da}', '\u{19da}'),
        ('\u{2070}', '\u{2070}'),
        ('\u{2074}', '\u{2079}'),
        ('\u{2080}', '\u{2089}'),
        ('\u{2460}', '\u{2468}'),
        ('\u{2474}', '\u{247c}'),
        ('\u{2488}', '\u{2490}'),
        ('\u{24ea}', '\u{24ea}'),
        ('\u{24f5}', '\u{24fd}'),
        ('\u{24ff}', '\u{24ff}'),
        ('\u{2776}', '\u{277e}'),
        ('\u{2780}', '\u{2788}'),
        ('\u{278a}', '\u{2792}'),
        ('\u{10a40}', '\u{10a43}'),
        ('\u{10e60}', '\u{10e68}'),
        ('\u{11052}', '\u{1105a}'),
        ('\u{1f100}', '\u{1f10a}'),
        ('\u{1d7ce}', '\u{1d7ff}'),
    ];
    is_decimal(c) || OTHERS.iter().any(|&(first, last)| (first..=last).contains(&c))
}

pub fn is_numeric(c: char) -> bool {
    is_digit(c) || c.is_numeric()
}

pub fn is_alphanumeric(c: char) -> bool {
    if c.is_ascii() { c.is_ascii_alphanumeric() } else { is_alpha(c) || is_numeric(c) }
}

fn is_cased(c: char) -> bool {
    c.is_lowercase() || c.is_uppercase() || get_general_category(c) == GeneralCategory::TitlecaseLetter
}

pub fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(|c| is_cased(c) && !c.is_lowercase())
}

pub fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(|c| is_cased(c) && !c.is_uppercase())
}

pub fn is_title(text: &str) -> bool {
    let (mut cased_before, mut found) = (false, false);
    for c in text.chars() {
        let lower = c.is_lowercase();
        if is_cased(c) && lower != cased_before {
            return false;
        }
        cased_before = is_cased(c);
        found |= cased_before;
    }
    found
}

/// Adds the character in title case: `ǆ` becomes `ǅ`, `ß` becomes `Ss`.
fn push_title(c: char, out: &mut String) {
    let title = match c {
        '\u{1c4}'..='\u{1c6}' => Some('\u{1c5}'),
        '\u{1c7}'..='\u{1c9}' => Some('\u{1c8}'),
        '\u{1ca}'..='\u{1cc}' => Some('\u{1cb}'),
        '\u{1f1}'..='\u{1f3}' => Some('\u{1f2}'),
        '\u{10d0}'..='\u{10fa}' | '\u{10fd}'..='\u{10ff}' => Some(c),
        _ => None,
    };
    if let Some(title) = title {
        return out.push(title);
    }
    let mut upper = c.to_uppercase();
    out.extend(upper.next());
    out.extend(upper.flat_map(char::to_lowercase));
}

/// Returns `str.capitalize`.
pub fn capitalize(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    if let Some(first) = chars.next() {
        push_title(first, &mut out);
        out.push_str(&chars.as_str().to_lowercase());
    }
    out
}

/// Returns `str.title`.
pub fn title(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut cased_before = false;
    for (at, c) in text.char_indices() {
        match cased_before {
            true => push_lower(text, at, c, &mut out),
            false => push_title(c, &mut out),
        }
        cased_before = is_cased(c);
    }
    out
}

/// Adds the character in lower case. A sigma at the end of a word has another form.
fn push_lower(text: &str, at: usize, c: char, out: &mut String) {
    // These characters can be within a word without having a case.
    let ignored = |c: &char| "'.:^`\u{ad}\u{b7}\u{2019}".contains(*c) || get_general_category(*c) == GeneralCategory::NonspacingMark;
    let before = || text[..at].chars().rev().find(|c| !ignored(c)).is_some_and(is_cased);
    let after = || text[at + c.len_utf8()..].chars().find(|c| !ignored(c)).is_some_and(is_cased);
    match c {
        'Σ' if before() && !after() => out.push('ς'),
        c => out.extend(c.to_lowercase()),
    }
}

/// Returns `str.swapcase`.
pub fn swapcase(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for (at, c) in text.char_indices() {
        if c.is_uppercase() { push_lower(text, at, c, &mut out) } else { out.extend(c.to_uppercase()) }
    }
    out
}

/// Returns `str.casefold`, without the rarest foldings.
pub fn casefold(text: &str) -> String {
    let mut folded = String::with_capacity(text.len());
    for c in text.chars().flat_map(char::to_lowercase) {
        match c {
            'ß' => folded.push_str("ss"),
            'ς' => folded.push('σ'),
            c => folded.push(c),
        }
    }
    folded
}

#[cfg(test)]
mod tests {
    #[test]
    fn cased_marks_take_linear_time() {
        // Quadratic time would take minutes here.
        let text = format!("a{}", "\u{345}".repeat(400_000));
        assert_eq!(super::title(&text), format!("A{}", "\u{345}".repeat(400_000)));
    }
}
