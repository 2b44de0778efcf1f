use serde_json::{Map, Value as Json, json};

use crate::generation::grammar::tests::{END, byte_grammars, text_of, writes};
use crate::generation::grammar::{Constraint, Grammars};
use crate::generation::sampler::{Lane, uniform};
use crate::types::options::Grammar;

fn goldens() -> Json {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/schemas/schemas.json");
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

fn compile(grammars: &Grammars, schema: &Json) -> Constraint {
    grammars.compile(&Grammar::JsonSchema(schema.to_string())).unwrap_or_else(|error| panic!("{schema}: {error}"))
}

/// Whether the constraint allows the value with its members in some order.
fn is_allowed(constraint: &Constraint, value: &Json) -> bool {
    let Json::Object(members) = value else { return writes(constraint, &value.to_string()) };
    let reversed: Map<String, Json> = members.iter().rev().map(|(name, value)| (name.clone(), value.clone())).collect();
    writes(constraint, &value.to_string()) || writes(constraint, &Json::Object(reversed).to_string())
}

/// Writes random allowed tokens, preferably tokens that end strings and objects. Returns `None` if
/// the text has not ended after `limit` tokens.
fn random_text(constraint: &mut Constraint, seed: u64, limit: u64) -> Result<Option<String>, String> {
    let mut tokens = Vec::new();
    for i in 0..limit {
        let mask = constraint.mask().map_err(|error| format!("{error} after {:?}", text_of(&tokens)))?.to_vec();
        let all: Vec<u32> = (0..mask.len() as u32 * 32).filter(|token| mask[*token as usize / 32] >> (token % 32) & 1 == 1).collect();
        let short: Vec<u32> =
            all.iter().copied().filter(|token| b"\"{},:a".contains(&(*token as u8)) && *token < 256 || *token == END).collect();
        let choices = if !short.is_empty() && uniform(seed, i, Lane::Token) < 0.7 { short } else { all };
        let token = choices[(uniform(seed + 1000, i, Lane::Token) * choices.len() as f64) as usize];
        tokens.push(token);
        if token == END {
            return Ok(Some(text_of(&tokens)));
        }
        constraint.advance(token).map_err(|error| error.to_string())?;
    }
    Ok(None)
}

#[test]
fn schemas_allow_the_values_that_jsonschema_accepts() {
    let grammars = byte_grammars();
    let goldens = goldens();
    let mut wrong = Vec::new();
    for case in ["names", "patterns"].iter().flat_map(|kind| goldens[kind].as_array().unwrap()) {
        let constraint = compile(&grammars, &case["schema"]);
        for (kind, expected) in [("valid", true), ("invalid", false)] {
            let values = case[kind].as_array().unwrap();
            let differing = values.iter().filter(|value| is_allowed(&constraint, value) != expected);
            wrong.extend(differing.map(|value| format!("{} with {value}, which is {kind}", case["schema"])));
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn patterns_of_declared_names_never_run_out_of_tokens() {
    let grammars = byte_grammars();
    let goldens = goldens();
    let schemas = goldens["names"].as_array().unwrap();
    assert!(schemas.len() >= 20);
    let mut ended = 0;
    for schema in schemas.iter().map(|case| &case["schema"]) {
        let validator = jsonschema::options().build(schema).unwrap();
        for seed in 0..40 {
            let text = random_text(&mut compile(&grammars, schema), seed, 80).unwrap_or_else(|error| panic!("{schema}: {error}"));
            let Some(text) = text else { continue };
            let value: Json = serde_json::from_str(&text).unwrap();
            assert!(validator.is_valid(&value), "{schema} does not describe {text}");
            ended += 1;
        }
    }
    assert!(ended > 400, "only {ended} ended");
}

/// Compares the grammar of each schema with the results of jsonschema for the values, and for
/// random generated texts.
fn assert_same_as_jsonschema(schemas: &[Json], values: &[Json]) {
    let grammars = byte_grammars();
    let mut ended = 0;
    for schema in schemas {
        let validator = jsonschema::options().build(schema).unwrap();
        let constraint = compile(&grammars, schema);
        for value in values {
            assert_eq!(is_allowed(&constraint, value), validator.is_valid(value), "{schema} with {value}");
        }
        for seed in 0..40 {
            let text = random_text(&mut compile(&grammars, schema), seed, 80).unwrap_or_else(|error| panic!("{schema}: {error}"));
            let Some(text) = text else { continue };
            assert!(validator.is_valid(&serde_json::from_str(&text).unwrap()), "{schema} does not describe {text}");
            ended += 1;
        }
    }
    assert!(ended > schemas.len() * 10, "only {ended} ended");
}

#[test]
fn a_reference_to_the_schema_of_a_property_keeps_its_meaning() {
    let object = |members: Json| {
        let mut members = members.as_object().unwrap().clone();
        members.insert("type".into(), "object".into());
        Json::Object(members)
    };
    let schemas = [
        // A pattern that stays a pattern, with a reference from outside and one from within.
        object(json!({"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {"$ref": "#/patternProperties/%5Ea"}})),
        object(json!({"patternProperties": {"^a/~b?": {"type": "integer"}}, "additionalProperties": false, "required": ["b"],
            "properties": {"b": {"$ref": "#/patternProperties/%5Ea~1~0b%3F"}}})),
        object(
            json!({"patternProperties": {"^a": {"type": ["object", "integer"], "patternProperties": {"^b": {"$ref": "#/patternProperties/%5Ea"}},
            "additionalProperties": false}}, "additionalProperties": false}),
        ),
        object(json!({"patternProperties": {"^a": {"properties": {"b": {"type": "null"}}}}, "additionalProperties": {"anyOf": [
            {"$ref": "#/patternProperties/%5Ea/properties/b"}, {"type": "integer"}]}})),
        // A pattern that becomes a declared property.
        object(
            json!({"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/patternProperties/%5Ea%24"}, "c": {"$ref": "#/properties/a"}},
            "patternProperties": {"^a$": {"minimum": 3}}, "additionalProperties": false}),
        ),
        // Two patterns with the same translation.
        object(json!({"patternProperties": {"^[a]": {"type": "integer"}, "^a": {"minimum": 3}}, "additionalProperties": {"anyOf": [
            {"$ref": "#/patternProperties/%5Ea"}, {"$ref": "#/patternProperties/%5E%5Ba%5D"}]}})),
        // "additionalProperties" becomes false.
        object(json!({"patternProperties": {"": {"type": "integer"}}, "additionalProperties": {"type": "null"},
            "properties": {"b": {"items": {"$ref": "#/additionalProperties"}, "type": ["array", "integer"]}}})),
        // Definitions of the same name.
        object(json!({"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": {"$ref": "#/patternProperties/%5Ea"},
            "$defs": {"property0": {"type": "null"}}, "properties": {"b": {"$ref": "#/$defs/property0"}}})),
    ];
    let mut values =
        vec![json!({}), json!({"a": {"b": {"b": 1}}}), json!({"a": {"b": "x"}}), json!({"a": {}, "b": null}), json!({"a": {"b": 1}})];
    for value in [json!(1), json!(5), json!(null), json!("x"), json!([null]), json!([1])] {
        values.extend(["a", "a/~b", "ab", "b", "c"].map(|name| json!({name: value})));
        values.push(json!({"a": 7, "b": value}));
    }
    assert_same_as_jsonschema(&schemas, &values);
}

#[test]
fn names_are_bounded_by_one_keyword() {
    let object = |names: Json| json!({"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}});
    let mut schemas = [
        json!({"enum": ["a", "b"], "type": "string"}),
        json!({"const": "a", "title": "The name"}),
        json!({"pattern": "^a"}),
        json!({"minLength": 2, "type": "string"}),
        json!({"maxLength": 1}),
        json!({"minLength": 1, "maxLength": 2}),
        json!({"type": "string"}),
        json!(true),
    ]
    .map(object)
    .to_vec();
    let mut by_reference = object(json!({"$ref": "#/$defs/Name"}));
    by_reference["$defs"] = json!({"Name": {"enum": ["a", "é"], "title": "Name", "type": "string"}});
    schemas.push(by_reference);
    schemas.push(json!({"type": "object", "propertyNames": {"pattern": "^a"}}));
    schemas.push(json!({"type": "object", "propertyNames": {"enum": ["a", "b", 3]}, "required": ["b"]}));
    schemas.push(json!({"type": "object", "propertyNames": {"type": "string"}, "properties": {"a": {"type": "null"}}}));
    let names = ["", "a", "b", "ab", "abc", "é", "éé", "c"];
    let values: Vec<Json> = names.iter().flat_map(|name| [json!({*name: 1}), json!({*name: "x"}), json!({*name: 2, "b": 1})]).collect();
    assert_same_as_jsonschema(&schemas, &values);
}

#[test]
fn keywords_that_cannot_be_generated_are_refused_or_ignored() {
    let grammars = byte_grammars();
    let cases = [
        ("uniqueItems", json!(true)),
        ("propertyNames", json!({"pattern": "a", "minLength": 2})),
        ("propertyNames", json!({"$ref": "#/$defs/n", "maxLength": 3})),
        ("not", json!({})),
    ];
    for (keyword, value) in cases {
        let schema = |lenient: bool| json!({keyword: value, "items": {"type": "integer"}, "$defs": {"n": {"pattern": "a"}}, "x-guidance": {"lenient": lenient}});
        let error = grammars.compile(&Grammar::JsonSchema(schema(false).to_string())).err().unwrap();
        assert!(error.message().contains(&format!("Unimplemented keys: [\"{keyword}\"]")), "{error}");
        assert!(writes(&compile(&grammars, &schema(true)), "[1,1]"));
        assert!(!writes(&compile(&grammars, &schema(true)), "[true]"));
    }
}

#[test]
fn patterns_of_merged_objects_never_run_out_of_tokens() {
    let integer = json!({"type": "integer"});
    let object = |name: &str, schema: Json| json!({"type": "object", "patternProperties": {name: schema}});
    let with = |mut object: Json, keyword: &str, value: Json| {
        object[keyword] = value;
        object
    };
    let x = || json!({"x": {"type": ["integer", "string"]}});
    let (a, b, others, not_a) = ("^a", "^b", r"^[^abx]|^x[\s\S]|^$", r"^[^ax]|^x[\s\S]|^$");
    let first = |schema: &Json| with(object(a, schema.clone()), "properties", x());
    let text = json!({"type": "string"});
    let schemas = [
        json!({"allOf": [first(&json!(false)), object(not_a, json!(false))]}),
        json!({"allOf": [object(not_a, json!(false)), first(&json!(false))]}),
        json!({"allOf": [first(&integer), object(not_a, json!(false))]}),
        json!({"allOf": [first(&json!(false)), object(b, json!(false)), object(others, json!(false))]}),
        json!({"allOf": [first(&json!(false)), object(b, integer.clone()), object(others, json!(false)), {"required": ["x"]}]}),
        // Types that exclude each other.
        json!({"allOf": [
            with(first(&integer), "additionalProperties", text.clone()),
            with(object(not_a, json!({"type": "boolean"})), "additionalProperties", text.clone())]}),
        with(with(object(not_a, json!(false)), "$ref", json!("#/$defs/o")), "$defs", json!({"o": first(&json!(false))})),
        with(first(&json!(false)), "anyOf", json!([object(not_a, json!(false)), {"required": ["x"]}])),
        // A name that becomes a property in one schema is a pattern in another one.
        json!({"allOf": [
            {"type": "object", "patternProperties": {"^id$": {"minimum": 3}, "^[a-z]+$": integer}},
            {"type": "object", "patternProperties": {"^id$": {"maximum": 5}}, "additionalProperties": false}]}),
        // Objects under one name.
        json!({"type": "object", "properties": {"x": first(&json!(false))}, "patternProperties": {"^x$": object(not_a, json!(false))},
            "additionalProperties": false}),
        // "additionalProperties" far from "patternProperties".
        json!({"type": "object", "patternProperties": {a: true}, "anyOf": [{"required": ["x"]}, {"required": ["a"]}], "properties": x(),
            "additionalProperties": false}),
        // Objects that are not merged.
        json!({"anyOf": [first(&json!(false)), object(not_a, json!(false)), {"type": "integer"}]}),
    ];
    let mut values = vec![json!({}), json!(3), json!({"x": {"x": 1}}), json!({"x": {"a": 1}}), json!({"x": {"b": 1}}), json!({"id": 4})];
    for value in [json!(1), json!("t"), json!(true)] {
        values.extend(["a", "ab", "b", "c", "", "x", "xx", "id"].map(|name| json!({name: value})));
        values.extend(["a", "b", "c", "xx"].map(|name| json!({"x": 1, name: value})));
    }
    assert_same_as_jsonschema(&schemas, &values);
}

/// `count` members of "patternProperties" with disjoint names.
fn disjoint_patterns(prefix: &str, count: usize) -> Json {
    Json::Object((0..count).map(|i| (format!("^{prefix}{i}_"), json!({"type": "integer"}))).collect())
}

fn distinct_names(count: usize, length: usize) -> Json {
    Json::Object((0..count).map(|i| (format!("{i:0length$}"), json!({"type": "integer"}))).collect())
}

#[test]
fn the_work_for_pattern_properties_is_bounded() {
    let several = |count: usize| -> Vec<Json> {
        (0..count).map(|i| json!({"type": "object", "patternProperties": disjoint_patterns(&format!("x{i}"), 10)})).collect()
    };
    let objects = |count: usize| vec![json!({"type": "object"}); count];
    let recursive = json!({"type": "object", "patternProperties": disjoint_patterns("x", 8), "properties": {"a": {"$ref": "#/$defs/t"}}});
    let hard: Map<String, Json> = (0..30).map(|i| (format!("^([ab]*a[ab]{{{}}}|{i})$", 100 + i), json!({}))).collect();
    let texts: Map<String, Json> =
        (0..90u64).map(|i| ((0..60).map(|j| if uniform(i, j, Lane::Token) < 0.5 { 'a' } else { 'b' }).collect(), json!({}))).collect();
    let copied = json!({"enum": vec![1; 1000]});
    let cases = [
        (json!({"patternProperties": disjoint_patterns("x", 65)}), "(65, limit 64)"),
        (json!({"patternProperties": disjoint_patterns("x", 3000), "properties": distinct_names(3000, 4)}), "(3000, limit 64)"),
        (json!({"anyOf": several(7)}), "(70, limit 64)"),
        (
            json!({"patternProperties": disjoint_patterns("x", 50), "properties": distinct_names(4001, 9)}),
            "(50 members, 40010 bytes of names, product 2000500, limit 1000000)",
        ),
        (json!({"anyOf": several(6), "$defs": {"a": {"properties": distinct_names(5000, 6)}}}), "(60 members, 35000 bytes of names"),
        (json!({"allOf": ([several(3), objects(100)].concat())}), "(30 patterns, 137 merged schemas, 59730 pairs, limit 20000)"),
        (json!({"allOf": [{"$ref": "#/$defs/t"}, {"required": ["a"]}], "$defs": {"t": recursive}}), "limit 20000"),
        (json!({"patternProperties": hard, "properties": texts}), "(limit 5000000 steps)"),
        (
            json!({"properties": distinct_names(10, 1), "patternProperties": {"^[0-9]$": {"enum": vec![1; 11_000]}}}),
            "(110020 values, 100000 left of 100000)",
        ),
        (
            json!({"properties": distinct_names(100, 2), "patternProperties": {"^[0-9]{2}$": {"title": "t".repeat(100_000)}}}),
            "(156400 values, 100000 left of 100000)",
        ),
        (
            json!({"propertyNames": {"enum": (0..101).map(|i| i.to_string()).collect::<Vec<_>>()}, "additionalProperties": copied}),
            "(101202 values, 100000 left of 100000)",
        ),
    ];
    let many = json!({"type": "object", "properties": distinct_names(3100, 4)});
    let cases = cases.into_iter().chain([(many, "(3100 in one, 4803450 pairs in all, limit 4500000)")]);
    let grammars = byte_grammars();
    for (schema, expected) in cases {
        let error = grammars.compile(&Grammar::JsonSchema(schema.to_string())).err().unwrap();
        assert!(error.message().contains(expected), "{error}, expected {expected}");
    }
    let patterns: Vec<Json> = (0..10).map(|i| json!({"pattern": format!("{}{i}", ".".repeat(8000))})).collect();
    let schema = json!({ "anyOf": patterns });
    let error = grammars.compile(&Grammar::JsonSchema(schema.to_string())).err();
    assert!(error.as_ref().is_some_and(|error| error.message().contains("too large together")), "{error:?}");
    let in_lark = format!("start: {}", "%json {\"patternProperties\": {\"^a\": {}, \"^b\": {}}}\n".repeat(33));
    let error = grammars.compile(&Grammar::Lark(in_lark)).err().unwrap();
    assert!(error.message().contains("line 33: too many members of \"patternProperties\" (66, limit 64)"), "{error}");
    let error = grammars.compile(&Grammar::Lark(format!("start: {}", format!("/{}/ ", ".".repeat(8000)).repeat(25)))).err().unwrap();
    assert!(error.message().contains("too large together"), "{error}");
    // The largest schemas within the bounds.
    let names = distinct_names(1000, 9);
    // Optional names would exceed the items of the first state.
    let required: Vec<&String> = names.as_object().unwrap().keys().collect();
    let largest = json!({"patternProperties": disjoint_patterns("x", 64), "properties": names, "required": required, "type": "object"});
    compile(&grammars, &largest);
    compile(&grammars, &json!({"allOf": ([several(1), objects(100)].concat())}));
}

#[test]
fn formats_that_are_not_generated_are_annotations() {
    let grammars = byte_grammars();
    for format in goldens()["formats"].as_array().unwrap() {
        compile(&grammars, &json!({"type": "string", "format": format}));
        compile(
            &grammars,
            &json!({"type": "string", "format": format, "minLength": 1, "x-guidance": {"strict_formats": format != "regex"}}),
        );
    }
    assert!(writes(&compile(&grammars, &json!({"type": "string", "format": "uuid4", "maxLength": 3})), "\"abc\""));
    assert!(!writes(&compile(&grammars, &json!({"type": "string", "format": "date"})), "\"abc\""));
}

#[test]
fn strict_formats_refuse_only_formats_of_json_schema_that_are_not_generated() {
    let grammars = byte_grammars();
    for format in ["json-pointer", "uri-template", "iri", "idn-email", "relative-json-pointer"] {
        let schema =
            |strict: bool| json!({"properties": {"a": {"type": "string", "format": format}}, "x-guidance": {"strict_formats": strict}});
        compile(&grammars, &schema(false));
        let error = grammars.compile(&Grammar::JsonSchema(schema(true).to_string())).err().unwrap();
        assert!(error.message().contains(&format!("the format \"{format}\" cannot be generated")), "{error}");
    }
    compile(&grammars, &json!({"type": "integer", "format": "regex", "x-guidance": {"strict_formats": true}}));
}

#[test]
fn a_declared_name_has_only_one_spelling() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "patternProperties": {"^b": {"type": "null"}}});
    let constraint = compile(&byte_grammars(), &schema);
    assert!(writes(&constraint, r#"{"a":1}"#) && writes(&constraint, r#"{"c":1}"#) && writes(&constraint, r#"{"\\u0061":1}"#));
    assert!(!writes(&constraint, r#"{"\u0061":"x"}"#) && !writes(&constraint, r#"{"\u0062":1}"#));
}

#[test]
fn control_characters_of_a_schema_can_be_written() {
    let grammars = byte_grammars();
    let constraint = compile(&grammars, &json!({"type": "object", "properties": {"a": {"const": "\u{1}\u{7f}"}}, "required": ["a"]}));
    assert!(writes(&constraint, "{\"a\":\"\\u0001\\u007f\"}"));
    let constraint = compile(
        &grammars,
        &json!({"properties": {"a": {"type": "string", "pattern": "^\\x01[^b]$"}}, "required": ["a"], "type": "object"}),
    );
    assert!(writes(&constraint, r#"{"a":"\u0001\\"}"#) && !writes(&constraint, r#"{"a":"\u0001b"}"#));
}

#[test]
fn schemas_under_unknown_keywords_are_prepared_if_referenced() {
    let schema = json!({"$ref": "#/components/schemas/a~1b%20c",
        "components": {"schemas": {"a/b c": {"type": "string", "format": "frob", "pattern": "^[&&]$"}}}});
    let constraint = compile(&byte_grammars(), &schema);
    assert!(writes(&constraint, "\"&\"") && !writes(&constraint, "\"a\""));
}

#[test]
fn an_error_shows_the_patterns_of_the_schema() {
    let schema = json!({"type": "object", "patternProperties": {"^a.*": {"type": "integer"}, "z$": {"type": "string"}}});
    let error = byte_grammars().compile(&Grammar::JsonSchema(schema.to_string())).err().unwrap();
    assert!(error.message().contains("/^a.*/ and /z$/ are not disjoint"), "{error}");
    let schema = json!({"type": "object", "properties": {"a": {"pattern": "^(?=b)"}}});
    let error = byte_grammars().compile(&Grammar::JsonSchema(schema.to_string())).err().unwrap();
    let expected =
        "\"pattern\": a lookahead (character 2 of the ECMA-262 regular expression /^(?=b)/); write the texts that match without it";
    assert!(error.message().contains(expected), "{error}");
}

#[test]
fn a_text_matches_if_its_decoded_value_does() {
    let grammars = byte_grammars();
    // Each pattern with JSON texts that match and JSON texts that do not.
    let cases: [(&str, &[&str], &[&str]); 7] = [
        ("^[^\"]+$", &[r#""a""#, r#""\\""#, r#""\n""#], &[r#""\"""#, r#""a\"""#]),
        ("^[^\\\\]+$", &[r#""\"""#, r#""\t""#], &[r#""\\""#, r#""a\\n""#]),
        ("^\"$", &[r#""\"""#], &[r#""""#, r#""\\""#]),
        ("^\\\\n$", &[r#""\\n""#], &[r#""\n""#]),
        ("^\\n$", &[r#""\n""#], &[r#""\\n""#, r#""n""#]),
        ("^.$", &[r#""\t""#, r#""\\""#, r#""\"""#, "\"\u{e9}\"", "\"\u{1f600}\""], &[r#""\n""#, r#""\r""#, "\"\u{2028}\""]),
        ("^[\\s\\S]$", &[r#""\n""#, r#""\\""#, r#""\"""#, "\"\u{2028}\""], &[r#""ab""#]),
    ];
    for (pattern, yes, no) in cases {
        let constraint = compile(&grammars, &json!({"type": "string", "pattern": pattern}));
        assert!(yes.iter().all(|text| writes(&constraint, text)), "{pattern}: {:?}", yes.iter().find(|text| !writes(&constraint, text)));
        assert!(!no.iter().any(|text| writes(&constraint, text)), "{pattern}: {:?}", no.iter().find(|text| writes(&constraint, text)));
    }
}
