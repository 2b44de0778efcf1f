//! bindings/abi.json describes src/ffi: constants, structs, callbacks and functions. `make header`
//! writes it, and the wrappers' tables are generated from it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use syn::{Expr, ExprLit, Fields, FnArg, Item, Lit, Meta, ReturnType, Type};

use super::convert::Versioned;

/// The files of src/ffi in the order of the header.
pub const FILES: [&str; 16] = [
    "library",
    "convert",
    "error",
    "budget",
    "kv_store",
    "communicator",
    "options",
    "reports",
    "sampling",
    "request",
    "engine",
    "outputs",
    "sequences",
    "text",
    "response_parser",
    "kv_events",
];

/// The first release. Names that its header lacks are newer.
const FIRST_RELEASE: &str = "0.3.0";
/// The release in which newer names appear.
const NEXT_RELEASE: &str = "0.4.0";

#[test]
fn the_committed_description_matches_the_source() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = written(&describe(root), "") + "\n";
    let path = root.join("bindings/abi.json");
    if std::env::var_os("PLLM_WRITE_HEADER").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == text, "bindings/abi.json is stale: run `make header` and commit it");
}

/// Returns JSON with one line for each constant, field and argument.
fn written(value: &Value, indent: &str) -> String {
    let inner = format!("{indent} ");
    let list =
        |open: &str, items: Vec<String>, close: &str| format!("{open}\n{inner}{}\n{indent}{close}", items.join(&format!(",\n{inner}")));
    let has_objects = |value: &Value| value.as_array().is_some_and(|items| items.iter().any(Value::is_object));
    match value {
        Value::Array(items) if has_objects(value) => list("[", items.iter().map(|item| written(item, &inner)).collect(), "]"),
        Value::Object(fields) if fields.values().any(has_objects) => {
            list("{", fields.iter().map(|(name, value)| format!("\"{name}\": {}", written(value, &inner))).collect(), "}")
        }
        _ => value.to_string(),
    }
}

pub fn source(root: &Path, name: &str) -> PathBuf {
    root.join("src/ffi").join(format!("{name}.rs"))
}

fn describe(root: &Path) -> Value {
    let first = std::fs::read_to_string(root.join(format!("tests/ffi/abi/{FIRST_RELEASE}/pagedllm.h"))).unwrap();
    let first = Release::parse(&first);
    let items: Vec<Item> =
        FILES.iter().flat_map(|name| syn::parse_file(&std::fs::read_to_string(source(root, name)).unwrap()).unwrap().items).collect();
    let constants = constants(&items, &first);
    let structs = structs(&items, &constants, &first);
    json!({
        "about": "Generated from src/ffi by `make header`. Sizes and offsets are in bytes.",
        "constants": constants,
        "callbacks": callbacks(&items, &first),
        "structs": structs,
        "functions": functions(&items, &first),
    })
}

/// The names in the header of a release.
struct Release(BTreeSet<String>);

impl Release {
    fn parse(header: &str) -> Release {
        let mut names = BTreeSet::new();
        let code = header.lines().filter(|line| !line.trim_start().starts_with("//"));
        let mut fields = Vec::new();
        for line in code {
            let words: Vec<&str> = line.split(|c: char| !c.is_alphanumeric() && c != '_').filter(|word| !word.is_empty()).collect();
            match line {
                _ if line.starts_with("typedef struct {") => fields.clear(),
                _ if line.starts_with("} ") => names.extend(fields.drain(..).map(|field| format!("{}.{field}", words[0]))),
                _ if line.starts_with("  ") => fields.extend(words.last().map(|word| word.to_string())),
                _ => {}
            }
            names.extend(words.into_iter().filter(|word| word.to_lowercase().starts_with("pllm_")).map(String::from));
        }
        Release(names)
    }

    /// Returns the release in which a name, or `struct.field`, appeared.
    fn since(&self, name: &str) -> &'static str {
        if self.0.contains(name) { FIRST_RELEASE } else { NEXT_RELEASE }
    }
}

/// Returns the text of the doc comments.
fn doc(attributes: &[syn::Attribute]) -> String {
    let line = |attribute: &syn::Attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
            Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    };
    let lines: Vec<String> = attributes.iter().filter_map(line).map(|line| line.strip_prefix(' ').unwrap_or(&line).to_string()).collect();
    // A paragraph is one line.
    let mut text = String::new();
    for line in lines {
        let starts = line.is_empty() || line.starts_with("- ");
        text += if text.is_empty() || text.ends_with('\n') && !starts {
            ""
        } else if starts {
            "\n"
        } else {
            " "
        };
        text += &line;
    }
    text
}

fn constants(items: &[Item], first: &Release) -> Vec<Value> {
    let found: Vec<_> = items
        .iter()
        .filter_map(|item| match item {
            Item::Const(item) if item.ident.to_string().starts_with("PLLM_") => Some(item),
            _ => None,
        })
        .collect();
    let sets = named_sets(items);
    found
        .iter()
        .map(|item| {
            let name = item.ident.to_string();
            let of_set = |set: &&String| type_name(&item.ty) != "u64" && name.starts_with(&format!("{set}_"));
            let set = sets.iter().filter(of_set).max_by_key(|set| set.len());
            let value = integer(&item.expr);
            json!({"name": name, "set": set, "type": type_name(&item.ty), "value": value, "doc": doc(&item.attrs), "since": first.since(&name)})
        })
        .collect()
}

/// Returns the sets of constants that the comments of fields mention: `PLLM_SET` for `PLLM_SET_*`.
fn named_sets(items: &[Item]) -> BTreeSet<String> {
    let records = items.iter().filter_map(|item| match item {
        Item::Struct(item) => Some(item),
        _ => None,
    });
    let texts: Vec<String> = records.flat_map(|item| item.fields.iter().map(|field| doc(&field.attrs))).collect();
    let words = texts.iter().flat_map(|text| text.split(|c: char| !c.is_alphanumeric() && c != '_' && c != '*'));
    words.filter_map(|word| word.strip_suffix("_*")).filter(|set| set.starts_with("PLLM_")).map(String::from).collect()
}

fn integer(expr: &Expr) -> Value {
    match expr {
        Expr::Lit(ExprLit { lit: Lit::Int(value), .. }) => json!(value.base10_parse::<u64>().unwrap()),
        Expr::Path(path) if path.path.segments.last().is_some_and(|last| last.ident == "MAX") => {
            json!(if path.path.segments[0].ident == "u32" { u32::MAX as u64 } else { u64::MAX })
        }
        other => panic!("{other:?} is not a value of a constant"),
    }
}

/// Returns the C type: u32, i64, f64, char, void, a name, or a pointer to one of them.
fn type_name(ty: &Type) -> String {
    match ty {
        Type::Ptr(pointer) => format!("{}{} *", if pointer.const_token.is_some() { "const " } else { "" }, type_name(&pointer.elem)),
        Type::Path(path) => match &path.path.segments.last().unwrap().ident.to_string()[..] {
            "c_char" => "char".into(),
            "c_void" => "void".into(),
            name => name.into(),
        },
        other => panic!("{other:?} has no C type"),
    }
}

fn size(type_name: &str) -> u64 {
    match type_name {
        "u32" | "i32" | "f32" => 4,
        "u64" | "i64" | "f64" => 8,
        _ if type_name.ends_with('*') || type_name.starts_with("pllm_") => 8, // pointers and functions
        _ => panic!("the size of {type_name} is not known"),
    }
}

fn functions(items: &[Item], first: &Release) -> Vec<Value> {
    let functions = items.iter().filter_map(|item| match item {
        Item::Fn(item) if item.sig.ident.to_string().starts_with("pllm_") => Some(item),
        _ => None,
    });
    functions
        .map(|item| {
            let name = item.sig.ident.to_string();
            let arguments = item.sig.inputs.iter().map(|argument| match argument {
                FnArg::Typed(argument) => match &*argument.pat {
                    syn::Pat::Ident(pattern) => json!({"name": pattern.ident.to_string(), "type": type_name(&argument.ty)}),
                    other => panic!("{name}: {other:?}"),
                },
                FnArg::Receiver(_) => panic!("{name} has a receiver"),
            });
            let returns = match &item.sig.output {
                ReturnType::Default => "void".into(),
                ReturnType::Type(_, ty) => type_name(ty),
            };
            json!({"name": name, "arguments": arguments.collect::<Vec<_>>(), "returns": returns, "doc": doc(&item.attrs), "since": first.since(&name)})
        })
        .collect()
}

fn callbacks(items: &[Item], first: &Release) -> Vec<Value> {
    let aliases = items.iter().filter_map(|item| match item {
        Item::Type(item) if item.ident.to_string().starts_with("pllm_") => Some(item),
        _ => None,
    });
    aliases
        .map(|item| {
            let name = item.ident.to_string();
            let Type::Path(option) = &*item.ty else { panic!("{name} is not an option") };
            let syn::PathArguments::AngleBracketed(inner) = &option.path.segments.last().unwrap().arguments else { panic!("{name}") };
            let Some(syn::GenericArgument::Type(Type::BareFn(function))) = inner.args.first() else { panic!("{name} is not a function") };
            let arguments = function.inputs.iter().map(|argument| {
                json!({"name": argument.name.as_ref().map(|(name, _)| name.to_string()), "type": type_name(&argument.ty)})
            });
            let returns = match &function.output {
                ReturnType::Default => "void".into(),
                ReturnType::Type(_, ty) => type_name(ty),
            };
            json!({"name": name, "arguments": arguments.collect::<Vec<_>>(), "returns": returns, "doc": doc(&item.attrs), "since": first.since(&name)})
        })
        .collect()
}

fn structs(items: &[Item], constants: &[Value], first: &Release) -> Vec<Value> {
    let records = items.iter().filter_map(|item| match item {
        Item::Struct(item) if item.ident.to_string().starts_with("pllm_") => Some(item),
        _ => None,
    });
    let initialized: BTreeSet<String> = items
        .iter()
        .filter_map(|item| match item {
            Item::Fn(item) => item.sig.ident.to_string().strip_suffix("_init").map(String::from),
            _ => None,
        })
        .collect();
    let is_open = |item: &&syn::ItemStruct| item.attrs.iter().any(|attribute| attribute.path().is_ident("repr"));
    records
        .map(|item| {
            let name = item.ident.to_string();
            if !is_open(&item) {
                return json!({"name": name, "opaque": true, "doc": doc(&item.attrs), "since": first.since(&name)});
            }
            let Fields::Named(named) = &item.fields else { panic!("{name} has no named fields") };
            let values = defaults(&name);
            assert_eq!(values.is_some(), initialized.contains(&name), "defaults() lacks {name}, or it has no _init function");
            let mut offset = 0;
            let types: Vec<(String, String)> =
                named.named.iter().map(|field| (field.ident.as_ref().unwrap().to_string(), type_name(&field.ty))).collect();
            let mut fields = Vec::new();
            for (field, (field_name, ty)) in named.named.iter().zip(&types) {
                let bytes = size(ty);
                assert!(offset % bytes == 0, "{name}.{field_name} needs padding");
                let text = doc(&field.attrs);
                let mut entry = Map::new();
                entry.insert("name".into(), json!(field_name));
                entry.insert("type".into(), json!(ty));
                entry.insert("offset".into(), json!(offset));
                entry.extend(role(field_name, &types, &text, constants));
                if let Some(values) = &values {
                    entry.insert("default".into(), number(ty, &values[offset as usize..][..bytes as usize]));
                }
                if entry["role"] != "choice" {
                    entry.extend(unit(field_name, &text).map(|unit| ("unit".into(), json!(unit))));
                }
                entry.extend(range(&text).map(|range| ("range".into(), json!(range))));
                if text.contains("Range above ") {
                    entry.insert("excludes_low".into(), json!(true));
                }
                entry.insert("doc".into(), json!(text));
                entry.insert("since".into(), json!(first.since(&format!("{name}.{field_name}"))));
                fields.push(Value::Object(entry));
                offset += bytes;
            }
            json!({"name": name, "doc": doc(&item.attrs), "size": offset, "init": values.is_some(), "since": first.since(&name), "fields": fields})
        })
        .collect()
}

/// Returns the unit of a field: the one that its name ends with, or what a comment such as `Maximum
/// number of prompt tokens` counts.
fn unit(name: &str, text: &str) -> Option<&'static str> {
    let units = [("_bytes", "bytes"), ("_ms", "milliseconds"), ("_seconds", "seconds"), ("_tokens", "tokens"), ("_model_len", "tokens")];
    let counted = || {
        let count = text.strip_prefix("Maximum number of ").or(text.strip_prefix("Number of "))?;
        let words = count.split([' ', '.', ',', ':', ';']).take(3);
        words.filter_map(|word| ["tokens", "blocks", "bytes"].into_iter().find(|unit| *unit == word)).next()
    };
    units.into_iter().find(|(end, _)| name.ends_with(end)).map(|(_, unit)| unit).or_else(counted)
}

/// Returns the range that a comment states as `A to B` or `At most B`, of the value or of the
/// number of elements.
fn range(text: &str) -> Option<[f64; 2]> {
    let words: Vec<&str> = text.split_whitespace().map(|word| word.trim_end_matches([',', '.', ':', ';'])).collect();
    let number = |word: &str| word.replace(',', "").parse::<f64>().ok();
    words.windows(3).find_map(|words| match words {
        [low, "to", high] => Some([number(low)?, number(high)?]),
        ["At", "most", high] => Some([0.0, number(high)?]),
        _ => None,
    })
}

/// The library accepts both ends of each range of the sampling parameters, and nothing beyond them.
#[test]
fn the_described_ranges_are_those_that_the_library_checks() {
    let description = describe(Path::new(env!("CARGO_MANIFEST_DIR")));
    const WITHOUT_RANGE: [&str; 8] =
        ["seed", "top_k", "max_tokens", "min_tokens", "prompt_logprobs_start", "allowed_length", "penalty_last_n", "groups"];
    for record in description["structs"].as_array().unwrap() {
        let name = record["name"].as_str().unwrap();
        if !["pllm_sampling", "pllm_dry", "pllm_beam"].contains(&name) {
            continue;
        }
        for field in record["fields"].as_array().unwrap().iter().filter(|field| field["role"] == "number") {
            let field_name = field["name"].as_str().unwrap();
            assert_eq!(field["range"].is_null(), WITHOUT_RANGE.contains(&field_name), "{name}.{field_name}");
            if field["range"].is_null() {
                continue;
            }
            let [low, high] = [0, 1].map(|end| field["range"][end].as_f64().unwrap());
            let step = if field["type"] == "f32" { (high - low) * 1e-5 } else { 1.0 };
            let excludes_low = field["excludes_low"] == true;
            for (value, accepted) in [(low, !excludes_low), (high, true), (low - step, false), (high + step, false)] {
                if value >= 0.0 || field["type"] == "f32" {
                    let result = check_field(name, field, value);
                    assert_eq!(result.is_ok(), accepted, "{name}.{} = {value}: {result:?}", field["name"]);
                }
            }
        }
    }
}

/// Checks the parameters of a request with one changed field.
fn check_field(name: &str, field: &Value, value: f64) -> crate::error::Result<()> {
    use super::*;
    use crate::types::options::SamplingParams;
    fn with<T: Versioned>(mut value: T, field: &Value, number: f64) -> T {
        let at = (&raw mut value).cast::<u8>().wrapping_add(field["offset"].as_u64().unwrap() as usize);
        // SAFETY: the field has this type and offset.
        unsafe {
            match field["type"].as_str().unwrap() {
                "f32" => at.cast::<f32>().write(number as f32),
                "u32" => at.cast::<u32>().write(number as u32),
                other => panic!("a number of type {other}"),
            }
        }
        value
    }
    if name == "pllm_beam" {
        let groups = if field["name"] == "diversity_penalty" && value != 0.0 { 2 } else { 1 };
        let beam = with(pllm_beam { groups, ..pllm_beam::defaults() }, field, value);
        // SAFETY: the struct outlives the call.
        return unsafe { pllm_beam::to_beam(&beam) }?.expect("it is not null").validate(1);
    }
    let dry = if name == "pllm_dry" { with(pllm_dry::defaults(), field, value) } else { pllm_dry::defaults() };
    let mut sampling =
        pllm_sampling { flags: PLLM_SAMPLING_LOGPROBS | PLLM_SAMPLING_PROMPT_LOGPROBS, dry: &dry, ..pllm_sampling::defaults() };
    if name == "pllm_sampling" {
        sampling.mirostat_tau = if field["name"] == "mirostat_eta" { 5.0 } else { 0.0 };
        sampling = with(sampling, field, value);
    }
    // SAFETY: the structs outlive the call.
    let params: SamplingParams = unsafe { pllm_sampling::to_params(&sampling) }?;
    params.validate(1000)
}

/// Returns what a field is for: a number, a text with its length, a value of a set of constants...
fn role(name: &str, fields: &[(String, String)], text: &str, constants: &[Value]) -> Map<String, Value> {
    let ty = &fields.iter().find(|field| field.0 == name).unwrap().1;
    let has = |other: &str| fields.iter().any(|field| field.0 == other);
    let singular = name.strip_suffix('s').unwrap_or(name);
    let (role, more) = match &ty[..] {
        _ if name == "struct_size" => ("struct_size", json!({})),
        _ if name.starts_with("reserved") => ("reserved", json!({})),
        "const const char * *" => ("texts", json!({"lens": format!("{singular}_lens"), "count": format!("{singular}_count")})),
        "const u64 *" if name.ends_with("_lens") => ("length", json!({})),
        "u64" if name.ends_with("_count") => ("length", json!({})),
        "u64" if name.strip_suffix("_len").is_some_and(has) => ("length", json!({})),
        "const char *" => ("text", json!({"len": format!("{name}_len")})),
        "*mut void" | "mut void *" | "void *" => ("user_data", json!({})),
        _ if ty.contains('*') && has(&format!("{name}_len")) => ("array", json!({"len": format!("{name}_len")})),
        _ if ty.contains('*') => ("pointer", json!({})),
        _ if ty.starts_with("pllm_") => ("callback", json!({})),
        _ => match set(text, constants) {
            Some(set) if text.contains(&format!("{set}_* flags")) => ("flags", json!({"set": set})),
            Some(set) => ("choice", json!({"set": set})),
            None => ("number", json!({})),
        },
    };
    let mut entry = Map::from_iter([("role".to_string(), json!(role))]);
    entry.extend(more.as_object().unwrap().clone());
    entry
}

/// Returns the set of constants that a field takes: its first sentence ends with `PLLM_SET_*`.
fn set(text: &str, constants: &[Value]) -> Option<String> {
    let before = &text[..text.find("_*")?];
    let start = before.rfind("PLLM_")?;
    let begins = before[..start].is_empty() || before[..start].ends_with(": ");
    let set = before[start..].to_string();
    (begins && !before[..start].contains(". ")).then(|| {
        assert!(constants.iter().any(|constant| constant["set"] == *set), "{set} is not a set of constants");
        set
    })
}

/// Returns the bytes of the struct that the `_init` function writes.
fn defaults(name: &str) -> Option<Vec<u8>> {
    fn bytes<T: Versioned>() -> (&'static str, Vec<u8>) {
        let value = T::defaults();
        // SAFETY: a versioned struct has no padding.
        let bytes = unsafe { std::slice::from_raw_parts((&raw const value).cast::<u8>(), size_of::<T>()) };
        (T::NAME, bytes.to_vec())
    }
    use super::*;
    let all = [
        bytes::<pllm_kv_store>(),
        bytes::<pllm_communicator>(),
        bytes::<pllm_engine_options>(),
        bytes::<pllm_sampling>(),
        bytes::<pllm_dry>(),
        bytes::<pllm_beam>(),
        bytes::<pllm_request>(),
        bytes::<pllm_fork>(),
        bytes::<pllm_resume>(),
        bytes::<pllm_pin>(),
    ];
    all.into_iter().find(|(known, _)| *known == name).map(|(_, bytes)| bytes)
}

fn number(type_name: &str, bytes: &[u8]) -> Value {
    match type_name {
        "u32" => json!(u32::from_ne_bytes(bytes.try_into().unwrap())),
        "i32" => json!(i32::from_ne_bytes(bytes.try_into().unwrap())),
        // The shortest decimal of the number, not that of the next f64.
        "f32" => json!(f32::from_ne_bytes(bytes.try_into().unwrap()).to_string().parse::<f64>().unwrap()),
        "u64" => json!(u64::from_ne_bytes(bytes.try_into().unwrap())),
        "i64" => json!(i64::from_ne_bytes(bytes.try_into().unwrap())),
        "f64" => json!(f64::from_ne_bytes(bytes.try_into().unwrap())),
        _ => {
            assert!(bytes.iter().all(|&byte| byte == 0), "the default of a pointer is NULL");
            Value::Null
        }
    }
}
