//! The keyword "format".

use serde_json::{Map, Value as Json};

/// Formats whose texts llguidance generates.
const GENERATED: [&str; 10] = ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// The other formats of JSON Schema.
const KNOWN: [&str; 9] = [
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "uri-reference",
    "uri-template",
];

/// Removes a format that cannot be generated, because it is an annotation. If the schema is strict,
/// such a format of JSON Schema is an error.
pub fn remove_annotation(members: &mut Map<String, Json>, strict: bool) -> Result<(), String> {
    let Some(Json::String(format)) = members.get("format") else { return Ok(()) };
    if GENERATED.contains(&&format[..]) {
        return Ok(());
    }
    if strict && KNOWN.contains(&&format[..]) && crate::generation::grammar::schema::may_be(members, "string") {
        return Err(format!("the format \"{format}\" cannot be generated; leave it out, or leave strict_formats in x-guidance out"));
    }
    members.shift_remove("format");
    Ok(())
}
