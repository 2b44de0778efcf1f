//! The keyword "patternProperties".
//!
//! llguidance 1.9 writes the declared properties first, then other names that match a pattern, then
//! names that match none. If there is no such name, it still allows the comma before one, after
//! which no token is allowed. A pattern that matches declared names only is therefore replaced by
//! declared properties. If the patterns match every name, "additionalProperties" becomes false.
//!
//! llguidance merges the schemas of one object ("allOf", "$ref"). The names that any schema
//! declares therefore count as declared. If objects are merged, the patterns of different schemas
//! may match all names together.

use std::collections::{BTreeMap, BTreeSet};

use llguidance::derivre::{ExprRef, JsonQuoteOptions, Regex, RegexAst, RegexBuilder};
use serde_json::{Map, Value as Json};

use super::limits::WorkLimit;
use super::{both, limits, walk};
use crate::generation::grammar::pattern::Language;

/// Maximum number of texts of a pattern that is replaced by declared properties because it overlaps
/// another one. llguidance refuses overlapping patterns.
const MAX_OVERLAPPING_NAMES: usize = 32;
/// Maximum work for one query about names. If a query needs more, its answer is that other names
/// exist.
const FUEL: u64 = 50_000;
/// Names that quickly show, in most schemas, that the patterns do not match every name.
const PROBES: [&str; 6] = ["", "0", "a", "Z", "_~", "\u{e9} "];

/// Patterns and their languages by translation.
pub type Translated = BTreeMap<String, (String, Language)>;

/// Rewrites "patternProperties" in the whole schema.
pub fn rewrite(
    root: &mut Json,
    declared: &mut BTreeSet<String>,
    translated: &Translated,
    escapes: &str,
    budget: &mut WorkLimit,
) -> Result<(), String> {
    let mut objects = Objects { declared, translated, escapes, budget, patterns: BTreeSet::new(), is_merged: false };
    walk::every_schema(root, &mut |members| objects.declare_overlapping(members))?;
    walk::every_schema(root, &mut |members| objects.declare_covered(members))?;
    walk::every_schema(root, &mut |members| {
        objects.close(members)?;
        keep_together(members);
        Ok(())
    })
}

/// The objects of one schema.
struct Objects<'a> {
    /// Names under "properties" or in "required" in any schema.
    declared: &'a mut BTreeSet<String>,
    translated: &'a Translated,
    escapes: &'a str,
    budget: &'a mut WorkLimit,
    /// Patterns that match other names than declared ones.
    patterns: BTreeSet<String>,
    /// True if several schemas describe one object.
    is_merged: bool,
}

/// One member of "patternProperties".
struct Pattern {
    translation: String,
    schema: Json,
    matcher: Matcher,
}

impl Objects<'_> {
    /// Replaces patterns with few texts that overlap another pattern by declared properties.
    /// llguidance applies the other pattern to them itself.
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

    /// Replaces patterns that match declared names only by declared properties.
    fn declare_covered(&mut self, members: &mut Map<String, Json>) -> Result<(), String> {
        self.is_merged |= limits::is_merge(members);
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
                self.patterns.insert(pattern.translation.clone());
                object.patterns.push(pattern);
            }
        }
        object.write(members);
        Ok(())
    }

    /// Makes "additionalProperties" false if each name is declared or matches a pattern of another
    /// schema, and applies its schema to these names.
    fn close(&mut self, members: &mut Map<String, Json>) -> Result<(), String> {
        let additional = members.get("additionalProperties").cloned().unwrap_or(Json::Bool(true));
        let Some(mut object) = self.object(members)?.filter(|_| additional != Json::Bool(false)) else { return Ok(()) };
        let own = object.patterns.len();
        if self.is_merged {
            self.add_others(&mut object, &additional)?;
        }
        let all: BTreeSet<String> = self.declared.union(&object.own).cloned().collect();
        if object.has_free_probe(&all, self.budget)? {
            return Ok(());
        }
        object.keep_disjoint(own, self.budget)?;
        let all: Vec<String> = all.into_iter().collect();
        let quoted: Vec<ExprRef> = object.patterns.iter().map(|pattern| pattern.matcher.quoted).collect();
        // The patterns of the object itself are first. If they match all names, no others are
        // needed.
        let enough = if object.is_covered(object.valid, &all, &quoted[..own], self.budget)? { own } else { quoted.len() };
        if enough > own && !object.is_covered(object.valid, &all, &quoted, self.budget)? {
            return Ok(());
        }
        object.patterns.truncate(enough);
        let mut others = Vec::new();
        for name in all {
            if !object.own.contains(&name) && !object.matches(&name, self.budget)? {
                others.push(name);
            }
        }
        object.declare(members, others, &additional, self.budget)?;
        self.budget.copy(&additional, enough - own)?;
        members.insert("additionalProperties".into(), Json::Bool(false));
        object.write(members);
        Ok(())
    }

    /// Adds the patterns of other schemas, with this schema's conditions on their names.
    fn add_others(&mut self, object: &mut Object, additional: &Json) -> Result<(), String> {
        let own: BTreeSet<String> = object.patterns.iter().map(|pattern| pattern.translation.clone()).collect();
        for translation in self.patterns.difference(&own) {
            let matcher = object.compile(translation, self.budget)?;
            object.patterns.push(Pattern { translation: translation.clone(), schema: additional.clone(), matcher });
        }
        Ok(())
    }

    /// Returns the object schema, if it has patterns.
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

/// Moves "additionalProperties" directly after "patternProperties". llguidance 1.9 loses the
/// patterns if an "anyOf" or a similar keyword is between them.
fn keep_together(members: &mut Map<String, Json>) {
    let Some(additional) = members.get("additionalProperties").cloned().filter(|_| members.contains_key("patternProperties")) else {
        return;
    };
    members.shift_remove("additionalProperties");
    for (keyword, value) in std::mem::take(members) {
        let is_last = keyword == "patternProperties";
        members.insert(keyword, value);
        if is_last {
            members.insert("additionalProperties".into(), additional.clone());
        }
    }
}

struct Matcher {
    /// None if the pattern takes too much work. llguidance then refuses it.
    regex: Option<Regex>,
    /// The names in their JSON form.
    quoted: ExprRef,
}

impl Matcher {
    fn matches(&mut self, name: &str, budget: &mut WorkLimit) -> Result<bool, String> {
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
    /// All names in their JSON form.
    valid: ExprRef,
    /// Names that the schema itself declares.
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

    fn compile(&mut self, translation: &str, budget: &mut WorkLimit) -> Result<Matcher, String> {
        let search = RegexAst::SearchRegex(translation.into());
        let found = self.builder.mk(&search).unwrap_or(ExprRef::NO_MATCH);
        budget.question(self.builder.exprset().num_bytes())?;
        let regex = self.builder.to_regex_limited(found, FUEL).ok();
        let quoted = RegexAst::JsonQuote(Box::new(RegexAst::ExprRef(found)), self.quote.clone());
        let quoted = self.builder.mk(&quoted).unwrap_or(self.valid);
        Ok(Matcher { regex, quoted })
    }

    /// Returns true if a pattern other than the given one matches one of the texts.
    fn has_another(&mut self, except: usize, texts: &BTreeSet<String>, budget: &mut WorkLimit) -> Result<bool, String> {
        for (_, pattern) in self.patterns.iter_mut().enumerate().filter(|(i, _)| *i != except) {
            for text in texts {
                if pattern.matcher.matches(text, budget)? {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    fn matches(&mut self, name: &str, budget: &mut WorkLimit) -> Result<bool, String> {
        for pattern in &mut self.patterns {
            if pattern.matcher.matches(name, budget)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns true if one of the probes does not match.
    fn has_free_probe(&mut self, taken: &BTreeSet<String>, budget: &mut WorkLimit) -> Result<bool, String> {
        for probe in PROBES.into_iter().filter(|probe| !taken.contains(*probe)) {
            if !self.matches(probe, budget)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes the patterns after the first `own` that overlap an earlier one, because llguidance
    /// cannot merge them.
    fn keep_disjoint(&mut self, own: usize, budget: &mut WorkLimit) -> Result<(), String> {
        let mut i = own;
        while i < self.patterns.len() {
            let mut overlaps = false;
            for before in 0..i {
                let (one, other) = (self.patterns[before].matcher.quoted, self.patterns[i].matcher.quoted);
                let both = RegexAst::And(vec![RegexAst::ExprRef(one), RegexAst::ExprRef(other)]);
                overlaps = overlaps || !self.is_empty(&both, budget)?;
            }
            if overlaps {
                self.patterns.remove(i);
            } else {
                i += 1;
            }
        }
        Ok(())
    }

    /// Returns true if all of these names are among the texts or the others.
    fn is_covered(&self, names: ExprRef, texts: &[String], others: &[ExprRef], budget: &mut WorkLimit) -> Result<bool, String> {
        let texts = texts.iter().map(|text| RegexAst::Literal(Json::from(&text[..]).to_string()));
        let taken = texts.chain(others.iter().map(|other| RegexAst::ExprRef(*other))).collect();
        self.is_empty(&RegexAst::And(vec![RegexAst::ExprRef(names), RegexAst::Not(Box::new(RegexAst::Or(taken)))]), budget)
    }

    /// Returns true if there is no such text. Returns false if the query takes too much work.
    fn is_empty(&self, texts: &RegexAst, budget: &mut WorkLimit) -> Result<bool, String> {
        budget.question(self.builder.exprset().num_bytes())?;
        // A copy, so that the next query does not count the texts of this one.
        let mut builder = self.builder.clone();
        let regex = builder.mk(texts).and_then(|texts| builder.into_regex_limited(texts, FUEL));
        Ok(regex.is_ok_and(|mut regex| regex.always_empty()))
    }

    /// Adds properties, or adds the schema to the conditions of existing ones.
    fn declare(
        &mut self,
        members: &mut Map<String, Json>,
        names: Vec<String>,
        schema: &Json,
        budget: &mut WorkLimit,
    ) -> Result<(), String> {
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

    /// Writes the remaining patterns into the schema.
    fn write(self, members: &mut Map<String, Json>) {
        if self.patterns.is_empty() {
            members.shift_remove("patternProperties");
            return;
        }
        let patterns = self.patterns.into_iter().map(|pattern| (pattern.translation, pattern.schema));
        members.insert("patternProperties".into(), Json::Object(patterns.collect()));
    }
}

/// Collects all names under "properties" or in "required".
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
