//! The keyword "propertyNames", which llguidance refuses.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::limits::WorkLimit;
use super::{may_be, walk};

/// The names that a schema describes.
#[derive(Clone)]
enum Names {
    Any,
    Listed(Vec<String>),
    /// A pattern of ECMA-262.
    Matching(String),
}

/// Replaces "propertyNames" by "properties" or "patternProperties" with the schema of
/// "additionalProperties", and allows no others. Other uses of "propertyNames" stay, and llguidance
/// refuses them.
pub fn rewrite(root: &mut Json, budget: &mut WorkLimit) -> Result<(), String> {
    let mut targets = BTreeMap::new();
    walk::every_schema(root, &mut |members| {
        let reference = members.get("propertyNames").and_then(|names| names.get("$ref")?.as_str());
        targets.extend(reference.map(|reference| (reference.to_string(), None)));
        Ok(())
    })?;
    for (reference, names) in &mut targets {
        *names = walk::pointer_of(reference).and_then(|pointer| described(root.pointer(&pointer)?));
    }
    walk::every_schema(root, &mut |members| rewrite_members(members, &targets, budget))
}

fn rewrite_members(
    members: &mut Map<String, Json>,
    targets: &BTreeMap<String, Option<Names>>,
    budget: &mut WorkLimit,
) -> Result<(), String> {
    let Some(schema) = members.get("propertyNames") else { return Ok(()) };
    let reference = schema.get("$ref").and_then(Json::as_str);
    let names = match reference {
        // Other keywords next to the reference would restrict the names further.
        Some(reference) => targets.get(reference).cloned().flatten().filter(|_| is_alone(schema)),
        None => described(schema),
    };
    let has_others = members.contains_key("properties") || members.contains_key("patternProperties");
    let Some(names) = names.filter(|names| !has_others || matches!(names, Names::Any)) else { return Ok(()) };
    members.shift_remove("propertyNames");
    if matches!(names, Names::Any) {
        return Ok(());
    }
    let schema = members.insert("additionalProperties".into(), Json::Bool(false)).unwrap_or(Json::Bool(true));
    match names {
        Names::Any => {}
        Names::Listed(names) => {
            budget.copy(&schema, names.len())?;
            let properties: Map<String, Json> = names.into_iter().map(|name| (name, schema.clone())).collect();
            members.insert("properties".into(), properties.into());
        }
        Names::Matching(pattern) => drop(members.insert("patternProperties".into(), json!({ pattern: schema }))),
    }
    Ok(())
}

/// Returns true if "$ref" has no other keywords next to it than annotations.
fn is_alone(schema: &Json) -> bool {
    let mut others = schema.clone();
    others.as_object_mut().map(|members| members.shift_remove("$ref"));
    matches!(described(&others), Some(Names::Any))
}

/// Returns the names that the schema describes. Returns None if it has several keywords that
/// restrict them, or another keyword.
fn described(schema: &Json) -> Option<Names> {
    const ANNOTATIONS: [&str; 6] = ["$comment", "default", "description", "examples", "title", "type"];
    let members = match schema {
        Json::Bool(true) => return Some(Names::Any),
        Json::Object(members) if may_be(members, "string") => members,
        _ => return None,
    };
    let keywords: Vec<(&str, &Json)> = members.iter().map(|(keyword, value)| (&keyword[..], value)).collect();
    let keywords: Vec<(&str, &Json)> = keywords.into_iter().filter(|(keyword, _)| !ANNOTATIONS.contains(keyword)).collect();
    match keywords[..] {
        [] => Some(Names::Any),
        [("pattern", pattern)] => Some(Names::Matching(pattern.as_str()?.into())),
        [("const", name)] => Some(Names::Listed(vec![name.as_str()?.into()])),
        [("enum", names)] => Some(Names::Listed(names.as_array()?.iter().filter_map(Json::as_str).map(String::from).collect())),
        [("minLength", min)] => Some(Names::Matching(format!("^[\\s\\S]{{{},}}$", min.as_u64()?))),
        [("maxLength", max)] => Some(Names::Matching(format!("^[\\s\\S]{{0,{}}}$", max.as_u64()?))),
        [("minLength", min), ("maxLength", max)] | [("maxLength", max), ("minLength", min)] => {
            let (min, max) = (min.as_u64()?, max.as_u64()?);
            (min <= max).then(|| Names::Matching(format!("^[\\s\\S]{{{min},{max}}}$")))
        }
        _ => None,
    }
}
