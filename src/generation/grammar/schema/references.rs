//! References to schemas that are rewritten.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::walk;

/// Moves the schemas of properties that are the target of a "$ref" to "$defs". With
/// "patternProperties" or "propertyNames", patterns are renamed, and schemas of properties move or
/// get conditions. References must not include these changes.
pub fn keep_targets(root: &mut Json) -> Result<(), String> {
    let (mut targets, mut is_rewritten) = (BTreeMap::new(), false);
    walk::every_schema(root, &mut |members| {
        is_rewritten |= members.contains_key("patternProperties") || members.contains_key("propertyNames");
        targets.extend(target(members).map(|pointer| (pointer, String::new())));
        Ok(())
    })?;
    targets.retain(|pointer, _| root.pointer(pointer).is_some());
    if !is_rewritten || targets.is_empty() {
        return Ok(());
    }
    let taken = root.get("$defs").and_then(Json::as_object).cloned().unwrap_or_default();
    let mut names = (0..).map(|i| format!("property{i}")).filter(|name| !taken.contains_key(name));
    let mut moved = Map::new();
    // An inner schema has the longer pointer, and moves first.
    let mut longest_first: Vec<(&String, &mut String)> = targets.iter_mut().collect();
    longest_first.sort_by_key(|(pointer, _)| Reverse(pointer.len()));
    for (pointer, new) in longest_first {
        let (Some(schema), Some(name)) = (root.pointer_mut(pointer), names.next()) else { continue };
        *new = format!("#/$defs/{name}");
        moved.insert(name, std::mem::replace(schema, json!({ "$ref": new })));
    }
    let Some(members) = root.as_object_mut() else { return Ok(()) };
    if let Some(definitions) = members.entry("$defs").or_insert_with(|| json!({})).as_object_mut() {
        definitions.extend(moved);
    }
    walk::every_schema(root, &mut |members| {
        if let Some(new) = target(members).and_then(|pointer| targets.get(&pointer)) {
            members.insert("$ref".into(), new[..].into());
        }
        Ok(())
    })
}

/// Returns the JSON pointer of the schema's reference, if its target is the schema of properties or
/// within one.
fn target(members: &Map<String, Json>) -> Option<String> {
    let pointer = walk::pointer_of(members.get("$ref")?.as_str()?)?;
    let mut parts = pointer.rsplit('/');
    let is_single = |part: &str| ["additionalProperties", "propertyNames"].contains(&part);
    let is_target =
        parts.next().is_some_and(is_single) || parts.any(|part| is_single(part) || ["patternProperties", "properties"].contains(&part));
    is_target.then_some(pointer)
}
