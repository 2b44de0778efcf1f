//! What the engine keeps of one sequence beside its tokens: how to choose, and how to turn tokens into text.

use std::sync::Arc;

use super::outputs::Output;
use super::queue::Outbox;
use crate::decode::{Constraint, Rules, StopMatcher};
use crate::error::Result;
use crate::sched::FinishReason;
use crate::text::{Detokenizer, Text};

pub struct Stream {
    pub request: u64,
    pub user_data: u64,
    /// Where its outputs go.
    pub outbox: Arc<Outbox>,
    pub rules: Rules,
    pub prompt_tokens: usize,
    pub generated: usize,
    /// The grammar that its output follows. Away while its mask is computed.
    pub constraint: Option<Constraint>,
    detokenizer: Detokenizer,
    stops: StopMatcher,
    /// New text before the stop strings have had their say.
    fresh: String,
}

impl Stream {
    pub fn new(request: u64, user_data: u64, outbox: Arc<Outbox>, mut rules: Rules, prompt: &[u32], skip_special: bool) -> Stream {
        let mut detokenizer = Detokenizer::new(skip_special);
        detokenizer.prime(prompt);
        let stops = StopMatcher::new(std::mem::take(&mut rules.params.stop));
        Stream {
            request,
            user_data,
            outbox,
            rules,
            prompt_tokens: prompt.len(),
            generated: 0,
            constraint: None,
            detokenizer,
            stops,
            fresh: String::new(),
        }
    }

    /// An output with nothing in it yet.
    pub fn output(&self) -> Output {
        Output {
            request: self.request,
            sequence: self.request,
            user_data: self.user_data,
            prompt_tokens: self.prompt_tokens as u64,
            generated_tokens: self.generated as u64,
            ..Output::default()
        }
    }

    /// The last output of a sequence that ends without a new token. Text held back comes out.
    pub fn close(&mut self, finish: FinishReason, text: Option<&Text>) -> Output {
        let mut output = Output { finish: Some(finish), ..self.output() };
        self.fresh.clear();
        if let Some(text) = text {
            // Whatever can still be said is said; an end is never refused.
            let _ = self.detokenizer.finish(text, &mut self.fresh);
        }
        self.stops.pass(&self.fresh, &mut output.text);
        output
    }

    /// The output for a token just committed. A stop string ends the sequence here.
    pub fn advance(&mut self, token: u32, logprob: Option<f32>, finish: Option<FinishReason>, text: Option<&Text>) -> Output {
        self.generated += 1;
        let mut output = Output { finish, ..self.output() };
        output.tokens.push(token);
        output.logprobs.extend(logprob);
        match text.map_or(Ok(()), |text| self.write(token, text, &mut output)) {
            Ok(()) => output,
            Err(error) => output.failed(error),
        }
    }

    fn write(&mut self, token: u32, text: &Text, output: &mut Output) -> Result<()> {
        self.fresh.clear();
        // The token that ends a sequence is reported, its text is not.
        if output.finish != Some(FinishReason::Stop) {
            self.detokenizer.push(text, token, &mut self.fresh)?;
        }
        if output.finish.is_some() {
            self.detokenizer.finish(text, &mut self.fresh)?;
        }
        if self.generated < self.rules.params.min_tokens {
            self.stops.pass(&self.fresh, &mut output.text);
        } else if self.stops.push(&self.fresh, &mut output.text) {
            output.finish = Some(FinishReason::Stop);
            return Ok(());
        }
        if output.finish.is_some() {
            self.stops.finish(&mut output.text);
        }
        Ok(())
    }
}
