//! Renders chats as prompts with the model's Jinja template, as `apply_chat_template` of
//! transformers does.
//!
//! A template is a part of the model and may be hostile. `jinja` bounds the memory and time of
//! parsing and rendering. Both run on a stack that is deep enough for these bounds.

use std::fmt;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value as Json};

use super::jinja::{self, Failure, Kind, Tree};
use super::response::Format;
use super::special_tokens::SpecialTokens;
use super::{on_stack, read_if_there};
use crate::error::{Error, Result};
use crate::sys::{files, threads};

/// Name of the template for chats that name none and have no tools.
const DEFAULT: &str = "default";
/// Name of the template for chats with tools.
const TOOL_USE: &str = "tool_use";
/// Marks the end of the message to continue. The same text as in transformers, because templates
/// may process it.
const CONTINUATION: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// The chat templates of a model, and the special tokens that they can read.
pub(super) struct Chat {
    templates: Vec<(String, Template)>,
    /// `bos_token`, `eos_token` and other special tokens of the model.
    tokens: SpecialTokens,
    /// The format of responses, by the template for tools, or else by the default one.
    response_format: &'static Format,
}

enum Template {
    /// The template does not compile. The model works without chats.
    Broken(Error),
    Ready(Box<Tree>),
}

impl Chat {
    pub fn load(dir: &Path, config: &Json, tokens: SpecialTokens) -> Result<Chat> {
        let sources = find_templates(dir, config)?;
        let named = |name: &str| sources.iter().find(|source| source.name == name);
        let response_format = Format::detect(named(TOOL_USE).or(named(DEFAULT)).map_or("", |source| &source.text));
        let templates = sources.into_iter().map(|source| {
            let compiled = threads::with_stack(jinja::STACK_BYTES, || jinja::parse(&source.text))?;
            let template = match compiled {
                Ok(Ok(tree)) => Template::Ready(Box::new(tree)),
                Ok(Err(failure)) => Template::Broken(broken(&source.file, &failure.to_string())),
                Err(panic) => Template::Broken(broken(&source.file, &panic)),
            };
            Ok((source.name, template))
        });
        Ok(Chat { templates: templates.collect::<Result<_>>()?, tokens, response_format })
    }

    pub fn response_format(&self) -> &'static Format {
        self.response_format
    }

    pub fn render(&self, json: &str) -> Result<String> {
        on_stack(jinja::STACK_BYTES, || self.render_chat(json))
    }

    fn render_chat(&self, json: &str) -> Result<String> {
        let mut request = Request::parse(json)?;
        let tree = match self.template(&request)? {
            Template::Ready(tree) => tree,
            Template::Broken(error) => return Err(error.clone()),
        };
        if request.flatten_content {
            request.variables.get_mut("messages").map_or(Ok(()), flatten_content)?;
        }
        let continued = if request.continue_final_message { Some(mark_final_message(&mut request.variables)?) } else { None };
        let variables = request.variables.iter().map(|(name, value)| (name.as_str(), value));
        let prompt = jinja::render(tree, self.tokens.iter().chain(variables)).map_err(refused)?;
        match continued {
            Some(message) => cut_at_continuation(prompt, &message),
            None => Ok(prompt),
        }
    }

    /// Returns the template that the chat selects by name or by its tools.
    fn template(&self, request: &Request) -> Result<&Template> {
        let named = |name: &str| self.templates.iter().find(|(known, _)| known == name).map(|(_, template)| template);
        let names = || self.templates.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
        if self.templates.is_empty() {
            return Err(absent());
        }
        if let Some(name) = &request.template {
            return named(name).ok_or_else(|| Error::invalid(format!("the model has no chat template \"{name}\"; it has: {}", names())));
        }
        let tool_use = if request.has_tools() { named(TOOL_USE) } else { None };
        tool_use
            .or_else(|| named(DEFAULT))
            .ok_or_else(|| Error::invalid(format!("the model has no default chat template; choose one by \"chat_template\": {}", names())))
    }
}

impl fmt::Debug for Chat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.templates.iter().map(|(name, _)| name)).finish()
    }
}

/// A chat of the host.
struct Request {
    /// Variables of the template. Those of the host replace those of transformers.
    variables: Map<String, Json>,
    /// The name of a template.
    template: Option<String>,
    continue_final_message: bool,
    flatten_content: bool,
}

impl Request {
    fn parse(json: &str) -> Result<Request> {
        let chat: Json = serde_json::from_str(json).map_err(|e| Error::invalid(format!("the chat is not valid JSON: {e}")))?;
        let mut given = match chat {
            Json::Array(_) => [("messages".to_string(), chat)].into_iter().collect(),
            Json::Object(object) => object,
            _ => return Err(Error::invalid("the chat is neither an array nor an object; give [{\"role\": ..., \"content\": ...}]")),
        };
        if !given.get("messages").is_some_and(Json::is_array) {
            return Err(Error::invalid("the chat has no array \"messages\"; give [{\"role\": ..., \"content\": ...}]"));
        }
        let continue_final_message = flag(&mut given, "continue_final_message")?;
        let template = match given.shift_remove("chat_template") {
            None | Some(Json::Null) => None,
            Some(Json::String(name)) => Some(name),
            Some(other) => return Err(Error::invalid(format!("chat_template is {other}; give the name of a template"))),
        };
        let flatten_content = match given.shift_remove("chat_template_content_format") {
            None | Some(Json::Null) => false,
            Some(Json::String(format)) if format == "openai" => false,
            Some(Json::String(format)) if format == "string" => true,
            Some(other) => {
                return Err(Error::invalid(format!("chat_template_content_format is {other}; give \"string\" or \"openai\"")));
            }
        };
        if continue_final_message && given.get("add_generation_prompt").is_some_and(|flag| *flag == Json::Bool(true)) {
            return Err(Error::invalid("continue_final_message and add_generation_prompt exclude each other; set one of them"));
        }
        let mut variables = Map::new();
        variables.insert("tools".into(), Json::Null);
        variables.insert("documents".into(), Json::Null);
        variables.insert("add_generation_prompt".into(), Json::Bool(!continue_final_message));
        variables.extend(given);
        Ok(Request { variables, template, continue_final_message, flatten_content })
    }

    fn has_tools(&self) -> bool {
        self.variables.get("tools").is_some_and(|tools| !tools.is_null())
    }
}

/// Removes and returns a boolean member.
fn flag(given: &mut Map<String, Json>, name: &str) -> Result<bool> {
    match given.shift_remove(name) {
        None | Some(Json::Null) => Ok(false),
        Some(Json::Bool(flag)) => Ok(flag),
        Some(other) => Err(Error::invalid(format!("{name} is {other}; give true or false"))),
    }
}

/// Replaces content that is a list of text parts by one string, with a newline between the parts.
fn flatten_content(messages: &mut Json) -> Result<()> {
    let messages = messages.as_array_mut().into_iter().flatten();
    for content in messages.filter_map(|message| message.get_mut("content")) {
        let Some(parts) = content.as_array() else { continue };
        let texts = parts.iter().map(|part| match part {
            Json::String(text) => Ok(text.as_str()),
            part => part["text"].as_str().ok_or_else(|| {
                Error::invalid(format!(
                    "a content part has no text (type {}); chat_template_content_format \"string\" requires text parts",
                    part["type"]
                ))
            }),
        });
        *content = Json::String(texts.collect::<Result<Vec<_>>>()?.join("\n"));
    }
    Ok(())
}

/// Marks the end of the final message, and returns its text.
fn mark_final_message(variables: &mut Map<String, Json>) -> Result<String> {
    let last = variables.get_mut("messages").and_then(Json::as_array_mut).and_then(|messages| messages.last_mut());
    let text = match last.and_then(|message| message.get_mut("content")) {
        Some(Json::String(text)) => Some(text),
        Some(Json::Array(parts)) => parts.iter_mut().rev().find_map(|part| match part.get_mut("text") {
            Some(Json::String(text)) => Some(text),
            _ => None,
        }),
        _ => None,
    };
    let Some(text) = text else {
        return Err(Error::invalid("continue_final_message is set, but the final message has no text; give its content"));
    };
    let message = text.clone();
    text.push_str(CONTINUATION);
    Ok(message)
}

/// Returns the prompt up to the end of the final message.
fn cut_at_continuation(mut prompt: String, message: &str) -> Result<String> {
    let mark = CONTINUATION.trim_end();
    let found = prompt.rfind(mark).filter(|_| prompt.contains(message.trim()));
    let Some(at) = found else {
        return Err(Error::invalid("continue_final_message is set, but the template does not print the final message as it is"));
    };
    let spacing_kept = prompt[at..].starts_with(CONTINUATION);
    prompt.truncate(at);
    if !spacing_kept {
        prompt.truncate(prompt.trim_end().len());
    }
    Ok(prompt)
}

/// A template before compilation.
struct Source {
    name: String,
    file: PathBuf,
    text: String,
}

/// Returns the templates of a model. As in transformers, files have precedence over the config.
fn find_templates(dir: &Path, config: &Json) -> Result<Vec<Source>> {
    let default = dir.join("chat_template.jinja");
    let mut found = Vec::new();
    found.extend(read_template(DEFAULT.to_string(), default)?);
    for file in files::with_extension(&dir.join("additional_chat_templates"), "jinja")? {
        let name = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default().to_string();
        found.extend(read_template(name, file)?);
    }
    if !found.is_empty() {
        return Ok(found);
    }
    let file = dir.join("tokenizer_config.json");
    let source = |name: &str, text: &str| Source { name: name.to_string(), file: file.clone(), text: text.to_string() };
    Ok(match &config["chat_template"] {
        Json::String(text) => vec![source(DEFAULT, text)],
        Json::Array(entries) => {
            entries.iter().filter_map(|entry| Some(source(entry["name"].as_str()?, entry["template"].as_str()?))).collect()
        }
        _ => Vec::new(),
    })
}

fn read_template(name: String, file: PathBuf) -> Result<Option<Source>> {
    let Some(bytes) = read_if_there(&file)? else { return Ok(None) };
    let text = String::from_utf8(bytes).map_err(|e| Error::model(format!("{}: {e}", file.display())))?;
    Ok(Some(Source { name, file, text }))
}

fn absent() -> Error {
    Error::unsupported(
        "this model has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); \
         add one, or give the prompt as text",
    )
}

fn broken(file: &Path, reason: &str) -> Error {
    Error::model(format!("{}: the chat template does not compile: {reason}", file.display()))
}

fn refused(failure: Failure) -> Error {
    match failure.kind {
        Kind::Memory => Error::out_of_memory(),
        Kind::Limit => Error::capacity(format!("the chat template exceeds a limit: {failure}")),
        Kind::Template => Error::invalid(format!("the chat template does not accept these messages: {failure}")),
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

    fn load(config: &Json) -> Chat {
        let dir = Path::new("/nowhere");
        Chat::load(dir, config, SpecialTokens::load(dir, config, None).unwrap()).unwrap()
    }

    fn chat(template: &str) -> Chat {
        let config = json!({"chat_template": template, "bos_token": "<s>", "eos_token": {"content": "</s>"}});
        load(&config)
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
            let chat = load(&config);
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
    fn template_file_overrides_the_config() {
        let files = [("chat_template.jinja", "file"), ("tokenizer_config.json", r#"{"chat_template": "config"}"#)];
        assert_eq!(Text::load(&model_dir("jinja", &files)).unwrap().render_chat("{\"messages\": []}").unwrap(), "file");
        assert_eq!(Text::load(&model_dir("config", &files[1..])).unwrap().render_chat(USER).unwrap(), "config");
    }

    #[test]
    fn template_named_default_is_taken_from_a_list() {
        let list = json!([{"name": "rag", "template": "rag"}, {"name": "default", "template": "yes"}]);
        let config = json!({"chat_template": list});
        let chat = load(&config);
        assert_eq!(chat.render(USER).unwrap(), "yes");
    }

    #[test]
    fn error_of_a_model_without_a_template_names_the_file() {
        for config in [json!(null), json!({}), json!({"chat_template": 3}), json!({"chat_template": [{"name": "rag"}]})] {
            let chat = load(&config);
            let error = chat.render(USER).unwrap_err();
            assert_eq!(error.code(), Code::Unsupported);
            assert!(error.message().contains("chat_template.jinja"), "{error}");
        }
    }

    #[test]
    fn template_that_does_not_compile_fails_only_when_it_is_used() {
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
    fn undefined_renders_as_nothing_and_is_false_but_has_no_attributes() {
        assert_eq!(rendered("[{{ nothing }}{{ messages[0].nothing }}{{ 'yes' if nothing else 'no' }}]"), "[no]");
        refused("a\n{{ nothing.more }}", Code::InvalidArgument, "line 2");
    }

    #[test]
    fn exception_of_the_template_is_an_error_with_its_message() {
        refused("{{ raise_exception('roles must alternate: ' ~ 7) }}", Code::InvalidArgument, "roles must alternate: 7");
    }

    #[test]
    fn methods_override_members_of_the_same_name() {
        let chat = chat("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}");
        assert_eq!(chat.render(r#"[{"items": 1, "b": 2}]"#).unwrap(), "items=1;b=2;");
    }

    #[test]
    fn generation_tags_render_their_body() {
        let template = "a\n  {%- generation -%}\n b {% endgeneration %}\n{% set generation = 1 %}{{ generation }}";
        assert_eq!(rendered(template), "ab 1");
    }

    #[test]
    fn prefixes_and_suffixes_are_removed() {
        assert_eq!(rendered("{{ 'abc'.removeprefix('a') }} {{ 'abc'.removesuffix('c') }} {{ 'abc'.removeprefix('x') }}"), "bc ab abc");
    }

    #[test]
    fn line_ends_of_the_template_are_handled_as_in_jinja() {
        assert_eq!(rendered("a\r\nb\rc\n"), "a\nb\nc");
    }

    #[test]
    fn endless_template_exceeds_the_budget_of_steps() {
        let template = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a * b %}{% endfor %}{% endfor %}";
        refused(template, Code::Capacity, "more than 10000000 steps");
    }

    #[test]
    fn values_that_grow_exceed_the_budget_of_bytes() {
        let growing = [
            "{% set a = 'x' * 1000000 %}{% for i in range(999) %}{{ a }}{% endfor %}",
            "{% set ns = namespace(a='x') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
            "{% set ns = namespace(a=[1]) %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
            "{{ 'x' * 999999999999 }}",
            "{{ [1] * 999999999999 }}",
            "{{ ('x' * 100000).replace('x', 'y' * 100000) }}",
            "{{ 'x'.center(999999999999) }}",
            "{{ '%999999999999d' % 1 }}",
            "{{ '{:999999999999}'.format(1) }}",
            "{{ range(99999)|join('x' * 100000) }}",
            "{{ [1]|batch(999999999, 0)|list }}",
            "{{ [1]|slice(999999999, 0)|list }}",
            "{{ 'a\\tb'.expandtabs(999999999999) }}",
            "{{ [1]|tojson(indent=999999999999) }}",
            "{{ 'a\\nb'|indent(999999999999) }}",
        ];
        for template in growing {
            refused(template, Code::Capacity, "limit");
        }
    }

    #[test]
    fn recursion_and_self_reference_are_errors() {
        let deep = [
            "{% macro f(x) %}{% for i in [1] %}{% if true %}{{ f([x] | map('upper') | list) }}{% endif %}{% endfor %}{% endmacro %}{{ f(1) }}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            "{% set ns = namespace() %}{% set ns.me = ns %}{{ ns }}",
            "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
            "{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}",
            "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ [ns.x].count(ns.y) }}",
            "{% set s = 'x' * 10000000 %}{% for i in range(100000) %}{% if {s: 1}[s] %}{% endif %}{% endfor %}",
            "{{ ([{'a': 1}] * 100000)|sort(attribute='a' ~ ',a' * 1000) }}",
        ];
        let thread = std::thread::Builder::new().stack_size(64 << 10);
        let render = move || deep.into_iter().for_each(|template| refused(template, Code::Capacity, "limit"));
        thread.spawn(render).unwrap().join().unwrap();
    }

    #[test]
    fn long_chains_and_deep_nesting_are_errors_of_the_model() {
        let chain = |part: &str, n: usize| part.repeat(n);
        let n = 40_000;
        let templates = [
            format!("{{% if 0 %}}{}{{% endif %}}", chain("{% elif 0 %}", 50)) + &" ".repeat(jinja::MAX_SOURCE),
            format!("{{{{ 1{} }}}}", chain("+1", n)),
            format!("{{{{ {}1 }}}}", chain("not ", n)),
            format!("{{{{ a{} }}}}", chain(".b", n)),
            format!("{{{{ a{} }}}}", chain("|upper", n)),
            format!("{{{{ {}1{} }}}}", chain("(", n), chain(")", n)),
            format!("{{{{ {}1{} }}}}", chain("[", n), chain("]", n)),
            format!("{{{{ {}1 }}}}", chain("-", n)),
            format!("{{{{ 1{} }}}}", chain(" if 1 else 1", n)),
            format!("{}{}", chain("{% if 1 %}", n), chain("{% endif %}", n)),
            format!("{{% set {}a{} = 1 %}}", chain("(", n), chain(")", n)),
            (0..2000).map(|i| format!("{{% set a{i} = 1 %}}")).collect(),
        ];
        let thread = std::thread::Builder::new().stack_size(64 << 10);
        let check = move || {
            for template in &templates {
                refused(template, Code::Model, "at most");
            }
            // Neither branches nor the parts of a concatenation count as nested.
            let branches = format!("{{% if 0 %}}{}{{% else %}}x{{% endif %}}", "{% elif 0 %}".repeat(n));
            assert_eq!(rendered(&branches), "x");
            assert_eq!(rendered(&format!("{{{{ 1{} }}}}", "~1".repeat(n))).len(), n + 1);
        };
        thread.spawn(check).unwrap().join().unwrap();
    }

    #[test]
    fn tools_select_the_template_for_tools() {
        let list = |names: &[&str]| json!(names.iter().map(|name| json!({"name": name, "template": name})).collect::<Vec<_>>());
        let chat = |names: &[&str]| load(&json!({"chat_template": list(names)}));
        let both = chat(&["default", "tool_use", "rag"]);
        assert_eq!(both.render(USER).unwrap(), "default");
        for (json, template) in [
            (r#"{"messages": [], "tools": []}"#, "tool_use"),
            (r#"{"messages": [], "tools": null}"#, "default"),
            (r#"{"messages": [], "tools": [], "chat_template": "rag"}"#, "rag"),
        ] {
            assert_eq!(both.render(json).unwrap(), template);
        }
        let tools_only = chat(&["tool_use"]);
        assert_eq!(tools_only.render(r#"{"messages": [], "tools": []}"#).unwrap(), "tool_use");
        assert!(tools_only.render(USER).unwrap_err().message().contains("tool_use"));
        let error = both.render(r#"{"messages": [], "chat_template": "no"}"#).unwrap_err();
        assert!(error.message().contains("it has: default, tool_use, rag"), "{error}");
    }

    #[test]
    fn named_template_files_override_the_config() {
        let dir = model_dir("additional", &[("tokenizer_config.json", r#"{"chat_template": "config"}"#)]);
        std::fs::create_dir(dir.join("additional_chat_templates")).unwrap();
        std::fs::write(dir.join("additional_chat_templates/tool_use.jinja"), "tools").unwrap();
        let text = Text::load(&dir).unwrap();
        assert_eq!(text.render_chat(r#"{"messages": [], "tools": []}"#).unwrap(), "tools");
        assert!(text.render_chat(USER).is_err());
        std::fs::write(dir.join("chat_template.jinja"), "file").unwrap();
        assert_eq!(Text::load(&dir).unwrap().render_chat(USER).unwrap(), "file");
    }

    #[test]
    fn final_message_is_continued_as_in_transformers() {
        let chat = chat(
            "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}",
        );
        let render = |content: Json| {
            let messages = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]);
            chat.render(&json!({"messages": messages, "continue_final_message": true}).to_string())
        };
        assert_eq!(render(json!("Sure, ")).unwrap(), "<user>Hi<end><assistant>Sure,");
        assert!(render(json!(null)).is_err());
        let kept = load(&json!({"chat_template": "{{ messages[0].content }}!"}));
        let json = r#"{"messages": [{"role": "assistant", "content": "Sure, "}], "continue_final_message": true}"#;
        assert_eq!(kept.render(json).unwrap(), "Sure, ");
        let lost = load(&json!({"chat_template": "{{ messages[0].content | upper }}!"}));
        assert!(lost.render(json).unwrap_err().message().contains("does not print the final message"));
        let both = r#"{"messages": [], "continue_final_message": true, "add_generation_prompt": true}"#;
        assert!(lost.render(both).unwrap_err().message().contains("exclude each other"));
    }

    #[test]
    fn parts_are_joined_for_templates_that_take_strings() {
        let chat = chat("{{ messages[0].content }}");
        let request = |parts: Json, format: &str| {
            json!({"messages": [{"role": "user", "content": parts}], "chat_template_content_format": format}).to_string()
        };
        let parts = json!([{"type": "text", "text": "a"}, "b"]);
        assert_eq!(chat.render(&request(parts.clone(), "string")).unwrap(), "a\nb");
        assert_eq!(chat.render(&request(parts, "openai")).unwrap(), "[{'type': 'text', 'text': 'a'}, 'b']");
        let error = chat.render(&request(json!([{"type": "image"}]), "string")).unwrap_err();
        assert!(error.message().contains("a content part has no text"), "{error}");
        assert!(chat.render(&request(json!([]), "other")).is_err());
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn rounding_mode_of_the_host_does_not_change_a_rendering() {
        let template = "{{ 0.3 }} {{ 0.1 + 0.2 }} {{ 1e23 }}";
        assert_eq!(crate::sys::float::rounding_up(|| rendered(template)), "0.3 0.30000000000000004 1e+23");
    }
}
