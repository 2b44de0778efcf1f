//! The keyword "patternProperties".
//!
//! llguidance 1.9 writes the declared properties first, and then names that match a pattern and are not declared, or that match none.
//! If there is no such name, it still allows the comma before one, and then no token at all. So a pattern that has no other names than
//! declared ones becomes declared properties here, and if every name is taken, "additionalProperties" becomes false.
//!
//! Objects of one place may come from several schemas ("allOf", "$ref"), which llguidance merges. So the names that any schema declares
//! count as declared.

use std::collections::BTreeSet;

use llguidance::derivre::{ExprRef, JsonQuoteOptions, Regex, RegexAst, RegexBuilder};
use serde_json::{Map, Value as Json};

use super::both;
use crate::decode::constraint::pattern::Language;

/// A pattern with few texts becomes declared properties also if it overlaps another one, which llguidance refuses.
const MAX_OVERLAPPING_NAMES: usize = 32;
/// Bounds the work for one question about names. What takes more is answered as if there were further names.
const FUEL: u64 = 50_000;

/// One member of "patternProperties".
pub struct NamePattern {
    pub translation: String,
    pub language: Language,
    pub schema: Json,
}

/// Writes the patterns into the schema.
pub fn put(members: &mut Map<String, Json>, patterns: Vec<NamePattern>, declared: &BTreeSet<String>, escapes: &str) {
    let mut names = Names::new(members, declared, escapes);
    let mut patterns: Vec<(NamePattern, Matcher)> = patterns.into_iter().map(|pattern| names.compile(pattern)).collect();
    patterns.retain_mut(|(pattern, matcher)| {
        let matching: Vec<String> = declared.iter().filter(|name| matcher.matches(name)).cloned().collect();
        let is_needed = !names.is_covered(matcher.quoted, &matching, &[]);
        if !is_needed {
            names.declare(members, matching, &pattern.schema);
        }
        is_needed
    });
    declare_overlapping(members, &mut names, &mut patterns);
    close(members, &mut names, &mut patterns, declared);
    if patterns.is_empty() {
        members.shift_remove("patternProperties");
        return;
    }
    let kept = patterns.into_iter().map(|(pattern, _)| (pattern.translation, pattern.schema));
    members.insert("patternProperties".into(), Json::Object(kept.collect()));
}

/// Patterns of few texts that overlap another pattern become declared properties. llguidance applies the other pattern to these itself.
fn declare_overlapping(members: &mut Map<String, Json>, names: &mut Names, patterns: &mut Vec<(NamePattern, Matcher)>) {
    let mut i = 0;
    while i < patterns.len() {
        let texts = patterns[i].0.language.texts(MAX_OVERLAPPING_NAMES).unwrap_or_default();
        let overlaps = (0..patterns.len()).any(|other| other != i && texts.iter().any(|text| patterns[other].1.matches(text)));
        if overlaps {
            let (pattern, _) = patterns.remove(i);
            names.declare(members, texts.into_iter().collect(), &pattern.schema);
        } else {
            i += 1;
        }
    }
}

/// Makes "additionalProperties" false if it could describe declared names only, and declares these.
fn close(members: &mut Map<String, Json>, names: &mut Names, patterns: &mut [(NamePattern, Matcher)], declared: &BTreeSet<String>) {
    let additional = members.get("additionalProperties").cloned().unwrap_or(Json::Bool(true));
    if additional == Json::Bool(false) {
        return;
    }
    let all: BTreeSet<String> = declared.iter().chain(&names.own).cloned().collect();
    let quoted: Vec<ExprRef> = patterns.iter().map(|(_, matcher)| matcher.quoted).collect();
    let all: Vec<String> = all.into_iter().collect();
    if !names.is_covered(names.valid, &all, &quoted) {
        return;
    }
    let others = all.into_iter().filter(|name| !names.own.contains(name) && !patterns.iter_mut().any(|(_, matcher)| matcher.matches(name)));
    let others: Vec<String> = others.collect();
    names.declare(members, others, &additional);
    members.insert("additionalProperties".into(), Json::Bool(false));
}

struct Matcher {
    /// Nothing if the pattern takes too much work. llguidance refuses it then.
    regex: Option<Regex>,
    /// The names as they are written in JSON.
    quoted: ExprRef,
}

impl Matcher {
    fn matches(&mut self, name: &str) -> bool {
        self.regex.as_mut().is_some_and(|regex| regex.is_match(name))
    }
}

/// Names of one object schema.
struct Names {
    builder: RegexBuilder,
    quote: JsonQuoteOptions,
    /// Every name as it is written in JSON.
    valid: ExprRef,
    /// What the schema itself declares.
    own: BTreeSet<String>,
}

impl Names {
    fn new(members: &Map<String, Json>, declared: &BTreeSet<String>, escapes: &str) -> Names {
        let mut builder = RegexBuilder::new();
        let quote = JsonQuoteOptions { allowed_escapes: escapes.into(), raw_mode: false };
        let any = RegexAst::Regex("(?s:.*)".into());
        let valid = builder.mk(&RegexAst::JsonQuote(Box::new(any), quote.clone())).unwrap_or(ExprRef::NO_MATCH);
        let properties = members.get("properties").and_then(Json::as_object);
        let own = properties.map_or_else(BTreeSet::new, |properties| properties.keys().cloned().collect());
        debug_assert!(own.iter().all(|name| declared.contains(name)));
        Names { builder, quote, valid, own }
    }

    fn compile(&mut self, pattern: NamePattern) -> (NamePattern, Matcher) {
        let search = RegexAst::SearchRegex(pattern.translation.clone());
        let found = self.builder.mk(&search).unwrap_or(ExprRef::NO_MATCH);
        let regex = self.builder.to_regex_limited(found, FUEL).ok();
        let quoted = RegexAst::JsonQuote(Box::new(RegexAst::ExprRef(found)), self.quote.clone());
        let quoted = self.builder.mk(&quoted).unwrap_or(self.valid);
        (pattern, Matcher { regex, quoted })
    }

    /// Whether all of these names are among the texts or the others.
    fn is_covered(&mut self, names: ExprRef, texts: &[String], others: &[ExprRef]) -> bool {
        let texts = texts.iter().map(|text| RegexAst::Literal(Json::from(&text[..]).to_string()));
        let taken = texts.chain(others.iter().map(|other| RegexAst::ExprRef(*other))).collect();
        let rest = RegexAst::And(vec![RegexAst::ExprRef(names), RegexAst::Not(Box::new(RegexAst::Or(taken)))]);
        let rest = self.builder.mk(&rest).and_then(|rest| self.builder.to_regex_limited(rest, FUEL));
        rest.is_ok_and(|mut rest| rest.always_empty())
    }

    /// Adds properties, or what these have to match too.
    fn declare(&mut self, members: &mut Map<String, Json>, names: Vec<String>, schema: &Json) {
        if names.is_empty() {
            return;
        }
        self.own.extend(names.iter().cloned());
        let properties = members.entry("properties").or_insert_with(|| Json::Object(Map::new()));
        let Some(properties) = properties.as_object_mut() else { return };
        for name in names {
            let before = properties.get_mut(&name).map(std::mem::take);
            properties.insert(name, before.map_or_else(|| schema.clone(), |before| both(before, schema.clone())));
        }
    }
}

/// Every name under "properties" or in "required", anywhere.
pub fn declared(schema: &Json, names: &mut BTreeSet<String>) {
    match schema {
        Json::Object(members) => {
            if let Some(Json::Object(properties)) = members.get("properties") {
                names.extend(properties.keys().cloned());
            }
            if let Some(Json::Array(required)) = members.get("required") {
                names.extend(required.iter().filter_map(Json::as_str).map(String::from));
            }
            members.values().for_each(|value| declared(value, names));
        }
        Json::Array(values) => values.iter().for_each(|value| declared(value, names)),
        _ => {}
    }
}
