//! Limits on the work for the patterns of a grammar in the call that adds a request.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value as Json};

use super::{may_be, walk};

/// Maximum total size of the translated patterns in bytes. llguidance takes about 50 ms for a
/// mebibyte.
const MAX_PATTERN_BYTES: usize = 4 << 20;
/// Maximum number of members of "patternProperties" in the whole grammar.
const MAX_MEMBERS: usize = 64;
/// Maximum number of members of "patternProperties" times the bytes of all declared names, which
/// are matched one by one (0.1 us per byte).
const MAX_MATCHED_BYTES: usize = 1_000_000;
/// Maximum number of steps of the regular expressions that are built while names are matched (20 ns
/// each).
const MAX_STEPS: u64 = 5_000_000;
/// Maximum number of values in the schemas that declared names get from "patternProperties" and
/// "propertyNames".
const MAX_COPIED_VALUES: usize = 100_000;
/// Maximum number of pairs of properties of one object, summed over all objects. The time of
/// llguidance grows with it (3,000 properties: 0.7 s).
const MAX_PROPERTY_PAIRS: u64 = 4_500_000;
/// Maximum number of pairs of patterns that llguidance compares (15 us each).
const MAX_PAIRS: u64 = 20_000;
/// Maximum number of copied bytes. Each query about patterns copies all patterns of an object.
const MAX_COPIED_BYTES: u64 = 4_000_000_000;
const MIN_COPIED_BYTES: u64 = 100_000;
/// Number of schemas, or of nested schemas, after which llguidance stops.
const MAX_SCHEMAS: u64 = 50_000;
const MAX_LEVELS: u64 = 128;

/// The remaining work. All schemas of a grammar share it.
pub struct WorkLimit {
    pattern_bytes: usize,
    members: usize,
    matched: usize,
    pairs: u64,
    property_pairs: u64,
    steps: u64,
    values: usize,
    bytes: u64,
    /// Size in bytes of the largest object's patterns.
    largest: u64,
}

impl WorkLimit {
    pub fn new() -> WorkLimit {
        WorkLimit {
            pattern_bytes: 0,
            members: 0,
            matched: 0,
            pairs: 0,
            property_pairs: 0,
            steps: MAX_STEPS,
            values: MAX_COPIED_VALUES,
            bytes: MAX_COPIED_BYTES,
            largest: 0,
        }
    }

    /// Spends the size of a translated pattern.
    pub fn translate(&mut self, bytes: usize) -> Result<(), String> {
        self.pattern_bytes = self.pattern_bytes.saturating_add(bytes);
        if self.pattern_bytes > MAX_PATTERN_BYTES {
            let problem = "the translated patterns of the grammar are too large together";
            return Err(format!("{problem} ({} bytes, limit {MAX_PATTERN_BYTES}); simplify them", self.pattern_bytes));
        }
        Ok(())
    }

    /// Spends the patterns of a schema, and the bytes to match with them, before the work begins.
    pub fn members(&mut self, members: usize, declared: &BTreeSet<String>) -> Result<(), String> {
        self.members += members;
        if self.members > MAX_MEMBERS {
            let problem = "too many members of \"patternProperties\"";
            return Err(format!("{problem} ({}, limit {MAX_MEMBERS}); join patterns with \"|\"", self.members));
        }
        let bytes: usize = declared.iter().map(|name| name.len() + 1).sum();
        self.matched = self.matched.saturating_add(members.saturating_mul(bytes));
        if self.matched > MAX_MATCHED_BYTES {
            return Err(format!(
                "too many names for the members of \"patternProperties\" ({members} members, {bytes} bytes of names, product {}, limit \
                 {MAX_MATCHED_BYTES}); use fewer",
                self.matched
            ));
        }
        Ok(())
    }

    /// Spends the properties of all objects of a schema.
    pub fn properties(&mut self, schema: &mut Json) -> Result<(), String> {
        walk::every_schema(schema, &mut |members| {
            let count = members.get("properties").and_then(Json::as_object).map_or(0, Map::len);
            self.property_pairs += pairs(count);
            if self.property_pairs > MAX_PROPERTY_PAIRS {
                return Err(format!(
                    "too many properties in the objects of the grammar ({count} in one, {} pairs in all, limit {MAX_PROPERTY_PAIRS}); nest objects",
                    self.property_pairs
                ));
            }
            Ok(())
        })
    }

    /// Spends steps of a regular expression.
    pub fn step(&mut self, steps: u64) -> Result<(), String> {
        self.steps = self.steps.checked_sub(steps).ok_or_else(|| {
            format!("the patterns of \"patternProperties\" take too long to match the names of the schema (limit {MAX_STEPS} steps); simplify them")
        })?;
        Ok(())
    }

    /// Spends a copy of an object's patterns.
    pub fn question(&mut self, bytes: usize) -> Result<(), String> {
        let bytes = MIN_COPIED_BYTES.max(bytes as u64);
        self.largest = self.largest.max(bytes);
        self.questions(bytes, 1)
    }

    /// Spends the comparison of `pairs` pairs of patterns.
    pub fn compare(&mut self, pairs: u64) -> Result<(), String> {
        self.pairs += pairs;
        if self.pairs > MAX_PAIRS {
            let problem = "too many patterns of \"patternProperties\" to compare in several schemas";
            return Err(format!("{problem} ({} pairs, limit {MAX_PAIRS}); join patterns with \"|\"", self.pairs));
        }
        self.questions(self.largest, pairs)
    }

    fn questions(&mut self, bytes: u64, count: u64) -> Result<(), String> {
        self.bytes = self.bytes.checked_sub(bytes.saturating_mul(count)).ok_or_else(|| {
            let problem = "the patterns of \"patternProperties\" are too large to be compared";
            format!("{problem} ({bytes} bytes, {count} more times, limit {MAX_COPIED_BYTES} bytes); simplify them")
        })?;
        Ok(())
    }

    /// Spends the values of a schema that is copied `times` times.
    pub fn copy(&mut self, schema: &Json, times: usize) -> Result<(), String> {
        let copied = values(schema).saturating_mul(times);
        self.values = self.values.checked_sub(copied).ok_or_else(|| {
            let problem = "the names that \"patternProperties\" or \"propertyNames\" match need too many copies of a schema";
            format!("{problem} ({copied} values, {} left of {MAX_COPIED_VALUES}); put the schema under \"$defs\"", self.values)
        })?;
        Ok(())
    }
}

/// Returns the number of values in a value. A long text counts as several.
fn values(value: &Json) -> usize {
    const TEXT_BYTES: usize = 64;
    match value {
        Json::Object(members) => 1 + members.iter().map(|(name, value)| name.len() / TEXT_BYTES + values(value)).sum::<usize>(),
        Json::Array(list) => 1 + list.iter().map(values).sum::<usize>(),
        Json::String(text) => 1 + text.len() / TEXT_BYTES,
        _ => 1,
    }
}

/// Checks how often llguidance compares patterns: once per object, and again for each merge of
/// objects.
pub fn check_pairs(schema: &mut Json) -> Result<u64, String> {
    let (mut alone, mut merges, mut patterns) = (0, false, BTreeSet::new());
    walk::every_schema(schema, &mut |members| {
        if let Some(Json::Object(own)) = members.get("patternProperties") {
            alone += pairs(own.len());
            patterns.extend(own.keys().cloned());
        }
        merges |= is_merge(members);
        Ok(())
    })?;
    // With fewer than two patterns, nothing is compared.
    let merged = if merges && patterns.len() > 1 { Expansion::merges(schema) } else { 0 };
    let compared = pairs(patterns.len()).saturating_mul(merged).saturating_add(alone);
    if compared > MAX_PAIRS {
        return Err(format!(
            "too many patterns of \"patternProperties\" to compare with each other ({} patterns, {merged} merged schemas, {compared} pairs, \
             limit {MAX_PAIRS}); join patterns with \"|\", or leave out \"allOf\" and the keywords beside \"$ref\"",
            patterns.len()
        ));
    }
    Ok(compared)
}

fn pairs(count: usize) -> u64 {
    (count * count.saturating_sub(1) / 2) as u64
}

/// Returns true if llguidance merges several parts of this schema into one object schema.
pub fn is_merge(members: &Map<String, Json>) -> bool {
    const PARTS: [&str; 6] = ["allOf", "anyOf", "oneOf", "$ref", "const", "enum"];
    const ANNOTATIONS: [&str; 11] =
        ["$comment", "$defs", "$id", "$schema", "default", "definitions", "description", "examples", "readOnly", "title", "writeOnly"];
    let has_several = members.get("allOf").and_then(Json::as_array).is_some_and(|all| all.len() > 1);
    let keywords = members.keys().filter(|keyword| !ANNOTATIONS.contains(&&keyword[..])).count();
    let has_parts = has_several || (keywords > 1 && PARTS.iter().any(|part| members.contains_key(*part)));
    // The schema of a pattern is merged with the schemas of the properties that match it.
    let has_nested = || members.get("patternProperties").is_some_and(may_have_patterns);
    may_be(members, "object") && (has_parts || has_nested())
}

/// Returns true if one of the named schemas may have "patternProperties".
fn may_have_patterns(named: &Json) -> bool {
    fn mentions(value: &Json) -> bool {
        match value {
            Json::Object(members) => {
                members.iter().any(|(keyword, value)| ["$ref", "patternProperties"].contains(&&keyword[..]) || mentions(value))
            }
            Json::Array(list) => list.iter().any(mentions),
            _ => false,
        }
    }
    named.as_object().is_some_and(|named| named.values().any(mentions))
}

/// Counts schemas. A reference counts as its target.
struct Expansion<'a> {
    root: &'a Json,
    /// Counts by JSON pointer. None while the target is counted.
    targets: BTreeMap<String, Option<u64>>,
    /// True if a schema contains itself.
    is_recursive: bool,
}

impl<'a> Expansion<'a> {
    /// Returns an upper bound of the number of schemas that llguidance merges.
    fn merges(root: &'a Json) -> u64 {
        let mut expansion = Expansion { root, targets: BTreeMap::new(), is_recursive: false };
        let schemas = expansion.schemas(root);
        schemas.saturating_mul(if expansion.is_recursive { MAX_LEVELS } else { 1 }).min(MAX_SCHEMAS)
    }

    fn schemas(&mut self, value: &'a Json) -> u64 {
        match value {
            Json::Array(list) => list.iter().fold(0, |sum, value| self.schemas(value).saturating_add(sum)),
            Json::Object(members) => {
                let reference = members.get("$ref").and_then(Json::as_str).and_then(walk::pointer_of);
                let target = reference.map_or(0, |pointer| self.target(pointer));
                let parts = members.iter().filter(|(keyword, _)| !["$defs", "definitions"].contains(&&keyword[..]));
                parts.fold(target.saturating_add(1), |sum, (_, value)| self.schemas(value).saturating_add(sum))
            }
            _ => 0,
        }
    }

    fn target(&mut self, pointer: String) -> u64 {
        if let Some(counted) = self.targets.get(&pointer) {
            self.is_recursive |= counted.is_none();
            return counted.unwrap_or(0);
        }
        let Some(target) = self.root.pointer(&pointer) else { return 0 };
        self.targets.insert(pointer.clone(), None);
        let schemas = self.schemas(target);
        self.targets.insert(pointer, Some(schemas));
        schemas
    }
}
