//! Streams the answers to three prompts at once. The second request is aborted after a few tokens.
//!
//! usage: hello MODEL_DIR

use std::time::Duration;

use pagedllm::engine::{Engine, Prompt, Request};
use pagedllm::error::{Error, Result};
use pagedllm::types::RequestId;
use pagedllm::types::options::{EngineOptions, SamplingParams};

fn ask(engine: &Engine, question: &str) -> Result<RequestId> {
    let prompt = engine.text()?.render_chat(&format!(r#"[{{"role": "user", "content": "{question}"}}]"#))?;
    let mut request = Request::new(Prompt::Text(prompt), SamplingParams::greedy());
    request.add_special = false; // the template has written the special tokens
    let id = engine.add_request(request)?;
    println!("[{id}] {question}");
    Ok(id)
}

fn run(model: &str) -> Result<()> {
    let engine = Engine::create(&EngineOptions { model_dir: model.into(), ..EngineOptions::default() })?;
    ask(&engine, "What is the capital of France?")?;
    let story = ask(&engine, "Tell me a short story.")?;
    ask(&engine, "What is 7 + 5?")?;
    loop {
        let step = engine.step()?;
        for output in engine.queue().poll(Some(Duration::ZERO))? {
            let end = output.finish.map_or(String::new(), |finish| format!(" ({})", finish.name()));
            println!("[{}] {}{end}", output.request, output.text);
            if output.request == story && output.generated_tokens == 8 && output.finish.is_none() {
                engine.abort(story)?;
            }
        }
        if step.unfinished == 0 {
            return Ok(());
        }
    }
}

fn main() -> std::result::Result<(), Error> {
    run(&std::env::args().nth(1).unwrap_or_else(|| "../model".into()))
}
