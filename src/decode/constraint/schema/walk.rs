//! Finds the schemas within a schema.

use std::collections::BTreeSet;

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

/// Changes one schema. `Err` says what is wrong with it.
type Visit<'a> = dyn FnMut(&mut Map<String, Json>) -> Result<(), String> + 'a;

/// Calls `visit` for every schema that is an object: those under the keywords of JSON Schema, and those that a "$ref" names. The schemas
/// within a schema come before it.
pub fn every_schema(root: &mut Json, visit: &mut Visit) -> Result<(), String> {
    let mut walk = Walk { visit, seen: BTreeSet::new(), references: Vec::new() };
    walk.schema(root, String::new())?;
    // A "$ref" may name a schema that is under no keyword, as "#/components/schemas/Name".
    while let Some(pointer) = walk.references.pop() {
        if let Some(schema) = root.pointer_mut(&pointer) {
            walk.schema(schema, pointer)?;
        }
    }
    Ok(())
}

struct Walk<'a> {
    visit: &'a mut Visit<'a>,
    /// JSON pointers to the schemas that have been visited.
    seen: BTreeSet<String>,
    references: Vec<String>,
}

impl Walk<'_> {
    fn schema(&mut self, schema: &mut Json, pointer: String) -> Result<(), String> {
        let Json::Object(members) = schema else { return Ok(()) };
        if !self.seen.insert(pointer.clone()) {
            return Ok(());
        }
        if let Some(Json::String(reference)) = members.get("$ref") {
            self.references.extend(pointer_of(reference));
        }
        for (keyword, value) in members.iter_mut() {
            let place = format!("{pointer}/{}", escaped(keyword));
            match value {
                Json::Object(named) if NAMED_SCHEMAS.contains(&&keyword[..]) => {
                    for (name, schema) in named {
                        self.schema(schema, format!("{place}/{}", escaped(name)))?;
                    }
                }
                Json::Array(list) if SCHEMAS.contains(&&keyword[..]) => {
                    for (i, schema) in list.iter_mut().enumerate() {
                        self.schema(schema, format!("{place}/{i}"))?;
                    }
                }
                value if SCHEMAS.contains(&&keyword[..]) => self.schema(value, place)?,
                _ => {}
            }
        }
        (self.visit)(members)
    }
}

/// A name as a part of a JSON pointer.
fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// The JSON pointer of a reference to a part of the same schema.
pub fn pointer_of(reference: &str) -> Option<String> {
    reference.strip_prefix('#').map(decoded)
}

/// The JSON pointer of a fragment.
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
