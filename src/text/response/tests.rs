use std::collections::HashMap;

use serde_json::Value;

use super::{DeltaKind, Deltas, FORMATS, Format, MAX_HELD, ResponseParser, Settings};

#[derive(Debug, Default, PartialEq, Eq, Clone)]
struct Message {
    reasoning: String,
    content: String,
    calls: Vec<(String, String, String, bool)>,
}

fn add(message: &mut Message, deltas: &Deltas) {
    for delta in deltas.iter() {
        let call = delta.call as usize;
        match delta.kind {
            DeltaKind::Content => message.content.push_str(delta.text),
            DeltaKind::Reasoning => message.reasoning.push_str(delta.text),
            DeltaKind::ToolCall => {
                assert_eq!(call, message.calls.len());
                message.calls.push((delta.text.into(), delta.id.into(), String::new(), false));
            }
            DeltaKind::Arguments => message.calls[call].2.push_str(delta.text),
            DeltaKind::ToolCallEnd => message.calls[call].3 = true,
        }
    }
}

fn settings(open: bool) -> Settings {
    let typed = [("get_weather", &["days", "metric"][..]), ("search", &["filters", "tags", "limit"][..])];
    let typed = typed.into_iter().map(|(tool, keys)| (tool.to_string(), keys.iter().map(|key| key.to_string()).collect()));
    Settings { in_reasoning: open, typed: typed.collect::<HashMap<_, _>>(), ..Settings::default() }
}

fn parse(format: &'static Format, open: bool, pieces: &[&str]) -> Message {
    let (mut parser, mut deltas, mut message) = (ResponseParser::new(format, settings(open)), Deltas::default(), Message::default());
    for piece in pieces {
        deltas.clear();
        parser.feed(piece, &mut deltas);
        add(&mut message, &deltas);
    }
    deltas.clear();
    parser.finish(&mut deltas);
    add(&mut message, &deltas);
    message
}

fn table() -> Vec<Value> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tool_calls/cases.json");
    let table: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    table["cases"].as_array().unwrap().clone()
}

fn format_of(case: &Value) -> &'static Format {
    let family = case["family"].as_str().unwrap();
    let name = family.strip_suffix("_reasoning").or(family.strip_suffix("_thinking")).unwrap_or(family);
    Format::find(name).unwrap_or_else(|| panic!("{family}"))
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.into()))
}

/// What a case of the table is compared by. White space at the ends of reasoning and content is a
/// part of the format.
fn summary(reasoning: &str, content: &str, calls: Vec<(String, Value)>) -> Value {
    let calls: Vec<Value> = calls.into_iter().map(|(name, arguments)| serde_json::json!([name, arguments])).collect();
    serde_json::json!({"reasoning": reasoning.trim(), "content": content.trim(), "calls": calls})
}

fn of_vllm(parse: &Value) -> Value {
    let text = |key: &str| parse[key].as_str().unwrap_or_default().to_string();
    let calls = parse["calls"].as_array().into_iter().flatten();
    let calls = calls.map(|call| (call["name"].as_str().unwrap().into(), json(call["arguments"].as_str().unwrap())));
    summary(&text("reasoning"), &text("content"), calls.collect())
}

#[test]
fn outputs_are_parsed_as_by_vllm_except_for_the_listed_differences() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tool_calls/differences.json");
    let listed: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let mut wrong = Vec::new();
    let mut used = 0;
    for case in table() {
        let (family, name) = (case["family"].as_str().unwrap(), case["case"].as_str().unwrap());
        let message = parse(format_of(&case), case["open"] == true, &[case["text"].as_str().unwrap()]);
        let calls = message.calls.iter().map(|(name, _, arguments, _)| (name.clone(), json(arguments)));
        let ours = summary(&message.reasoning, &message.content, calls.collect());
        let difference = &listed[format!("{family}: {name}")];
        let expected = if difference.is_null() { of_vllm(&case["vllm"]) } else { difference["expected"].clone() };
        used += usize::from(!difference.is_null());
        if !difference.is_null() && of_vllm(&case["vllm"]) == difference["expected"] {
            wrong.push(format!("{family}: {name}: the difference is no longer one"));
        }
        if ours != expected {
            wrong.push(format!("{family}: {name}\n  ours {ours}\n  want {expected}"));
        }
    }
    assert!(wrong.is_empty(), "{} wrong\n{}", wrong.len(), wrong.join("\n"));
    assert_eq!(used, listed.as_object().unwrap().len());
}

#[test]
fn every_split_gives_the_same_deltas() {
    for case in table() {
        let (format, open, text) = (format_of(&case), case["open"] == true, case["text"].as_str().unwrap());
        let whole = parse(format, open, &[text]);
        for (at, _) in text.char_indices() {
            assert_eq!(parse(format, open, &[&text[..at], &text[at..]]), whole, "{} at {at}", case["case"]);
        }
        let each: Vec<&str> = text.split_inclusive(|_: char| true).collect();
        assert_eq!(parse(format, open, &each), whole);
    }
}

/// Numbers from a fixed sequence.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }
}

#[test]
fn random_text_of_every_format_is_parsed_and_splits_agree() {
    let texts: Vec<String> = table().iter().map(|case| case["text"].as_str().unwrap().to_string()).collect();
    let mut random = Random(7);
    for round in 0..6000 {
        let format = &FORMATS[round % FORMATS.len()];
        let mut text = String::new();
        for _ in 0..1 + random.below(5) {
            let chars: Vec<char> = texts[random.below(texts.len())].chars().collect();
            let from = random.below(chars.len() + 1);
            let to = from + random.below(chars.len() - from + 1);
            text.extend(&chars[from..to]);
            let markers = [format.begin, format.end, format.section].concat();
            if !markers.is_empty() {
                text.push_str(markers[random.below(markers.len())]);
            }
        }
        let open = random.below(2) == 0;
        let whole = parse(format, open, &[&text]);
        let chars: Vec<&str> = text.split_inclusive(|_: char| true).collect();
        assert_eq!(parse(format, open, &chars), whole, "{} {text:?}", format.name);
        let cut = text.char_indices().map(|(at, _)| at).nth(random.below(chars.len().max(1))).unwrap_or(0);
        assert_eq!(parse(format, open, &[&text[..cut], &text[cut..]]), whole, "{} {text:?}", format.name);
    }
}

#[test]
fn no_marker_begins_with_another_of_its_state() {
    for format in FORMATS {
        let markers = [format.section, format.begin, format.end, format.drop].concat();
        for (i, a) in markers.iter().enumerate() {
            let clash = markers.iter().enumerate().any(|(j, b)| i != j && b.starts_with(a));
            let fence = format.name == "json" && *a == "```"; // ends a call, and begins one only where none is open
            assert!(fence || !clash, "{}: {a}", format.name);
        }
    }
}

#[test]
fn long_text_without_an_end_is_not_held_back_without_limit() {
    let long = "x".repeat(MAX_HELD + 100);
    for (name, begin) in [("hermes", "<tool_call>{\"x\": \""), ("mistral", "[TOOL_CALLS]"), ("pythonic", "["), ("harmony", "<|channel|>")] {
        let mut parser = ResponseParser::new(Format::find(name).unwrap(), Settings::default());
        let mut deltas = Deltas::default();
        parser.feed(begin, &mut deltas);
        parser.feed(&long, &mut deltas);
        let seen: usize = deltas.iter().map(|delta| delta.text.len()).sum();
        assert!(seen > 100, "{name}");
    }
}

#[test]
fn names_of_formats_are_unique() {
    let mut names: Vec<&str> = FORMATS.iter().flat_map(|format| format.aliases.iter().copied().chain([format.name])).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
}

#[test]
fn a_template_with_the_markers_of_a_format_is_detected() {
    for format in FORMATS.iter().filter(|format| !format.template.is_empty()) {
        let template = format!("{{% if tools %}}{}{{% endif %}}", format.template.join(" ... "));
        assert_eq!(Format::detect(&template).name, format.name);
    }
    for (template, name) in [
        ("", "text"),
        ("{{ messages[0].content }}", "text"),
        ("<tool_call>{{ call }}</tool_call> <think></think>", "hermes"),
        ("{{ '[AVAILABLE_TOOLS]' }} {{ '[TOOL_CALLS]' }}", "mistral"),
        ("<tool_call>\n<function=f>\n<parameter=x>\n</tool_call>", "qwen3_coder"),
    ] {
        assert_eq!(Format::detect(template).name, name, "{template}");
    }
}

#[test]
fn deltas_have_the_form_of_a_chat_completion() {
    let mut parser = ResponseParser::new(Format::find("hermes").unwrap(), Settings { id_prefix: "id-".into(), ..Settings::default() });
    let mut deltas = Deltas::default();
    parser.feed("<think>a</think>b<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": \"\\\"\"}}</tool_call>", &mut deltas);
    parser.finish(&mut deltas);
    let json: Value = serde_json::from_str(&deltas.to_json()).unwrap();
    let begin = serde_json::json!({"index": 0, "id": "id-0", "type": "function", "function": {"name": "f", "arguments": ""}});
    let arguments = serde_json::json!({"index": 0, "function": {"arguments": "{\"x\": \"\\\"\"}"}});
    assert_eq!(
        json,
        serde_json::json!([{"reasoning_content": "a"}, {"content": "b"}, {"tool_calls": [begin]}, {"tool_calls": [arguments]}])
    );
    assert_eq!(Deltas::default().to_json(), "[]");
}
