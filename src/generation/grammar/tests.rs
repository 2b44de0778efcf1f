use super::*;
use crate::error::Code;
use crate::generation::sampler::{Lane, uniform};
use crate::sys::quiet;
use serde_json::{Value as Json, json};

pub(crate) const END: u32 = 256;
const TOOL: u32 = 257;
const PADDED: u32 = 258;

/// A token for each byte, an end, another special token, a padded row, and a few longer tokens.
pub(crate) fn byte_grammars() -> Grammars {
    let longer = ["{\"", "\": ", ", \"", "true", "false", "null", "ab", "abc", "12", "\"}", "]}", "\n  ", "é", "((", "))", "yes", "no"];
    let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    tokens.extend([b"<end>".to_vec(), b"<tool>".to_vec(), Vec::new()]);
    tokens.extend(longer.iter().map(|text| text.as_bytes().to_vec()));
    let special = (0..tokens.len() as u32).map(|token| token == END || token == TOOL).collect();
    Grammars::new(Vocabulary { tokens, special, eos: vec![END] }).unwrap()
}

fn schema(schema: Json) -> Grammar {
    Grammar::JsonSchema(schema.to_string())
}

pub(super) fn lark(text: &str) -> Grammar {
    Grammar::Lark(text.into())
}

fn allowed(constraint: &mut Constraint) -> Vec<u32> {
    let mask = constraint.mask().unwrap();
    (0..mask.len() as u32 * 32).filter(|token| has(mask, *token)).collect()
}

pub(crate) fn text_of(tokens: &[u32]) -> String {
    let grammars = byte_grammars();
    let trie = grammars.shared.factory.tok_env().tok_trie();
    let bytes: Vec<u8> = tokens.iter().filter(|token| **token != END).flat_map(|token| trie.token(*token).to_vec()).collect();
    String::from_utf8(bytes).unwrap()
}

/// Writes at most `limit` random allowed tokens, or to the end.
fn walk(constraint: &mut Constraint, seed: u64, limit: usize) -> Vec<u32> {
    let mut tokens = Vec::new();
    for i in 0..limit {
        let choices = allowed(constraint);
        let token = choices[(uniform(seed, i as u64, Lane::Token) * choices.len() as f64) as usize];
        constraint.advance(token).unwrap();
        tokens.push(token);
        if token == END {
            break;
        }
    }
    tokens
}

fn person() -> Json {
    json!({"type": "object", "additionalProperties": false, "required": ["name", "age"], "properties": {
        "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "maxItems": 3}}})
}

/// One grammar of each kind, and one that llguidance cannot rewind.
pub(super) fn all_kinds() -> Vec<Grammar> {
    let stopped = lark("start: word \"!\" word\nword[stop=\".\"]: /[a-z]{0,9}/");
    assert!(byte_grammars().compile(&stopped).is_ok_and(|mut c| c.advance(b'a' as u32).is_ok() && c.parser.rollback(1).is_err()));
    vec![
        schema(person()),
        Grammar::JsonObject,
        Grammar::Regex("(ab|abc)*[0-9]{2,5}x?".into()),
        Grammar::Choice(vec!["yes".into(), "no".into(), "yes, no".into()]),
        lark("start: \"(\" start \")\" | \"[\" start* \"]\" | /[a-c]+/"),
        stopped,
    ]
}

/// The mask of a new constraint after these tokens.
fn replayed(grammars: &Grammars, grammar: &Grammar, tokens: &[u32]) -> Vec<u32> {
    let mut constraint = grammars.compile(grammar).unwrap();
    tokens.iter().for_each(|&token| constraint.advance(token).unwrap());
    constraint.mask().unwrap().to_vec()
}

#[test]
fn masks_of_forks_equal_those_of_a_replay() {
    let grammars = byte_grammars();
    for grammar in all_kinds() {
        for seed in 0..10 {
            let mut first = grammars.compile(&grammar).unwrap();
            let common = walk(&mut first, seed, 1 + seed as usize);
            if common.ends_with(&[END]) {
                continue;
            }
            let mut second = first.fork().unwrap();
            let firsts = [common.clone(), walk(&mut first, seed + 100, 5)].concat();
            let seconds = [common, walk(&mut second, seed + 200, 5)].concat();
            assert_eq!(first.mask().unwrap(), replayed(&grammars, &grammar, &firsts), "{grammar:?} {firsts:?}");
            assert_eq!(second.mask().unwrap(), replayed(&grammars, &grammar, &seconds), "{grammar:?} {seconds:?}");
        }
    }
}

#[test]
fn masks_after_a_rewind_equal_those_of_a_replay() {
    let grammars = byte_grammars();
    for grammar in all_kinds() {
        for seed in 0..20 {
            let mut constraint = grammars.compile(&grammar).unwrap();
            let mut tokens = walk(&mut constraint, seed, 12);
            for again in 0..3 {
                let back = (uniform(seed, 1000 + again, Lane::Token) * (tokens.len() + 1) as f64) as usize;
                constraint.rewind(back).unwrap();
                tokens.truncate(tokens.len() - back);
                assert_eq!(constraint.mask().unwrap(), replayed(&grammars, &grammar, &tokens), "{grammar:?} {tokens:?}");
                if !tokens.ends_with(&[END]) {
                    tokens.extend(walk(&mut constraint, seed + 100 * again, 6));
                }
                assert_eq!(constraint.mask().unwrap(), replayed(&grammars, &grammar, &tokens), "{grammar:?} {tokens:?}");
            }
        }
    }
}

#[test]
fn removing_more_tokens_than_there_are_is_an_error() {
    let mut constraint = byte_grammars().compile(&Grammar::JsonObject).unwrap();
    constraint.advance(b'{' as u32).unwrap();
    assert!(constraint.rewind(2).unwrap_err().message().contains("too many tokens to remove (2, the sequence has 1)"));
    constraint.rewind(1).unwrap();
    assert_eq!(allowed(&mut constraint), [b'{' as u32, 259]);
}

/// All texts that the constraint allows.
fn all_texts(constraint: &Constraint, tokens: Vec<u32>, found: &mut Vec<String>) {
    let mut here = constraint.fork().unwrap();
    for token in allowed(&mut here) {
        let tokens = [tokens.clone(), vec![token]].concat();
        if token == END {
            found.push(text_of(&tokens));
            continue;
        }
        let mut next = constraint.fork().unwrap();
        next.advance(token).unwrap();
        all_texts(&next, tokens, found);
    }
}

#[test]
fn a_choice_allows_exactly_its_texts() {
    let texts = ["yes", "yes, no", "12", "", "a/b\\c", "\"é\n.*"].map(String::from);
    let constraint = byte_grammars().compile(&Grammar::Choice(texts.to_vec())).unwrap();
    let mut found = Vec::new();
    all_texts(&constraint, Vec::new(), &mut found);
    found.sort();
    found.dedup();
    let mut expected = texts;
    expected.sort();
    assert_eq!(found, expected);
}

#[test]
fn a_regex_is_matched_by_the_whole_output() {
    let constraint = byte_grammars().compile(&Grammar::Regex(r"a/[0-9]?b|(ab){1,2}".into())).unwrap();
    let mut found = Vec::new();
    all_texts(&constraint, Vec::new(), &mut found);
    found.sort();
    found.dedup();
    let digits = (0..10).map(|digit| format!("a/{digit}b"));
    let mut expected: Vec<String> = ["ab", "abab", "a/b"].map(String::from).into_iter().chain(digits).collect();
    expected.sort();
    assert_eq!(found, expected);
}

#[test]
fn json_objects_are_objects_and_schemas_are_kept() {
    let grammars = byte_grammars();
    let mut ended = 0;
    for seed in 0..200 {
        for grammar in [Grammar::JsonObject, schema(person())] {
            let mut constraint = grammars.compile(&grammar).unwrap();
            let tokens = walk(&mut constraint, seed, 150);
            if tokens.ends_with(&[END]) {
                let text = text_of(&tokens);
                let value: Json = match serde_json::from_str(&text) {
                    Ok(value) => value,
                    // JSON has no bounds for numbers, serde has.
                    Err(error) if error.to_string().contains("number out of range") => continue,
                    Err(error) => panic!("{error}: {text}"),
                };
                assert!(value.is_object());
                assert!(grammar == Grammar::JsonObject || value["age"].as_i64().is_some_and(|age| (0..=150).contains(&age)));
                ended += 1;
            }
        }
    }
    assert!(ended > 50, "only {ended} of 400 ended");
}

#[test]
fn whitespace_in_json_is_limited() {
    let mut constraint = byte_grammars().compile(&Grammar::JsonObject).unwrap();
    "{\n".bytes().for_each(|byte| constraint.advance(byte.into()).unwrap());
    let indented = (0..100).take_while(|_| constraint.advance(b' ' as u32).is_ok()).count();
    assert_eq!(indented, 40);
}

#[test]
fn a_lark_grammar_can_be_recursive() {
    let grammars = byte_grammars();
    for seed in 0..100 {
        let mut constraint = grammars.compile(&lark("start: \"(\" start \")\" | \"x\"")).unwrap();
        let text = text_of(&walk(&mut constraint, seed, 60));
        let depth = text.find('x').unwrap_or(0);
        assert!(!text.contains('x') || text == format!("{}x{}", "(".repeat(depth), ")".repeat(depth)), "{text}");
    }
}

#[test]
fn an_end_token_is_allowed_only_where_the_grammar_can_end() {
    let mut constraint = byte_grammars().compile(&Grammar::Choice(vec!["a".into(), "ab".into()])).unwrap();
    assert!(!allowed(&mut constraint).contains(&END));
    constraint.advance(b'a' as u32).unwrap();
    assert_eq!(allowed(&mut constraint), [b'b' as u32, END]);
    assert!(!constraint.is_complete());
    let mut longer = constraint.fork().unwrap();
    longer.advance(b'b' as u32).unwrap();
    assert!(longer.is_complete());
    assert_eq!(allowed(&mut longer), [END]);
    constraint.advance(END).unwrap();
    assert!(constraint.is_complete());
    assert_eq!(allowed(&mut constraint), [END]);
    constraint.rewind(1).unwrap();
    assert_eq!(allowed(&mut constraint), [b'b' as u32, END]);
}

#[test]
fn special_tokens_and_padded_rows_are_never_allowed_unless_a_grammar_names_them() {
    let grammars = byte_grammars();
    let first = allowed(&mut grammars.compile(&Grammar::Regex("(?s:.)*".into())).unwrap());
    assert!(first.len() > 100 && first.contains(&END) && !first.contains(&TOOL) && !first.contains(&PADDED));
    assert_eq!(allowed(&mut grammars.compile(&lark("start: <tool>")).unwrap()), [TOOL]);
    assert_eq!(allowed(&mut grammars.compile(&lark("start: <[256-258]>")).unwrap()), [END, TOOL]);
}

#[test]
fn a_forbidden_token_is_a_permanent_error() {
    let mut constraint = byte_grammars().compile(&Grammar::Choice(vec!["yes".into()])).unwrap();
    constraint.advance(b'y' as u32).unwrap();
    let error = constraint.advance(b'n' as u32).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(
        error.message().contains(
            "token 110 (\"n\") is not allowed by the grammar after 1 tokens (\"y\"): its byte 1 is \"n\", and the grammar allows 'e'"
        ),
        "{error}"
    );
    assert_eq!(constraint.mask().unwrap_err(), error);
    assert_eq!(constraint.fork().err(), Some(error));
    let mut constraint = byte_grammars().compile(&Grammar::Choice(vec!["yes".into()])).unwrap();
    assert!(constraint.advance(4_000_000_000).is_err());
}

#[test]
fn a_cached_grammar_starts_at_its_beginning() {
    let grammars = byte_grammars();
    let grammar = Grammar::Choice(vec!["ab".into()]);
    let mut first = grammars.compile(&grammar).unwrap();
    first.advance(b'a' as u32).unwrap();
    assert_eq!(allowed(&mut grammars.compile(&grammar).unwrap()), [b'a' as u32, 265]);
    assert_eq!(allowed(&mut first), [b'b' as u32]);
    // Many other grammars evict it from the cache.
    (0..40).for_each(|i| drop(grammars.compile(&Grammar::Choice(vec![i.to_string()])).unwrap()));
    assert_eq!(allowed(&mut grammars.compile(&grammar).unwrap()), [b'a' as u32, 265]);
}

#[test]
fn a_grammar_that_cannot_be_compiled_is_an_error_with_the_reason() {
    let deep = 5_000;
    let chain: String = (0..20_000).map(|i| format!("r{i}:r{}\n", i + 1)).collect();
    let cases = [
        (Grammar::JsonSchema("{".into()), "not valid JSON"),
        (Grammar::JsonSchema("[".repeat(200_000)), "recursion limit"),
        (Grammar::JsonSchema("3".into()), "must be an object or boolean"),
        (schema(json!({"type": "strin"})), "Invalid type: strin"),
        (schema(json!({"type": "string", "pattern": "("})), "unclosed group"),
        (schema(json!({"type": "string", "format": "regex", "x-guidance": {"strict_formats": true}})), "the format \"regex\" cannot be"),
        (schema(json!({"x-guidance": {"strict_formats": 1}})), "invalid value of strict_formats in x-guidance (1)"),
        (schema(json!({"type": "object", "not": {}})), "Unimplemented keys: [\"not\"]"),
        (schema(json!({"$ref": "https://example.com/s.json"})), "does not fetch"),
        (schema(json!({"$ref": "file:///etc/passwd"})), "does not fetch"),
        (schema(json!({"$ref": "#"})), "allows no text at all"),
        (schema(json!({"type": "integer", "minimum": 3, "maximum": 2})), "nsatisfiable"),
        (schema(json!({"type": "integer", "multipleOf": 1_000_003})), "1000003 steps"),
        (schema(json!({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]})), "988027 steps"),
        (schema(json!({"x-guidance": {"colour": 1}})), "unknown field `colour`"),
        (Grammar::Regex("(".into()), "unclosed group"),
        (Grammar::Regex(r"a\".into()), "ends in a backslash"),
        (Grammar::Regex(r"a\\\".into()), "ends in a backslash"),
        (Grammar::Regex("(".repeat(deep) + "a" + &")".repeat(deep)), "groups within groups (61, limit 60)"),
        (lark("%llguidance {\"allow_invalid_utf8\": true}\nstart: /.*/"), "the output is text"),
        (Grammar::Regex(r"(a)\1".into()), "a backreference (character 4 of the Python regular expression /(a)\\1/)"),
        (Grammar::Regex(r"[^\s\S]".into()), "allows no text at all"),
        (Grammar::Choice(Vec::new()), "choices is empty"),
        (lark("start: a b"), "unknown name"),
        (lark("start: ("), "Expected token"),
        (lark(""), "no start rule"),
        (lark("start: start"), "allows no text at all"),
        (lark("start: <nope>"), "unknown special token"),
        (lark(&format!("start: {}\"a\"{}", "(".repeat(deep), ")".repeat(deep))), "too deeply nested"),
        (lark(&format!("start: r0\n{chain}r20000:\"a\"")), "too many rules and brackets (20002, limit 10000)"),
        (Grammar::Regex("a".repeat(300_000)), "300000 bytes"),
    ];
    let grammars = byte_grammars();
    for (grammar, reason) in cases {
        let error = grammars.compile(&grammar).err().unwrap_or_else(|| panic!("{grammar:?} compiles"));
        assert_eq!(error.code(), Code::InvalidArgument, "{error}");
        assert!(error.message().contains(reason), "{error}, expected {reason}");
        assert!(error.message().len() < 1000);
    }
}

#[test]
fn exponential_regexes_end_at_a_limit_or_cost_little() {
    let grammars = byte_grammars();
    // Writes up to 300 tokens, less if a limit is reached. Returns the work of the lexer.
    let outcome = |grammar: Grammar| -> Result<_> {
        let mut constraint = grammars.compile(&grammar)?;
        for i in 0..300 {
            let mask = constraint.mask()?.to_vec();
            let choices: Vec<u32> = (0..mask.len() as u32 * 32).filter(|token| has(&mask, *token)).collect();
            match choices[(uniform(1, i, Lane::Token) * choices.len() as f64) as usize] {
                END => break,
                token => constraint.advance(token)?,
            }
        }
        Ok(constraint.parser.parser.lexer_stats())
    };
    let error = outcome(lark("start: T\nT: /(.*a.{20}b.*)/ & /(.*c.{30}d.*)/ & ~/(.*e.{25}f.*)/ & /[\\w ]{1,200}/")).unwrap_err();
    assert_eq!(error.code(), Code::Capacity);
    assert!(error.message().contains("too many expressions"), "{error}");
    let regexes =
        ["((((a{1,100}){1,100}){1,100}){1,100}){1,100}", "(a|b)*a(a|b){200}", "(.*a.{50}){10}", "(a?){2000}a{2000}", "a{1000000000}"];
    for regex in regexes {
        let work = outcome(Grammar::Regex(regex.into())).unwrap();
        assert!(work.total_fuel_spent < 2_000_000 && work.num_states < 2_000, "{regex}: {work}");
    }
}

/// Changes some part of the value.
fn mutate(value: &mut Json, random: &mut impl FnMut(usize) -> usize) {
    let odd = [json!(-1), json!(1e308), json!("("), json!({}), json!([]), json!(null), json!(true), json!({"$ref": "#"}), json!(u64::MAX)];
    let words = ["type", "items", "$ref", "anyOf", "allOf", "enum", "pattern", "minLength", "maxItems", "properties", "required", "format"];
    match value {
        Json::Object(members) if !members.is_empty() && random(4) > 0 => {
            let key = members.keys().nth(random(members.len())).unwrap().clone();
            let mut member = members[&key].clone();
            match random(5) {
                0 => drop(members.shift_remove(&key)),
                1 => drop(members.insert(words[random(words.len())].into(), member)),
                _ => {
                    mutate(&mut member, random);
                    members.insert(key, member);
                }
            }
        }
        Json::Array(items) if !items.is_empty() && random(3) > 0 => {
            let i = random(items.len());
            mutate(&mut items[i], random);
        }
        value => *value = odd[random(odd.len())].clone(),
    }
}

#[test]
fn thousands_of_mutated_schemas_compile_or_are_refused() {
    let grammars = byte_grammars();
    let rich = json!({"$defs": {"n": {"type": "object", "properties": {"next": {"$ref": "#/$defs/n"}}}}, "type": "object",
        "properties": {"a": {"anyOf": [{"type": "string", "pattern": "^[a-z]+$"}, {"$ref": "#/$defs/n"}]},
            "b": {"type": "array", "items": {"type": "number", "minimum": 0.5, "multipleOf": 0.5}, "minItems": 1, "maxItems": 4},
            "c": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}, "d": {"type": "string", "format": "date", "maxLength": 20},
            "e": {"enum": [1, "x", null]}, "f": {"const": {"k": [1]}}}, "required": ["a", "c"], "additionalProperties": false});
    let (mut compiled, mut refused) = (0, 0);
    for seed in 0..2000u64 {
        let mut drawn = 0;
        let mut random = |n: usize| {
            drawn += 1;
            (uniform(seed, drawn, Lane::Token) * n as f64) as usize
        };
        let mut spoiled = rich.clone();
        (0..1 + seed % 4).for_each(|_| mutate(&mut spoiled, &mut random));
        let mut text = spoiled.to_string();
        if seed % 10 == 0 {
            text.truncate(random(text.len()));
        }
        match grammars.compile(&Grammar::JsonSchema(text)) {
            Ok(mut constraint) => {
                walk(&mut constraint, seed, 8);
                compiled += 1;
            }
            Err(error) => {
                assert!(error.message().len() > 30, "{error}");
                refused += 1;
            }
        }
    }
    assert!(compiled > 200 && refused > 200, "{compiled} compiled, {refused} refused");
}

/// Simulates a defect of the crate that invalidates the lexer of all constraints that share it.
pub(crate) fn lose_lexer(constraint: &mut Constraint) {
    quiet::during(|| no_panic(|| constraint.parser.parser.test_trigger_lexer_error())).unwrap_err();
    constraint.fresh = false;
    constraint.parser.invalidate_bias_cache();
}

#[test]
fn a_panic_in_one_request_does_not_affect_others_with_its_grammar() {
    let grammars = byte_grammars();
    let grammar = Grammar::Choice(vec!["yes".into()]);
    let mut other = grammars.compile(&grammar).unwrap();
    other.advance(b'y' as u32).unwrap();
    let mut another = other.fork().unwrap();
    lose_lexer(&mut grammars.compile(&grammar).unwrap());
    quiet::during(|| {
        assert_eq!(allowed(&mut other), [b'e' as u32]);
        another.advance(b'e' as u32).unwrap();
        another.rewind(1).unwrap();
        assert_eq!(allowed(&mut another), [b'e' as u32]);
        assert_eq!(allowed(&mut grammars.compile(&grammar).unwrap()).len(), 2);
    });
}

#[test]
fn a_repeated_panic_ends_its_request() {
    let mut constraint = byte_grammars().compile(&Grammar::Choice(vec!["yes".into()])).unwrap();
    constraint.owns_lexer = true;
    lose_lexer(&mut constraint);
    let error = quiet::during(|| constraint.mask().unwrap_err());
    assert_eq!(error.code(), Code::Internal);
    assert_eq!(constraint.advance(b'y' as u32), Err(error));
}

#[test]
fn an_exhausted_lexer_of_one_request_does_not_end_others() {
    let grammars = byte_grammars();
    let grammar = lark("start: T\nT: /(.*a.{20}b.*)/ & /(.*c.{30}d.*)/ & ~/(.*e.{25}f.*)/ & /[\\w ]{1,200}/");
    let (mut spender, mut other) = (grammars.compile(&grammar).unwrap(), grammars.compile(&grammar).unwrap());
    let spent = (0..300).find_map(|i| {
        let mask = spender.mask().map(<[u32]>::to_vec);
        let choices = mask.map(|mask| (0..256).filter(|token| has(&mask, *token)).collect::<Vec<u32>>());
        choices.and_then(|choices| spender.advance(choices[(uniform(1, i, Lane::Token) * choices.len() as f64) as usize])).err()
    });
    assert!(spent.is_some());
    for _ in 0..8 {
        assert!(allowed(&mut other).contains(&(b'z' as u32)));
        other.advance(b'z' as u32).unwrap();
    }
    assert!(other.owns_lexer, "the shared lexer is unusable");
    assert!(allowed(&mut other).contains(&(b'z' as u32)));
    assert!(allowed(&mut grammars.compile(&grammar).unwrap()).contains(&(b'z' as u32)));
}

#[test]
fn unusual_vocabularies_work_or_are_errors() {
    let bytes = |n: usize| (0..n).map(|byte| vec![byte as u8]).collect::<Vec<_>>();
    assert!(Grammars::new(Vocabulary { tokens: bytes(3), special: Vec::new(), eos: vec![3] }).is_err());
    let empty = Grammars::new(Vocabulary::default());
    assert!(empty.is_err() || empty.is_ok_and(|grammars| grammars.compile(&Grammar::JsonObject).is_err()));
    let long = Vocabulary { tokens: [bytes(256), vec![vec![b'a'; 5000]]].concat(), special: Vec::new(), eos: Vec::new() };
    let mut constraint = Grammars::new(long).unwrap().compile(&Grammar::Regex("a*".into())).unwrap();
    assert_eq!(allowed(&mut constraint), [b'a' as u32], "the vocabulary has no end token");
}

#[test]
fn constraints_move_between_threads_and_grammars_are_shared() {
    fn sent<T: Send>() {}
    fn shared<T: Send + Sync>() {}
    sent::<Constraint>();
    shared::<Grammars>();
}

/// Whether the constraint allows this text and an end after it.
pub(crate) fn writes(constraint: &Constraint, text: &str) -> bool {
    let mut here = constraint.fork().unwrap();
    let allowed = text.bytes().all(|byte| here.allows(byte.into()).unwrap() && here.advance(byte.into()).is_ok());
    allowed && here.allows(END).unwrap()
}

#[test]
fn regular_expressions_in_lark_have_the_syntax_of_python() {
    let grammars = byte_grammars();
    let cases = [
        ("start: /[^&&<>]*/", "a", "&"),
        ("start: /[]a]+/", "]a]", "["),
        ("start: /[a-z[]+/", "a[", "&"),
        (r"start: /[a\/]+/", "a/", "\\"),
        ("start: /ab/i", "aB", "abc"),
        ("start: /a.b/s", "a\nb", "ab"),
        (r"start: /\p{Lu}+/", "É", "é"),
        ("start: /a b # c\n/x \"!\"", "ab!", "a b !"),
        ("start: \"/[&&]/\" // /[&&]/ \n", "/[&&]/", "&"),
        ("start: A\nA: /a/ & /[+--]/ | /()/ \"x\" # \"/\n", "x", "-"),
        ("start: <[256]> /[&&]/", "", "&"),
    ];
    for (grammar, yes, no) in cases {
        let constraint = grammars.compile(&lark(grammar)).unwrap_or_else(|error| panic!("{grammar}: {error}"));
        assert!(yes.is_empty() || writes(&constraint, yes), "{grammar} does not allow {yes}");
        assert!(!writes(&constraint, no), "{grammar} allows {no}");
    }
    let error = grammars.compile(&lark("start: A\nA: /a\\b/")).err().unwrap();
    assert!(error.message().contains(r#"line 2: a word boundary "\b" (character 2 of the Python regular expression /a\b/)"#), "{error}");
    assert!(grammars.compile(&lark("start: /a/l")).err().unwrap().message().contains("the flag l"));
}

#[test]
fn a_schema_inside_lark_is_prepared_like_other_schemas() {
    let grammars = byte_grammars();
    let grammar = "start: \"<\" j \">\" j?\nj: %json {\n \"type\": \"object\", \"properties\": {\"a\": {\"type\": \"string\",\n \"format\": \"uuid4\", \
         \"pattern\": \"^[^&&]*$\"}}, \"patternProperties\": {\"^a$\": {}}, \"additionalProperties\": false}";
    let constraint = grammars.compile(&lark(grammar)).unwrap();
    assert!(writes(&constraint, r#"<{"a": "<"}>"#) && !writes(&constraint, r#"<{"a": "&"}>"#));
    let mut indented = constraint.fork().unwrap();
    "<{\n".bytes().for_each(|byte| indented.advance(byte.into()).unwrap());
    assert_eq!((0..100).take_while(|_| indented.advance(b' ' as u32).is_ok()).count(), 40);
    let mut spaced = constraint.fork().unwrap();
    "<{".bytes().for_each(|byte| spaced.advance(byte.into()).unwrap());
    assert_eq!((0..100).take_while(|_| spaced.advance(b' ' as u32).is_ok()).count(), 1);
    for anything in
        [lark("start: %json true"), Grammar::JsonSchema("true".into()), schema(json!({"x-guidance": {"whitespace_pattern": null}}))]
    {
        let mut spaced = grammars.compile(&anything).unwrap();
        spaced.advance(b'[' as u32).unwrap();
        assert_eq!((0..100).take_while(|_| spaced.advance(b' ' as u32).is_ok()).count(), 1, "{anything:?}");
    }
    let error = grammars.compile(&lark("start: %json {\"multipleOf\": 1000003}")).err().unwrap();
    assert!(error.message().contains("1000003 steps"), "{error}");
    let error = grammars.compile(&lark("start: \"a\"\n  j\nj: %json\n{\"pattern\": \"(\"}\n")).err().unwrap();
    assert!(error.message().contains("line 3: \"pattern\": unclosed group"), "{error}");
}

#[test]
fn the_error_of_a_refused_token_names_its_byte_and_the_allowed_ones() {
    let grammars = byte_grammars();
    let cases: [(Grammar, &str, u32, &str); 8] = [
        (
            Grammar::Regex("[a-c]x".into()),
            "",
            266,
            "token 266 (\"abc\") is not allowed by the grammar at the start of the output: its byte 2 is \"b\"",
        ),
        (Grammar::Regex("é".into()), "", 0xC4, "token 196 (bytes 0xC4)"),
        (Grammar::Regex("é".into()), "", 0xC4, "its byte 1 is bytes 0xC4, and the grammar allows 0xC3"),
        (
            Grammar::Regex("abc".into()),
            "a",
            END,
            "token 256 (\"<end>\") is not allowed by the grammar after 1 tokens (\"a\"): the text is not complete",
        ),
        (Grammar::Regex("abc".into()), "a", TOOL, "token 257 (\"<tool>\")"),
        (Grammar::Regex("abc".into()), "a", TOOL, "it is a special token, and the grammar does not name it here"),
        (Grammar::Regex("abc".into()), "", 4_000_000_000, ": it is outside of the vocabulary"),
        (schema(json!({"type": "boolean"})), "t", b'x' as u32, "its byte 1 is \"x\", and the grammar allows 'r'"),
    ];
    for (grammar, before, token, expected) in cases {
        let mut constraint = grammars.compile(&grammar).unwrap();
        before.bytes().for_each(|byte| constraint.advance(byte.into()).unwrap());
        let mut appended = constraint.fork().unwrap();
        let error = constraint.advance(token).unwrap_err();
        assert!(error.message().contains(expected), "{error}, expected {expected}");
        assert_eq!(constraint.mask().unwrap_err(), error);
        appended.append(&[token, token]).unwrap();
        let error = appended.mask().unwrap_err();
        assert!(error.message().contains("the host added it") && error.message().contains(&format!("token {token}")), "{error}");
        appended.rewind(2).unwrap();
        assert!(appended.mask().is_ok());
    }
}

#[test]
fn an_error_names_text_that_no_token_can_write() {
    let tokens = (b'a'..=b'z').map(|byte| vec![byte]).collect();
    let grammars = Grammars::new(Vocabulary { tokens, special: Vec::new(), eos: Vec::new() }).unwrap();
    let error = grammars.compile(&Grammar::Regex("[0-9]x".into())).err().unwrap();
    assert!(error.message().contains("no token of the model matches the text that the grammar requires ('0' to '9')"), "{error}");
    let mut constraint = grammars.compile(&Grammar::Regex("ab[0-9]".into())).unwrap();
    let error = "ab".bytes().find_map(|byte| constraint.advance(u32::from(byte - b'a')).and_then(|()| constraint.mask().map(drop)).err());
    let expected =
        "no token of the model matches the text that the grammar requires ('0' to '9') after 2 tokens (\"ab\"); allow other texts there";
    assert!(error.clone().is_some_and(|error| error.message() == expected), "{error:?}");
}
