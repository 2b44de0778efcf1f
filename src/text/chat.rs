//! Chats to prompts: the model's own Jinja template, rendered as transformers renders it.
//!
//! A template is part of the model, as its weights are. Its mistakes are errors: it can't loop without
//! end, call itself without end, or write without end, and a panic of the interpreter is caught. But the
//! interpreter bounds neither the memory of a template's variables nor how deep they are nested, so one
//! that is written to do harm (a string that doubles in a loop, a namespace that contains itself) can.
//! No chat can do so: the messages are only as deep and as large as the JSON in which they come.

use std::fmt;
use std::io;
use std::path::Path;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, State, UndefinedBehavior, Value};
use minijinja_contrib::pycompat;
use serde_json::Value as Json;

use super::{python, read_if_there, token_content};
use crate::error::{Error, Result};
use crate::sys::threads;

/// Instructions of one rendering, after which it is given up. A message takes some hundred.
const MAX_FUEL: u64 = 10_000_000;

/// Bytes of one prompt.
const MAX_PROMPT: usize = 64 << 20;

/// A call of a macro costs about four: enough for macros that descend into a tool's schema, and too
/// little to use up a thread's stack (the test below has 512 KiB).
const MAX_RECURSION: usize = 200;

/// Stack for compiling and rendering, both of which recurse. The system lends pages of it as they are touched.
const STACK_BYTES: usize = 64 << 20;

const NAME: &str = "chat_template";

type Rendered<T> = std::result::Result<T, minijinja::Error>;

/// The model's chat template, with the tokens that it may name.
pub(super) struct Chat {
    template: Template,
    /// `bos_token`, `eos_token` and the like, as far as the config has them.
    tokens: Vec<(String, Value)>,
}

enum Template {
    Absent,
    /// It does not compile. Everything else works without it.
    Broken(Error),
    Ready(Box<Environment<'static>>),
}

impl Chat {
    pub fn load(jinja: &Path, config: &Json) -> Result<Chat> {
        Ok(Chat { template: load_template(jinja, config)?, tokens: special_tokens(config) })
    }

    pub fn render(&self, json: &str) -> Result<String> {
        let environment = match &self.template {
            Template::Ready(environment) => environment,
            Template::Broken(error) => return Err(error.clone()),
            Template::Absent => return Err(absent()),
        };
        threads::with_stack(STACK_BYTES, || render(environment, self.variables(json)?))?
            .map_err(|panic| Error::invalid(format!("the chat template cannot render these messages: {panic}")))?
    }

    /// What the template can read: transformers' variables, then the host's, which win.
    fn variables(&self, json: &str) -> Result<Value> {
        let chat: Json = serde_json::from_str(json).map_err(|e| Error::invalid(format!("the chat is not valid JSON: {e}")))?;
        let given = match chat {
            Json::Array(_) => [("messages".to_string(), chat)].into_iter().collect(),
            Json::Object(object) => object,
            _ => return Err(Error::invalid("the chat is neither an array of messages nor an object that has one")),
        };
        if !given.get("messages").is_some_and(Json::is_array) {
            return Err(Error::invalid("the chat has no array \"messages\": give [{\"role\": ..., \"content\": ...}]"));
        }
        let mut variables = vec![
            ("tools".to_string(), Value::from(())),
            ("documents".to_string(), Value::from(())),
            ("add_generation_prompt".to_string(), Value::from(true)),
        ];
        variables.extend(self.tokens.iter().cloned());
        variables.extend(given.iter().map(|(name, value)| (name.clone(), to_value(value))));
        Ok(Value::from_pairs(variables))
    }
}

impl fmt::Debug for Chat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.template {
            Template::Absent => "Chat(no template)",
            Template::Broken(_) => "Chat(broken template)",
            Template::Ready(_) => "Chat",
        })
    }
}

fn load_template(jinja: &Path, config: &Json) -> Result<Template> {
    let (place, source) = if let Some(bytes) = read_if_there(jinja)? {
        let text = String::from_utf8(bytes);
        (jinja.display().to_string(), text.map_err(|e| Error::model(format!("{}: {e}", jinja.display())))?)
    } else if let Some(text) = config_template(&config["chat_template"]) {
        (jinja.with_file_name("tokenizer_config.json").display().to_string(), text.to_string())
    } else {
        return Ok(Template::Absent);
    };
    Ok(match threads::with_stack(STACK_BYTES, || compile(&source))? {
        Ok(Ok(environment)) => Template::Ready(Box::new(environment)),
        Ok(Err(e)) => Template::Broken(broken(&place, &describe(&e))),
        Err(panic) => Template::Broken(broken(&place, &panic)),
    })
}

/// A template, or the one named `default` of a list of them.
fn config_template(config: &Json) -> Option<&str> {
    let listed = || config.as_array()?.iter().find(|entry| entry["name"] == "default")?["template"].as_str();
    config.as_str().or_else(listed)
}

fn absent() -> Error {
    Error::unsupported(
        "this model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): \
         put one there, or write the prompt as text",
    )
}

fn broken(place: &str, reason: &str) -> Error {
    Error::model(format!("{place}: the chat template does not compile: {reason}"))
}

/// Every `..._token` of the config.
fn special_tokens(config: &Json) -> Vec<(String, Value)> {
    let entries = config.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_token"));
    entries.filter_map(|(name, token)| Some((name.clone(), Value::from(token_content(token)?)))).collect()
}

fn to_value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(b) => Value::from(*b),
        Json::Number(n) => match (n.as_i64(), n.as_u64()) {
            (Some(i), _) => Value::from(i),
            (None, Some(u)) => Value::from(u),
            (None, None) => Value::from(n.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(s) => Value::from(s.as_str()),
        Json::Array(items) => items.iter().map(to_value).collect(),
        Json::Object(members) => Value::from_pairs(members.iter().map(|(k, v)| (k.as_str(), to_value(v)))),
    }
}

/// The environment of transformers: `ImmutableSandboxedEnvironment(trim_blocks, lstrip_blocks)` with
/// loop controls, and what transformers adds.
fn compile(source: &str) -> Rendered<Environment<'static>> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_undefined_behavior(UndefinedBehavior::Lenient);
    environment.set_debug(false);
    environment.set_fuel(Some(MAX_FUEL));
    environment.set_recursion_limit(MAX_RECURSION);
    environment.set_unknown_method_callback(call_method);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", python::strftime_now);
    environment.add_filter("tojson", python::tojson);
    environment.add_template_owned(NAME, without_generation_tags(&with_unix_newlines(source)))?;
    Ok(environment)
}

/// Jinja2 reads every kind of line end as `\n`.
fn with_unix_newlines(source: &str) -> String {
    source.replace("\r\n", "\n").replace('\r', "\n")
}

/// `{% generation %}...{% endgeneration %}` marks what an assistant wrote for training, and renders
/// what is in it: here it is `{% if true %}...{% endif %}`.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open + 2);
        out.push_str(before);
        rest = tag;
        let body = tag.trim_start_matches(['-', '+']).trim_start();
        for (name, instead) in [("generation", "if true"), ("endgeneration", "endif")] {
            let Some(end) = body.strip_prefix(name) else { continue };
            if end.trim_start().trim_start_matches(['-', '+']).starts_with("%}") {
                out.push_str(&tag[..tag.len() - body.len()]);
                out.push_str(instead);
                rest = end;
            }
        }
    }
    out.push_str(rest);
    out
}

fn render(environment: &Environment<'static>, variables: Value) -> Result<String> {
    let mut prompt = Prompt::default();
    let rendered = environment.get_template(NAME).and_then(|template| template.render_captured_to(variables, &mut prompt).map(drop));
    if let Some(error) = prompt.refused {
        return Err(error);
    }
    rendered.map_err(|e| failed(&e))?;
    String::from_utf8(prompt.bytes).map_err(|e| Error::invalid(format!("the chat template wrote no UTF-8: {e}")))
}

fn failed(e: &minijinja::Error) -> Error {
    if e.kind() == ErrorKind::OutOfFuel {
        return Error::capacity(format!("the chat template was given up after {MAX_FUEL} instructions"));
    }
    Error::invalid(format!("the chat template does not accept these messages: {}", describe(e)))
}

/// The innermost reason, and the line of the template.
fn describe(e: &minijinja::Error) -> String {
    let mut reason = e.detail().map_or_else(|| e.kind().to_string(), str::to_string);
    let mut source = std::error::Error::source(e);
    while let Some(inner) = source {
        reason = format!("{reason}: {inner}");
        source = inner.source();
    }
    match e.line() {
        Some(line) => format!("{reason} (line {line})"),
        None => reason,
    }
}

/// The rendered text, of a bounded size.
#[derive(Default)]
struct Prompt {
    bytes: Vec<u8>,
    /// Why no more is taken.
    refused: Option<Error>,
}

impl Prompt {
    fn push(&mut self, bytes: &[u8]) -> Result<()> {
        if bytes.len() > MAX_PROMPT - self.bytes.len() {
            return Err(Error::capacity(format!("the chat template wrote more than {MAX_PROMPT} bytes")));
        }
        self.bytes.try_reserve(bytes.len())?;
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }
}

impl io::Write for Prompt {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.push(bytes) {
            Ok(()) => Ok(bytes.len()),
            Err(error) => {
                self.refused = Some(error);
                Err(io::ErrorKind::OutOfMemory.into())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn raise_exception(message: String) -> Rendered<Value> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// The methods of Python's strings, lists and dictionaries.
fn call_method(state: &mut State, value: &Value, method: &str, args: &[Value]) -> Rendered<Value> {
    match (value.as_str(), method, args) {
        (Some(text), "removeprefix", [affix]) => Ok(Value::from(affix.as_str().and_then(|affix| text.strip_prefix(affix)).unwrap_or(text))),
        (Some(text), "removesuffix", [affix]) => Ok(Value::from(affix.as_str().and_then(|affix| text.strip_suffix(affix)).unwrap_or(text))),
        _ => pycompat::unknown_method_callback(state, value, method, args),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Text;
    use super::super::tests::{golden_cases, model_dir};
    use super::*;
    use crate::error::Code;
    use serde_json::json;

    const USER: &str = r#"[{"role": "user", "content": "Hi"}]"#;

    fn chat(template: &str) -> Chat {
        let config = json!({"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}});
        Chat::load(Path::new("/nowhere/chat_template.jinja"), &config).unwrap()
    }

    fn rendered(template: &str) -> String {
        chat(template).render(USER).unwrap()
    }

    #[track_caller]
    fn refused(template: &str, code: Code, reason: &str) {
        let error = chat(template).render(USER).unwrap_err();
        assert_eq!(error.code(), code, "{error}");
        assert!(error.message().contains(reason), "{error}");
    }

    #[test]
    fn golden_chats_render_as_in_transformers() {
        let cases = golden_cases("chat_cases.json");
        assert!(cases.len() > 20);
        for case in &cases {
            let config = json!({"chat_template": case["template"], "bos_token": case["bos_token"],
                "eos_token": case["eos_token"]});
            let chat = Chat::load(Path::new("/nowhere/chat_template.jinja"), &config).unwrap();
            let request = json!({"messages": case["messages"], "tools": case["tools"],
                "add_generation_prompt": case["add_generation_prompt"]});
            match chat.render(&request.to_string()) {
                Ok(prompt) => assert_eq!(prompt, case["rendered"].as_str().unwrap(), "{}", case["name"]),
                Err(error) => {
                    let wanted = case["error"].as_str().unwrap_or_else(|| panic!("{}: {error}", case["name"]));
                    assert!(error.message().contains(wanted), "{error} instead of {wanted}");
                }
            }
        }
    }

    #[test]
    fn template_file_wins_over_the_config() {
        let files = [("chat_template.jinja", "file"), ("tokenizer_config.json", r#"{"chat_template": "config"}"#)];
        assert_eq!(Text::load(&model_dir("jinja", &files)).unwrap().render_chat("{\"messages\": []}").unwrap(), "file");
        assert_eq!(Text::load(&model_dir("config", &files[1..])).unwrap().render_chat(USER).unwrap(), "config");
    }

    #[test]
    fn template_named_default_is_taken_from_a_list() {
        let list = json!([{"name": "rag", "template": "rag"}, {"name": "default", "template": "yes"}]);
        let config = json!({"chat_template": list});
        let chat = Chat::load(Path::new("/nowhere/chat_template.jinja"), &config).unwrap();
        assert_eq!(chat.render(USER).unwrap(), "yes");
    }

    #[test]
    fn model_without_a_template_says_where_it_would_be() {
        for config in [json!(null), json!({}), json!({"chat_template": 3}), json!({"chat_template": [{"name": "rag"}]})] {
            let chat = Chat::load(Path::new("/nowhere/chat_template.jinja"), &config).unwrap();
            let error = chat.render(USER).unwrap_err();
            assert_eq!(error.code(), Code::Unsupported);
            assert!(error.message().contains("chat_template.jinja"), "{error}");
        }
    }

    #[test]
    fn template_that_does_not_compile_fails_only_where_it_is_used() {
        let text = Text::load(&model_dir("broken-template", &[("chat_template.jinja", "a\n{% if %}")])).unwrap();
        assert!(text.encode("a", false).is_ok());
        let error = text.render_chat(USER).unwrap_err();
        assert_eq!(error.code(), Code::Model);
        assert!(error.message().contains("chat_template.jinja: the chat template does not compile"), "{error}");
        assert!(error.message().contains("line 2"), "{error}");
    }

    #[test]
    fn chat_of_the_wrong_shape_is_an_error() {
        for json in ["", "{", "7", "{}", r#"{"messages": "Hi"}"#, &"[".repeat(100_000)] {
            assert_eq!(chat("x").render(json).unwrap_err().code(), Code::InvalidArgument);
        }
    }

    #[test]
    fn host_sets_the_variables_of_the_template() {
        let chat = chat("{{ bos_token }}{{ eos_token }} {{ add_generation_prompt }} {{ tools is none }} {{ thinking }}");
        assert_eq!(chat.render(USER).unwrap(), "<s></s> True True ");
        let json = r#"{"messages": [], "add_generation_prompt": false, "tools": [], "thinking": "yes", "bos_token": "B"}"#;
        assert_eq!(chat.render(json).unwrap(), "B</s> False False yes");
    }

    #[test]
    fn undefined_prints_nothing_and_is_false_but_has_no_attributes() {
        assert_eq!(rendered("[{{ nothing }}{{ messages[0].nothing }}{{ 'yes' if nothing else 'no' }}]"), "[no]");
        refused("a\n{{ nothing.more }}", Code::InvalidArgument, "line 2");
    }

    #[test]
    fn exception_of_the_template_is_an_error_with_its_words() {
        refused("{{ raise_exception('roles must alternate: ' ~ 7) }}", Code::InvalidArgument, "roles must alternate: 7");
    }

    #[test]
    fn methods_win_over_members_of_the_same_name() {
        let chat = chat("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}");
        assert_eq!(chat.render(r#"[{"items": 1, "b": 2}]"#).unwrap(), "items=1;b=2;");
    }

    #[test]
    fn generation_tags_render_what_is_in_them() {
        let template = "a\n  {%- generation -%}\n b {% endgeneration %}\n{% set generation = 1 %}{{ generation }}";
        assert_eq!(rendered(template), "ab 1");
    }

    #[test]
    fn prefixes_and_suffixes_are_removed() {
        assert_eq!(rendered("{{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }} {{ 'abc'.removeprefix('x') }}"), "bc ab abc");
    }

    #[test]
    fn line_ends_of_the_template_are_those_of_jinja() {
        assert_eq!(rendered("a\r\nb\rc\n"), "a\nb\nc");
    }

    #[test]
    fn endless_template_is_given_up() {
        let template = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}";
        refused(template, Code::Capacity, "10000000 instructions");
    }

    #[test]
    fn too_long_prompt_is_given_up() {
        refused("{% set a = 'x' * 1000000 %}{% for i in range(99) %}{{ a }}{% endfor %}", Code::Capacity, "67108864 bytes");
    }

    #[test]
    fn macro_that_calls_itself_forever_does_not_exhaust_a_small_stack() {
        let template = "{% macro f(x) %}{% for i in [1] %}{% if true %}{{ f([x] | map('upper') | list) }}{% endif %}{% endfor %}{% endmacro %}{{ f(1) }}";
        let thread = std::thread::Builder::new().stack_size(512 << 10);
        let render = || refused(template, Code::InvalidArgument, "recursion limit");
        thread.spawn(render).unwrap().join().unwrap();
    }
}
