//! Structured output from end to end: the bundled model, which rarely writes valid JSON on its own,
//! under many schemas.

use std::path::PathBuf;
use std::time::Duration;

use pagedllm::engine::{Engine, Output, Prompt, Request};
use pagedllm::error::Code;
use pagedllm::generation::sampler::{Lane, uniform};
use pagedllm::types::RequestId;
use pagedllm::types::options::{EngineOptions, Grammar, SamplingParams};
use pagedllm::types::outputs::FinishReason;
use serde_json::{Map, Value as Json, json};

const SCHEMAS: u64 = 200;
const SEEDS: u64 = 5;

/// Generates random schemas. The same seed gives the same schema.
struct Schemas {
    seed: u64,
    drawn: u64,
}

impl Schemas {
    fn below(&mut self, n: usize) -> usize {
        self.drawn += 1;
        (uniform(self.seed, self.drawn, Lane::Token) * n as f64) as usize
    }

    fn one_of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }

    /// Generates an object with the definitions that its members refer to.
    fn root(&mut self) -> Json {
        let mut root = self.object(2);
        let next = json!({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]});
        let node = json!({"type": "object", "properties": {"value": {"type": "boolean"}, "next": next},
            "required": ["value", "next"], "additionalProperties": false});
        root["$defs"] = json!({"node": node, "small": self.scalar(), "pair": self.array(0)});
        root
    }

    fn any(&mut self, depth: usize) -> Json {
        match self.below(if depth > 0 { 10 } else { 5 }) {
            0..=4 => self.scalar(),
            5 => self.array(depth - 1),
            6 | 7 => self.object(depth - 1),
            8 => json!({"anyOf": [self.any(depth - 1), self.any(depth - 1), self.scalar()]}),
            _ => json!({"$ref": self.one_of(&["#/$defs/node", "#/$defs/small", "#/$defs/pair"])}),
        }
    }

    fn object(&mut self, depth: usize) -> Json {
        let names = ["name", "age", "x", "is_it", "größe", "a b", "items", "q\"q", "type", "$id2"];
        let (mut properties, mut required) = (Map::new(), Vec::new());
        for _ in 0..1 + self.below(4) {
            let name = self.one_of(&names);
            properties.insert(name.into(), self.any(depth));
            if self.below(3) > 0 && !required.contains(&name) {
                required.push(name);
            }
        }
        let mut object = json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false});
        if self.below(6) == 0 {
            object["additionalProperties"] = json!({"type": "boolean"});
        }
        object
    }

    fn array(&mut self, depth: usize) -> Json {
        let min_items = self.below(3);
        let mut array = json!({"type": "array", "items": self.any(depth), "minItems": min_items, "maxItems": min_items + self.below(3)});
        if self.below(4) == 0 {
            array = json!({"type": "array", "prefixItems": [self.scalar(), self.scalar()], "items": false, "minItems": 2});
        }
        array
    }

    fn scalar(&mut self) -> Json {
        let low = self.below(200) as i64 - 100;
        match self.below(12) {
            0 => json!({"type": "boolean"}),
            1 => json!({"type": ["null", "boolean"]}),
            2 => json!({"type": "integer", "minimum": low, "maximum": low + self.below(1000) as i64}),
            3 => json!({"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 20, "multipleOf": self.one_of(&[1, 2, 5])}),
            4 => json!({"type": "number", "minimum": low, "maximum": low as f64 + 0.5}),
            5 => json!({"enum": ["red", "green", 7, null, [1, "two"], {"k": true}]}),
            6 => json!({"const": self.one_of(&["fixed", "é\n\"", ""])}),
            7 => json!({"type": "string", "minLength": self.below(4), "maxLength": 4 + self.below(9)}),
            8 => json!({"type": "string", "pattern": self.one_of(&["^[a-z]{2,6}$", "^(GET|PUT) /[a-z0-9/]{1,9}$", "^\\d{3}-\\d{4}$"])}),
            9 => json!({"type": "string", "format": self.one_of(&["date", "time", "date-time", "uuid", "ipv4"])}),
            10 => json!({"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 3 + self.below(50)}]}),
            _ => json!({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 10}),
        }
    }
}

fn schema(seed: u64) -> Json {
    Schemas { seed, drawn: 0 }.root()
}

fn engine() -> Engine {
    let model_dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/model");
    Engine::create(&EngineOptions { model_dir, threads: Some(2), ..Default::default() }).unwrap()
}

fn request(grammar: Option<Grammar>, seed: u64) -> Request {
    let prompt = "<s><|user|>\nGive JSON for Anna, 31, Paris.<|end|>\n<|assistant|>\n";
    let sampling = SamplingParams { grammar, seed: Some(seed), max_tokens: Some(120), ..Default::default() };
    Request { add_special: false, ..Request::new(Prompt::Text(prompt.into()), sampling) }
}

/// Runs the requests and returns text, finish reason and error of each, in the order of the
/// requests.
fn run(engine: &Engine, requests: impl IntoIterator<Item = Request>) -> Vec<(String, FinishReason, Option<String>)> {
    let ids: Vec<RequestId> = requests.into_iter().map(|request| engine.add_request(request).unwrap()).collect();
    let mut ends: Vec<(String, Option<Output>)> = vec![(String::new(), None); ids.len()];
    while engine.step().unwrap().unfinished > 0 {
        for output in engine.queue().poll(Some(Duration::ZERO)).unwrap() {
            append(&mut ends, &ids, output);
        }
    }
    engine.queue().poll(Some(Duration::ZERO)).unwrap().into_iter().for_each(|output| append(&mut ends, &ids, output));
    let end = |(text, last): (String, Option<Output>)| {
        let last = last.unwrap();
        (text, last.finish.unwrap(), last.error.map(|error| error.to_string()))
    };
    ends.into_iter().map(end).collect()
}

fn append(ends: &mut [(String, Option<Output>)], ids: &[RequestId], output: Output) {
    let end = &mut ends[ids.iter().position(|&id| id == output.request).unwrap()];
    end.0.push_str(&output.text);
    end.1 = output.finish.is_some().then_some(output);
}

fn is_valid(schema: &Json, text: &str) -> bool {
    let validator = jsonschema::options().should_validate_formats(true).build(schema).unwrap();
    serde_json::from_str::<Json>(text).is_ok_and(|value| value.is_object() && validator.is_valid(&value))
}

#[test]
fn finished_structured_output_matches_its_schema() {
    let engine = engine();
    let cases: Vec<(Json, u64)> = (0..SCHEMAS).flat_map(|i| (0..SEEDS).map(move |seed| (schema(i), seed))).collect();
    let grammar = |schema: &Json| Some(Grammar::JsonSchema(schema.to_string()));
    let ends = run(&engine, cases.iter().map(|(schema, seed)| request(grammar(schema), *seed)));
    let mut counts = [0; 2];
    for ((schema, seed), (text, finish, error)) in cases.iter().zip(&ends) {
        match finish {
            FinishReason::Stop => assert!(is_valid(schema, text), "{schema} with seed {seed}: {text}"),
            FinishReason::Length => {}
            other => panic!("{other:?} {error:?}: {schema} with seed {seed}: {text}"),
        }
        counts[usize::from(*finish == FinishReason::Length)] += 1;
    }
    println!("{} finished with Stop, {} with Length", counts[0], counts[1]);
    assert!(counts[0] >= cases.len() / 2, "only {} of {} finished with Stop", counts[0], cases.len());
}

/// Shows that the valid objects of the previous test come from the grammar, not from the model.
#[test]
fn output_without_a_grammar_rarely_matches_a_schema() {
    let ends = run(&engine(), (0..20).map(|seed| request(None, seed)));
    let valid = ends.iter().enumerate().filter(|(i, (text, ..))| is_valid(&schema(*i as u64), text)).count();
    assert!(valid <= 2, "{valid} of 20 are valid");
}

#[test]
fn a_grammar_produces_the_same_text_alone_and_in_a_batch() {
    let engine = engine();
    let make_request = |i| request(Some(Grammar::JsonSchema(schema(i).to_string())), i);
    let batched: Vec<String> = run(&engine, (0..12).map(make_request)).into_iter().map(|end| end.0).collect();
    for i in 0..12 {
        assert_eq!(run(&engine, [make_request(i)])[0].0, batched[i as usize]);
    }
}

#[test]
fn stop_strings_and_all_grammar_kinds_work_in_one_batch() {
    let engine = engine();
    let mut stopped = request(Some(Grammar::Choice(vec!["one two three".into()])), 1);
    stopped.sampling.stop = vec![" two".into()];
    let regex = request(Some(Grammar::Regex("[a-f]{3}-[0-9]{2}".into())), 1);
    let lark = request(Some(Grammar::Lark("start: \"<\" /[a-z]{1,3}/ \">\"".into())), 1);
    let mut greedy = request(Some(Grammar::JsonObject), 1);
    greedy.sampling.temperature = 0.0;
    let ends = run(&engine, [stopped, regex, lark, greedy]);
    assert_eq!(ends[0], ("one".into(), FinishReason::Stop, None));
    assert!(ends[1].0.len() == 6 && ends[1].1 == FinishReason::Stop, "{:?}", ends[1]);
    assert!(ends[2].0.starts_with('<') && ends[2].0.ends_with('>') && ends[2].1 == FinishReason::Stop, "{:?}", ends[2]);
    assert!(serde_json::from_str::<Json>(&ends[3].0).is_ok_and(|value| value.is_object()), "{:?}", ends[3]);
}

#[test]
fn property_name_patterns_cause_no_request_errors() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/schemas/schemas.json");
    let goldens: Json = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    let schemas: Vec<&Json> = goldens["names"].as_array().unwrap().iter().map(|case| &case["schema"]).collect();
    assert!(schemas.len() >= 20);
    let engine = engine();
    let cases: Vec<(&Json, u64)> = schemas.iter().flat_map(|schema| (0..40).map(move |seed| (*schema, seed))).collect();
    let ends = run(
        &engine,
        cases.iter().map(|(schema, seed)| {
            let mut request = request(Some(Grammar::JsonSchema(schema.to_string())), *seed);
            (request.sampling.temperature, request.sampling.max_tokens) = (1.5, Some(60));
            request
        }),
    );
    for ((schema, seed), (text, finish, error)) in cases.iter().zip(&ends) {
        match finish {
            FinishReason::Stop => assert!(is_valid(schema, text), "{schema} with seed {seed}: {text}"),
            FinishReason::Length => {}
            other => panic!("{other:?} {error:?}: {schema} with seed {seed}: {text}"),
        }
    }
}

#[test]
fn an_invalid_grammar_is_refused_when_the_request_is_added() {
    let engine = engine();
    let error = engine.add_request(request(Some(Grammar::Regex("(".into())), 1)).unwrap_err();
    assert_eq!(error.code(), Code::InvalidArgument);
    assert!(error.message().contains("unclosed group"), "{error}");
    assert_eq!(run(&engine, [request(Some(Grammar::Choice(vec!["ok".into()])), 1)])[0].0, "ok");
}
