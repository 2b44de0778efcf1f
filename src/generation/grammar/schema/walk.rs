//! Finds the schemas within a schema.

use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};

use serde_json::{Map, Value as Json};

/// Keywords whose value is a schema, or a list of schemas.
const SCHEMAS: [&str; 17] = [
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "oneOf",
    "prefixItems",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "extends",
];
/// Keywords whose value has a schema under each name.
const NAMED_SCHEMAS: [&str; 6] = ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"];

/// Changes one schema. The error describes the problem.
type Visit<'a> = dyn FnMut(&mut Map<String, Json>) -> Result<(), String> + 'a;

/// Calls `visit` for every schema that is an object: those under the keywords of JSON Schema, and
/// the targets of "$ref". Inner schemas precede outer ones.
pub fn every_schema(root: &mut Json, visit: &mut Visit) -> Result<(), String> {
    let mut walk = Walk { visit, keys: RandomState::new(), seen: HashSet::new(), references: Vec::new() };
    walk.schema(root, 0)?;
    // The target of a "$ref" may be under no keyword, such as "#/components/schemas/Name".
    while let Some(pointer) = walk.references.pop() {
        if let Some(schema) = root.pointer_mut(&pointer) {
            let place = walk.place_of(&pointer);
            walk.schema(schema, place)?;
        }
    }
    Ok(())
}

struct Walk<'a> {
    visit: &'a mut Visit<'a>,
    keys: RandomState,
    /// Hashes of the places of visited schemas, because JSON pointers may be long and many.
    seen: HashSet<u64>,
    references: Vec<String>,
}

impl Walk<'_> {
    fn schema(&mut self, schema: &mut Json, place: u64) -> Result<(), String> {
        let Json::Object(members) = schema else { return Ok(()) };
        if !self.seen.insert(place) {
            return Ok(());
        }
        if let Some(Json::String(reference)) = members.get("$ref") {
            self.references.extend(pointer_of(reference));
        }
        for (keyword, value) in members.iter_mut() {
            let place = self.within(place, keyword);
            match value {
                Json::Object(named) if NAMED_SCHEMAS.contains(&&keyword[..]) => {
                    for (name, schema) in named {
                        self.schema(schema, self.within(place, name))?;
                    }
                }
                Json::Array(list) if SCHEMAS.contains(&&keyword[..]) => {
                    for (i, schema) in list.iter_mut().enumerate() {
                        self.schema(schema, self.within(place, &i.to_string()))?;
                    }
                }
                value if SCHEMAS.contains(&&keyword[..]) => self.schema(value, place)?,
                _ => {}
            }
        }
        (self.visit)(members)
    }

    /// Returns the place of a member of the value at a place.
    fn within(&self, place: u64, name: &str) -> u64 {
        self.keys.hash_one((place, name))
    }

    fn place_of(&self, pointer: &str) -> u64 {
        let names = pointer.split('/').skip(1).map(|part| part.replace("~1", "/").replace("~0", "~"));
        names.fold(0, |place, name| self.within(place, &name))
    }
}

/// Returns the JSON pointer of a reference to a part of the same schema.
pub fn pointer_of(reference: &str) -> Option<String> {
    reference.strip_prefix('#').map(decoded)
}

/// Returns the JSON pointer of a fragment.
fn decoded(fragment: &str) -> String {
    let bytes = fragment.as_bytes();
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut i = 0;
    while i < bytes.len() {
        let code = fragment.get(i + 1..i + 3).and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match code.filter(|_| bytes[i] == b'%') {
            Some(byte) => decoded.push(byte),
            None => decoded.push(bytes[i]),
        }
        i += if bytes[i] == b'%' && code.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&decoded).into_owned()
}
