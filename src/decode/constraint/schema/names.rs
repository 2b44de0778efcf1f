//! The keyword "patternProperties".
//!
//! llguidance 1.9 writes the declared properties first, and then names that match a pattern and are not declared, or that match none.
//! If there is no such name, it still allows the comma before one, and then no token at all. So a pattern that has no other names than
//! declared ones becomes declared properties here, and if every name is taken, "additionalProperties" becomes false.
//!
//! Objects of one place may come from several schemas ("allOf", "$ref"), which llguidance merges. So the names that any schema declares
//! count as declared.

use std::collections::{BTreeMap, BTreeSet};

use llguidance::derivre::{ExprRef, JsonQuoteOptions, Regex, RegexAst, RegexBuilder};
use serde_json::{Map, Value as Json};

use super::limits::Budget;
use super::{both, walk};
use crate::decode::constraint::pattern::Language;

/// A pattern with few texts becomes declared properties also if it overlaps another one, which llguidance refuses.
const MAX_OVERLAPPING_NAMES: usize = 32;
/// Bounds the work for one question about names. If a question takes more, the answer is that there are further names.
const FUEL: u64 = 50_000;
/// Names of which one is not taken in most schemas, so that the question whether all are taken has a quick answer.
const PROBES: [&str; 6] = ["", "0", "a", "Z", "_~", "\u{e9} "];

/// By translation: the pattern, and what it matches.
pub type Translated = BTreeMap<String, (String, Language)>;

/// Rewrites "patternProperties" in the whole schema.
pub fn rewrite(
    root: &mut Json,
    declared: &mut BTreeSet<String>,
    translated: &Translated,
    escapes: &str,
    budget: &mut Budget,
) -> Result<(), String> {
    let mut objects = Objects { declared, translated, escapes, budget };
    walk::every_schema(root, &mut |members| objects.declare_overlapping(members))?;
    walk::every_schema(root, &mut |members| objects.close(members))
}

/// The objects of one schema.
struct Objects<'a> {
    /// Names under "properties" or in "required", anywhere.
    declared: &'a mut BTreeSet<String>,
    translated: &'a Translated,
    escapes: &'a str,
    budget: &'a mut Budget,
}

/// One member of "patternProperties".
struct Pattern {
    translation: String,
    schema: Json,
    matcher: Matcher,
}

impl Objects<'_> {
    /// Patterns of few texts that overlap another pattern become declared properties. llguidance applies the other pattern to these itself.
    fn declare_overlapping(&mut self, members: &mut Map<String, Json>) -> Result<(), String> {
        let Some(mut object) = self.object(members)? else { return Ok(()) };
        let mut i = 0;
        while i < object.patterns.len() {
            let language = self.translated.get(&object.patterns[i].translation).map(|(_, language)| language);
            let texts = language.and_then(|language| language.texts(MAX_OVERLAPPING_NAMES)).unwrap_or_default();
            if object.has_another(i, &texts, self.budget)? {
                let pattern = object.patterns.remove(i);
                self.declared.extend(texts.iter().cloned());
                object.declare(members, texts.into_iter().collect(), &pattern.schema, self.budget)?;
            } else {
                i += 1;
            }
        }
        object.write(members);
        Ok(())
    }

    /// Declares the names of patterns that have no others, and all names that are left if these are declared ones only.
    fn close(&mut self, members: &mut Map<String, Json>) -> Result<(), String> {
        let Some(mut object) = self.object(members)? else { return Ok(()) };
        for mut pattern in std::mem::take(&mut object.patterns) {
            let mut matching = Vec::new();
            for name in self.declared.iter() {
                if pattern.matcher.matches(name, self.budget)? {
                    matching.push(name.clone());
                }
            }
            if object.is_covered(pattern.matcher.quoted, &matching, &[], self.budget)? {
                object.declare(members, matching, &pattern.schema, self.budget)?;
            } else {
                object.patterns.push(pattern);
            }
        }
        let additional = members.get("additionalProperties").cloned().unwrap_or(Json::Bool(true));
        if additional != Json::Bool(false) {
            self.close_additional(members, &mut object, additional)?;
        }
        object.write(members);
        Ok(())
    }

    /// Makes "additionalProperties" false if it could describe declared names only, and declares these.
    fn close_additional(&mut self, members: &mut Map<String, Json>, object: &mut Object, additional: Json) -> Result<(), String> {
        let all: BTreeSet<String> = self.declared.union(&object.own).cloned().collect();
        let mut patterns = object.patterns.iter_mut().map(|pattern| &mut pattern.matcher).collect::<Vec<_>>();
        if has_free_probe(&all, &mut patterns, self.budget)? {
            return Ok(());
        }
        let all: Vec<String> = all.into_iter().collect();
        let quoted: Vec<ExprRef> = object.patterns.iter().map(|pattern| pattern.matcher.quoted).collect();
        if !object.is_covered(object.valid, &all, &quoted, self.budget)? {
            return Ok(());
        }
        let mut others = Vec::new();
        for name in all {
            if !object.own.contains(&name) && !object.matches(&name, self.budget)? {
                others.push(name);
            }
        }
        object.declare(members, others, &additional, self.budget)?;
        members.insert("additionalProperties".into(), Json::Bool(false));
        Ok(())
    }

    /// The object schema, if it has patterns.
    fn object(&mut self, members: &Map<String, Json>) -> Result<Option<Object>, String> {
        let Some(patterns) = members.get("patternProperties").and_then(Json::as_object) else { return Ok(None) };
        let mut object = Object::new(members, self.escapes);
        for (translation, schema) in patterns {
            let matcher = object.compile(translation, self.budget)?;
            object.patterns.push(Pattern { translation: translation.clone(), schema: schema.clone(), matcher });
        }
        Ok(Some(object))
    }
}

/// Whether one of a few names is not taken.
fn has_free_probe(taken: &BTreeSet<String>, patterns: &mut [&mut Matcher], budget: &mut Budget) -> Result<bool, String> {
    for probe in PROBES.into_iter().filter(|probe| !taken.contains(*probe)) {
        let mut is_free = true;
        for pattern in patterns.iter_mut() {
            is_free &= !pattern.matches(probe, budget)?;
        }
        if is_free {
            return Ok(true);
        }
    }
    Ok(false)
}

struct Matcher {
    /// Nothing if the pattern takes too much work. llguidance refuses it then.
    regex: Option<Regex>,
    /// The names as they are written in JSON.
    quoted: ExprRef,
}

impl Matcher {
    fn matches(&mut self, name: &str, budget: &mut Budget) -> Result<bool, String> {
        let Some(regex) = &mut self.regex else { return Ok(false) };
        let mut state = regex.initial_state();
        for byte in name.bytes() {
            if state.is_dead() {
                break;
            }
            let before = regex.cost();
            state = regex.transition(state, byte);
            budget.step(regex.cost() - before)?;
        }
        Ok(regex.is_accepting(state))
    }
}

/// An object schema with patterns.
struct Object {
    builder: RegexBuilder,
    quote: JsonQuoteOptions,
    /// Every name as it is written in JSON.
    valid: ExprRef,
    /// The names that the schema itself declares.
    own: BTreeSet<String>,
    patterns: Vec<Pattern>,
}

impl Object {
    fn new(members: &Map<String, Json>, escapes: &str) -> Object {
        let mut builder = RegexBuilder::new();
        let quote = JsonQuoteOptions { allowed_escapes: escapes.into(), raw_mode: false };
        let any = RegexAst::Regex("(?s:.*)".into());
        let valid = builder.mk(&RegexAst::JsonQuote(Box::new(any), quote.clone())).unwrap_or(ExprRef::NO_MATCH);
        let properties = members.get("properties").and_then(Json::as_object);
        let own = properties.map_or_else(BTreeSet::new, |properties| properties.keys().cloned().collect());
        Object { builder, quote, valid, own, patterns: Vec::new() }
    }

    fn compile(&mut self, translation: &str, budget: &mut Budget) -> Result<Matcher, String> {
        let search = RegexAst::SearchRegex(translation.into());
        let found = self.builder.mk(&search).unwrap_or(ExprRef::NO_MATCH);
        budget.question(self.builder.exprset().num_bytes())?;
        let regex = self.builder.to_regex_limited(found, FUEL).ok();
        let quoted = RegexAst::JsonQuote(Box::new(RegexAst::ExprRef(found)), self.quote.clone());
        let quoted = self.builder.mk(&quoted).unwrap_or(self.valid);
        Ok(Matcher { regex, quoted })
    }

    /// Whether another pattern than the given one matches one of the texts.
    fn has_another(&mut self, except: usize, texts: &BTreeSet<String>, budget: &mut Budget) -> Result<bool, String> {
        for (_, pattern) in self.patterns.iter_mut().enumerate().filter(|(i, _)| *i != except) {
            for text in texts {
                if pattern.matcher.matches(text, budget)? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn matches(&mut self, name: &str, budget: &mut Budget) -> Result<bool, String> {
        for pattern in &mut self.patterns {
            if pattern.matcher.matches(name, budget)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether all of these names are among the texts or the others.
    fn is_covered(&self, names: ExprRef, texts: &[String], others: &[ExprRef], budget: &mut Budget) -> Result<bool, String> {
        budget.question(self.builder.exprset().num_bytes())?;
        let texts = texts.iter().map(|text| RegexAst::Literal(Json::from(&text[..]).to_string()));
        let taken = texts.chain(others.iter().map(|other| RegexAst::ExprRef(*other))).collect();
        let rest = RegexAst::And(vec![RegexAst::ExprRef(names), RegexAst::Not(Box::new(RegexAst::Or(taken)))]);
        // A copy, so that the next question does not pay for the texts of this one.
        let mut builder = self.builder.clone();
        let rest = builder.mk(&rest).and_then(|rest| builder.into_regex_limited(rest, FUEL));
        Ok(rest.is_ok_and(|mut rest| rest.always_empty()))
    }

    /// Adds properties, or adds the schema to what these have to match.
    fn declare(&mut self, members: &mut Map<String, Json>, names: Vec<String>, schema: &Json, budget: &mut Budget) -> Result<(), String> {
        budget.copy(schema, names.len())?;
        if names.is_empty() {
            return Ok(());
        }
        self.own.extend(names.iter().cloned());
        let properties = members.entry("properties").or_insert_with(|| Json::Object(Map::new()));
        let Some(properties) = properties.as_object_mut() else { return Ok(()) };
        for name in names {
            let before = properties.get_mut(&name).map(std::mem::take);
            properties.insert(name, before.map_or_else(|| schema.clone(), |before| both(before, schema.clone())));
        }
        Ok(())
    }

    /// Writes the patterns that are left into the schema.
    fn write(self, members: &mut Map<String, Json>) {
        if self.patterns.is_empty() {
            members.shift_remove("patternProperties");
            return;
        }
        let patterns = self.patterns.into_iter().map(|pattern| (pattern.translation, pattern.schema));
        members.insert("patternProperties".into(), Json::Object(patterns.collect()));
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
