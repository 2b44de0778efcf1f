use super::*;
use crate::sys::random::Random;

/// The parts of random expressions.
const ELEMENTS: [&str; 37] = [
    "a",
    "b",
    "é",
    " ",
    ".",
    "ss",
    r"\s",
    r"\S",
    r"\d",
    r"\w",
    r"\p{L}",
    r"\p{^Lu}",
    r"\P{N}",
    r"\x61",
    r"\x{e9}",
    r"\u0062",
    r"\.",
    r"\060",
    r"\0",
    "8",
    "s",
    "[ab]",
    "[^ab]",
    "[]a]",
    "[^]a]",
    "[a-c&&[^b]]",
    r"[\p{L}\]]",
    "[[:alpha:]_]",
    "[[a]b]",
    "^",
    "$",
    r"\b",
    r"\B",
    "{",
    "a{,}",
    "}",
    "ß",
];
const OPENINGS: [&str; 12] = ["(", "(?:", "(?i:", "(?i-m:", "(?>", "(?=", "(?!", "(?<=", "(?<!", "(?<n>", "(?m:", "(?i)(?:"];
const QUANTIFIERS: [&str; 18] =
    ["*", "+", "?", "{1}", "{1,2,3}", "*?", "+?", "??", "*+", "++", "?+", "{2}", "{1,3}", "{2,}", "{,2}", "{1,2}?", "{2}+", "*?"];
const TEXTS: [&str; 24] = [
    "a", "b", "c", "aa", "ab", "é", "e\u{301}", "ß", "ss", "SS", "A", "B", " ", "  ", "\n", "1", "12", ".", "]", "_", "{", "}", "中",
    "\u{0}",
];

fn random_expression(random: &mut Random, depth: usize) -> String {
    let mut expression = String::new();
    for _ in 0..1 + random.below(4) {
        if depth > 0 && random.below(4) == 0 {
            expression += OPENINGS[random.below(OPENINGS.len())];
            expression += &random_expression(random, depth - 1);
            expression.push(')');
        } else {
            expression += ELEMENTS[random.below(ELEMENTS.len())];
        }
        if random.below(3) == 0 {
            expression += QUANTIFIERS[random.below(QUANTIFIERS.len())];
        }
        expression += if random.below(6) == 0 { "|" } else { "" };
    }
    expression
}

/// The reference is Oniguruma with the unchanged expression.
#[test]
fn bounded_searches_find_the_matches_of_oniguruma() {
    let mut random = Random(7);
    let (mut compared, mut too_long) = (0, 0);
    for _ in 0..20_000 {
        let expression = random_expression(&mut random, 2);
        let Ok(reference) = Regex::new(&expression) else { continue };
        let bounded = BoundedRegex::new(&expression).unwrap_or_else(|e| panic!("{expression:?}: {e}"));
        for _ in 0..4 {
            let text: String = (0..random.below(9)).map(|_| TEXTS[random.below(TEXTS.len())]).collect();
            // If case is ignored, a class can have a hundred alternatives, and two adjacent classes
            // ten thousand.
            let Ok(found) = bounded.bounded(&Steps::new()).find_matches(&text) else {
                too_long += 1;
                continue;
            };
            assert_eq!(found, (&reference).find_matches(&text).unwrap(), "{expression:?} in {text:?}");
            compared += 1;
        }
    }
    assert!(compared > 20_000 && too_long < 40, "{compared} compared, {too_long} took too long");
}

/// Each search takes at least quadratic time. Oniguruma limits only the last two.
#[test]
fn a_search_that_takes_too_long_is_an_error() {
    let patterns = ["a+b|a", "a++b|a", "(?=a*b)a|a", ".*b|.", "(?:aa)+b|a", "a(?!a*b)b|.", "[^b]{2,}b|a", "a*a*a*b", "(?:a|a)*b"];
    let long = [format!("(?:{})+b|a", "a".repeat(1000)), format!("(?:{})+b|a", r"\w".repeat(800))];
    let patterns = patterns.into_iter().chain(long.iter().map(String::as_str));
    let text = "a".repeat(50_000);
    for pattern in patterns {
        let regex = BoundedRegex::new(pattern).unwrap();
        let error = regex.bounded(&Steps::new()).find_matches(&text).expect_err(pattern).to_string();
        assert!(error.contains(&format!("the pattern {pattern:?} takes more than")), "{error}");
        assert!(regex.bounded(&Steps::new()).find_matches("aaab").is_ok(), "{pattern}");
    }
}

#[test]
fn patterns_of_published_tokenizers_take_few_steps() {
    let patterns = [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?|",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t)?|\p{N}{1,3}"
        ),
        r"(?<=[a-z])(?=[A-Z])|\p{L}+|\s+",
        r" ?[^(\s|[.,!?…。，、।۔،])]+",
    ];
    for pattern in patterns {
        let regex = BoundedRegex::new(pattern).unwrap();
        for part in ["a", "A", "aB", "1", " ", "\n", " \n", "é", "中", "'", "'s", "a ", "_", "।"] {
            assert!(regex.bounded(&Steps::new()).find_matches(&part.repeat(3000)).is_ok(), "{pattern} in {part:?}");
        }
    }
    // For each group of three digits, this expression looks at all digits that follow.
    let thousands = BoundedRegex::new(r"\d{1,3}(?=(?:\d{3})*\b)|\D+").unwrap();
    assert_eq!(thousands.bounded(&Steps::new()).find_matches("1234567").unwrap().len(), 3);
    assert!(thousands.bounded(&Steps::new()).find_matches(&"1".repeat(2000)).is_ok());
    assert!(thousands.bounded(&Steps::new()).find_matches(&"1".repeat(50_000)).is_err());
}

#[test]
fn expressions_that_nest_or_repeat_too_much_are_refused() {
    let deep = "(".repeat(17);
    let classes = "[".repeat(17);
    let long = "a".repeat(2049);
    let cases = [
        ("a{1,257}", "too many repetitions (257, limit 256)"),
        ("(?:(?:a{0,32}b){0,32}c){0,2}", "too many repetitions within repetitions (2048, limit 1024)"),
        ("((a{256}){4}b){2,}|(c{256}){5}", "too many repetitions within repetitions (2048, limit 1024)"),
        ("a{3}{4}{5}", "more than two quantifiers in a row"),
        (r"(a)\1", "back references are not supported"),
        (r"(?<x>a)\g<x>", "calls and back references"),
        (r"\Xa", r"\X is not supported"),
        ("(?{x})", "not supported ((?{...)"),
        ("(?x: a)", "not supported ((?x...)"),
        ("(?i-x: a)", "not supported ((?..x...)"),
        ("(*FAIL)", "callouts are not supported"),
        ("(", "not a regular expression (end pattern with unmatched parenthesis)"),
        (")", "an unmatched parenthesis"),
        (&deep, "groups nest too deep (more than 16)"),
        (&classes, "classes nest too deep (more than 16)"),
        (&long, "too long (2049 bytes, limit 2048)"),
    ];
    for (regex, problem) in cases {
        let message = BoundedRegex::new(regex).expect_err(regex);
        assert!(message.contains(problem), "{message:?} does not contain {problem:?}");
    }
}

/// The expressions may be accepted or refused.
#[test]
fn expressions_at_the_limits_need_little_stack() {
    let within = |open: &str, count: usize, close: &str| format!("{}a{}", open.repeat(count), close.repeat(count));
    let expressions = [
        "a|".repeat(1000) + "b",
        "[a-z]".repeat(400),
        "a?".repeat(1000),
        "(a)".repeat(650),
        "(?=a)".repeat(400),
        format!("(?<={})x", "a|bb|ccc|".repeat(200)),
        "\\p{L}".repeat(400),
        "a{256}".repeat(300),
        within("(", 16, ")"),
        within("(?:", 16, "){2}"),
        within("(?<!", 16, ")"),
        within("[^", 16, "]"),
        within("(?>", 16, ")?"),
        within("(?:", 16, ")*"),
    ];
    let compile = || expressions.iter().for_each(|regex| drop(BoundedRegex::new(regex)));
    std::thread::scope(|scope| std::thread::Builder::new().stack_size(256 << 10).spawn_scoped(scope, compile).unwrap().join().unwrap());
}
